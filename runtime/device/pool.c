// SPDX-License-Identifier: MIT
// device/pool.c -- caching allocators, one over the memory of each device.
//
// CPU memory comes from arenas: one huge reservation of addresses each, of which only touched pages cost
// memory. Blocks are cut from it by size class (eight per power of two, so at most 1/8 is wasted) and, once
// freed, wait in their arena's list of that class. Nothing is ever merged or split: programs that train ask
// for the same sizes in every step.
//
// An arena is anonymous memory, or one memfd that a peer on the node maps once and in which it then finds
// every block by offset. Invariant: every block is live, free (its pages are still there)
// or hollow (its pages were given back; the addresses wait to be used again).
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <fcntl.h>
#include <unistd.h>
#include "base/launcher.h"
#include "device/device.h"
#include "device/pool.h"
#include "base/trace.h"
#include "base/watched.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1; older headers lack it
#endif

enum {
    UNIT = 64,             // alignment and smallest block
    CLASSES = 8 + 8 * 32,  // up to 2^41 bytes
    LARGE = 256 << 10,     // from here on a block has pages of its own
    CHUNK = 1 << 20,       // smaller ones are cut from these
    HUGE_PAGE = 2 << 20,
};

struct ms_segment {
    ms_block *free[CLASSES], *hollow[CLASSES];
    char *base;
    size_t bytes, used;
    char *chunk;  // what is left of the latest chunk
    size_t chunk_left;
    int fd;  // -1: anonymous
    uint64_t id;
    ms_segment *older;
};

static struct {
    ms_segment *top;    // where blocks come from; its `older` ones of the same kind are asked too
    ms_block *headers;  // unused block records
    size_t allocated, peak, reserved, peak_reserved;
    size_t limit;      // on allocated; SIZE_MAX = none
    size_t memory;     // of the machine or of our control group
    uint64_t fail_in;  // the nth allocation from now fails; 0 = off
    bool fail_on;      // ... and all after it
    bool shared;
} pool = { .limit = SIZE_MAX };

int64_t ms__live_tensors;

// Units of 64 bytes; classes of 1..8 units, then eight to the octave.
static inline int class_of(size_t bytes, size_t *size)
{
    size_t n = (bytes + UNIT - 1) / UNIT;
    if (n <= 8) {
        *size = n * UNIT;
        return (int)n - 1;
    }
    int shift = 60 - __builtin_clzll(n - 1);
    size_t m = (n - 1) >> shift;  // 8..15
    *size = ((m + 1) << shift) * UNIT;
    return 8 * shift + (int)m;
}

static size_t memory_size(void)
{
    struct sysinfo si;
    size_t total = sysinfo(&si) == 0 ? ((size_t)si.totalram + si.totalswap) * si.mem_unit : (size_t)1 << 40;
    FILE *f = fopen("/sys/fs/cgroup/memory.max", "re");
    if (f) {
        unsigned long long max;
        if (fscanf(f, "%llu", &max) == 1 && max < total) total = (size_t)max;
        fclose(f);
    }
    return total;
}

void *ms__map_aligned(int fd, size_t bytes)
{
    int flags = MAP_NORESERVE | (fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS);
    char *p = mmap(NULL, bytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    size_t head = -(uintptr_t)p & (HUGE_PAGE - 1);
    void *at = mmap(p + head, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED) {
        munmap(p, bytes + HUGE_PAGE);
        return NULL;
    }
    if (head) munmap(p, head);
    if (head < HUGE_PAGE) munmap(p + head + bytes, HUGE_PAGE - head);
    madvise(at, bytes, MADV_DONTDUMP);
    return at;
}

// Huge pages under a block without content: one address look-up then serves 512 small pages. Shared memory gets them
// only by being collapsed (Linux 6.1), which asks for one small page in each, and takes less than half the time of
// touching all.
static void huge_pages(ms_segment *s, char *p, size_t size)
{
    static bool refused;
    size_t whole = size & ~(size_t)(HUGE_PAGE - 1);
    if (!whole) return;
    if (s->fd < 0) {
        madvise(p, whole, MADV_HUGEPAGE);
        return;
    }
    if (refused || whole > pool.memory / 8) return;  // what may never be touched is not to cost so much
    for (size_t i = 0; i < whole; i += HUGE_PAGE) {
        MS_OWNED(p + i, 1);  // a hollow block is nobody's
        p[i] = 0;
        MS_NOBODYS(p + i, 1);
    }
    refused = madvise(p, whole, MADV_COLLAPSE) != 0 && errno == EINVAL;
}

static ms_segment *arena_new(bool shared, size_t need)
{
    static uint64_t ids;
    ms_segment *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->fd = -1;
    if (!pool.memory) pool.memory = memory_size();
    if (MS_ARENA && pool.memory > MS_ARENA) pool.memory = MS_ARENA;
    // Peers map it too: many ranks of a large machine must fit one address space.
    int local = shared ? ms__ranks_here() : 0;
    size_t bytes = 2 * pool.memory / (size_t)(local > 8 ? local / 4 : 1);
    if (bytes < 4 * need) bytes = 4 * need;
    bytes = (bytes + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
    // Address-space limits (ulimit -v, valgrind) refuse a large reservation: halve it.
    for (; bytes >= need + 2 * HUGE_PAGE && bytes >= (64u << 20); bytes /= 2) {
        if (shared) {
            if (s->fd < 0 && (s->fd = memfd_create("moonshard", MFD_CLOEXEC)) < 0) break;
            if (ftruncate(s->fd, (off_t)bytes) != 0) continue;
        }
        char *p = ms__map_aligned(s->fd, bytes);
        if (!p) continue;
        s->base = p;
        s->bytes = bytes;
        s->id = ++ids;
        return s;
    }
    if (s->fd >= 0) close(s->fd);
    free(s);
    return NULL;
}

static ms_block *header_new(void)
{
    enum { SLAB = 64 };
    if (!pool.headers) {
        ms_block *slab = calloc(SLAB, sizeof *slab);
        if (!slab) return NULL;
        for (int i = 0; i < SLAB; i++) {
            slab[i].next = pool.headers;
            pool.headers = &slab[i];
        }
    }
    ms_block *b = pool.headers;
    pool.headers = b->next;
    return b;
}

// Cuts `size` bytes from arena s, or returns NULL when it is full.
static void *cut(ms_segment *s, size_t size)
{
    if (size < LARGE) {
        if (s->chunk_left < size) {
            if (s->bytes - s->used < CHUNK) return NULL;
            s->chunk = s->base + s->used;
            s->chunk_left = CHUNK;
            s->used += CHUNK;
            pool.reserved += CHUNK;
        }
        void *p = s->chunk;
        s->chunk += size;
        s->chunk_left -= size;
        return p;
    }
    size_t align = size >= HUGE_PAGE ? HUGE_PAGE : 4096;
    size_t first = (s->used + align - 1) & ~(align - 1);
    size_t whole = (size + 4095) & ~(size_t)4095;
    if (first > s->bytes || s->bytes - first < whole) return NULL;
    s->used = first + whole;
    pool.reserved += size;
    huge_pages(s, s->base + first, size);
    return s->base + first;
}

static ms_block *pop(ms_block **list)
{
    ms_block *b = *list;
    if (b) *list = b->next;
    return b;
}

static void empty_cache(void)
{
    for (ms_segment *s = pool.top; s; s = s->older)
        for (int c = 0; c < CLASSES; c++) {
            ms_block *b;
            if (!s->free[c] || s->free[c]->size < LARGE) continue;
            while ((b = pop(&s->free[c]))) {
                size_t whole = (b->size + 4095) & ~(size_t)4095;
                if (s->fd >= 0)
                    fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (char *)b->data - s->base,
                              (off_t)whole);
                else madvise(b->data, whole, MADV_DONTNEED);
                pool.reserved -= b->size;
                b->next = s->hollow[c];
                s->hollow[c] = b;
            }
        }
}

// No free block of the class in the top arena.
static ms_block *alloc_slow(int c, size_t size, bool retried)
{
    if (!pool.top) {
        // Started beside others: then what is made before dist.init can be read in place as well.
        ms_launch launch;
        ms_launcher(&launch);
        bool beside = launch.local_world != 1;
        if (beside && (pool.top = arena_new(true, size))) pool.shared = true;
        else if (!(pool.top = arena_new(false, size))) return NULL;
    }
    for (ms_segment *s = pool.top; s; s = s->older) {
        if ((s->fd >= 0) != pool.shared) continue;
        ms_block *b = pop(&s->free[c]);
        // A slightly larger block that is at hand is cheaper than fresh pages.
        for (int k = 1; !b && size >= LARGE && k <= 2 && c + k < CLASSES; k++) b = pop(&s->free[c + k]);
        if (b) return b;
    }
    size_t fresh = size < LARGE ? CHUNK : size;
    if (pool.reserved + fresh > pool.memory) {
        if (retried) return NULL;
        empty_cache();
        return alloc_slow(c, size, true);
    }
    for (ms_segment *s = pool.top; s; s = s->older) {
        ms_block *b;
        if ((s->fd >= 0) != pool.shared || !(b = pop(&s->hollow[c]))) continue;
        pool.reserved += b->size;
        if (pool.reserved > pool.peak_reserved) pool.peak_reserved = pool.reserved;
        huge_pages(s, b->data, b->size);
        return b;
    }
    ms_block *b = header_new();
    if (!b) return NULL;
    void *p = cut(pool.top, size);
    if (!p) {
        ms_segment *s = arena_new(pool.shared, size);
        if (s) {
            s->older = pool.top;
            pool.top = s;
            p = cut(s, size);
        }
    }
    if (!p) {
        b->next = pool.headers;
        pool.headers = b;
        return NULL;
    }
    if (pool.reserved > pool.peak_reserved) pool.peak_reserved = pool.reserved;
    b->data = p;
    b->size = size;
    b->segment = pool.top;
    MS_NOBODYS(p, size);
    return b;
}

static ms_status no_memory(size_t bytes, const char *what, const char *why)
{
    return ms__fail(MS_ENOMEM, "%s: no memory for %zu bytes on cpu (%s; %zu bytes allocated, %zu reserved)",
                    what ? what : "allocation", bytes, why, pool.allocated, pool.reserved);
}

// ---- a GPU's memory: the same classes; small blocks are cut from chunks, large ones are the driver's own ----

enum { CUDA_CHUNK = 2 << 20, CUDA_LARGE = 1 << 20, CUDA_UNIT = 256 };

static struct {
    ms_block *free[CLASSES];
    char *chunk;
    size_t chunk_left, allocated, peak, reserved, peak_reserved;
} gpu[MS_CUDA_DEVICES];

// Where every chunk begins: what other processes map is the driver's allocation.
static char **chunks;
static int n_chunks, cap_chunks;

static void chunk_new(char *p)
{
    // Without memory its tensors cannot be shared.
    if (!ms__grow(&chunks, &cap_chunks, n_chunks, sizeof *chunks, "allocation", "chunks")) chunks[n_chunks++] = p;
}

void *ms__device_base(const ms_block *b)
{
    if (b->size >= CUDA_LARGE || ms__cuda()->emulated) return b->data;
    for (int k = 0; k < n_chunks; k++)
        if ((char *)b->data >= chunks[k] && (char *)b->data < chunks[k] + CUDA_CHUNK) return chunks[k];
    return NULL;
}

static ms_status no_device_memory(int index, size_t bytes, const char *what, const char *why)
{
    return ms__fail(MS_ENOMEM, "%s: no memory for %zu bytes on cuda:%d (%s; %zu bytes allocated, %zu reserved)",
                    what ? what : "allocation", bytes, index, why, gpu[index].allocated, gpu[index].reserved);
}

// Gives the driver back what waits in the lists, except chunks' pieces. Kernels that still use it come first.
static void cuda_empty_cache(int index)
{
    const ms_cuda_table *t = ms__cuda();
    if (!t || t->sync(index, -1)) return;
    for (int c = 0; c < CLASSES; c++) {
        if (!gpu[index].free[c] || (gpu[index].free[c]->size < CUDA_LARGE && !t->emulated)) continue;
        ms_block *b;
        while ((b = pop(&gpu[index].free[c]))) {
            t->free(index, b->data);
            gpu[index].reserved -= b->size;
            b->next = pool.headers;
            pool.headers = b;
        }
    }
}

// A freed block may go to the next caller at once: all that operators do with it is in the order of the compute
// stream, and a record on another stream holds its storage until it is through.
static ms_status cuda_alloc(ms_block **out, int device, size_t bytes, const char *what)
{
    int index = ms__index(device), c;
    size_t size;
    ms_block *b;
    MS_TRY(ms__cuda_need(device, what));
    const ms_cuda_table *t = ms__cuda();
    if (bytes > pool.limit || gpu[index].allocated > pool.limit - bytes)
        return no_device_memory(index, bytes, what, "ms_set_memory_limit");
    if (bytes > (size_t)1 << 40) return no_device_memory(index, bytes, what, "more than a device has");
    c = class_of((bytes + CUDA_UNIT - 1) & ~(size_t)(CUDA_UNIT - 1), &size);
    if (!(b = pop(&gpu[index].free[c]))) {
        if (!(b = header_new())) return no_device_memory(index, bytes, what, "malloc");
        bool small = size < CUDA_LARGE && !t->emulated;  // the emulator's blocks lie apart: overruns show
        size_t fresh = small ? CUDA_CHUNK : size;
        void *p = NULL;
        if (!small || gpu[index].chunk_left < size) {
            ms_status st = t->alloc(index, fresh, &p);
            if (st == MS_ENOMEM) {
                cuda_empty_cache(index);
                st = t->alloc(index, fresh, &p);
            }
            if (st != MS_OK) {
                b->next = pool.headers;
                pool.headers = b;
                return st == MS_ENOMEM ? no_device_memory(index, bytes, what, "more than the device has free") : st;
            }
            gpu[index].reserved += fresh;
            if (gpu[index].reserved > gpu[index].peak_reserved) gpu[index].peak_reserved = gpu[index].reserved;
            if (small) {  // what was left of the chunk before stays unused
                gpu[index].chunk = p;
                chunk_new(p);
                gpu[index].chunk_left = CUDA_CHUNK;
            }
        }
        if (small) {
            size_t whole = (size + CUDA_UNIT - 1) & ~(size_t)(CUDA_UNIT - 1);
            p = gpu[index].chunk;
            gpu[index].chunk += whole < gpu[index].chunk_left ? whole : gpu[index].chunk_left;
            gpu[index].chunk_left -= whole < gpu[index].chunk_left ? whole : gpu[index].chunk_left;
        }
        *b = (ms_block) { .data = p, .size = size };
    }
    b->bytes = bytes;
    b->device = device;
    b->next = NULL;
    if (t->mark) t->mark(index, b->data, bytes, b->size);
    gpu[index].allocated += bytes;
    if (gpu[index].allocated > gpu[index].peak) gpu[index].peak = gpu[index].allocated;
    *out = b;
    return MS_OK;
}

static void cuda_free(ms_block *b)
{
    int index = ms__index(b->device);
    size_t size;
    int c = class_of(b->size, &size);
    const ms_cuda_table *t = ms__cuda();
    if (t->mark) t->mark(index, b->data, 0, b->size);
    gpu[index].allocated -= b->bytes;
    b->next = gpu[index].free[c];
    gpu[index].free[c] = b;
}

ms_status ms__alloc(ms_block **out, int device, size_t bytes, const char *what)
{
    ms_block *b;
    if (MS_UNLIKELY(pool.fail_in) && --pool.fail_in == 0) {
        if (pool.fail_on) pool.fail_in = 1;
        return no_memory(bytes, what, "ms_fail_allocation");
    }
    if (MS_UNLIKELY(device != MS_CPU || bytes == 0)) {
        int type = ms__device_type(device);
        if (type != MS_CPU && type != MS_META) {
            if (bytes) return cuda_alloc(out, device, bytes, what);
            MS_TRY(ms__cuda_need(device, what));
        }
        if (!(b = header_new())) return no_memory(bytes, what, "malloc");
        *b = (ms_block) { .bytes = type == MS_META ? 0 : bytes, .device = device };  // meta: no bytes anywhere
        *out = b;
        return MS_OK;
    }
    if (MS_UNLIKELY(bytes > pool.limit || pool.allocated > pool.limit - bytes))
        return no_memory(bytes, what, "ms_set_memory_limit");
    if (MS_UNLIKELY(bytes > (size_t)1 << 40)) return no_memory(bytes, what, "more than this machine has");
    size_t size;
    int c = class_of(bytes, &size);
    if (MS_LIKELY(pool.top && (b = pool.top->free[c]))) pool.top->free[c] = b->next;
    else if (!(b = alloc_slow(c, size, false))) return no_memory(bytes, what, "more than this machine has");
    b->bytes = bytes;
    b->device = device;
    MS_OWNED(b->data, bytes);
    pool.allocated += bytes;
    if (pool.allocated > pool.peak) pool.peak = pool.allocated;
    *out = b;
    return MS_OK;
}

void ms__free(ms_block *b)
{
    if (!b) return;
    ms_segment *s = b->segment;
    if (MS_UNLIKELY(!s)) {
        if (ms__is_cuda(b->device) && b->data) {
            cuda_free(b);
            return;
        }
        b->next = pool.headers;
        pool.headers = b;
        return;
    }
    pool.allocated -= b->bytes;
    MS_NOBODYS(b->data, b->size);
    size_t size;
    int c = class_of(b->size, &size);
    b->next = s->free[c];
    s->free[c] = b;
}

bool ms__segment_of(const ms_block *b, int *fd, uint64_t *offset, uint64_t *segment_id, uint64_t *segment_bytes)
{
    if (!b || !b->segment || b->segment->fd < 0) return false;
    *fd = b->segment->fd;
    *offset = (uint64_t)((char *)b->data - b->segment->base);
    *segment_id = b->segment->id;
    *segment_bytes = b->segment->bytes;
    return true;
}

void ms__pool_share(void)
{
    if (pool.shared) return;
    ms_segment *s = arena_new(true, CHUNK);
    if (!s) return;  // no memfd here: tensors stay anonymous, peers get them staged
    // What is cached cannot be shared; give it back. Live blocks retire into their own arena's lists.
    empty_cache();
    s->older = pool.top;
    pool.top = s;
    pool.shared = true;
}

void ms__pool_stats(int device, ms_memory *out)
{
    memset(out, 0, sizeof *out);
    out->live_tensors = (double)ms__live_tensors;
    if (ms__is_cuda(device) && ms__index(device) < MS_CUDA_DEVICES) {
        int k = ms__index(device);
        out->allocated = (double)gpu[k].allocated;
        out->peak_allocated = (double)gpu[k].peak;
        out->reserved = (double)gpu[k].reserved;
        out->peak_reserved = (double)gpu[k].peak_reserved;
    }
    if (ms__device_type(device) != MS_CPU) return;
    out->allocated = (double)pool.allocated;
    out->peak_allocated = (double)pool.peak;
    out->reserved = (double)pool.reserved;
    out->peak_reserved = (double)pool.peak_reserved;
}

static double allocated_everywhere(void)
{
    size_t sum = pool.allocated;
    for (int k = 0; k < MS_CUDA_DEVICES; k++) sum += gpu[k].allocated;
    return (double)sum;
}

__attribute__((constructor)) static void count_for_traces(void) { ms__trace_memory = allocated_everywhere; }

ms_status ms_memory_stats(int device, ms_memory *out)
{
    if (!out) return ms__fail(MS_EINVAL, "ms_memory_stats: out is NULL");
    ms__pool_stats(device, out);
    return MS_OK;
}

void ms_reset_peak_memory(int device)
{
    if (ms__is_cuda(device) && ms__index(device) < MS_CUDA_DEVICES) {
        int k = ms__index(device);
        gpu[k].peak = gpu[k].allocated;
        gpu[k].peak_reserved = gpu[k].reserved;
    }
    if (ms__device_type(device) != MS_CPU) return;
    pool.peak = pool.allocated;
    pool.peak_reserved = pool.reserved;
}

void ms_empty_cache(void)
{
    empty_cache();
    if (ms__cuda())
        for (int k = 0; k < MS_CUDA_DEVICES; k++)
            if (gpu[k].reserved) cuda_empty_cache(k);
}

void ms_set_memory_limit(double bytes) { pool.limit = bytes > 0 && bytes < 1e18 ? (size_t)bytes : SIZE_MAX; }

double ms_fail_allocation(double nth)
{
    double left = (double)pool.fail_in;
    pool.fail_on = nth < 0;
    pool.fail_in = (uint64_t)(nth < 0 ? -nth : nth);
    return left;
}
