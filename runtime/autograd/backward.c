// SPDX-License-Identifier: MIT
// autograd/backward.c -- the nodes of a run: traverses the graph from its roots to its leaves.
//
// The nodes reachable from the roots are sorted by ascending sequence number and processed from the end. Every
// reachable node is processed, even if no gradient reaches it, so that each leaf's count of pending contributions stays
// correct. A checkpoint's recomputed nodes are younger than all remaining nodes, so they are appended to the agenda.
//
// Nodes and leaves hold the state of the run that uses them (run, gout, total ...). A nested run over the same graph
// saves the outer run's state and restores it at its end.
#include "autograd/anomaly.h"
#include "autograd/owner.h"
#include "autograd/backward.h"
#include "device/capture.h"

enum { PHASE_HOOKS, PHASE_BACKWARD, PHASE_ANSWER, PHASE_DELIVER };

// ---- the agenda: nodes still to be processed ---------------------------------------------------

static ms_status set_aside_node(ms_run *r, ms_node *n)
{
    ms_aside *a = malloc(sizeof *a);
    if (!a || !(a->gout = malloc((size_t)n->n_out * sizeof *a->gout + 1))) {
        free(a);
        return ms__run_no_memory(sizeof *a + (size_t)n->n_out * sizeof *a->gout + 1);
    }
    a->node = n;
    a->leaf = NULL;
    a->run = n->run;
    a->needed = n->needed;
    for (int k = 0; k < n->n_out; k++) {
        a->gout[k] = n->gout[k];
        n->gout[k] = NULL;
    }
    a->next = r->asides;
    r->asides = a;
    return MS_OK;
}

static ms_status set_aside_leaf(ms_run *r, ms_leaf *l)
{
    ms_aside *a = malloc(sizeof *a);
    if (!a) return ms__run_no_memory(sizeof *a);
    *a = (ms_aside) { .leaf = l, .run = l->run, .pending = l->pending, .total = l->total, .next = r->asides };
    l->total = NULL;
    l->pending = 0;
    r->asides = a;
    return MS_OK;
}

static ms_status add_node(ms_run *r, ms_node *n)
{
    if (MS_UNLIKELY(n->freed && n->keeps)) return ms__used_up(n);
    if (MS_UNLIKELY(ms__recording != NULL && n->seq < ms__recording->first_node))
        return ms__capture_refuse("backward reaches %s, which ran before the step; run the forward inside the step, or "
                                  "detach() what comes from outside",
                                  n->op ? ms__op_title(n->op->name) : "a function or module");
    MS_TRY(
        ms__grow(&r->agenda, &r->cap_agenda, r->n_agenda, sizeof *r->agenda, "backward", "the lists of pending work"));
    if (MS_UNLIKELY(n->run != NULL)) MS_TRY(set_aside_node(r, n));
    n->run = r;
    n->counted = false;
    for (const ms_hook *h = n->hooks; MS_UNLIKELY(h != NULL); h = h->next) r->units |= h->kind == MS_HOOK_UNIT;
    r->agenda[r->n_agenda++] = (ms_entry) { n->seq, n };
    return MS_OK;
}

static int by_seq(const void *a, const void *b)
{
    uint64_t x = ((const ms_entry *)a)->seq, y = ((const ms_entry *)b)->seq;
    return x < y ? -1 : x > y;
}

static bool is_captured(const ms_run *r, const ms_node *n)
{
    for (int k = 0; k < r->n_captures; k++)
        if (r->captures[k].node == n) return true;
    return false;
}

static ms_edge edge_end(ms_edge e)
{
    while (e.leaf && e.leaf->forward) e = *e.leaf->forward;
    return e;
}

static bool edge_needed(const ms_run *r, ms_edge e)
{
    e = edge_end(e);
    if (!r->grad) return e.node || e.leaf;
    if (e.node) return e.node->run == r && e.node->needed;
    for (int k = 0; e.leaf && k < r->n_captures; k++)
        if (r->captures[k].leaf == e.leaf) return true;
    return false;
}

static ms_status touch_leaf(ms_run *r, ms_leaf *l)
{
    if (l->run != r) {
        MS_TRY(ms__grow(&r->leaves, &r->cap_leaves, r->n_leaves, sizeof *r->leaves, "backward",
                        "the lists of pending work"));
        if (MS_UNLIKELY(l->run != NULL)) MS_TRY(set_aside_leaf(r, l));
        l->run = r;
        l->pending = 0;
        l->total = NULL;
        l->refs++;
        r->units |= l->tensor && l->tensor->unit_param;
        r->leaves[r->n_leaves++] = l;
    }
    l->pending++;
    return MS_OK;
}

// Adds every node reachable from those at agenda[first ..], and sorts the agenda.
static ms_status collect_roots(ms_run *r, int first)
{
    for (int i = first; i < r->n_agenda; i++) {
        ms_node *n = r->agenda[i].node;
        for (int k = 0; k < n->n_in; k++) {
            ms_node *m = edge_end(n->edges[k]).node;
            if (m && m->run != r) MS_TRY(add_node(r, m));
        }
    }
    // The search finds the nodes in nearly descending order (for a chain, exactly), so the reversed list is nearly
    // sorted.
    ms_entry *a = r->agenda;
    for (int i = first, j = r->n_agenda - 1; i < j; i++, j--) {
        ms_entry e = a[i];
        a[i] = a[j];
        a[j] = e;
    }
    int from = first ? first - 1 : 0;
    bool sorted = true;
    int n = r->n_agenda;
    for (int i = from + 1; i < n && sorted; i++) sorted = a[i - 1].seq < a[i].seq;
    if (!sorted && n <= 48) {
        for (int i = 1; i < n; i++) {
            ms_entry e = a[i];
            int j = i;
            for (; j > 0 && a[j - 1].seq > e.seq; j--) a[j] = a[j - 1];
            a[j] = e;
        }
    } else if (!sorted) {
        qsort(a, (size_t)n, sizeof *a, by_seq);
    }
    return MS_OK;
}

// For the n_new nodes of the agenda that are not counted yet, counts the contributions that leaves will receive from
// them. Works in ascending order, so that `needed` of a node is known before the consumers of its outputs are counted.
static ms_status count_leaves(ms_run *r, int n_new)
{
    int first = r->n_agenda;
    while (n_new > 0) n_new -= !r->agenda[--first].node->counted;
    for (int i = first; i < r->n_agenda; i++) {
        ms_node *n = r->agenda[i].node;
        if (n->counted) continue;
        n->counted = n->needed = true;
        if (r->grad) {
            n->needed = n->kind == MS_NODE_CHECKPOINT || is_captured(r, n);
            for (int k = 0; k < n->n_in && !n->needed; k++) n->needed = edge_needed(r, n->edges[k]);
            if (!n->needed) continue;
        }
        for (int k = 0; k < n->n_in; k++) {
            ms_edge e = edge_end(n->edges[k]);
            if (e.leaf) MS_TRY(touch_leaf(r, e.leaf));
        }
        const ms_region *g = n->kind == MS_NODE_CHECKPOINT ? n->unit : NULL;
        for (int k = 0; g && k < g->n; k++) {
            ms_edge e = edge_end((ms_edge) { .leaf = g->leaves[k] });
            if (e.leaf && edge_needed(r, e)) MS_TRY(touch_leaf(r, e.leaf));
        }
    }
    return MS_OK;
}

static ms_status hold_node(ms_run *r, ms_node *n)
{
    MS_TRY(ms__grow(&r->held, &r->cap_held, r->n_held, sizeof *r->held, "backward", "the lists of pending work"));
    n->refs++;
    r->held[r->n_held++] = n;
    return MS_OK;
}

// ---- delivery of gradients ----------------------------------------------------------------------

// Adds g to the gradient at the end of an edge. Takes ownership of g, which may be NULL. counts: whether g is one of
// the contributions that the leaf expects.
static ms_status deliver(ms_run *r, ms_edge e, ms_tensor *g, bool counts)
{
    e = edge_end(e);
    if (e.node) {
        if (!g) return MS_OK;
        if (MS_UNLIKELY(e.node->run != r || !e.node->needed)) {
            ms__release(g);
            return MS_OK;
        }
        return ms__accumulate(&e.node->gout[e.index], g);
    }
    if (!e.leaf || e.leaf->run != r) {
        ms__release(g);
        return MS_OK;
    }
    if (g && e.leaf->tensor && e.leaf->tensor->unit_param)
        MS_TRY(ms__or_drop(ms__run_owner->gradient_fits(e.leaf->tensor, g), &g));
    if (g) MS_TRY(ms__accumulate(&e.leaf->total, g));
    if (counts && --e.leaf->pending == 0) return ms__leaf_complete(r, e.leaf);
    return MS_OK;
}

// ---- nodes ------------------------------------------------------------------------------------

// The grad of a leaf on a GPU, if an operator's backward may add its result directly to that tensor: the result is the
// leaf's only contribution in this run, the leaf has no hooks and belongs to no unit, and nothing else uses the grad's
// memory. Otherwise NULL.
static ms_tensor *grad_so_far(const ms_run *r, const ms_leaf *l)
{
    const ms_tensor *t = l->tensor, *g = l->grad;
    if (r->grad || l->total || l->pending != 1 || l->hooks || !t || t->unit_param || !g) return NULL;
    return ms__is_cuda(ms__device(g)) && ms__exclusive(g) && !g->storage->readers ? l->grad : NULL;
}

static ms_tensor *gradient_so_far(const ms_backward_call *b, int k)
{
    ms_edge e = edge_end(b->edges[k]);
    const ms_meta *m = &b->in_meta[k];
    ms_tensor *grad = e.leaf && e.leaf->run == b->run ? grad_so_far(b->run, e.leaf) : NULL;
    if (grad && grad->dtype == m->dtype && ms__device(grad) == m->device && ms__has_shape(grad, m->ndim, m->shape))
        return grad;
    ms_tensor *t = e.node && e.node->run == b->run && e.node->needed ? e.node->gout[e.index]
                   : e.leaf && e.leaf->run == b->run                 ? e.leaf->total
                                                                     : NULL;
    bool fits = t && t->dtype == m->dtype && ms__device(t) == m->device && ms__has_shape(t, m->ndim, m->shape);
    return fits && ms__exclusive(t) && !t->slot && !t->storage->readers ? t : NULL;
}

static ms_status op_backward(ms_run *r, ms_node *n)
{
    bool need[MS_MAX_IN], some = false;
    MS_TRY(ms__check_saved(n));
    for (int k = 0; k < n->n_in; k++) {
        some |= need[k] = edge_needed(r, n->edges[k]);
        r->at.gin[k] = NULL;
    }
    if (!some) return MS_OK;
    MS_RANGE(MS_RANGE_BACKWARD, ms__trace_text("backward of %s", n->op->name),
             n->use >> 1 ? ms__trace_text("module %lld", (long long)(n->use >> 1)) : NULL);
    ms_backward_call b = {
        .op = n->op,
        .n_in = n->n_in,
        .n_out = n->n_out,
        .n_i = n->n_i,
        .n_f = n->n_f,
        .in = n->in,
        .out = n->out,
        .in_meta = n->in_meta,
        .out_meta = n->out_meta,
        .i = n->i,
        .f = n->f,
        .saved_rng = n->saved_rng,
        .gout = n->gout,
        .gin = r->at.gin,
        .need = need,
        .so_far = gradient_so_far,
        .run = r,
        .edges = n->edges,
    };
    int32_t outer = ms__state.memory_module;
    ms__state.memory_module = (int32_t)(n->use >> 1);
    ms_status st = ms__compute_again(n);
    if (st == MS_OK) st = n->op->backward(&b);
    ms__drop_again(n);
    ms__state.memory_module = outer;
    return st == MS_OK ? st : ms__fail_prefix("backward of ");
}

// Adds the recomputed region to the agenda. The gradients of its detached inputs continue along the checkpoint's own
// edges.
static ms_status enter_region(ms_run *r, ms_node *n)
{
    int first = r->n_agenda;
    ms_tensor *const *a;
    int na = ms__run_answers(r, &a);
    if (na != n->n_out)
        return ms__fail(MS_EINVAL,
                        "checkpoint: the region returned %d tensors when recomputed, %d before; the numbers must be "
                        "equal",
                        na, n->n_out);
    for (int k = 0; k < na; k++) {
        ms_tensor *o = a[k];
        if (!n->gout[k]) continue;
        if (o && !o->node && o->requires_grad && !ms__leaf_of(o)) return MS_ENOMEM;
        if (!o || !ms__has_shape(o, n->out_meta[k].ndim, n->out_meta[k].shape))
            return ms__fail(MS_EINVAL,
                            "checkpoint: output %d is %s when recomputed, shape %s before; the shapes must be equal",
                            k + 1, o ? ms__tensor_text(o) : "nothing",
                            ms__shape_text(n->out_meta[k].ndim, n->out_meta[k].shape));
        if (o->node && o->node->run != r) {
            MS_TRY(hold_node(r, o->node));
            MS_TRY(add_node(r, o->node));
        }
    }
    MS_TRY(collect_roots(r, first));
    MS_TRY(count_leaves(r, r->n_agenda - first));
    for (int k = 0; k < na; k++) {
        if (!n->gout[k] || !a[k]->requires_grad) continue;
        ms_edge e = edge_end((ms_edge) { a[k]->node, a[k]->node ? NULL : a[k]->leaf, a[k]->out_index });
        bool own_leaf = e.leaf && !a[k]->leaf->forward;  // an output that is itself a leaf, for example a parameter
        if (own_leaf) MS_TRY(touch_leaf(r, e.leaf));
        MS_TRY(deliver(r, e, ms__retain(n->gout[k]), own_leaf));
    }
    return MS_OK;
}

// Ends the wait of the leaves for a contribution of the checkpoint's region g: either g was recomputed and the
// contributions of its own nodes are counted now, or no gradient reached g.
static ms_status settle_region(ms_run *r, const ms_region *g)
{
    for (int k = 0; g && k < g->n; k++) {
        ms_edge e = edge_end((ms_edge) { .leaf = g->leaves[k] });
        if (e.leaf && edge_needed(r, e)) MS_TRY(deliver(r, e, NULL, true));
    }
    return MS_OK;
}

static ms_run_state node_event(ms_run *r, ms_event *ev, const ms_question *q)
{
    r->at.phase = PHASE_ANSWER;
    return ms__run_event(r, ev, q);
}

static ms_run_state module_event(ms_run *r, ms_event *ev, ms_node *n, ms_module_call *m)
{
    ms_tensor *all[MS_MAX_IN + MS_MAX_OUT];
    int n_first = n->kind == MS_NODE_MODULE_IN ? n->n_out : 0;
    for (int k = 0; k < n_first; k++) all[k] = n->gout[k];
    for (int k = 0; k < m->n_out; k++) all[n_first + k] = m->grad_out[k];
    return node_event(r, ev,
                      &(ms_question) { MS_EV_MODULE_BACKWARD, .key = m->key, .n = n_first + m->n_out, .in = all,
                                       .n_first = n_first });
}

static ms_status module_out(ms_node *n)
{
    ms_module_call *m = n->unit;
    for (int k = 0; k < n->n_out; k++) {
        ms__release(m->grad_out[k]);
        m->grad_out[k] = ms__retain(n->gout[k]);
    }
    return MS_OK;
}

static ms_status take_answers(ms_run *r, ms_node *n, const char *who, bool all)
{
    ms_tensor *const *a;
    int na = ms__run_answers(r, &a);
    if (na == 0 && !all) return MS_OK;
    if (na > n->n_in)
        return ms__fail(MS_EINVAL,
                        "%s: the number of returned gradients is %d, expected at most the number of inputs, %d", who,
                        na, n->n_in);
    for (int k = 0; k < n->n_in; k++) {
        ms_tensor *g = k < na ? ms__retain(a[k]) : NULL;
        if (!all && !g) continue;  // a hook that returned nil leaves the gradient unchanged
        if (g && (!n->in_meta[k].present || !(n->edges[k].node || n->edges[k].leaf))) ms__drop(&g);
        if (g) MS_TRY(ms__fit_gradient(&g, &n->in_meta[k], who, k));
        ms__release(r->at.gin[k]);
        r->at.gin[k] = g;
    }
    return MS_OK;
}

// Processes one node: its hooks, its backward, its gradients along the edges. Returns MS_RUN_DONE when the node is
// finished, and also when it has pushed tasks that must run first.
ms_run_state ms__node_step(ms_run *r, ms_event *ev)
{
    ms_node *n = r->at.node;
    ms_tensor *const *a;
    switch (r->at.phase) {
    case PHASE_HOOKS:
        if (MS_UNLIKELY(r->event.kind == MS_EV_TENSOR_HOOK && r->at.hook && ms__run_answers(r, &a) > 0 && a[0])) {
            int at = r->at.hook_output;
            ms_tensor *g = ms__retain(a[0]);
            if (ms__fit_gradient(&g, &n->out_meta[at], "register_hook", 0)) return MS_RUN_FAILED;
            ms__release(n->gout[at]);
            n->gout[at] = g;
        }
        r->event.kind = 0;
        for (ms_hook *h = r->at.hook ? r->at.hook->next : n->hooks; MS_UNLIKELY(h != NULL); h = h->next) {
            if (h->kind == MS_HOOK_REMOVED || !n->gout[h->index] || !n->needed) continue;
            r->at.hook = h;
            if (h->kind == MS_HOOK_UNIT) {
                if (ms__run_owner->pre_backward(r, h->unit, h->use)) return MS_RUN_FAILED;
                return MS_RUN_DONE;  // the tasks that it pushed run first
            }
            r->at.hook_output = h->index;
            return ms__run_event(r, ev,
                                 &(ms_question) { MS_EV_TENSOR_HOOK, .key = h->key, .n = 1, .in = &n->gout[h->index] });
        }
        r->at.hook = NULL;
        for (int k = 0; k < r->n_captures; k++) {
            ms_capture *c = &r->captures[k];
            if (c->node == n && !c->value) c->value = ms__retain(n->gout[c->index]);
        }
        r->at.phase = PHASE_BACKWARD;
        // fall through
    case PHASE_BACKWARD: {
        bool any = false, started = false;
        for (int k = 0; k < n->n_out; k++) any |= n->gout[k] != NULL;
        if (any && n->needed && r->units && n->kind == MS_NODE_OP && !n->freed) {
            if (ms__read_parameters(r, n, &started)) return MS_RUN_FAILED;
            if (MS_UNLIKELY(started)) return MS_RUN_DONE;
        }
        for (int k = 0; k < n->n_in; k++) r->at.gin[k] = NULL;
        r->at.phase = PHASE_DELIVER;
        if (MS_LIKELY(any && n->needed)) {
            if (MS_UNLIKELY(n->freed && n->keeps)) {  // freed by a nested run
                ms__used_up(n);
                return MS_RUN_FAILED;
            }
            switch (n->kind) {
            case MS_NODE_OP:
                if (op_backward(r, n)) return MS_RUN_FAILED;
                break;
            case MS_NODE_FUNCTION:
                return node_event(r, ev,
                                  &(ms_question) { MS_EV_FUNCTION, .key = n->key, .n = n->n_out, .in = n->gout });
            case MS_NODE_CHECKPOINT: return node_event(r, ev, &(ms_question) { MS_EV_RECOMPUTE, .key = n->key });
            case MS_NODE_MODULE_OUT:
                for (int k = 0; k < n->n_in; k++) r->at.gin[k] = ms__retain(n->gout[k]);
                module_out(n);
                // If no input requires a gradient, there is no MODULE_IN node: the hook runs here.
                if (((ms_module_call *)n->unit)->n_in == 0) return module_event(r, ev, n, n->unit);
                break;
            case MS_NODE_MODULE_IN:
                for (int k = 0; k < n->n_in; k++) r->at.gin[k] = ms__retain(n->gout[k]);
                return module_event(r, ev, n, n->unit);
            case MS_NODE_UNIT:
                for (int k = 0; k < n->n_in; k++) r->at.gin[k] = ms__retain(n->gout[k]);
                break;
            }
        }
        goto deliver;
    }
    case PHASE_ANSWER:
        r->at.phase = PHASE_DELIVER;
        if (n->kind == MS_NODE_FUNCTION && take_answers(r, n, "Function", true)) return MS_RUN_FAILED;
        if (n->kind == MS_NODE_MODULE_IN && take_answers(r, n, "backward hook", false)) return MS_RUN_FAILED;
        if (n->kind == MS_NODE_CHECKPOINT && enter_region(r, n)) return MS_RUN_FAILED;
        // fall through
    default:
    deliver:
        if (MS_UNLIKELY(ms__anomaly) && ms__anomaly_gradients(n, r->at.gin)) return MS_RUN_FAILED;
        ms__node_drop_gouts(n);
        n->run = NULL;
        for (int k = n->n_in - 1; k >= 0; k--) {
            ms_tensor *g = r->at.gin[k];
            r->at.gin[k] = NULL;
            if (n->needed && deliver(r, n->edges[k], g, true)) return MS_RUN_FAILED;
            if (!n->needed) ms__release(g);
        }
        if (MS_UNLIKELY(n->kind == MS_NODE_CHECKPOINT) && n->needed && settle_region(r, n->unit)) return MS_RUN_FAILED;
        if (MS_UNLIKELY(n->kind == MS_NODE_UNIT) && n->needed && ms__run_owner->post_backward(r, n->unit, n->use))
            return MS_RUN_FAILED;
        if (!r->retain) ms__node_free_saved(n);
        r->at.node = NULL;
        return MS_RUN_DONE;
    }
}

// ---- backward and grad ------------------------------------------------------------------------

// The gradient of root k: the one that the caller passed, or 1.
static ms_status seed(ms_tensor **out, ms_tensor *root, ms_tensor *given, const char *who, int k)
{
    if (given) {
        ms_meta m = ms__meta_of(root);
        *out = ms__retain(given);
        return ms__fit_gradient(out, &m, who, k);
    }
    if (root->numel != 1)
        return ms__fail(MS_EINVAL, "%s: root %d has shape %s; only a root of one element may omit its gradient", who,
                        k + 1, ms__shape_text(root->ndim, root->shape));
    MS_TRY(ms__tensor_like(out, root, who));
    return ms__or_drop(ms__fill_data(*out, 1), out);
}

// The roots of a run and their gradients, as ids and as tensors.
typedef struct {
    const char *who;
    int n;
    const ms_id *ids, *grad_ids;
    ms_tensor *at[MS_MAX_OUT], *grad[MS_MAX_OUT];
} root_list;

static ms_status find_roots(root_list *l)
{
    if (l->n < 1 || l->n > MS_MAX_OUT)
        return ms__fail(MS_EINVAL, "%s: %d roots; 1 to %d are supported", l->who, l->n, MS_MAX_OUT);
    for (int k = 0; k < l->n; k++) {
        l->grad[k] = NULL;
        if (!(l->at[k] = ms__tensor(l->ids[k]))) return ms__failure();
        if (l->grad_ids && l->grad_ids[k] != 0 && !(l->grad[k] = ms__tensor(l->grad_ids[k]))) return ms__failure();
        if (!l->at[k]->requires_grad)
            return ms__fail(MS_EINVAL,
                            "%s: root %d, %s, does not require grad, and was not computed from a tensor that does%s",
                            l->who, k + 1, ms__tensor_text(l->at[k]),
                            ms__state.grad_mode
                                ? ""
                                : " (no graph is recorded here, inside no_grad or a hook; see enable_grad)");
    }
    return MS_OK;
}

static ms_status capture_inputs(ms_run *r, int m, const ms_id *inputs)
{
    if (!(r->captures = calloc((size_t)m, sizeof *r->captures)))
        return ms__run_no_memory((size_t)m * sizeof *r->captures);
    for (int k = 0; k < m; k++) {
        ms_tensor *t = ms__tensor(inputs[k]);
        if (!t) return ms__failure();
        if (!t->requires_grad)
            return ms__fail(MS_EINVAL, "grad: input %d, %s, does not require grad", k + 1, ms__tensor_text(t));
        ms_capture *c = &r->captures[r->n_captures++];
        c->index = t->out_index;
        if (t->node) (c->node = t->node)->refs++;
        else if (ms__leaf_of(t)) (c->leaf = t->leaf)->refs++;
        else return MS_ENOMEM;
    }
    return MS_OK;
}

static ms_status start_backward(ms_run *r, const root_list *l)
{
    for (int k = 0; k < l->n; k++) {
        ms_node *node = l->at[k]->node;
        if (!node) continue;
        MS_TRY(hold_node(r, node));
        if (node->run != r) MS_TRY(add_node(r, node));
    }
    MS_TRY(collect_roots(r, 0));
    MS_TRY(count_leaves(r, r->n_agenda));
    // Count all roots that are leaves before delivering any gradient, so that no leaf is completed too early.
    for (int k = 0; k < l->n; k++) {
        if (l->at[k]->node) continue;
        if (!ms__leaf_of(l->at[k])) return MS_ENOMEM;
        MS_TRY(touch_leaf(r, l->at[k]->leaf));
    }
    for (int k = 0; k < l->n; k++) {
        ms_tensor *root = l->at[k], *g;
        MS_TRY(seed(&g, root, l->grad[k], l->who, k));
        MS_TRY(deliver(r, (ms_edge) { root->node, root->node ? NULL : root->leaf, root->out_index }, g, true));
    }
    return MS_OK;
}

// Starts a run: a backward if m = 0, otherwise one that computes the gradients with respect to m inputs. NULL with the
// error set on failure.
static ms_run *run_from(root_list *l, int m, const ms_id *inputs, bool retain_graph, bool allow_unused)
{
    // Peers may already wait in the collectives of their backward. If this rank's backward fails before its own
    // collectives, the peers must learn of the error.
    bool expected = ms__run_owner && ms__state.run_depth == 0 && ms__run_owner->expects_backward();
    ms_run *r = find_roots(l) == MS_OK ? ms__run_new() : NULL;
    if (!r) {
        if (expected) ms__run_owner->failed(ms_error(), true);
        return NULL;
    }
    r->backward = true;
    r->grad = m > 0;
    r->retain = retain_graph;
    r->unused_ok = allow_unused;
    if ((m == 0 || capture_inputs(r, m, inputs) == MS_OK) && start_backward(r, l) == MS_OK) return r;
    r->units |= expected;
    ms_run_abort(r, NULL);
    return NULL;
}

ms_run *ms_backward(int n, const ms_id *roots, const ms_id *grads, int retain_graph)
{
    root_list l = { .who = "backward", .n = n, .ids = roots, .grad_ids = grads };
    return run_from(&l, 0, NULL, retain_graph != 0, false);
}

ms_run *ms_grad(int n, const ms_id *roots, const ms_id *grads, int m, const ms_id *inputs, int retain_graph,
                int allow_unused)
{
    if (m < 1) return ms__null(ms__fail(MS_EINVAL, "grad: no inputs given, expected at least 1"));
    root_list l = { .who = "grad", .n = n, .ids = roots, .grad_ids = grads };
    return run_from(&l, m, inputs, retain_graph != 0, allow_unused != 0);
}
