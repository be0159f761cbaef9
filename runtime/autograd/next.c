// SPDX-License-Identifier: MIT
// autograd/next.c -- advances a run: its tasks, then its nodes.
#include "autograd/backward.h"
#include "autograd/owner.h"
#include "base/activity.h"

static bool is_outermost_backward(const ms_run *r)
{
    for (ms_run *b = r->below; b; b = b->below)
        if (b->backward) return false;
    return r->backward;
}

ms_run_state ms_run_next(ms_run *r, ms_event *ev)
{
    MS_BUSY;
    if (MS_UNLIKELY(r != ms_run_top())) {
        ms__fail(MS_ESTATE,
                 "ms_run_next: another backward or gather, begun during an event of this one, has not ended");
        return MS_RUN_FAILED;
    }
    if (r->event.out) ms__run_leave_event(r);
    for (;;) {
        ms_run_state st;
        if (MS_UNLIKELY(ms__state.interrupted) && ms__check_interrupt()) return MS_RUN_FAILED;
        if (r->tasks) {
            st = ms__run_step_task(r, ev);
        } else if (r->at.node) {
            st = ms__node_step(r, ev);
        } else if (r->n_agenda) {
            r->at.node = r->agenda[--r->n_agenda].node;
            r->at.phase = 0;
            r->at.hook = NULL;
            r->event.kind = 0;
            st = ms__node_step(r, ev);
        } else if (!r->final_done) {
            r->final_done = true;
            st = ms__run_owner && is_outermost_backward(r) && ms__run_owner->final(r) ? MS_RUN_FAILED : MS_RUN_DONE;
        } else {
            for (int k = 0; r->grad && k < r->n_captures; k++)
                if (!r->captures[k].value && !r->unused_ok) {
                    ms__fail(
                        MS_EINVAL,
                        "grad: input %d was not used in computing the outputs; allow_unused = true gives nil for it",
                        k + 1);
                    return MS_RUN_FAILED;
                }
            ms__run_finish(r);
            return MS_RUN_DONE;
        }
        if (st != MS_RUN_DONE) return st;
        if (r->event.n_answers) ms__run_drop_answers(r);
    }
}
