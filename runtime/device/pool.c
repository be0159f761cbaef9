// SPDX-License-Identifier: MIT
// device/pool.c -- the caching allocator of the CPU, and what is common to all devices.
//
// CPU memory comes from arenas: large reserved address ranges in which only touched pages use memory. Blocks are
// allocated from an arena by size class (eight classes per power of two: at most 1/8 of a new block above 512 bytes
// is wasted). A freed block is added to its arena's free list for that class. Blocks are never merged or split, because
// training requests the same sizes in every step.
//
// An arena is either anonymous memory or a memfd. A peer on the node maps a memfd once and finds every block in it by
// its offset. Invariant: every block is live, free (its pages are resident) or hollow (its pages were returned to the
// system; its addresses can be reused).
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <fcntl.h>
#include <unistd.h>
#include "base/launcher.h"
#include "device/capturing.h"
#include "device/device.h"
#include "device/gpu_pool.h"
#include "device/history.h"
#include "device/host_pins.h"
#include "base/trace.h"
#include "base/watched.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // since Linux 6.1; older headers lack it
#endif

enum {
    LARGE = 256 << 10,  // blocks of at least this size have their own pages
    CHUNK = 1 << 20,    // smaller blocks are allocated from chunks
    HUGE_PAGE = 2 << 20,
};

struct ms_segment {
    ms_block *free[MS_CLASSES], *hollow[MS_CLASSES];
    char *base;
    size_t bytes, used;
    char *chunk;  // the unused part of the latest chunk
    size_t chunk_left;
    int fd;  // -1: anonymous memory
    uint64_t id;
    ms_segment *older;
};

static struct {
    ms_segment *top;  // new blocks come from this arena; `older` arenas of the same kind are searched for free blocks
    ms_usage use;
    size_t memory;     // RAM and swap of the machine, or the limit of this process's control group if it is smaller
    uint64_t fail_in;  // the nth allocation from now fails; 0: none
    bool fail_on;      // all allocations after the failing one fail, too
    bool shared;
} pool;

int64_t ms__live_tensors;

static ms_usage *usage_of(int device)
{
    if (ms__is_cuda(device)) return ms__gpu_usage(ms__index(device));
    return ms__device_type(device) == MS_CPU ? &pool.use : NULL;
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

// Requests huge pages for a block without content, so that one address translation covers 512 small pages. Shared
// memory gets huge pages only by collapsing small ones (Linux 6.1). This needs one touched small page per huge page and
// takes less than half the time of touching all small pages.
static void huge_pages(ms_segment *s, char *p, size_t size)
{
    static bool refused;
    size_t whole = size & ~(size_t)(HUGE_PAGE - 1);
    if (!whole) return;
    if (s->fd < 0) {
        madvise(p, whole, MADV_HUGEPAGE);
        return;
    }
    if (refused || whole > pool.memory / 8) return;  // most pages of such a large block may never be used
    for (size_t i = 0; i < whole; i += HUGE_PAGE) {
        MS_UNPOISON(p + i, 1);
        p[i] = 0;
        MS_POISON(p + i, 1);
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
    // Peers map this memory too: the arenas of all ranks of a large machine must fit one address space. (qemu 7 keeps
    // 24 bytes for each 4 KiB of it.) A rank that needs more than four times its share takes another arena.
    int local = shared ? ms__ranks_here() : 0;
    size_t bytes = 2 * pool.memory / (size_t)(local > 2 ? local / 2 : 1);
    if (bytes < 4 * need) bytes = 4 * need;
    bytes = (bytes + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
    // Halve the reservation while a limit on address space (ulimit -v, valgrind) forbids it.
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

// Moves the end of the used part of an arena. Private memory gets huge pages throughout: a product with one row reads
// weights in small pages at 0.6 of the rate.
static void use(ms_segment *s, size_t end)
{
    size_t from = (s->used + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
    size_t to = (end + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
    if (s->fd < 0 && to > from) madvise(s->base + from, to - from, MADV_HUGEPAGE);
    s->used = end;
}

// Allocates `size` bytes from arena s; NULL if it is full.
static void *cut_block(ms_segment *s, size_t size)
{
    if (size < LARGE) {
        if (s->chunk_left < size) {
            if (s->bytes - s->used < CHUNK) return NULL;
            s->chunk = s->base + s->used;
            s->chunk_left = CHUNK;
            use(s, s->used + CHUNK);
            ms__add_reserved(&pool.use, CHUNK);
        }
        void *p = s->chunk;
        s->chunk += size;
        s->chunk_left -= size;
        return p;
    }
    size_t align = s->fd >= 0 && size >= HUGE_PAGE ? HUGE_PAGE : 4096;
    size_t first = (s->used + align - 1) & ~(align - 1);
    size_t whole = (size + 4095) & ~(size_t)4095;
    if (first > s->bytes || s->bytes - first < whole) return NULL;
    use(s, first + whole);
    ms__add_reserved(&pool.use, size);
    if (s->fd >= 0) huge_pages(s, s->base + first, size);
    return s->base + first;
}

static void empty_cpu_cache(void)
{
    for (ms_segment *s = pool.top; s; s = s->older)
        for (int c = 0; c < MS_CLASSES; c++) {
            ms_block *b, *stay = NULL;
            if (!s->free[c] || s->free[c]->size < LARGE) continue;
            while ((b = ms__pop(&s->free[c]))) {
                if (ms__host_pinned(b)) {
                    ms__push(&stay, b);
                    continue;
                }
                size_t whole = (b->size + 4095) & ~(size_t)4095;
                if (s->fd >= 0)
                    fallocate(s->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (char *)b->data - s->base,
                              (off_t)whole);
                else madvise(b->data, whole, MADV_DONTNEED);
                pool.use.reserved -= b->size;
                ms__push(&s->hollow[c], b);
            }
            s->free[c] = stay;
        }
}

// Allocates a block when the top arena has no free block of the class.
static ms_block *alloc_slow(int c, size_t size, bool retried)
{
    if (!pool.top) {
        // If there may be peers on this node, the first arena is shared, so that they can read in place even tensors
        // that were made before dist.init.
        ms_launch launch;
        ms_launcher(&launch);
        bool beside = launch.local_world != 1;
        if (beside && (pool.top = arena_new(true, size))) pool.shared = true;
        else if (!(pool.top = arena_new(false, size))) return NULL;
    }
    for (ms_segment *s = pool.top; s; s = s->older) {
        if ((s->fd >= 0) != pool.shared) continue;
        ms_block *b = ms__pop(&s->free[c]);
        // A slightly larger free block is cheaper than fresh pages.
        for (int k = 1; !b && size >= LARGE && k <= 2 && c + k < MS_CLASSES; k++) b = ms__pop(&s->free[c + k]);
        if (b) return b;
    }
    size_t fresh = size < LARGE ? CHUNK : size;
    if (pool.use.reserved + fresh > pool.memory) {
        if (retried) return NULL;
        empty_cpu_cache();
        return alloc_slow(c, size, true);
    }
    for (ms_segment *s = pool.top; s; s = s->older) {
        ms_block *b;
        if ((s->fd >= 0) != pool.shared || !(b = ms__pop(&s->hollow[c]))) continue;
        ms__add_reserved(&pool.use, b->size);
        huge_pages(s, b->data, b->size);
        return b;
    }
    ms_block *b = ms__header_new();
    if (!b) return NULL;
    void *p = cut_block(pool.top, size);
    if (!p) {
        ms_segment *s = arena_new(pool.shared, size);
        if (s) {
            s->older = pool.top;
            pool.top = s;
            p = cut_block(s, size);
        }
    }
    if (!p) {
        ms__header_drop(b);
        return NULL;
    }
    b->data = p;
    b->size = size;
    b->segment = pool.top;
    MS_POISON(p, size);
    return b;
}

static ms_status fail_no_memory(size_t bytes, const char *what, const char *why)
{
    return ms__pool_no_memory(&pool.use, MS_CPU, bytes, what, why);
}

// Records that b, a free block of p or one from the pool, is now in use for `bytes` bytes.
static void pin_cpu_block(ms_pins *p, ms_block *b, size_t bytes)
{
    if (b->pins) p->bytes -= b->size;
    b->pins = p;
    p->bytes += bytes;
    p->in_use++;
}

// b, a block of class c that a captured step has pinned, is no longer in use: adds it to the step's free blocks.
// Returns false once the step was freed: the block then goes back to the pool.
static bool unpin_cpu_block(ms_block *b, int c)
{
    ms_pins *p = b->pins;
    p->in_use--;
    p->bytes += b->size - b->bytes;
    if (!p->over) {
        b->bytes = b->size;
        ms__add_allocated(&pool.use, b, "captured step");
        ms__push(&p->free[c], b);
        return true;
    }
    b->pins = NULL;
    if (p->in_use == 0) free(p);
    return false;
}

// Takes a block of the CPU's pool. Scratch memory is not pinned: a repetition of a captured step allocates its own.
static inline ms_status take_block(ms_block **out, size_t bytes, const char *what, bool scratch)
{
    ms_block *b;
    if (MS_UNLIKELY(ms__over_limit(pool.use.allocated + pool.use.scratch, bytes)))
        return fail_no_memory(bytes, what, "limit of ms_state.memory_limit");
    if (MS_UNLIKELY(bytes > (size_t)1 << 40)) return fail_no_memory(bytes, what, "more than the largest block, 1 TiB");
    size_t size;
    int c = ms__class_of(bytes, &size);
    ms_pins *pins = scratch ? NULL : ms__pinning;
    if (MS_UNLIKELY(pins != NULL) && (b = ms__pop(&pins->free[c]))) ms__drop_allocated(&pool.use, b);
    else if (MS_LIKELY(pool.top && (b = pool.top->free[c]))) pool.top->free[c] = b->next;
    else if (!(b = alloc_slow(c, size, false)))
        return fail_no_memory(bytes, what, "more than the memory that this process may still use");
    if (MS_UNLIKELY(pins != NULL)) pin_cpu_block(pins, b, bytes);
    b->bytes = bytes;
    b->device = MS_CPU;
    MS_UNPOISON(b->data, bytes);
    if (scratch) ms__add_scratch(&pool.use, b);
    else ms__add_allocated(&pool.use, b, what);
    *out = b;
    return MS_OK;
}

ms_status ms__alloc(ms_block **out, int device, size_t bytes, const char *what)
{
    ms_block *b;
    if (MS_UNLIKELY(pool.fail_in) && --pool.fail_in == 0) {
        if (pool.fail_on) pool.fail_in = 1;
        return fail_no_memory(bytes, what, "failure requested by ms_fail_allocation");
    }
    if (MS_UNLIKELY(device != MS_CPU || bytes == 0)) {
        int type = ms__device_type(device);
        if (type != MS_CPU && type != MS_META) {
            if (bytes) return ms__gpu_alloc(out, device, bytes, what);
            MS_TRY(ms__cuda_need(device, what));
        }
        if (!(b = ms__header_new())) return fail_no_memory(bytes, what, "malloc failed");
        *b = (ms_block) { .bytes = type == MS_META ? 0 : bytes, .device = device };  // meta tensors have no bytes
        *out = b;
        return MS_OK;
    }
    return take_block(out, bytes, what, false);
}

ms_status ms__alloc_scratch(ms_block **out, size_t bytes, const char *what)
{
    if (bytes == 0 || pool.fail_in) return ms__alloc(out, MS_CPU, bytes, what);  // ms_fail_allocation counts it, too
    return take_block(out, bytes, what, true);
}

void ms__free(ms_block *b)
{
    if (!b) return;
    ms_segment *s = b->segment;
    if (MS_UNLIKELY(!s)) {
        if (ms__is_cuda(b->device) && b->data) ms__gpu_free(b);
        else ms__header_drop(b);
        return;
    }
    ms__drop_allocated(&pool.use, b);
    size_t size;
    int c = ms__class_of(b->size, &size);
    if (MS_UNLIKELY(b->pins != NULL) && unpin_cpu_block(b, c)) return;  // not poisoned: repetitions of the step use it
    MS_POISON(b->data, b->size);
    ms__push(&s->free[c], b);
}

// ---- pinned blocks --------------------------------------------------------------------------------

ms_pins *ms__pins_new(void) { return calloc(1, sizeof(ms_pins)); }
size_t ms__pins_bytes(const ms_pins *p) { return p->bytes; }
int ms__pins_in_use(const ms_pins *p) { return p->in_use; }

void ms__pins_free(ms_pins *p)
{
    p->over = true;
    p->in_use++;  // keeps p during the loop
    for (int c = 0; c < MS_CLASSES; c++)
        for (ms_block *b; (b = ms__pop(&p->free[c]));) {
            p->in_use++;
            ms__free(b);
        }
    for (ms_block *b; (b = ms__pop(&p->there));) {
        p->in_use++;
        ms__free(b);
    }
    if (--p->in_use == 0) free(p);
}

void ms__set_kind(ms_block *b, ms_memory_kind kind)
{
    ms_usage *u = b->size ? usage_of(b->device) : NULL;
    if (!u || kind == ms__kind_of(b)) return;
    if (b->tag > 15) ms__history_kind(b, kind);
    if (ms__kind_of(b)) u->kinds[ms__kind_of(b)] -= b->bytes;
    if (kind) u->kinds[kind] += b->bytes;
    b->tag = (b->tag & ~15u) | kind;
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
    if (!s) return;  // without memfds, tensors stay in anonymous memory and are staged for peers
    // Free blocks in anonymous memory cannot be shared: return their pages to the system. Live blocks will be freed to
    // their own arena.
    empty_cpu_cache();
    s->older = pool.top;
    pool.top = s;
    pool.shared = true;
}

void ms__pool_stats(int device, ms_memory *out)
{
    const ms_usage *u = usage_of(device);
    memset(out, 0, sizeof *out);
    out->live_tensors = (double)ms__live_tensors;
    if (!u) return;
    out->allocated = (double)u->allocated;
    out->peak_allocated = (double)u->peak;
    out->reserved = (double)u->reserved;
    out->peak_reserved = (double)u->peak_reserved;
    out->peak_scratch = (double)u->peak_scratch;
    ms__kinds_out(u->kinds, out);
}

static double allocated_everywhere(double *kinds)
{
    size_t sum = 0;
    for (int i = 0; kinds && i < MS_MEMORY_KINDS; i++) kinds[i] = 0;
    for (int k = -1; k < MS_CUDA_DEVICES; k++) {
        const ms_usage *u = k < 0 ? &pool.use : ms__gpu_usage(k);
        sum += u->allocated;
        for (int i = 1; kinds && i < MS_MEMORY_KINDS; i++) {
            kinds[i] += (double)u->kinds[i];
            kinds[0] -= (double)u->kinds[i];
        }
    }
    if (kinds) kinds[0] += (double)sum;
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
    ms_usage *u = usage_of(device);
    if (!u) return;
    u->peak = u->allocated;
    u->peak_reserved = u->reserved;
    u->peak_scratch = u->scratch;
    ms__history_restart(device, u);
}

void ms_memory_history(int on)
{
    for (int k = -1; k < MS_CUDA_DEVICES && on && !ms__history_on; k++) {
        int device = k < 0 ? MS_CPU : MS_CUDA | k << 8;
        ms__history_restart(device, usage_of(device));
    }
    ms__history_on = on != 0;
}

double ms_memory_snapshot(int device, ms_memory *now, ms_memory *peak, ms_memory_record *out, double room)
{
    if (now) ms__pool_stats(device, now);
    return usage_of(device) ? ms__history_read(device, peak, out, room) : 0;
}

void ms_empty_cache(void)
{
    empty_cpu_cache();
    ms__gpu_empty_caches();
}

double ms_fail_allocation(double nth)
{
    double left = (double)pool.fail_in;
    pool.fail_on = nth < 0;
    pool.fail_in = (uint64_t)(nth < 0 ? -nth : nth);
    return left;
}
