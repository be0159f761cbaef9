// SPDX-License-Identifier: MIT
// train/optim.h -- the pass of an optimizer, for steps (train/step.c) and their repetitions (train/pass.c).
#ifndef MS_TRAIN_OPTIM_H
#define MS_TRAIN_OPTIM_H

#include <string.h>

#include "device/device.h"

typedef struct ms_stepped {
    struct ms_tensor *leaf;
    double *steps;  // number of steps that the leaf has taken
    const ms_optim_options *options;
    int job;  // index of the leaf's job; -1: the leaf has no elements
    struct ms_tensor *state[MS_OPTIM_STATES];
} ms_stepped;

// The factors of an optimizer's formula, such as bias corrections, that were computed last: they serve the next leaf,
// too, if it has the same options and number of steps, as most leaves of a group have.
typedef struct ms_factors {
    const ms_optim_options *options;
    double steps, values[MS_OPTIM_FACTORS + 1];
} ms_factors;
// The factors of the step after `steps` steps.
void ms__factors_compute(ms_factors *last, const ms_optim_options *o, double steps);
static inline void ms__factors_of(ms_factors *last, const ms_stepped *l, double *f)
{
    if (last->options != l->options || last->steps != *l->steps) ms__factors_compute(last, l->options, *l->steps);
    memcpy(f, last->values, sizeof last->values);
}

enum { MS_OPTIM_BLOCK = 1 << 14 };  // elements that a thread processes at a time

unsigned ms__optim_keeps(const ms_optim_options *o);  // bit k: there is state k
const char *ms__optim_range(int kind);                // the name of a step in a profile
// Runs the jobs: one pass for each sequence of leaves of one optimizer on one device. there: a copy of all jobs on the
// GPU that runs them; NULL: none. reads: the factor or flag in GPU memory that passes on that GPU read; NULL: none.
ms_status ms__optim_run(ms_optim_job *jobs, int n, const ms_optim_job *there, const ms_cuda_step *reads);

#endif
