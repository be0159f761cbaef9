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
    void *data;  // NULL while vacated or of 0 bytes or on meta
    size_t bytes;
    ms_block *block;  // NULL for foreign memory and meta
    bool vacated;
    const char *owner;    // who vacates it: "parameter 'w' of unit 'blocks.0'"; interned, may be NULL
    ms_pending *event;    // latest record that writes it (readers and writers wait), NULL when none
    ms_pending *readers;  // latest record that reads it (writers wait)
} ms_storage;

ms_status ms__storage_new(ms_storage **out, int device, size_t bytes, const char *what);
ms_storage *ms__storage_retain(ms_storage *s);
void ms__storage_release(ms_storage *s);
void ms__storage_vacate(ms_storage *s);                         // gives the bytes back; views stay
ms_status ms__storage_refill(ms_storage *s, const char *what);  // allocates them again, uninitialised
ms_status ms__storage_sync(ms_storage *s, bool write);          // waits for its events; refuses vacated ones

#ifdef __cplusplus
}
#endif

#endif
