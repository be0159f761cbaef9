// SPDX-License-Identifier: MIT
// rows/grad.h -- gradients computed by a single operator, so that backward runs on every device that has a kernel for
// it. The operator's outputs are the needed gradients, in the order of the forward's inputs.
#ifndef MS_GRAD_H
#define MS_GRAD_H

#include "rows/ops.h"

static inline ms_status ms__zeros_of(ms_tensor **out, const ms_meta *m)
{
    return ms__zeros(out, m->dtype, m->device, m->ndim, m->shape);
}
// Sets the gradient of the first input to 0, for operators that overwrite it or are piecewise constant (sign).
static inline ms_status ms__zero_gradient(ms_backward_call *b) { return ms__zeros_of(&b->gin[0], &b->in_meta[0]); }

// Calls `op` on in[], with the integers and numbers (i and f) of the forward, and moves its outputs to gin[]. The
// forward's integers are followed by its seed and offset (if rng is set) and by the mask: bit k is set if the gradient
// of the forward's input k is needed.
static inline ms_status ms__grad_op(ms_backward_call *b, const ms_op *op, int n_in, ms_tensor *const *in, bool rng)
{
    int64_t i[MS_MAX_I], mask = 0;
    ms_tensor *out[8] = { NULL };
    int n_i = b->n_i, n_out = 0;
    for (int k = 0; k < n_i; k++) i[k] = b->i[k];
    if (rng) {
        i[n_i++] = (int64_t)b->saved_rng[0];
        i[n_i++] = (int64_t)b->saved_rng[1];
    }
    for (int k = 0; k < b->n_in; k++)
        if (b->need[k]) mask |= (int64_t)1 << k, n_out++;
    if (!n_out || !b->gout[0]) return MS_OK;
    i[n_i++] = mask;
    MS_TRY(ms__run_op(op, &(ms_op_args) { n_in, in, n_i, i, b->n_f, b->f }, n_out, out));
    for (int k = 0, o = 0; k < b->n_in; k++)
        if (b->need[k]) b->gin[k] = out[o++];
    return MS_OK;
}

// For kernels: the output for the gradient of the forward's input k, or NULL if it is not needed.
static inline ms_tensor *ms__grad_out(const ms_call *c, int k)
{
    int64_t mask = c->i[c->n_i - 1];
    return mask >> k & 1 ? c->out[__builtin_popcountll((uint64_t)mask & (((uint64_t)1 << k) - 1))] : NULL;
}

#endif
