// SPDX-License-Identifier: MIT
// autograd/run.h -- runs: stacks of tasks that may ask the script by events.
#ifndef MS_RUN_H
#define MS_RUN_H

#include "autograd/graph.h"

// A task on a run's stack. step returns MS_RUN_DONE when the task is finished, MS_RUN_EVENT after ms__run_event (step
// is called again with the answer), MS_RUN_FAILED with the error set. A step that pushes tasks may set `again` and
// return MS_RUN_DONE: it is called again after them.
typedef struct ms_task {
    ms_run_state (*step)(struct ms_task *t, ms_run *run, ms_event *ev);
    void (*drop)(struct ms_task *t);  // when the task is finished or aborted: releases what it holds; may be NULL
    void *ptr;
    int64_t phase, n;
    bool again;
} ms_task;
ms_status ms__run_push(ms_run *run, const ms_task *t);
ms_run *ms__run_new(void);  // an empty run on the stack (unshard, reduction)
// An event with its tensors; the other fields are those of ms_event.
typedef struct {
    ms_event_kind kind;
    double key, unit;
    int n, n_first;
    ms_tensor *const *in;
} ms_question;
// Fills ev; the tensors have ids until the event ends. Returns MS_RUN_EVENT or MS_RUN_FAILED.
ms_run_state ms__run_event(ms_run *run, ms_event *ev, const ms_question *q);
int ms__run_answers(ms_run *run, ms_tensor *const **t);  // to the last event; borrowed until the step returns
bool ms__run_is_backward(const ms_run *run);
bool ms__run_has_units(const ms_run *run);  // it goes through units
void ms__run_meets_unit(
    void);  // a unit was entered: the innermost run (a recomputed region, a hook) goes through units
bool ms__run_recomputing(void);  // a checkpoint of some open run is being recomputed
bool ms__run_in_backward(void);  // some open run is a backward
ms_status ms__run_no_memory(size_t bytes);
void ms__run_finish(ms_run *r);  // takes r off the stack and its state off the graph
void ms__run_recycle(ms_run *r);

#endif
