// SPDX-License-Identifier: MIT
// train/flag.c -- numbers that a GPU computes and the host reads later, so that the host does not wait in a step:
// whether gradients were finite, for the scale of amp.GradScaler and for the counts of steps.
//
// A flag's value is copied to pinned memory in the order of the compute stream; an event says when it is there.
#include "train/flag.h"

#include "base/activity.h"
#include "device/device.h"
#include "ops/captured.h"

struct ms_flag {
    float value, *pinned;  // pinned: NULL until the flag is first used for a GPU
    void *event;           // the copy to *pinned is under way until this event; NULL: `value` is valid
    ms_flag *next;         // in `unused`
};

// Flags that were freed, with their pinned memory. Copies to it may still be under way.
static ms_flag *unused;

ms_status ms__flag_check(const char *who, const ms_tensor *t)
{
    if (t->dtype == MS_F32 && t->numel == 1 && ms__device(t) != MS_META) return MS_OK;
    return ms__fail(MS_EINVAL, "%s is %s, expected one float32 element", who, ms__tensor_text(t));
}

// Takes an unused flag to which no copy is under way, or makes one.
static ms_flag *take_flag(void)
{
    for (ms_flag **at = &unused; *at; at = &(*at)->next) {
        ms_flag *f = *at;
        if (f->event && !ms__cuda()->done(f->event)) continue;
        if (f->event) ms__cuda()->drop(f->event);
        *at = f->next;
        *f = (ms_flag) { .pinned = f->pinned };
        return f;
    }
    ms_flag *f = calloc(1, sizeof *f);
    if (!f) (void)ms__no_memory(sizeof *f, "flag", "a number to be read later");
    return f;
}

static ms_status begin_flag(ms_flag *f, ms_tensor *t)
{
    int device = ms__device(t), index = ms__index(device);
    const ms_cuda_table *gpu = ms__cuda();
    MS_TRY(ms__storage_sync(t->storage, false));
    if (!ms__is_cuda(device)) {
        f->value = *(const float *)ms__data(t);
        return MS_OK;
    }
    if (!f->pinned) MS_TRY(gpu->host_alloc(sizeof *f->pinned, (void **)&f->pinned));
    MS_TRY(gpu->copy(index, MS_STREAM_COMPUTE, f->pinned, ms__data(t), sizeof *f->pinned, MS_TO_HOST));
    return gpu->record(index, MS_STREAM_COMPUTE, &f->event);
}

ms_flag *ms_flag_new(ms_id of)
{
    MS_BUSY;
    ms_tensor *t = ms__tensor(of);
    if (!t || ms__flag_check("flag: the tensor", t)) return NULL;
    if (MS_UNLIKELY(ms__capturing != NULL))
        return ms__null(ms__capture_refuse("the host reads a value of a tensor, which repetitions would not read"));
    ms_flag *f = take_flag();
    if (!f || begin_flag(f, t) == MS_OK) return f;
    ms_flag_free(f);
    return NULL;
}

ms_status ms_flag_read(ms_flag *f, double *out)
{
    MS_BUSY;
    if (f->event) {
        if (ms__cuda()->done(f->event) != 1) MS_TRY(ms__cuda()->wait(f->event));
        ms__cuda()->drop(f->event);
        f->event = NULL;
        f->value = *f->pinned;
    }
    *out = ms__for_script(f->value);
    return MS_OK;
}

void ms_flag_free(ms_flag *f)
{
    if (!f) return;
    f->next = unused;
    unused = f;
}
