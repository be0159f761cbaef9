// SPDX-License-Identifier: MIT
// autograd/custom.c -- nodes that are not operators: identities around units and modules, functions whose backward the
// script computes, and checkpoints. backward.c runs their backwards.
#include "autograd/graph.h"

// ---- identity nodes ---------------------------------------------------------------------------

// Makes an identity node over in[]. out[] receives aliases of the inputs that require grad (at least one does), and the
// other inputs themselves, retained.
static ms_node *identity(ms_node_kind kind, int n, ms_tensor *const *in, ms_tensor **out)
{
    ms_node *node = ms__node_new(kind, n, in, n);
    if (!node) return NULL;
    for (int k = 0; k < n; k++) {
        out[k] = in[k];
        if (!in[k]) continue;
        if (!in[k]->requires_grad) {
            ms__retain(in[k]);
            continue;
        }
        out[k] = ms__tensor_alias(in[k]);
        ms__node_output(node, k, out[k]);
    }
    return node;
}

ms_status ms__unit_boundary(void *unit, int64_t use, int n, ms_tensor *const *in, ms_tensor **out, bool *recorded)
{
    *recorded = ms__any_grad(n, in);
    if (!*recorded) {
        for (int k = 0; k < n; k++) out[k] = ms__retain(in[k]);
        return MS_OK;
    }
    ms_node *node = identity(MS_NODE_UNIT, n, in, out);
    if (!node) return MS_ENOMEM;
    node->unit = unit;
    node->use = use;
    return MS_OK;
}

ms_status ms__unit_hook(ms_tensor *t, void *unit, int64_t use)
{
    if (!t->node) return MS_OK;
    ms_hook *h = ms__hook_add(&t->node->hooks, MS_HOOK_UNIT, t->out_index);
    if (!h) return ms__no_memory(sizeof *h, "fsdp", "a hook");
    h->unit = unit;
    h->use = use;
    return MS_OK;
}

// ---- module hooks, custom functions, checkpoints ----------------------------------------------

static ms_status tensors_of(const char *who, int n, const ms_id *ids, ms_tensor **out)
{
    if (n < 0 || n > MS_MAX_IN)
        return ms__fail(MS_EINVAL, "%s: %d tensors; at most %d are supported", who, n, MS_MAX_IN);
    for (int k = 0; k < n; k++) {
        out[k] = NULL;
        if (ids[k] != 0 && !(out[k] = ms__tensor(ids[k]))) return ms__failure();
    }
    return MS_OK;
}

enum { CALLS = 1024 };
static struct {
    // Module calls whose outputs have not been recorded yet. A call whose forward failed stays in the list until an
    // enclosing call ends or the list is full.
    ms_module_call *calls[CALLS];
    int n_calls;
    double next_token, next_region;
    ms_region *ended;  // the region that ended last, until its checkpoint is recorded
} scripted = { .next_token = 1, .next_region = 1 };

static void drop_calls(int from)
{
    while (scripted.n_calls > from) ms__module_call_release(scripted.calls[--scripted.n_calls]);
}

double ms_module_hook_inputs(double key, int n, ms_id *ids)
{
    ms_tensor *in[MS_MAX_IN], *out[MS_MAX_IN];
    if (tensors_of("module hook", n, ids, in)) return 0;
    if (scripted.n_calls == CALLS) drop_calls(0);  // calls left over from failed forwards
    ms_module_call *m = calloc(1, sizeof *m);
    if (!m) return ms__no_id(ms__no_memory(sizeof *m, "module hook", "the record of a call"));
    m->refs = 1;
    m->key = key;
    m->token = scripted.next_token++;
    if (ms__any_grad(n, in)) {
        ms_node *node = identity(MS_NODE_MODULE_IN, n, in, out);
        if (!node) {
            free(m);
            return 0;
        }
        node->unit = m;
        m->refs++;
        m->n_in = n;
        for (int k = 0; k < n; k++) ids[k] = out[k] ? ms__name(out[k]) : 0;
    }
    scripted.calls[scripted.n_calls++] = m;
    return m->token;
}

ms_status ms_module_hook_outputs(double token, int n, ms_id *ids)
{
    ms_tensor *in[MS_MAX_IN], *out[MS_MAX_IN];
    int at = scripted.n_calls - 1;
    while (at >= 0 && scripted.calls[at]->token != token) at--;
    if (at < 0)
        return ms__fail(MS_ESTATE,
                        "module hook: the inputs of this call were not recorded, or its outputs were already recorded");
    drop_calls(at + 1);  // inner calls whose forward failed
    ms_module_call *m = scripted.calls[at];
    ms_status st = tensors_of("module hook", n, ids, in);
    if (st == MS_OK && ms__any_grad(n, in)) {
        m->grad_out = calloc((size_t)n, sizeof *m->grad_out);
        ms_node *node = m->grad_out ? identity(MS_NODE_MODULE_OUT, n, in, out) : NULL;
        if (node) {
            m->n_out = n;
            m->refs++;
            node->unit = m;
            for (int k = 0; k < n; k++) ids[k] = out[k] ? ms__name(out[k]) : 0;
        } else {
            st = ms__no_memory((size_t)n * sizeof *m->grad_out + sizeof(ms_node), "module hook", "%d outputs", n);
        }
    }
    drop_calls(at);
    return st;
}

// ---- regions of checkpoints --------------------------------------------------------------------

ms_region *ms__region;

static void meet(int n, ms_tensor *const *in)
{
    ms_region *g = ms__region;
    for (int k = 0; k < n; k++) {
        ms_tensor *t = in[k];
        if (!t || !t->requires_grad || t->node) continue;
        ms_leaf *l = ms__leaf_of(t);
        bool known = !l;
        for (int j = 0; j < g->n && !known; j++) known = g->leaves[j] == l;
        if (known) continue;
        // If there is no memory for the list, hooks may run twice; gradients stay correct.
        if (ms__grow(&g->leaves, &g->cap, g->n, sizeof *g->leaves, "checkpoint", "leaves")) return;
        l->refs++;
        g->leaves[g->n++] = l;
    }
}

static void enter(ms_region *g)
{
    ms__region = g;
    ms__recorder.meet = g ? meet : NULL;
}

double ms_checkpoint_begin(void)
{
    ms_region *g = calloc(1, sizeof *g);
    if (!g) return ms__no_id(ms__no_memory(sizeof *g, "checkpoint", "a region"));
    g->token = scripted.next_region++;
    g->around = ms__region;
    enter(g);
    return g->token;
}

void ms_checkpoint_end(double token)
{
    ms_region *g = ms__region;
    while (g && g->token != token) g = g->around;
    if (!g) return;
    while (ms__region != g) {  // regions left open inside g
        ms_region *inner = ms__region;
        enter(inner->around);
        ms__region_release(inner);
    }
    enter(g->around);
    ms__region_release(scripted.ended);
    scripted.ended = g;
}

static ms_status record_custom(ms_node_kind kind, double key, int n_in, const ms_id *in_ids, int n_out,
                               const ms_id *out_ids)
{
    ms_tensor *in[MS_MAX_IN], *out[MS_MAX_OUT];
    const char *who = kind == MS_NODE_FUNCTION ? "Function" : "checkpoint";
    MS_TRY(tensors_of(who, n_in, in_ids, in));
    MS_TRY(tensors_of(who, n_out, out_ids, out));
    bool recorded = ms__any_grad(n_in, in), any_float = false;
    for (int k = 0; recorded && k < n_out; k++) {
        any_float |= out[k] && ms__is_float(out[k]->dtype);
        if (out[k] && out[k]->requires_grad)
            return ms__fail(
                MS_EINVAL,
                "%s: output %d is part of a graph already; forward must make its outputs, or return detach() of "
                "an input",
                who, k + 1);
    }
    if (!any_float) {
        ms__dead_key(key);
        return MS_OK;
    }
    ms_node *n = ms__node_new(kind, n_in, in, n_out);
    if (!n) return MS_ENOMEM;
    n->key = key;
    n->keeps = true;
    if (kind == MS_NODE_CHECKPOINT) {
        n->unit = scripted.ended;
        scripted.ended = NULL;
    }
    for (int k = 0; k < n_out; k++) ms__node_output(n, k, out[k]);
    return MS_OK;
}

ms_status ms_function_record(double key, int n_in, const ms_id *in, int n_out, const ms_id *out)
{
    return record_custom(MS_NODE_FUNCTION, key, n_in, in, n_out, out);
}

ms_status ms_checkpoint_record(double key, int n_in, const ms_id *in, int n_out, const ms_id *out)
{
    return record_custom(MS_NODE_CHECKPOINT, key, n_in, in, n_out, out);
}
