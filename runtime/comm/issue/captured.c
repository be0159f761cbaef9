// SPDX-License-Identifier: MIT
// comm/issue/captured.c -- collectives as work of a captured step (device/capture.h).
//
// A repetition of the step issues the same request again. The new collective gets a new number, and ranks compare
// fingerprints as always, so a rank that repeats the step can meet peers that call the step's function. A wait for a
// collective is a separate piece of the step's work (ms__capture_wait). On GPUs, too, a repetition issues the request
// again: a collective is not a node of a CUDA graph, because ranks must have agreed before a GPU waits for its peers.
#include "comm/issue/captured.h"
#include "ops/captured.h"
#include "comm/issue/issue.h"

typedef struct {
    ms_request r;
    int event;  // number of the collective's event in the step; 0: the collective is complete on return
} coll_work;

static ms_status repeat_collective(void *arg, ms_captured *c)
{
    coll_work *w = arg;
    ms_work *work = NULL;
    MS_TRY(ms__coll_request(&w->r, &work));
    if (work) ms__capture_queued(c, w->event, ms__work_event(work));
    ms_work_free(work);
    return MS_OK;
}

static void drop_collective(void *arg)
{
    coll_work *w = arg;
    ms__group_release(w->r.group);
    free((void *)w->r.pieces);
    free((void *)w->r.parts);
}

static void *copy_of(ms_captured *c, const void *list, size_t bytes)
{
    void *copy = bytes ? malloc(bytes) : NULL;
    if (copy) memcpy(copy, list, bytes);
    else if (bytes) ms__capture_no_memory(c);
    return copy;
}

static const char *intern_text(const char *text) { return text ? ms__intern(text) : NULL; }

static void record_work(ms_captured *c, const ms_request *r, ms_pending *event)
{
    coll_work *w = ms__capture_work(c, repeat_collective, drop_collective, sizeof *w);
    if (!w) return;
    w->r = *r;
    w->event = event ? ms__capture_event(c, event) : 0;
    w->r.group = ms__group_hold(r->group);
    w->r.in = ms__capture_tensor(c, r->in);
    w->r.out = ms__capture_tensor(c, r->out);
    w->r.from = ms__capture_storage(c, r->from);
    w->r.to = ms__capture_storage(c, r->to);
    w->r.pieces = copy_of(c, r->pieces, (size_t)r->n_pieces * sizeof *r->pieces);
    ms_part *parts = copy_of(c, r->parts, (size_t)r->n_parts * sizeof *r->parts);
    for (int k = 0; parts && k < r->n_parts; k++) parts[k].t = ms__capture_tensor(c, parts[k].t);
    w->r.parts = parts;
    w->r.label.unit = intern_text(r->label.unit);
    w->r.label.site = intern_text(r->label.site);
    w->r.label.part_of = intern_text(r->label.part_of);
    c->sends |= ms__group_size(r->group) > 1;
}

ms_status ms__capture_collective(const ms_request *r, ms_work **work)
{
    ms_captured *c = ms__capture_suspend();
    ms_work *own = NULL;
    ms_status st = ms__coll_request(r, &own);
    ms__capture_resume(c);
    if (st == MS_OK) record_work(c, r, ms__work_event(own));
    if (work) *work = own;
    else ms_work_free(own);
    return st;
}

ms_status ms__collective(const ms_request *r, ms_work **work)
{
    return MS_UNLIKELY(ms__capturing != NULL) ? ms__capture_collective(r, work) : ms__coll_request(r, work);
}
