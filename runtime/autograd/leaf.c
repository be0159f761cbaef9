// SPDX-License-Identifier: MIT
// autograd/leaf.c -- gradients come together: sums of contributions, what a gradient must look like, and leaves,
// whose totals pass their hooks and land in their grad.
#include "autograd/owner.h"
#include "autograd/backward.h"

bool ms__exclusive(const ms_tensor *t)
{
    return t->refs == 1 && t->storage->refs == 1 && !t->node && t->storage->bytes == ms__nbytes(t) &&
           ms__is_contiguous(t);
}

ms_status ms__accumulate(ms_tensor **total, ms_tensor *g)
{
    static const ms_op *add, *add_;
    if (!*total) {
        *total = g;
        return MS_OK;
    }
    if (*total == g) {  // an operator has added its gradient to so_far
        ms__release(g);
        return MS_OK;
    }
    if (MS_UNLIKELY(!add)) {
        add = ms__op_by_name("add");
        add_ = ms__op_by_name("add_");
    }
    ms_tensor *a = *total, *sum = NULL;
    // The buffer that is nobody else's takes the sum; the order of the terms stays.
    ms_status st = ms__exclusive(a) ? ms__op2(&sum, add_, a, g) : ms__op2(&sum, add, a, g);
    ms__release(g);
    if (st != MS_OK) return st;
    ms__release(a);
    *total = sum;
    return MS_OK;
}

// Another tensor's values in the dtype and shape a gradient must have.
ms_status ms__fit_gradient(ms_tensor **g, const ms_meta *m, const char *who, int k)
{
    static const ms_op *cast;
    ms_tensor *t = *g, *c;
    if (t->ndim != m->ndim || memcmp(t->shape, m->shape, (size_t)m->ndim * sizeof *m->shape))
        return ms__fail(MS_EINVAL, "%s: gradient %d has shape %s, expected %s", who, k + 1,
                        ms__shape_text(t->ndim, t->shape), ms__shape_text(m->ndim, m->shape));
    if (ms__device(t) != m->device)
        return ms__fail(MS_EINVAL, "%s: gradient %d is %s: another device than its tensor's", who, k + 1,
                        ms__tensor_text(t));
    if (t->sharded) return ms__fail(MS_EINVAL, "%s: gradient %d is a sharded parameter", who, k + 1);
    if (t->dtype == m->dtype) return MS_OK;
    if (!ms__is_float(t->dtype))
        return ms__fail(MS_EINVAL, "%s: gradient %d is %s, expected %s", who, k + 1, ms__dtype_name(t->dtype),
                        ms__dtype_name(m->dtype));
    if (!cast) cast = ms__op_by_name("cast");
    int64_t to = m->dtype;
    MS_TRY(ms__run_op(cast, 1, &t, 1, &to, 0, NULL, 1, &c));
    ms__release(t);
    *g = c;
    return MS_OK;
}

// A complete total becomes, or is added to, the leaf's grad. Takes over g.
static ms_status land(ms_run *r, ms_leaf *l, ms_tensor *g)
{
    ms_tensor *t = l->tensor;
    bool taken = false;
    if (!t) {  // nobody can see it any more
        ms__release(g);
        return MS_OK;
    }
    if (t->unit_param) {
        ms_status st = ms__run_owner->accumulate(r, t, g, &taken);
        if (st != MS_OK && !taken) ms__release(g);
        if (st != MS_OK || taken) return st;
    }
    if (MS_UNLIKELY(g->dtype != t->dtype)) {
        ms_meta m = { .dtype = t->dtype, .ndim = t->ndim, .device = ms__device(t) };
        memcpy(m.shape, t->shape, sizeof m.shape);
        ms_status st = ms__fit_gradient(&g, &m, "backward", 0);
        if (st != MS_OK) {
            ms__release(g);
            return st;
        }
    }
    if (l->grad) {
        ms_tensor *same;
        ms_status st = ms__op2(&same, ms__op_by_name("add_"), l->grad, g);
        if (st == MS_OK) ms__release(same);
        ms__release(g);
        return st;
    }
    if (!ms__exclusive(g) || g->slot) {  // it shares its bytes with another gradient: a grad is its leaf's own
        ms_tensor *c;
        ms_status st = ms__tensor_like(&c, t, "backward");
        if (st == MS_OK && (st = ms__copy(c, g)) != MS_OK) ms__release(c);
        ms__release(g);
        if (st != MS_OK) return st;
        g = c;
    }
    g->is_view = false;
    ms__leaf_set_grad(l, g);
    return MS_OK;
}

static ms_hook *skip_removed(ms_hook *h, ms_hook_kind kind)
{
    while (h && h->kind != kind) h = h->next;
    return h;
}

// A leaf with hooks. phase 0: tensor hooks, 1: their answers, 2: land, 3: leaf hooks. n: the hook's position.
static ms_run_state leaf_step(ms_task *k, ms_run *r, ms_event *ev)
{
    ms_leaf *l = k->ptr;
    ms_hook *h;
    ms_tensor *const *a;
    if (k->phase == 1) {
        if (ms__run_answers(r, &a) > 0 && a[0]) {
            ms_tensor *g = ms__retain(a[0]);
            ms_meta m = { .dtype = l->total->dtype, .ndim = l->total->ndim, .device = ms__device(l->total) };
            memcpy(m.shape, l->total->shape, sizeof m.shape);
            if (ms__fit_gradient(&g, &m, "register_hook", 0)) {
                ms__release(g);
                return MS_RUN_FAILED;
            }
            ms__release(l->total);
            l->total = g;
        }
        k->phase = 0;
    }
    while (k->phase == 0 || k->phase == 3) {
        h = l->hooks;
        for (int64_t i = 0; i < k->n && h; i++) h = h->next;
        for (; h && h->kind != (k->phase == 0 ? MS_HOOK_TENSOR : MS_HOOK_LEAF); h = h->next) k->n++;
        if (!h) {
            if (k->phase == 3) return MS_RUN_DONE;
            k->phase = 2;
            break;
        }
        k->n++;
        if (k->phase == 0) {
            k->phase = 1;
            return ms__run_event(r, ev, MS_EV_TENSOR_HOOK, h->key, 0, 1, &l->total, 0);
        }
        if (!l->tensor) return MS_RUN_DONE;
        return ms__run_event(r, ev, MS_EV_LEAF_HOOK, h->key, 0, 1, &l->tensor, 0);
    }
    ms_tensor *g = l->total;
    l->total = NULL;
    bool managed = l->tensor && l->tensor->unit_param;
    if (land(r, l, g)) return MS_RUN_FAILED;
    // A managed parameter's gradient lands when its unit has reduced it, which calls ms__leaf_hooks then.
    if (managed || !skip_removed(l->hooks, MS_HOOK_LEAF)) return MS_RUN_DONE;
    k->phase = 3;
    k->n = 0;
    k->again = true;
    return MS_RUN_DONE;
}

static void leaf_drop_task(ms_task *k) { ms__leaf_release(k->ptr); }

ms_status ms__leaf_hooks(ms_run *r, ms_tensor *t)
{
    if (!t->leaf || !skip_removed(t->leaf->hooks, MS_HOOK_LEAF)) return MS_OK;
    ms_task k = { .step = leaf_step, .drop = leaf_drop_task, .ptr = t->leaf, .phase = 3 };
    MS_TRY(ms__run_push(r, &k));
    t->leaf->refs++;
    return MS_OK;
}

ms_status ms__leaf_complete(ms_run *r, ms_leaf *l)
{
    if (r->grad) {
        for (int k = 0; k < r->n_captures; k++)
            if (r->captures[k].leaf == l && !r->captures[k].value) r->captures[k].value = ms__retain(l->total);
        ms__release(l->total);
        l->total = NULL;
        return MS_OK;
    }
    if (!l->total) return MS_OK;
    if (MS_LIKELY(!l->hooks)) {
        ms_tensor *g = l->total;
        l->total = NULL;
        return land(r, l, g);
    }
    ms_task k = { .step = leaf_step, .drop = leaf_drop_task, .ptr = l };
    MS_TRY(ms__run_push(r, &k));
    l->refs++;
    return MS_OK;
}
