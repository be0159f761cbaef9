// SPDX-License-Identifier: MIT
// ops/anomaly.h -- the search for the first value that is nan or inf (ms_set_anomaly).
#ifndef MS_ANOMALY_H
#define MS_ANOMALY_H

#include "ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

extern int ms__anomaly;  // 0: off, 1: nan, 2: nan and infinities

// Fails if an out[k] has nan, unless f[], the call's numbers, has it; if ms__anomaly is 2, also if it has inf, unless
// an input or f[] has it. The error begins with `what`, such as "log: the result", and k + 1 if there are several
// results. Absent tensors are NULL.
typedef struct ms_values {
    const char *what, *of_inputs;  // of_inputs: what the inputs are called: "its arguments"
    int n_in, n_f, n_out;
    ms_tensor *const *in, *const *out;
    const double *f;
} ms_values;
ms_status ms__anomaly_check(const ms_values *v);

#ifdef __cplusplus
}
#endif

#endif
