// SPDX-License-Identifier: MIT
// autograd/graph.c -- the tape: nodes, leaves, hooks, and recording.
//
// A node is one block from a pool: the struct and its arrays. It holds its inputs' nodes (edges) and the tensors that
// its backward reads. Of its own outputs it holds only aliases, so that the graph has no cycles and is freed with the
// last tensor that needs it. Of a unit's parameters it holds aliases too: the parameter tensor changes its storage
// while the graph still needs the earlier view.
#include "autograd/captured.h"
#include "autograd/graph.h"
#include "base/watched.h"

enum { CLASS = 256, CLASSES = 17 };  // blocks of up to 4 KiB are pooled
static struct {
    ms_node *pool[CLASSES];
    uint64_t next_seq;
    ms_leaf *spare_leaf;  // free list, linked through tensor
    ms_tensor *before;    // the old values of an in-place operator's target, between record_before and record
    double *dead;         // keys of hooks and functions that the script forgets
    int n_dead, cap_dead;
    // Of hooks. A handle is an index into this table and a generation.
    struct {
        ms_hook *hook;
        uint32_t generation, next;
    } * handles;
    int n_handles, cap_handles;
    uint32_t free_handle;
} graph = { .next_seq = 1, .n_handles = 1 };

uint64_t ms__next_node(void) { return graph.next_seq; }

// ---- dead keys --------------------------------------------------------------------------------

void ms__dead_key(double key)
{
    if (key == 0) return;
    // If there is no memory for the list, the script never removes its entry for this key.
    if (ms__grow(&graph.dead, &graph.cap_dead, graph.n_dead, sizeof *graph.dead, "autograd", "released keys")) return;
    graph.dead[graph.n_dead++] = key;
}

int ms_dead_keys(double *out, int capacity)
{
    int n = graph.n_dead < capacity ? graph.n_dead : capacity;
    for (int k = 0; k < n; k++) out[k] = graph.dead[--graph.n_dead];
    return n;
}

// ---- hooks ------------------------------------------------------------------------------------

enum { HOOK_BITS = 22 };
static double handle_new(ms_hook *h, const char *who)
{
    uint32_t i = graph.free_handle;
    if (i) {
        graph.free_handle = graph.handles[i].next;
    } else {
        if (graph.n_handles >= 1 << HOOK_BITS)
            return ms__no_id(ms__fail(MS_ENOMEM, "%s: more than %d hooks are registered", who, (1 << HOOK_BITS) - 1));
        if (ms__grow(&graph.handles, &graph.cap_handles, graph.n_handles, sizeof *graph.handles, who, "hooks"))
            return 0;
        i = (uint32_t)graph.n_handles++;
        graph.handles[i].generation = 0;
    }
    graph.handles[i].hook = h;
    return (double)(((uint64_t)graph.handles[i].generation << HOOK_BITS) | i);
}

static void handle_free(double handle)
{
    if (handle == 0) return;
    uint32_t i = (uint32_t)((uint64_t)handle & ((1u << HOOK_BITS) - 1));
    graph.handles[i].hook = NULL;
    graph.handles[i].generation++;
    graph.handles[i].next = graph.free_handle;
    graph.free_handle = i;
}

static void free_hooks(ms_hook *h)
{
    while (h) {
        ms_hook *next = h->next;
        handle_free(h->handle);
        if (h->kind != MS_HOOK_UNIT) ms__dead_key(h->key);
        free(h);
        h = next;
    }
}

// Appends the hook, because hooks run in the order in which they were registered.
ms_hook *ms__hook_add(ms_hook **list, ms_hook_kind kind, int index)
{
    ms_hook *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    h->kind = kind;
    h->index = index;
    h->list = list;
    while (*list) list = &(*list)->next;
    *list = h;
    return h;
}

static double register_hook(ms_id id, double key, ms_hook_kind kind, const char *who)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return 0;
    if (!t->requires_grad)
        return ms__no_id(
            ms__fail(MS_EINVAL, "%s: the tensor does not require grad, so no gradient will reach it", who));
    if (kind == MS_HOOK_LEAF && t->node)
        return ms__no_id(
            ms__fail(MS_EINVAL,
                     "%s: the tensor is the result of an operator, expected a leaf (register_hook accepts any tensor)",
                     who));
    ms_hook **list = t->node ? &t->node->hooks : NULL;
    if (!list) {
        ms_leaf *l = ms__leaf_of(t);
        if (!l) return 0;
        list = &l->hooks;
    }
    ms_hook *h = ms__hook_add(list, kind, t->node ? t->out_index : 0);
    if (!h) return ms__no_id(ms__no_memory(sizeof *h, who, "a hook"));
    if ((h->handle = handle_new(h, who)) != 0) h->key = key;
    return h->handle;
}

double ms_register_hook(ms_id t, double key, int after)
{
    return after ? register_hook(t, key, MS_HOOK_LEAF, "register_post_accumulate_grad_hook")
                 : register_hook(t, key, MS_HOOK_TENSOR, "register_hook");
}

void ms_hook_remove(double handle)
{
    uint64_t bits = (uint64_t)(handle > 0 ? handle : 0);
    uint32_t i = (uint32_t)(bits & ((1u << HOOK_BITS) - 1));
    if (!i || i >= (uint32_t)graph.n_handles || !graph.handles[i].hook ||
        graph.handles[i].generation != bits >> HOOK_BITS)
        return;
    ms_hook *h = graph.handles[i].hook;
    handle_free(h->handle);
    h->handle = 0;
    ms__dead_key(h->key);
    h->key = 0;
    h->kind = MS_HOOK_REMOVED;
    if (ms__state.run_depth) return;  // a run may refer to the hook: free_hooks frees it with its list
    ms_hook **p = h->list;
    while (*p != h) p = &(*p)->next;
    *p = h->next;
    free(h);
}

// ---- leaves -----------------------------------------------------------------------------------

ms_leaf *ms__leaf_of(ms_tensor *t)
{
    if (MS_LIKELY(t->leaf != NULL)) return t->leaf;
    ms_leaf *l = graph.spare_leaf;
    if (l) graph.spare_leaf = (ms_leaf *)l->tensor;
    else if (!(l = malloc(sizeof *l))) return ms__null(ms__no_memory(sizeof *l, "autograd", "a leaf of the graph"));
    *l = (ms_leaf) { .refs = 1, .tensor = t };
    return t->leaf = l;
}

void ms__leaf_set_grad(ms_leaf *l, ms_tensor *g)
{
    ms_tensor *old = l->grad;
    if (MS_UNLIKELY(ms__capturing != NULL)) ms__note_grad_set(ms__capturing, l, g);
    if (g) {
        ms__own(g);
        if (g->storage->kind == MS_MEMORY_OTHER) ms__storage_hold(g->storage, MS_MEMORY_GRADIENTS);
    }
    l->grad = g;
    if (!old) return;
    ms__disown(old);
    ms__release(old);
}

void ms__leaf_release(ms_leaf *l)
{
    if (--l->refs > 0) return;
    free_hooks(l->hooks);
    l->hooks = NULL;
    if (!MS_RECYCLE) {
        free(l);
        return;
    }
    l->tensor = (ms_tensor *)graph.spare_leaf;
    graph.spare_leaf = l;
}

static void leaf_drop(ms_tensor *t)
{
    ms_leaf *l = t->leaf;
    t->leaf = NULL;
    l->tensor = NULL;
    ms__leaf_set_grad(l, NULL);
    ms__leaf_release(l);
}

ms_status ms_set_requires_grad(ms_id id, int on)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    if (t->node) {
        if (on) return MS_OK;
        return ms__fail(
            MS_EINVAL,
            "requires_grad: the tensor is the result of an operator; only leaves can be changed (use detach())");
    }
    if (on && !ms__is_float(t->dtype))
        return ms__fail(MS_EINVAL, "requires_grad: dtype %s cannot require gradients; floating point expected",
                        ms__dtype_name(t->dtype));
    t->requires_grad = on != 0;
    return MS_OK;
}

ms_id ms_get_grad(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    if (t && t->leaf) ms__grad_is_read(t->leaf);
    if (!t || !t->leaf || !t->leaf->grad) return 0;
    ms_tensor *g = t->leaf->grad;
    bool named = g->slot != 0;
    ms_id name = ms__name_unscoped(ms__retain(g));
    if (!named && name) ms__own(g);
    return name;
}

ms_status ms_set_grad(ms_id id, ms_id grad)
{
    ms_tensor *t = ms__tensor(id), *g = NULL;
    if (!t) return ms__failure();
    if (grad == 0) {
        if (t->leaf) ms__leaf_set_grad(t->leaf, NULL);
        return MS_OK;
    }
    if (!(g = ms__tensor(grad))) return ms__failure();
    if (t->node) return ms__fail(MS_EINVAL, "grad: the tensor is the result of an operator; only leaves have a grad");
    if (g == t) return ms__fail(MS_EINVAL, "grad: a tensor cannot be its own gradient");
    const ms_tensor *before = t->leaf ? t->leaf->grad : NULL;
    bool unreduced = before && before->unreduced && ms__has_shape(g, before->ndim, before->shape) &&
                     g->dtype == before->dtype && ms__device(g) == ms__device(before);
    if (unreduced) {  // g replaces an unreduced gradient of the whole parameter (shard/views/classic.c)
        g->unreduced = true;
    } else if (g->dtype != t->dtype || !ms__has_shape(g, t->ndim, t->shape) || ms__device(g) != ms__device(t))
        return ms__fail(MS_EINVAL, "grad: %s given, the tensor is %s: shape, dtype and device must be equal",
                        ms__tensor_text(g), ms__tensor_text(t));
    ms_leaf *l = ms__leaf_of(t);
    if (!l) return MS_ENOMEM;
    if (l->grad == g) return MS_OK;
    if (ms__grad_is_local(l) && !g->version->collective) g->rank_local = true;
    ms__leaf_set_grad(l, ms__retain(g));
    return MS_OK;
}

bool ms__grad_is_local(const ms_leaf *l)
{
    return l && l->grad && l->grad->rank_local && !l->grad->version->collective;
}

ms_status ms_grad_set_local(ms_id id, int on)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    ms_tensor *g = t->leaf ? t->leaf->grad : NULL;
    if (!g) return MS_OK;
    g->rank_local = on != 0;
    if (on) g->version->collective = false;
    return MS_OK;
}

// ---- nodes ------------------------------------------------------------------------------------

#define UP(n, a) (((n) + (a)-1) & ~(size_t)((a)-1))

typedef struct {
    int in, out, i, f;
} node_size;

static ms_node *node_alloc(const char *who, node_size s)
{
    size_t bytes = UP(sizeof(ms_node), 8) +
                   (size_t)s.in * (sizeof(ms_edge) + sizeof(ms_tensor *) + sizeof(ms_meta) + sizeof(uint32_t)) +
                   (size_t)s.out * (2 * sizeof(ms_tensor *) + sizeof(ms_meta) + sizeof(uint32_t)) +
                   (size_t)s.i * sizeof(int64_t) + (size_t)s.f * sizeof(double);
    size_t c = (bytes + CLASS - 1) / CLASS;
    ms_node *n;
    if (MS_LIKELY(c < CLASSES && (n = graph.pool[c]) != NULL)) {
        graph.pool[c] = n->next;
    } else if (!(n = malloc(c * CLASS))) return ms__null(ms__no_memory(bytes, who, "a graph node"));
    // Arrays with 8-byte elements come first, then those with 4-byte elements.
    char *p = (char *)n + UP(sizeof(ms_node), 8);
#define TAKE(field, count) \
    n->field = (void *)p;  \
    p += (size_t)(count) * sizeof *n->field
    TAKE(edges, s.in);
    TAKE(in, s.in);
    TAKE(out, s.out);
    TAKE(gout, s.out);
    TAKE(i, s.i);
    TAKE(f, s.f);
    TAKE(in_meta, s.in);
    TAKE(out_meta, s.out);
    TAKE(in_version, s.in);
    TAKE(out_version, s.out);
#undef TAKE
    n->refs = 0;
    n->n_in = (uint8_t)s.in;
    n->n_out = (uint8_t)s.out;
    n->n_i = (uint8_t)s.i;
    n->n_f = (uint8_t)s.f;
    n->size_class = (uint16_t)(c < CLASSES ? c : 0);
    n->keeps = n->freed = n->needed = false;
    n->op = NULL;
    n->seq = graph.next_seq++;
    n->key = 0;
    n->unit = NULL;
    n->use = 2 * (int64_t)ms__state.memory_module;
    n->hooks = NULL;
    n->run = NULL;
    n->next = NULL;
    return n;
}

static inline void set_meta(ms_meta *m, const ms_tensor *t)
{
    m->present = t != NULL;
    if (!t) return;
    m->dtype = t->dtype;
    m->ndim = t->ndim;
    m->device = ms__device(t);
    memcpy(m->shape, t->shape, sizeof m->shape);
}

static inline bool set_edge(ms_edge *e, ms_tensor *t)
{
    e->node = NULL;
    e->leaf = NULL;
    e->index = 0;
    if (!t || !t->requires_grad) return true;
    if (t->node) {
        e->node = t->node;
        e->node->refs++;
        e->index = t->out_index;
        return true;
    }
    if (MS_UNLIKELY(!(e->leaf = ms__leaf_of(t)))) return false;
    e->leaf->refs++;
    return true;
}

void ms__node_output(ms_node *n, int k, ms_tensor *t)
{
    set_meta(&n->out_meta[k], t);
    if (!t || !ms__is_float(t->dtype)) return;
    ms_node *old = t->node;
    t->node = n;
    t->out_index = (int16_t)k;
    t->requires_grad = true;
    n->refs++;
    if (old) ms__node_release(old);  // t was changed in place: an edge of n keeps t's earlier node alive
}

static inline ms_node *node_new(const char *who, ms_node_kind kind, node_size s, ms_tensor *const *in)
{
    ms_node *n = node_alloc(who, s);
    if (!n) return NULL;
    n->kind = (uint8_t)kind;
    for (int k = 0; k < s.in; k++) {
        n->in[k] = NULL;
        n->in_version[k] = 0;
        set_meta(&n->in_meta[k], in[k]);
        if (MS_UNLIKELY(!set_edge(&n->edges[k], in[k]))) {
            n->n_in = (uint8_t)k;
            n->n_out = 0;
            n->refs = 1;
            ms__node_release(n);
            return NULL;
        }
    }
    for (int k = 0; k < s.out; k++) {
        n->out[k] = n->gout[k] = NULL;
        n->out_meta[k].present = false;
    }
    return n;
}

ms_meta ms__meta_of(const ms_tensor *t)
{
    ms_meta m;
    set_meta(&m, t);
    return m;
}

bool ms__any_grad(int n, ms_tensor *const *in)
{
    if (!ms__state.grad_mode) return false;
    for (int k = 0; k < n; k++)
        if (in[k] && in[k]->requires_grad) return true;
    return false;
}

static ms_status record_before(const ms_call *c)
{
    ms__drop(&graph.before);
    if (!(c->op->save_in & 1) || !c->in[0]) return MS_OK;
    bool wanted = c->n_in == 1;  // with more inputs, only gradients of the other inputs read the target's old values
    for (int k = 1; k < c->n_in; k++) wanted |= c->in[k] && c->in[k]->requires_grad;
    if (!wanted) return MS_OK;
    MS_TRY(ms__tensor_like(&graph.before, c->in[0], c->op->name));
    return ms__or_drop(ms__copy(graph.before, c->in[0]), &graph.before);
}

ms_node *ms__node_new(ms_node_kind kind, int n_in, ms_tensor *const *in, int n_out)
{
    return node_new("autograd", kind, (node_size) { n_in, n_out, 0, 0 }, in);
}

static ms_node *node_for(const ms_call *c)
{
    return node_new(c->op->name, MS_NODE_OP, (node_size) { c->n_in, c->n_out, c->n_i, c->n_f }, c->in);
}

static void drop_node(ms_node *n)
{
    n->refs = 1;
    ms__node_release(n);
}

static void record_node(ms_node *n, ms_call *c)
{
    const ms_op *op = c->op;
    int n_in = c->n_in, n_out = c->n_out;
    n->op = op;
    uint64_t save = op->save_in;
    bool inplace = op->flags & MS_OP_INPLACE;
    for (int k = 0; save && k < n_in; k++, save >>= 1) {
        ms_tensor *t = c->in[k];
        if (!(save & 1) || !t) continue;
        if (MS_UNLIKELY(t->node && t->node->kind == MS_NODE_OP && (t->node->use & 1)) && !(inplace && k == 0)) {
            n->in_version[k] = MS_AGAIN;
            n->keeps = true;
            continue;
        }
        if (MS_UNLIKELY(inplace && k == 0)) {
            // The copy of the old values; or an alias of the target, if no gradient reads them.
            t = graph.before ? graph.before : ms__tensor_alias(t);
            graph.before = NULL;
        } else {
            t = t->unit_param ? ms__tensor_alias(t) : ms__retain(t);
        }
        n->in[k] = t;
        n->in_version[k] = t->version->count;
        n->keeps = true;
    }
    save = op->save_out;
    for (int k = 0; k < n_out; k++) {
        ms_tensor *t = c->out[k];
        ms__node_output(n, k, t);
        if (!(save >> k & 1) || !t) continue;
        n->out[k] = ms__tensor_alias(t);
        n->out_version[k] = t->version->count;
        n->keeps = true;
    }
    for (int k = 0; k < c->n_i; k++) n->i[k] = c->i[k];
    for (int k = 0; k < c->n_f; k++) n->f[k] = c->f[k];
    n->saved_rng[0] = c->saved_rng[0];
    n->saved_rng[1] = c->saved_rng[1];
    if (MS_UNLIKELY(n->refs == 0)) drop_node(n);  // no output is floating-point
}

void ms__node_free_saved(ms_node *n)
{
    n->freed = true;
    if (n->key != 0) {
        ms__dead_key(n->key);
        n->key = 0;
    }
    for (int k = 0; k < n->n_in; k++) ms__drop(&n->in[k]);
    for (int k = 0; k < n->n_out; k++) ms__drop(&n->out[k]);
}

void ms__module_call_release(ms_module_call *m)
{
    if (--m->refs > 0) return;
    for (int k = 0; k < m->n_out; k++) ms__release(m->grad_out[k]);
    free(m->grad_out);
    free(m);
}

void ms__region_release(ms_region *g)
{
    if (!g) return;
    for (int k = 0; k < g->n; k++) ms__leaf_release(g->leaves[k]);
    free(g->leaves);
    free(g);
}

// Drops a reference. Releasing a node may release the nodes of its inputs, and so on: uses a list instead of recursion.
void ms__node_release(ms_node *n)
{
    static ms_node *dying;
    static bool draining;

    if (--n->refs > 0) return;
    n->next = dying;
    dying = n;
    if (draining) return;
    draining = true;
    while ((n = dying) != NULL) {
        dying = n->next;
        ms__node_free_saved(n);
        for (int k = 0; k < n->n_out; k++) ms__release(n->gout[k]);
        for (int k = 0; k < n->n_in; k++) {
            if (n->edges[k].node) ms__node_release(n->edges[k].node);
            else if (n->edges[k].leaf) ms__leaf_release(n->edges[k].leaf);
        }
        if (MS_UNLIKELY(n->hooks != NULL)) free_hooks(n->hooks);
        if (n->kind == MS_NODE_MODULE_IN || n->kind == MS_NODE_MODULE_OUT) ms__module_call_release(n->unit);
        if (n->kind == MS_NODE_CHECKPOINT) ms__region_release(n->unit);
        if (n->size_class && MS_RECYCLE) {
            n->next = graph.pool[n->size_class];
            graph.pool[n->size_class] = n;
        } else {
            free(n);
        }
    }
    draining = false;
}

static bool has_grad(const ms_tensor *t) { return t->leaf && t->leaf->grad; }

__attribute__((constructor)) static void serve(void)
{
    ms__tensor_observer = (ms_tensor_observer) {
        .leaf_drop = leaf_drop,
        .node_release = ms__node_release,
        .has_grad = has_grad,
    };
    ms__recorder = (ms_recorder) {
        .before = record_before,
        .node_for = node_for,
        .record = record_node,
        .drop = drop_node,
    };
}
