// SPDX-License-Identifier: MIT
// rows/layers/embedding.c -- embedding, which selects rows of a table by id.
#include "cpu/rows/layers.h"
#include "rows/grad.h"

static bool is_id(int dtype) { return dtype == MS_I64 || dtype == MS_I32; }

static ms_status embedding_check(ms_call *c)
{
    const ms_tensor *w = c->in[0], *ids = c->in[1];
    int64_t shape[MS_MAX_DIMS];
    if (w->ndim != 2 || !ms__is_float(w->dtype))
        return ms__call_fail(c, "the weight must be a floating-point tensor [n, d], got %s", ms__tensor_text(w));
    if (!is_id(ids->dtype))
        return ms__call_fail(c,
                             "ids must be int64 or int32, got %s %s; write ids:long(), or make them with "
                             "ms.tensor(..., { dtype = \"int64\" })",
                             ms__dtype_name(ids->dtype), ms__shape_text(ids->ndim, ids->shape));
    if (ids->ndim + 1 > MS_MAX_DIMS)
        return ms__call_fail(c, "ids may have at most %d dimensions, got %s", MS_MAX_DIMS - 1, ms__tensor_text(ids));
    memcpy(shape, ids->shape, sizeof shape);
    shape[ids->ndim] = w->shape[1];
    return ms__call_out(c, 0, w->dtype, ms__device(w), ids->ndim + 1, shape);
}

// Inputs: gradient, ids, and optionally the gradient that the table already has. Integers: padding_idx, number of rows
// of the table.
static ms_status embedding_backward_check(ms_call *c)
{
    const ms_tensor *g = c->in[0];
    if (c->n_in == 3) return ms__call_inplace(c, 0, 2), MS_OK;
    return ms__call_out(c, 0, g->dtype, ms__device(g), 2, (int64_t[]) { c->i[1], g->shape[g->ndim - 1] });
}

static const ms_op op_embedding_backward = MS_ROW("embedding_backward", 2, 3, .check = embedding_backward_check,
                                                  .run = { [MS_CPU] = ms__cpu_embedding_backward });

static ms_status embedding_backward(ms_backward_call *b)
{
    if (!b->need[0] || !b->gout[0]) return MS_OK;
    int64_t i[] = { b->n_i > 0 ? b->i[0] : -1, b->in_meta[0].shape[0] };
    // If the table has a gradient already (it may also be the weight of the last linear layer), adds to it in place,
    // because few rows change.
    ms_tensor *so_far = b->so_far(b, 0);
    return ms__run_op(&op_embedding_backward,
                      &(ms_op_args) { so_far ? 3 : 2, (ms_tensor *[]) { b->gout[0], b->in[1], so_far }, .n_i = 2,
                                      .i = i },
                      1, &b->gin[0]);
}

static const ms_op op_embedding =
    MS_ROW("embedding", 2, 2, .takes = "ids | padding_idx=-1",
           .doc = "Rows of a table by id; the row padding_idx gets no gradient.", .save_in = 2,
           .check = embedding_check, .run = { [MS_CPU] = ms__cpu_embedding }, .backward = embedding_backward,
           .samples = "[5,3] [4]i5; [5,3] [2,6]i5 i=-1; [7,20] [3,9]i6 i=6; [5,3] [0]i5; [5,3] []i5; [40,33] [70]i40");

MS_OPERATORS = { &op_embedding, &op_embedding_backward };
