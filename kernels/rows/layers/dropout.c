// SPDX-License-Identifier: MIT
// rows/layers/dropout.c -- dropout. The seed and offset are saved instead of the mask; backward generates the
// mask again.
#include "cpu/rows/layers.h"
#include "rows/grad.h"

static ms_status check_p(ms_call *c)
{
    if (!ms__is_float(c->in[0]->dtype))
        return ms__call_fail(c, "needs a floating-point dtype, got %s", ms__tensor_text(c->in[0]));
    if (!(c->f[0] >= 0 && c->f[0] <= 1)) return ms__call_fail(c, "p is %g, expected a number from 0 to 1", c->f[0]);
    return ms__call_out_like(c, 0, c->in[0]);
}

static ms_status dropout_check(ms_call *c)
{
    MS_TRY(check_p(c));
    ms__rng_next(&c->saved_rng[0], &c->saved_rng[1]);
    return MS_OK;
}

// Input: gradient. Integers: seed, offset, mask (rows/grad.h).
static ms_status dropout_backward_check(ms_call *c)
{
    c->saved_rng[0] = (uint64_t)c->i[c->n_i - 3];
    c->saved_rng[1] = (uint64_t)c->i[c->n_i - 2];
    return check_p(c);
}

static const ms_op op_dropout_backward = MS_ROW("dropout_backward", 1, 1, .flags = MS_OP_SEEDED,
                                                .check = dropout_backward_check, .run = { [MS_CPU] = ms__cpu_dropout });

static ms_status dropout_backward(ms_backward_call *b)
{
    return ms__grad_op(b, &op_dropout_backward, 1, b->gout, true);
}

static const ms_op op_dropout =
    MS_ROW("dropout", 1, 1, .takes = "; p",
           .doc = "Sets each element to 0 with probability p, and multiplies the others by 1 / (1 - p).",
           .flags = MS_OP_RANDOM, .check = dropout_check, .run = { [MS_CPU] = ms__cpu_dropout },
           .backward = dropout_backward,
           .samples = "[3,4] f=0.5; [7,101] f=0.1; [5] f=0; [5] f=1; [0,3] f=0.3; [] f=0.3");

MS_OPERATORS = { &op_dropout, &op_dropout_backward };
