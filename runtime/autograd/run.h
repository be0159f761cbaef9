// SPDX-License-Identifier: MIT
// autograd/run.h -- runs: stacks of tasks that may send events to the script.
#ifndef MS_RUN_H
#define MS_RUN_H

#include "autograd/graph.h"

// A task on a run's stack. step returns MS_RUN_DONE when the task is finished, MS_RUN_EVENT after ms__run_event (step
// is called again with the answer), or MS_RUN_FAILED with the error set. A step that pushes tasks may set `again` and
// return MS_RUN_DONE: it is called again after these tasks.
typedef struct ms_task {
    ms_run_state (*step)(struct ms_task *t, ms_run *run, ms_event *ev);
    // Called when the task is finished or aborted, to release what it holds; may be NULL.
    void (*drop)(struct ms_task *t);
    void *ptr;
    int64_t phase, n;
    bool again;
} ms_task;
ms_status ms__run_push(ms_run *run, const ms_task *t);
ms_run *ms__run_new(void);  // pushes an empty run; NULL with the error set
// The tensors and other contents of an event; the fields are as in ms_event.
typedef struct {
    ms_event_kind kind;
    double key, unit;
    int n, n_first;
    ms_tensor *const *in;
} ms_question;
// Fills ev; its tensors have ids until the event ends. Returns MS_RUN_EVENT or MS_RUN_FAILED.
ms_run_state ms__run_event(ms_run *run, ms_event *ev, const ms_question *q);
// The script's answers to the last event; borrowed until the step returns.
int ms__run_answers(ms_run *run, ms_tensor *const **t);
bool ms__run_is_backward(const ms_run *run);
bool ms__run_has_units(const ms_run *run);  // whether the run reaches units: their hooks, parameters or forwards
// Marks the innermost open run, if any, as one that reaches units. Called before a unit's forward, which a hook or a
// recomputed region may run.
void ms__run_meets_unit(void);
bool ms__run_recomputing(void);  // whether an open run is recomputing a checkpoint
bool ms__run_in_backward(void);  // whether an open run is a backward
ms_status ms__run_no_memory(size_t bytes);
// Steps the task on top of the stack.
ms_run_state ms__run_step_task(ms_run *r, ms_event *ev);
void ms__run_leave_event(ms_run *r);  // ends the event that the script has answered, with its scope and modes
void ms__run_drop_answers(ms_run *r);
void ms__node_drop_gouts(ms_node *n);
void ms__run_finish(ms_run *r);  // removes r from the stack and its state from the graph
void ms__run_recycle(ms_run *r);

#endif
