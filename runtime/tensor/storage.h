// SPDX-License-Identifier: MIT
// tensor/storage.h -- storages: bytes of one device, resident or vacated.
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
    void *data;  // NULL while vacated, of 0 bytes, or on meta
    size_t bytes;
    ms_block *block;  // NULL for foreign memory and meta
    bool vacated;
    const char *owner;    // for messages: "parameter 'w' of unit 'blocks.0'"; interned, may be NULL
    ms_pending *event;    // of the latest record that writes it: readers and writers wait; NULL: none
    ms_pending *readers;  // of the latest record that reads it: writers wait; NULL: none
} ms_storage;

ms_status ms__storage_new(ms_storage **out, int device, size_t bytes, const char *what);
ms_storage *ms__storage_retain(ms_storage *s);
void ms__storage_release(ms_storage *s);
void ms__storage_vacate(ms_storage *s);                         // frees the bytes; views stay
ms_status ms__storage_refill(ms_storage *s, const char *what);  // allocates the bytes again, uninitialised
ms_status ms__storage_sync(ms_storage *s, bool write);          // waits for its events; fails if it is vacated

#ifdef __cplusplus
}
#endif

#endif
