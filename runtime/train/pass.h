// SPDX-License-Identifier: MIT
// train/pass.h -- optimizers' steps as work of captured steps.
#ifndef MS_TRAIN_PASS_H
#define MS_TRAIN_PASS_H

#include "device/capture.h"
#include "tensor/tensor.h"
#include "train/optim.h"
#include "train/tally.h"

// An optimizer's step. The options and step counts are read again in each repetition. The version counters of leaves
// and states, and the leaves that units manage, are in lists of their own: finding them would take longer than the pass
// over a small leaf.
typedef struct ms_pass {
    int n_jobs, n_stepped, n_versions, n_managed;
    ms_optim_job *jobs;
    ms_stepped *stepped;
    ms_counter **versions;
    struct ms_tensor **managed;
    // For a step about which a GPU decides (ms__pass_decide). tally: counts its leaves' steps; NULL: the step is always
    // made, or the host decides. skip: the flag on the GPU. n_sets: the number of sets of factors for which there is
    // room. first: room for one leaf of each group of equal factors
    ms_tally *tally;
    const ms_stepped **first;
    const float *skip;
    int device, n_sets;
    // For train/scaler.c.
    ms_captured_work *work;
    struct ms_unless *within;  // what decides about the step; NULL: it is always made
    struct ms_pass *next;      // an earlier pass of the same captured step
} ms_pass;

// Adds a step to the captured step, which owns both lists from now on. Returns NULL if there is no memory or no leaf.
ms_pass *ms__pass_add(ms_captured *c, int n_jobs, ms_optim_job *jobs, int n_stepped, ms_stepped *stepped);
bool ms__pass_is_on(const ms_pass *p, int device);  // whether all its jobs are on the device
// Compares the leaves of two steps.
typedef enum { MS_PASS_APART, MS_PASS_EQUAL, MS_PASS_OVERLAP } ms_pass_relation;
ms_pass_relation ms__pass_compare(const ms_pass *a, const ms_pass *b);
// Makes the GPU decide about the step in all repetitions: it changes nothing if the flag is not 0. The tally counts the
// steps of its leaves.
ms_status ms__pass_decide(ms_captured *c, ms_pass *p, const struct ms_tensor *flag, ms_tally *tally);

#endif
