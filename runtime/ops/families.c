// SPDX-License-Identifier: MIT
// ops/families.c -- the list of operator families; to add a family, add a line here.
#include "ops/families.h"

// clang-format off
#define FAMILIES(X) \
    X(elementwise) \
    X(copy) \
    X(views) \
    X(reduce) \
    X(product) \
    X(int8) \
    X(norm) \
    X(rotary) \
    X(mlp) \
    X(batch_norm) \
    X(conv) \
    X(pooling) \
    X(resample) \
    X(columns) \
    X(loss) \
    X(embedding) \
    X(dropout) \
    X(assemble) \
    X(index) \
    X(order) \
    X(scan) \
    X(attention) \
    X(recurrent) \
    X(linalg_solve) \
    X(linalg_factor) \
    X(fft) \
    X(ctc) \
    X(draws) \
    X(random)
// clang-format on

#define DECLARE(f) extern const ms_op *const ms__ops_##f[];
FAMILIES(DECLARE)

#define ENTRY(f) ms__ops_##f,
static const ms_op *const *const families[] = { FAMILIES(ENTRY) NULL };
const ms_op *const *const *const ms__op_families = families;
