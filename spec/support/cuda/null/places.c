// SPDX-License-Identifier: MIT
// null/places.c -- the tensors and buffers at addresses of the device, and the bytes that a launch touches.
#include "null.h"

// A hash table with open addressing. Memory is reused, so the newest entry of an address replaces older ones.
enum { PLACES = 1 << 16, PROBES = 64, TABLES = 16, TABLE_BYTES = 1 << 20 };
static struct {
    const void *p;
    size_t bytes;
    int size;  // bytes per element; 0: unknown
} places[PLACES];
static struct {
    const void *there;
    const void **pointers;
    int n;
} tables[TABLES];
static int next_table;
// The latest 64 temporary buffers of operators; number n is at n % 64. An address inside one stands for the rest of
// that buffer.
static struct {
    const char *p;
    size_t bytes;
} rooms[64];
static int n_rooms;
bool ms__null_watching;

EXPORT void ms_null_forget(void)
{
    memset(places, 0, sizeof places);
    for (int k = 0; k < TABLES; k++) free(tables[k].pointers);
    memset(tables, 0, sizeof tables);
    n_rooms = 0;
    ms__null_watching = false;
}

static int place_of(const void *p)
{
    uint32_t h = (uint32_t)((uintptr_t)p >> 4) * 2654435761u >> 16;
    for (int k = 0; k < PROBES; k++) {
        int at = (int)((h + (uint32_t)k) % PLACES);
        if (!places[at].p || places[at].p == p) return at;
    }
    return -1;
}
void ms__null_note(const void *p, size_t bytes, int size)
{
    if (!ms__null_watching || !p) return;
    int at = place_of(p);
    if (at < 0) return;
    // A buffer of unknown element size keeps the size that a product gave it.
    if (size == 0 && places[at].p == p && places[at].bytes <= bytes) size = places[at].size;
    places[at].p = p;
    places[at].bytes = bytes;
    places[at].size = size;
}
void ms__null_note_tensor(const ms_tensor *t)
{
    if (t && t->storage && ms__is_cuda(ms__device(t)))
        ms__null_note(ms__data(t), ms__nbytes(t), (int)ms__dtype_size(t->dtype));
}
void ms__null_note_table(const void *there, const void *here, size_t bytes)
{
    if (!ms__null_watching || bytes > TABLE_BYTES) return;
    int at = 0;
    while (at < TABLES && tables[at].there != there) at++;
    if (at == TABLES) at = next_table++ % TABLES;
    free(tables[at].pointers);
    tables[at].there = there;
    tables[at].pointers = malloc(bytes + 1);
    tables[at].n = 0;
    if (!tables[at].pointers) abort();
    for (size_t k = 0; k + 8 <= bytes; k += 8) {
        const void *p;
        memcpy(&p, (const char *)here + k, 8);
        if (ms__null_on_device(p)) tables[at].pointers[tables[at].n++] = p;
    }
}

void ms__null_note_room(const void *p, size_t bytes)
{
    ms__null_note(p, bytes, 0);
    rooms[n_rooms % MS_COUNT(rooms)].p = p;
    rooms[n_rooms++ % MS_COUNT(rooms)].bytes = bytes;
}

static void touch(ms_null_launch *l, const void *p)
{
    static const ms_null_launch *latest;
    static const void *whole;              // the place that this launch touched last
    static const char *lowest, *room_end;  // the part of a temporary buffer that it has touched
    if (l != latest) whole = lowest = room_end = NULL;
    latest = l;
    int at = place_of(p);
    if (at >= 0 && places[at].p == p) {
        int size = places[at].size;
        double bytes = (double)places[at].bytes;
        if (room_end == (const char *)p + places[at].bytes) bytes -= (double)(room_end - lowest);
        l->bytes[size == 2 ? 0 : size == 4 || size == 0 ? 1 : 2] += bytes;
        whole = p;
        return;
    }
    int last = n_rooms > MS_COUNT(rooms) ? n_rooms - MS_COUNT(rooms) : 0;
    for (int k = n_rooms - 1; k >= last; k--) {
        const char *room = rooms[k % MS_COUNT(rooms)].p, *end = room + rooms[k % MS_COUNT(rooms)].bytes;
        if ((const char *)p < room || (const char *)p >= end) continue;
        if (room == whole) return;
        const char *up_to = end == room_end ? lowest : end;
        if ((const char *)p < up_to) {
            l->bytes[1] += (double)(up_to - (const char *)p);
            lowest = p, room_end = end;
        }
        return;
    }
}

void ms__null_touch(ms_null_launch *l, const void *arguments, size_t bytes)
{
    for (size_t k = 0; k + 8 <= bytes; k += 8) {
        const void *p;
        memcpy(&p, (const char *)arguments + k, 8);
        // Beside a number of 4 bytes the padding keeps what was there, often the upper half of an address: a small
        // number with it is the beginning of a block where one lies at a multiple of 4 GiB.
        if (!ms__null_on_device(p) || (uintptr_t)p % (1ull << 32) < 4096) continue;
        touch(l, p);
        for (int t = 0; t < TABLES; t++)
            for (int i = 0; tables[t].there == p && i < tables[t].n; i++) touch(l, tables[t].pointers[i]);
    }
}
