// SPDX-License-Identifier: MIT
// device/gpu_pool.c -- the caching allocator of each GPU.
//
// Small blocks are allocated from chunks, by size class. Large blocks are cut from slabs (slab.h). The size of a new
// slab is about 1/32 of the reserved bytes, within limits: there are then few slabs, and the last one wastes little.
// Slabs for lasting blocks have the smallest size, because other blocks use their free ranges only if the driver has no
// memory.
#include "device/gpu_pool.h"
#include "device/capturing.h"
#include "device/device.h"
#include "device/move.h"
#include "device/history.h"
#include "device/slab.h"
#include "device/stream.h"

enum { CUDA_CHUNK = 2 << 20, CUDA_LARGE = 1 << 20, CUDA_UNIT = 256, SLAB_LEAST = 32 << 20, SLAB_MOST = 256 << 20 };

typedef struct {
    ms_block *free[MS_CLASSES];
    char *chunk;
    size_t chunk_left;
    ms_slabs slabs;
    ms_usage use;
} gpu;
bool ms__gpu_lasting;

static struct {
    gpu gpus[MS_CUDA_DEVICES];
    // The start addresses of chunks, for sharing blocks: other processes can only map whole allocations of the driver.
    char **chunks;
    int n_chunks, cap_chunks;
    // Allocations that are never returned to the driver.
    void **kept;
    int n_kept, cap_kept;
} pool;

ms_usage *ms__gpu_usage(int index) { return index < MS_CUDA_DEVICES ? &pool.gpus[index].use : NULL; }

static bool is_large(size_t bytes) { return bytes >= CUDA_LARGE && !ms__cuda()->separate; }

void *ms__device_base(const ms_block *b)
{
    if (is_large(b->bytes)) return ms__slab_base(b);
    if (ms__cuda()->separate) return b->data;
    for (int k = 0; k < pool.n_chunks; k++)
        if ((char *)b->data >= pool.chunks[k] && (char *)b->data < pool.chunks[k] + CUDA_CHUNK) return pool.chunks[k];
    return NULL;
}

ms_status ms__gpu_keep(void *base)
{
    MS_TRY(ms__grow(&pool.kept, &pool.cap_kept, pool.n_kept, sizeof *pool.kept, "dist", "shared memory"));
    pool.kept[pool.n_kept++] = base;
    return MS_OK;
}
static bool is_segment_kept(const void *base)
{
    for (int k = 0; k < pool.n_kept; k++)
        if (pool.kept[k] == base) return true;
    return false;
}

// Returns free memory to the driver after kernels have finished using it: slabs, and blocks that are allocations of
// their own. Parts of chunks, and memory that peers have mapped, are kept. Fails if the GPU cannot end its work.
static ms_status empty_gpu_cache(int index)
{
    const ms_cuda_table *t = ms__cuda();
    gpu *g = &pool.gpus[index];
    MS_TRY(ms__cuda_settle(index));
    size_t bytes;
    for (void *base; (base = ms__slab_remove(&g->slabs, is_segment_kept, &bytes));) {
        t->free(index, base);
        g->use.reserved -= bytes;
    }
    for (int c = 0; t->separate && c < MS_CLASSES; c++) {
        ms_block *b, *stay = NULL;
        while ((b = ms__pop(&g->free[c]))) {
            if (is_segment_kept(b->data)) {
                ms__push(&stay, b);
                continue;
            }
            t->free(index, b->data);
            g->use.reserved -= b->size;
            ms__header_drop(b);
        }
        g->free[c] = stay;
    }
    return MS_OK;
}

static ms_status driver_alloc(void **out, int index, size_t size)
{
    ms_status st = ms__cuda()->alloc(index, size, out);
    if (st == MS_ENOMEM) {
        MS_TRY(empty_gpu_cache(index));
        st = ms__cuda()->alloc(index, size, out);
    }
    if (st == MS_OK) ms__add_reserved(&pool.gpus[index].use, size);
    return st;
}

// Cuts a block from a slab, and allocates a new slab if none has room. If the driver has no memory for one, cuts the
// block from a slab for the other kind of blocks (lasting or not), or from a new slab that is just large enough.
static ms_status alloc_large(ms_block **out, int index, size_t bytes)
{
    const ms_cuda_table *t = ms__cuda();
    gpu *g = &pool.gpus[index];
    bool lasting = ms__gpu_lasting;
    if ((*out = ms__slab_cut(&g->slabs, bytes, lasting))) return MS_OK;
    size_t least = (bytes + CUDA_CHUNK - 1) & ~(size_t)(CUDA_CHUNK - 1);
    size_t size = (g->use.reserved / 32) & ~(size_t)(CUDA_CHUNK - 1);
    if (size < SLAB_LEAST || lasting) size = SLAB_LEAST;
    if (size > SLAB_MOST) size = SLAB_MOST;
    if (size < least) size = least;
    else if (size >= 2 * least) size = (size + least - 1) / least * least;  // room for several such blocks
    void *base;
    ms_status st = t->alloc(index, size, &base);
    if (st == MS_OK) ms__add_reserved(&g->use, size);
    else if (st == MS_ENOMEM && (*out = ms__slab_cut(&g->slabs, bytes, !lasting))) return MS_OK;
    else if (st == MS_ENOMEM) st = driver_alloc(&base, index, size = least);
    MS_TRY(st);
    if (ms__slab_add(&g->slabs, base, size, lasting)) {
        t->free(index, base);
        g->use.reserved -= size;
        return MS_ENOMEM;
    }
    *out = ms__slab_cut(&g->slabs, bytes, lasting);
    return MS_OK;
}

// Allocates a new part of a chunk, or for the emulator an allocation of its own.
static ms_status alloc_small(void **out, int index, size_t size)
{
    gpu *g = &pool.gpus[index];
    if (ms__cuda()->separate) return driver_alloc(out, index, size);
    if (g->chunk_left < size) {
        MS_TRY(driver_alloc(out, index, CUDA_CHUNK));
        g->chunk = *out;  // the unused part of the previous chunk is abandoned
        g->chunk_left = CUDA_CHUNK;
        // If there is no memory for the list, tensors in this chunk cannot be pool.
        if (!ms__grow(&pool.chunks, &pool.cap_chunks, pool.n_chunks, sizeof *pool.chunks, "allocation", "chunks"))
            pool.chunks[pool.n_chunks++] = g->chunk;
    }
    size_t whole = (size + CUDA_UNIT - 1) & ~(size_t)(CUDA_UNIT - 1);
    if (whole > g->chunk_left) whole = g->chunk_left;
    *out = g->chunk;
    g->chunk += whole;
    g->chunk_left -= whole;
    return MS_OK;
}

// ---- blocks of captured steps ----

// Takes a free block of p for `bytes` bytes: one of the same class, or for large sizes the smallest that is big enough.
// NULL: there is none.
static ms_block *take_pinned_block(ms_pins *p, int device, size_t bytes, size_t size)
{
    ms_block **best = NULL;
    for (ms_block **at = &p->there; *at; at = &(*at)->next) {
        const ms_block *b = *at;
        if (b->device != device || is_large(b->bytes) != is_large(bytes)) continue;
        if (is_large(bytes) ? b->size >= bytes && (!best || b->size < (*best)->size) : b->size == size) best = at;
        if (best == at && b->size == size) break;
    }
    ms_block *b = best ? *best : NULL;
    if (!b) return NULL;
    *best = b->next;
    p->bytes -= b->bytes;
    ms__drop_allocated(&pool.gpus[ms__index(device)].use, b);
    return b;
}

static void pin_gpu_block(ms_pins *p, ms_block *b)
{
    b->pins = p;
    p->bytes += b->bytes;
    p->in_use++;
}

// b, a block that a captured step has pinned, is no longer in use: adds it to the step's free blocks. The pool
// still counts it as allocated, because repetitions use it. Returns false once the step was freed: the block then goes
// back to the pool.
static bool unpin_gpu_block(ms_block *b)
{
    ms_pins *p = b->pins;
    p->in_use--;
    if (!p->over) {
        ms_usage *u = &pool.gpus[ms__index(b->device)].use;
        ms__drop_allocated(u, b);
        ms__add_allocated(u, b, "captured step");
        ms__push(&p->there, b);
        return true;
    }
    p->bytes -= b->bytes;
    b->pins = NULL;
    if (p->in_use == 0) free(p);
    return false;
}

void ms__gpu_free(ms_block *b)
{
    int index = ms__index(b->device);
    gpu *g = &pool.gpus[index];
    size_t size;
    const ms_cuda_table *t = ms__cuda();
    if (MS_UNLIKELY(b->pins != NULL) && unpin_gpu_block(b)) return;
    if (t->mark) t->mark(index, b->data, 0, b->size);
    ms__drop_allocated(&g->use, b);
    if (is_large(b->bytes)) ms__slab_return(&g->slabs, b);
    else ms__push(&g->free[ms__class_of(b->size, &size)], b);
}

// A freed block can be reused at once: operators use it in the order of the compute stream, and work queued on
// another stream retains its storage until it has run.
static ms_status alloc_now(ms_block **out, int device, size_t bytes, const char *what)
{
    int index = ms__index(device);
    size_t size;
    MS_TRY(ms__cuda_need(device, what));
    const ms_cuda_table *t = ms__cuda();
    gpu *g = &pool.gpus[index];
    if (ms__over_limit(g->use.allocated, bytes))
        return ms__pool_no_memory(&g->use, device, bytes, what, "limit of ms_state.memory_limit");
    if (bytes > (size_t)1 << 40)
        return ms__pool_no_memory(&g->use, device, bytes, what, "more than the largest block, 1 TiB");
    int c = ms__class_of((bytes + CUDA_UNIT - 1) & ~(size_t)(CUDA_UNIT - 1), &size);
    ms_status st = MS_OK;
    ms_block *b;
    ms_pins *pins = ms__pinning;
    if (MS_UNLIKELY(pins != NULL) && (b = take_pinned_block(pins, device, bytes, size))) st = MS_OK;
    else if (is_large(bytes)) st = alloc_large(&b, index, bytes);
    else if (!(b = ms__pop(&g->free[c]))) {
        void *p = NULL;
        if (!(b = ms__header_new())) return ms__pool_no_memory(&g->use, device, bytes, what, "malloc failed");
        if ((st = alloc_small(&p, index, size)) == MS_OK) *b = (ms_block) { .data = p, .size = size };
        else ms__header_drop(b);
    }
    if (st == MS_ENOMEM)
        return ms__pool_no_memory(&g->use, device, bytes, what, "more than the free memory of the device");
    MS_TRY(st);
    b->bytes = bytes;
    b->device = device;
    b->next = NULL;
    if (MS_UNLIKELY(pins != NULL)) pin_gpu_block(pins, b);
    if (t->mark) t->mark(index, b->data, pins ? b->size : bytes, b->size);
    ms__add_allocated(&g->use, b, what);
    *out = b;
    return MS_OK;
}

ms_status ms__gpu_alloc(ms_block **out, int device, size_t bytes, const char *what)
{
    ms_status st = alloc_now(out, device, bytes, what);
    // Collectives that are queued on the GPU hold memory until something waits for them.
    if (st == MS_ENOMEM) {
        ms__streams_join();
        st = alloc_now(out, device, bytes, what);
    }
    return st;
}

void ms__gpu_empty_caches(void)
{
    for (int k = 0; ms__cuda() && k < MS_CUDA_DEVICES; k++)
        if (pool.gpus[k].use.reserved) (void)empty_gpu_cache(k);
}
