// SPDX-License-Identifier: MIT
// shard/views/hook.c -- communication hooks that the engine runs itself (docs/semantics.md#comm-hooks): gradients are
// divided, summed over a group chosen by the script, in a low-precision dtype or their own, and divided again.
#include "shard/views/hook.h"
#include "ops/op.h"

// Splits the divisor n of a mean over n ranks by PyTorch's rule: a power of two divides before the sum (near the square
// root of n if n is itself a power of two; 2 if n > 1 is odd), the rest after it, so that half types overflow less.
void ms_comm_division(int n, double *before, double *after)
{
    int f = 1;
    while (n % f == 0 && n / f > f) f *= 2;
    *before = f;
    *after = (double)n / f;
}

ms_status ms__divide(ms_tensor *t, double by)
{
    if (!(by > 1)) return MS_OK;
    ms_tensor *same;
    MS_TRY(ms__op1f(&same, ms__op_by_name("div_scalar_"), t, by));
    ms__release(same);
    return MS_OK;
}

static ms_status group_fits(const ms_group *g, int n, const char *what)
{
    if (ms__group_rank(g) < 0)
        return ms__fail(MS_EINVAL, "communication hook: this rank is not a member of the state's process group");
    if (ms__group_size(g) != n)
        return ms__fail(MS_EINVAL,
                        "communication hook: the state's process group has %d rank%s, expected %d, one per %s",
                        ms__group_size(g), ms__group_size(g) == 1 ? "" : "s", n, what);
    return MS_OK;
}

ms_status ms_comm_hook_run(const ms_comm_hook *h, ms_id grad_id, ms_id out_id)
{
    ms_tensor *grad = ms__tensor(grad_id), *out = NULL, *in, *sum = NULL;
    ms_group *g = ms__group_by_id(h->group);
    if (!grad || !g || (out_id != 0 && !(out = ms__tensor(out_id)))) return ms__failure();
    if (out && (grad->numel != out->numel * ms__group_size(g) || grad->dtype != out->dtype))
        return ms__fail(
            MS_EINVAL,
            "communication hook: grad must have the dtype and %d times the elements of output; grad is %s, output "
            "is %s",
            ms__group_size(g), ms__tensor_text(grad), ms__tensor_text(out));
    if (!ms__is_contiguous(grad) || (out && !ms__is_contiguous(out)))
        return ms__fail(MS_EINVAL, "communication hook: grad and output must be contiguous; call contiguous() first");
    bool low = h->kind == MS_COMM_LOW && h->low != grad->dtype;
    ms_status st = MS_OK;
    if (low) {
        MS_TRY(ms__tensor_new(&in, h->low, ms__device(grad), grad->ndim, grad->shape, "communication hook"));
        st = ms__copy(in, grad);
        if (st == MS_OK && out)
            st = ms__tensor_new(&sum, h->low, ms__device(out), out->ndim, out->shape, "communication hook");
    } else {
        in = ms__retain(grad);
        sum = ms__retain(out);
    }
    ms_tensor *result = out ? sum : in;
    if (st == MS_OK) st = ms__divide(in, h->before);
    if (st == MS_OK)
        st = ms__collective(&(ms_request) { .group = g,
                                            .op = out ? MS_DIST_REDUCE_SCATTER : MS_DIST_ALL_REDUCE,
                                            .in = out ? in : NULL,
                                            .out = result },
                            NULL);
    if (st == MS_OK) st = ms__divide(result, h->after);
    if (st == MS_OK && low) st = ms__copy(out ? out : grad, result);
    (out ? out : grad)->version->count++;
    ms__release(in);
    ms__release(sum);
    return st;
}

ms_status ms_unit_set_comm_hook(double handle, const ms_comm_hook *h)
{
    unit *u = ms__unit(handle);
    if (!u) return ms__failure();
    if (h->kind == MS_COMM_SUM || h->kind == MS_COMM_LOW) {
        ms_group *g = ms__group_by_id(h->group);
        if (!g) return ms__failure();
        bool sharded = u->world > 1;
        MS_TRY(group_fits(g,
                          sharded        ? u->world
                          : u->replicate ? ms__group_size(u->replicate)
                                         : 1,
                          sharded ? "shard" : "replica"));
    }
    u->settings.hook = *h;
    return MS_OK;
}
