// SPDX-License-Identifier: MIT
// rows/linalg/linalg.h -- shared by the operators of ms.linalg.
#ifndef MS_ROWS_LINALG_H
#define MS_ROWS_LINALG_H

#include "rows/ops.h"

// Fails unless in[k] has matrices, square ones if `square`, of float32 or float64. what: its name in errors.
ms_status ms__check_matrices(const ms_call *c, int k, const char *what, bool square);

// IN, OUT: bits of the inputs and outputs that the gradient reads. Under autocast the rows run in float32.
#define MS_LINALG_ROW(NAME, MIN, MAX, IN, OUT, SAMPLES, TAKES, DOC)                                               \
    MS_ROW("linalg_" #NAME, MIN, MAX, .flags = MS_OP_DIFFERENTIABLE | MS_OP_WIDE, .save_in = IN, .save_out = OUT, \
           .check = NAME##_check, .run = { [MS_CPU] = ms__linalg_##NAME, [MS_CUDA] = ms__linalg_##NAME },         \
           .backward = NAME##_grad, .samples = SAMPLES, .takes = TAKES, .doc = DOC)

#endif
