// SPDX-License-Identifier: MIT
// shard/gather_run.c -- gathers units in runs: for a unit with all-gather extensions, events call the script.
#include "shard/extend.h"
#include "shard/gather.h"
#include "shard/gather_run.h"

enum { ASK, START, FETCH, MAKE };

static ms_status gather_on(unit *u, bool early, bool prefetched)
{
    MS_TRY(ms__unit_start_gather(u, early, prefetched));
    return early ? MS_OK : ms__unit_finish_gather(u);
}

static ms_run_state gather_step(ms_task *t, ms_run *run, ms_event *ev)
{
    unit *u = ms__unit((double)(uint64_t)(uintptr_t)t->ptr);
    bool early = t->n & 1, prefetched = t->n & 2;
    if (!u) {  // the unit was freed because its module was collected
        ms__clear_error();
        return MS_RUN_DONE;
    }
    if (u->state.gathered || (early && (u->state.gather || u->state.fetched || u->world == 1))) return MS_RUN_DONE;
    if (u->memory.n_extensions == 0 || ms__is_meta(u->memory.device))
        return gather_on(u, early, prefetched) == MS_OK ? MS_RUN_DONE : MS_RUN_FAILED;
    switch (t->phase) {
    case ASK:
        if (!u->state.gather && !u->state.fetched) {
            t->phase = START;
            return ms__run_event(run, ev, &(ms_question) { MS_EV_PRE_GATHER, .unit = u->handle });
        }
        goto fetch;
    case START:
        if (ms__unit_start_gather(u, early, prefetched) != MS_OK) return MS_RUN_FAILED;
        if (early) return MS_RUN_DONE;
        // fall through
    case FETCH:
    fetch:
        if (ms__unit_fetch(u) != MS_OK || ms__extensions_refill(u) != MS_OK) return MS_RUN_FAILED;
        t->phase = MAKE;
        return ms__run_event(run, ev, &(ms_question) { MS_EV_POST_GATHER, .unit = u->handle });
    default:
        if (ms__extensions_made(u) != MS_OK || ms__unit_finish_gather(u) != MS_OK) return MS_RUN_FAILED;
        return MS_RUN_DONE;
    }
}

ms_status ms__unit_push_gather(ms_run *run, unit *u, bool early, bool prefetched)
{
    ms_task t = { .step = gather_step,
                  .ptr = (void *)(uintptr_t)(uint64_t)u->handle,
                  .n = (early ? 1 : 0) | (prefetched ? 2 : 0) };
    return ms__run_push(run, &t);
}

ms_run *ms_unit_gather_run(double handle, int early, int prefetched)
{
    unit *u = ms__unit(handle);
    ms_run *r = u ? ms__run_new() : NULL;
    if (!r) return NULL;
    if (ms__unit_push_gather(r, u, early != 0, prefetched != 0) == MS_OK) return r;
    ms_run_abort(r, NULL);
    return NULL;
}
