// SPDX-License-Identifier: MIT
// tensor/storage.c -- storages: reference-counted bytes on one device, resident or vacated, with the events of the
// latest records (work queued in a stream, device/stream.h) that write and read them.
#include "tensor/tensor.h"
#include "base/watched.h"

static ms_storage *spare;  // free list, linked through data

static void recycle_storage(ms_storage *s)
{
    if (!MS_RECYCLE) {
        free(s);
        return;
    }
    s->data = spare;
    spare = s;
}

ms_status ms__storage_new(ms_storage **out, int device, size_t bytes, const char *what)
{
    ms_storage *s = spare;
    if (MS_LIKELY(s != NULL)) {
        spare = (ms_storage *)s->data;
    } else if (!(s = malloc(sizeof *s))) {
        return ms__no_memory(sizeof *s, what, "a storage of %zu bytes", bytes);
    }
    *s = (ms_storage) { .refs = 1, .device = device, .bytes = bytes };
    if (!ms__is_meta(device)) {
        ms_status st = ms__alloc(&s->block, device, bytes, what);
        if (MS_UNLIKELY(st != MS_OK)) {
            recycle_storage(s);
            return st;
        }
        s->data = s->block->data;
    }
    *out = s;
    return MS_OK;
}

ms_storage *ms__storage_retain(ms_storage *s)
{
    s->refs++;
    return s;
}

// A freed block of a GPU may be reused at once, in the order of the compute stream: that stream must first wait for the
// work of other streams on the block.
static void drop_events(ms_storage *s)
{
    ms_pending *all[] = { s->event, s->readers };
    for (int k = 0; k < MS_COUNT(all); k++) {
        if (MS_LIKELY(!all[k])) continue;
        (void)ms__event_join(all[k]);
        ms__event_release(all[k]);
    }
    s->event = s->readers = NULL;
}

void ms__storage_release(ms_storage *s)
{
    if (--s->refs > 0) return;
    // A queued record (work of a stream) retains the storages that it uses, so none uses these bytes any more.
    drop_events(s);
    if (s->block) ms__free(s->block);
    recycle_storage(s);
}

void ms__storage_vacate(ms_storage *s)
{
    if (s->vacated) return;
    drop_events(s);
    if (s->block) ms__free(s->block);
    s->block = NULL;
    s->data = NULL;
    s->vacated = true;
}

ms_status ms__storage_refill(ms_storage *s, const char *what)
{
    if (!s->vacated) return MS_OK;
    if (!ms__is_meta(s->device)) {
        MS_TRY(ms__alloc(&s->block, s->device, s->bytes, what));
        s->data = s->block->data;
        if (s->kind) ms__set_kind(s->block, s->kind);
    }
    s->vacated = false;
    return MS_OK;
}

void ms__storage_hold(ms_storage *s, ms_memory_kind kind)
{
    if (s->kind == kind) return;
    s->kind = (uint8_t)kind;
    if (s->block) ms__set_kind(s->block, kind);
}

static ms_status wait_for_copy(ms_pending **event)
{
    ms_status st = ms__event_wait(*event);
    ms__event_release(*event);
    *event = NULL;
    return st;
}

ms_status ms__storage_sync(ms_storage *s, bool write)
{
    if (MS_UNLIKELY(s->vacated))
        return ms__fail(MS_ESTATE,
                        "%s is sharded now: its values are whole only inside its module's forward and backward; use "
                        "to_local() or full_tensor()",
                        s->owner ? s->owner : "this tensor's storage");
    if (MS_UNLIKELY(s->event != NULL)) MS_TRY(wait_for_copy(&s->event));
    return MS_UNLIKELY(write && s->readers != NULL) ? wait_for_copy(&s->readers) : MS_OK;
}
