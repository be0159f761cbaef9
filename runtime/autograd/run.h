// SPDX-License-Identifier: MIT
// autograd/run.h -- runs as a stack of tasks that end in events, which the script answers.
#ifndef MS_RUN_H
#define MS_RUN_H

#include "autograd/graph.h"

// A task on a run's agenda (a stack). step returns MS_RUN_DONE when finished (popped), MS_RUN_EVENT
// after ms__run_event (it is called again once the answer is there), MS_RUN_FAILED with the error set.
// A step that pushes further tasks returns MS_RUN_DONE with `again` set to be called after them.
typedef struct ms_task {
    ms_run_state (*step)(struct ms_task *t, ms_run *run, ms_event *ev);
    void (*drop)(struct ms_task *t);  // abort or done: release what it holds; may be NULL
    void *ptr;
    int64_t phase, n;
    bool again;
} ms_task;
ms_status ms__run_push(ms_run *run, const ms_task *t);
ms_run *ms__run_new(void);  // an empty run on the stack (unshard, reduction)
// Fills ev; tensors are named for the time of the event. MS_RUN_EVENT, or MS_RUN_FAILED.
ms_run_state ms__run_event(ms_run *run, ms_event *ev, ms_event_kind kind, double key, double unit, int n,
                           ms_tensor *const *in, int n_first);
int ms__run_answers(ms_run *run, ms_tensor *const **t);  // of the last event; borrowed until the step returns
bool ms__run_is_backward(const ms_run *run);
bool ms__run_has_units(const ms_run *run);  // it goes through units
void ms__run_meets_unit(
    void);  // a unit is entered: what runs just now (a recomputed region, a hook) goes through units too
bool ms__run_recomputing(void);  // a checkpoint of some open run is being recomputed
bool ms__run_in_backward(void);  // some open run is a backward
ms_status ms__run_no_memory(size_t bytes);
void ms__run_finish(ms_run *r);  // off the stack, marks off the graph
void ms__run_recycle(ms_run *r);

#endif
