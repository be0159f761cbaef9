// SPDX-License-Identifier: MIT
// shard/reduce.c -- the steps that all reductions of gradients share (docs/semantics.md#reduction): listing gradients,
// waiting, landing. backward.c decides when to reduce, the views decide how.
#include <stdio.h>

#include "autograd/captured.h"
#include "device/device.h"
#include "shard/gather.h"
#include "shard/reduce.h"
#include "shard/views/views.h"
#include "ops/op.h"

ms_status ms__reduction_new(ms_run *run, unit *u, reduction *reducing, reduction *r)
{
    *r = (reduction) { .owner = u,
                       .present = calloc((size_t)u->n + 1, sizeof *r->present),
                       .at = calloc((size_t)u->n + 1, sizeof *r->at) };
    if (!r->present || !r->at) {
        ms__reduction_free(r);
        return ms__no_memory(((size_t)u->n + 1) * (sizeof *r->present + sizeof *r->at), "fsdp", "reducing unit '%s'",
                             u->name);
    }
    for (int j = 0; j < u->n; j++)
        if (u->params[j].pending) r->present[r->n++] = &u->params[j];
    ms_status st = ms__unit_land(run, reducing);
    if (st != MS_OK || r->n == 0) ms__reduction_free(r);
    return st;
}

ms_status ms__reduction_wait(reduction *r)
{
    ms_status st = ms_work_wait(r->scattered), all = ms_work_wait(r->work);
    ms_work_free(r->scattered);
    ms_work_free(r->work);
    r->scattered = r->work = NULL;
    ms__drop(&r->in);
    return st != MS_OK ? st : all;
}

void ms__reduction_free(reduction *r)
{
    ms__release(r->in);
    ms__release(r->out);
    free(r->present);
    free(r->at);
    *r = (reduction) { 0 };
}

void ms__reduction_drop(reduction *r)
{
    if (!r->owner) return;
    (void)ms__reduction_wait(r);
    ms__reduction_free(r);
}

static void drop_task(ms_task *t)
{
    ms__reduction_drop(t->ptr);
    free(t->ptr);
}

ms_status ms__reduction_push(ms_run *run, const reduction *r, ms_run_state (*step)(ms_task *, ms_run *, ms_event *))
{
    reduction *kept = malloc(sizeof *kept);
    if (!kept) return ms__no_memory(sizeof *kept, "fsdp", "a reduction");
    *kept = *r;
    ms_task task = { .step = step, .drop = drop_task, .ptr = kept };
    ms_status st = ms__run_push(run, &task);
    if (st != MS_OK) free(kept);
    return st;
}

ms_status ms__unit_land(ms_run *run, reduction *reducing)
{
    if (!reducing->owner) return MS_OK;
    UNIT_RANGE(reducing->owner, "post_backward_rs_wait");
    return reducing->owner->views->land(run, reducing);
}

ms_status ms__add_to(ms_tensor *sum, ms_tensor *t)
{
    ms_tensor *same;
    MS_TRY(ms__op2(&same, ms__op_by_name("add_"), sum, t));
    ms__release(same);
    return MS_OK;
}

ms_status ms__unit_land_part(unit_param *p, ms_tensor *part)
{
    ms_leaf *l = ms__leaf_of(p->local);
    if (!l) return ms__failure();
    if (!l->grad) {
        ms__leaf_set_grad(l, ms__retain(part));
        return MS_OK;
    }
    ms__grad_is_read(l);
    return ms__add_to(l->grad, part);
}

// The common part of ms__unit_bring and ms__unit_bring_home. for_unit: the unit whose options may pin the copy; NULL:
// none.
static ms_status bring(int device, int dtype, const unit *for_unit, ms_tensor **t)
{
    for (int step = 0; step < 2; step++) {  // first convert on the source device, then move
        ms_tensor *from = *t, *to;
        int where = step == 0 ? ms__device(from) : device;
        if (from->dtype == dtype && ms__device(from) == where) continue;
        ms_status st = ms__tensor_new(&to, dtype, where, from->ndim, from->shape, "fsdp: gradients");
        if (st != MS_OK) return st;
        if (for_unit) ms__unit_pin(for_unit, to->storage);
        st = step == 1 && ms__is_contiguous(from) ? ms__copy_async(to, from, NULL) : ms__copy(to, from);
        if (st != MS_OK) {
            ms__release(to);
            return st;
        }
        ms__release(from);
        *t = to;
    }
    return MS_OK;
}

ms_status ms__unit_bring(int device, int dtype, ms_tensor **t) { return bring(device, dtype, NULL, t); }
ms_status ms__unit_bring_home(const unit *u, int dtype, ms_tensor **t) { return bring(u->memory.home, dtype, u, t); }

// A script may skip a backward on one rank, for example after an error that it caught. If the next forward gathers
// nothing, that rank's next reduction would match its peers' reduction of the previous step, and the ranks would stay
// one step apart. The name of the reduction therefore contains the number of passes without a backward, and ranks
// compare names.
const char *ms__unit_reduced_name(const unit *u)
{
    if (MS_LIKELY(u->gradients.behind <= 0)) return u->name;
    char text[512];
    snprintf(text, sizeof text, "%s (%d forward%s pending backward)", *u->name ? u->name : "root", u->gradients.behind,
             u->gradients.behind > 1 ? "s" : "");
    return ms__intern(text);
}
