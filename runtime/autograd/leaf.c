// SPDX-License-Identifier: MIT
// autograd/leaf.c -- sums the contributions to gradients, converts gradients to the dtype of their tensors, and
// completes leaves: runs the hooks on a leaf's total and adds it to the leaf's grad.
#include "autograd/owner.h"
#include "autograd/backward.h"
#include "autograd/captured.h"

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
    if (*total == g) {  // the operator has already added its gradient to this tensor (gradient_so_far)
        ms__release(g);
        return MS_OK;
    }
    if (MS_UNLIKELY(!add)) {
        add = ms__op_by_name("add");
        add_ = ms__op_by_name("add_");
    }
    ms_tensor *a = *total, *sum = NULL;
    // An exclusive buffer receives the sum in place; the order of the terms is the same either way.
    ms_status st = ms__exclusive(a) ? ms__op2(&sum, add_, a, g) : ms__op2(&sum, add, a, g);
    ms__release(g);
    if (st != MS_OK) return st;
    ms__release(a);
    *total = sum;
    return MS_OK;
}

static ms_status fit(ms_tensor **g, const ms_meta *m, const char *who, int k)
{
    static const ms_op *cast;
    ms_tensor *t = *g, *c;
    if (!ms__has_shape(t, m->ndim, m->shape))
        return ms__fail(MS_EINVAL, "%s: gradient %d has shape %s, expected %s", who, k + 1,
                        ms__shape_text(t->ndim, t->shape), ms__shape_text(m->ndim, m->shape));
    if (ms__device(t) != m->device)
        return ms__fail(MS_EINVAL,
                        "%s: gradient %d is %s, expected a tensor on the same device as the tensor that it belongs to",
                        who, k + 1, ms__tensor_text(t));
    if (t->sharded)
        return ms__fail(MS_EINVAL, "%s: gradient %d is a sharded parameter, expected a whole tensor", who, k + 1);
    if (t->dtype == m->dtype) return MS_OK;
    if (!ms__is_float(t->dtype))
        return ms__fail(MS_EINVAL, "%s: gradient %d has dtype %s, expected %s or another floating-point dtype", who,
                        k + 1, ms__dtype_name(t->dtype), ms__dtype_name(m->dtype));
    if (!cast) cast = ms__op_by_name("cast");
    int64_t to = m->dtype;
    MS_TRY(ms__run_op(cast, &(ms_op_args) { 1, &t, .n_i = 1, .i = &to }, 1, &c));
    ms__release(t);
    *g = c;
    return MS_OK;
}

ms_status ms__fit_gradient(ms_tensor **g, const ms_meta *m, const char *who, int k)
{
    return ms__or_drop(fit(g, m, who, k), g);
}

// Passes g, the leaf's complete total, to the owner of its unit, if it has one that takes g; otherwise makes g the
// leaf's grad, or adds g to the grad. Takes ownership of g.
static ms_status land_on_leaf(ms_run *r, ms_leaf *l, ms_tensor *g)
{
    ms_tensor *t = l->tensor;
    bool taken = false;
    if (!t) {  // the tensor has been freed
        ms__release(g);
        return MS_OK;
    }
    if (t->unit_param) {
        ms_status st = ms__run_owner->accumulate(r, t, g, &taken);
        if (st != MS_OK && !taken) ms__release(g);
        if (st != MS_OK || taken) return st;
    }
    if (MS_UNLIKELY(g->dtype != t->dtype)) {
        ms_meta m = ms__meta_of(t);
        MS_TRY(ms__fit_gradient(&g, &m, "backward", 0));
    }
    if (l->grad == g) {  // the operator has already added its gradient in place (grad_so_far)
        ms__release(g);
        return MS_OK;
    }
    if (l->grad) {
        ms_tensor *same;
        ms__grad_is_read(l);
        ms_status st = ms__op2(&same, ms__op_by_name("add_"), l->grad, g);
        if (st == MS_OK) ms__release(same);
        ms__release(g);
        return st;
    }
    if (!ms__exclusive(g) || g->slot) {  // a grad must not share its bytes with another tensor
        ms_tensor *c;
        ms_status st = ms__tensor_like(&c, t, "backward");
        if (st == MS_OK) st = ms__or_drop(ms__copy(c, g), &c);
        ms__release(g);
        MS_TRY(st);
        g = c;
    }
    g->is_view = false;
    ms__leaf_set_grad(l, g);
    return MS_OK;
}

// The first hook of this kind from h on; NULL: none.
static ms_hook *skip_removed(ms_hook *h, ms_hook_kind kind)
{
    while (h && h->kind != kind) h = h->next;
    return h;
}

// Completes a leaf that has hooks. k->phase 0: call tensor hooks, 1: read their answers, 2: land, 3: call leaf hooks.
// k->n: position of the next hook in the list.
static ms_run_state leaf_step(ms_task *k, ms_run *r, ms_event *ev)
{
    ms_leaf *l = k->ptr;
    ms_hook *h;
    ms_tensor *const *a;
    if (k->phase == 1) {
        if (ms__run_answers(r, &a) > 0 && a[0]) {
            ms_tensor *g = ms__retain(a[0]);
            ms_meta m = ms__meta_of(l->total);
            if (ms__fit_gradient(&g, &m, "register_hook", 0)) return MS_RUN_FAILED;
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
            return ms__run_event(r, ev, &(ms_question) { MS_EV_TENSOR_HOOK, .key = h->key, .n = 1, .in = &l->total });
        }
        if (!l->tensor) return MS_RUN_DONE;
        return ms__run_event(r, ev, &(ms_question) { MS_EV_LEAF_HOOK, .key = h->key, .n = 1, .in = &l->tensor });
    }
    ms_tensor *g = l->total;
    l->total = NULL;
    bool managed = l->tensor && l->tensor->unit_param;
    if (land_on_leaf(r, l, g)) return MS_RUN_FAILED;
    // The gradient of a unit's parameter lands after the unit has reduced it; the unit then calls ms__leaf_hooks.
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
        ms__drop(&l->total);
        return MS_OK;
    }
    if (!l->total) return MS_OK;
    if (MS_LIKELY(!l->hooks)) {
        ms_tensor *g = l->total;
        l->total = NULL;
        return land_on_leaf(r, l, g);
    }
    ms_task k = { .step = leaf_step, .drop = leaf_drop_task, .ptr = l };
    MS_TRY(ms__run_push(r, &k));
    l->refs++;
    return MS_OK;
}
