// SPDX-License-Identifier: MIT
// tensor/storage.h -- storages: bytes on one device, resident or vacated.
#ifndef MS_STORAGE_H
#define MS_STORAGE_H

#include "base/base.h"
#include "device/pool.h"
#include "device/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ms_storage {
    int refs;
    int device;
    void *data;  // NULL while vacated, for 0 bytes, and on meta
    size_t bytes;
    ms_block *block;  // NULL while vacated and on meta; has 0 bytes for foreign memory
    bool vacated;
    uint8_t kind;       // ms_memory_kind of its bytes
    const char *owner;  // for messages: "parameter 'w' of unit 'blocks.0'"; interned; may be NULL
    // Event of the latest record (queued work) that writes the bytes: readers and writers wait for it; NULL: none.
    ms_pending *event;
    ms_pending *readers;  // event of the latest record that reads the bytes: writers wait for it; NULL: none
} ms_storage;

ms_status ms__storage_new(ms_storage **out, int device, size_t bytes, const char *what);
ms_storage *ms__storage_retain(ms_storage *s);
void ms__storage_release(ms_storage *s);
void ms__storage_vacate(ms_storage *s);                         // frees the bytes; views remain
ms_status ms__storage_refill(ms_storage *s, const char *what);  // allocates the bytes again, uninitialised
void ms__storage_hold(ms_storage *s, ms_memory_kind kind);      // records what its bytes hold, now and after a refill
// Waits for the work that writes to s and, with write, for the work that reads it. Fails if s is vacated.
ms_status ms__storage_sync(ms_storage *s, bool write);

#ifdef __cplusplus
}
#endif

#endif
