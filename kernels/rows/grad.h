// SPDX-License-Identifier: MIT
// rows/grad.h -- gradients that are one operator: its row computes those that are needed, in the order of
// the forward's inputs, so that backwards run on every device that has the row's kernel.
#ifndef MS_GRAD_H
#define MS_GRAD_H

#include "ops/op.h"

// Calls `op` on in[] with the forward's integers and numbers, then (if rng) the seed and offset it drew, and at last a
// bit mask of the needed gradients (always the last integer); hands out[] to gin[] in order.
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
    MS_TRY(ms__run_op(op, n_in, in, n_i, i, b->n_f, b->f, n_out, out));
    for (int k = 0, o = 0; k < b->n_in; k++)
        if (b->need[k]) b->gin[k] = out[o++];
    return MS_OK;
}

// For run: the output that is the gradient of the forward's input k, or NULL when it is not wanted.
static inline ms_tensor *ms__grad_out(const ms_call *c, int k)
{
    int64_t mask = c->i[c->n_i - 1];
    return mask >> k & 1 ? c->out[__builtin_popcountll((uint64_t)mask & (((uint64_t)1 << k) - 1))] : NULL;
}

#endif
