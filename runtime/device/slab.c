// SPDX-License-Identifier: MIT
// device/slab.c -- free ranges of slabs: best fit, split and merge. The ranges of a slab form a list in the order of
// their addresses.
#include "device/slab.h"

struct ms_slab_range {
    ms_block block;                           // address and size of the range
    ms_slab_range *before, *after;            // the adjacent ranges of the slab
    ms_slab_range *free_before, *free_after;  // neighbours in the bin's list of free ranges
    char *base;                               // start of the slab
    bool free, lasting;                       // free: not in use; lasting: the slab is for lasting blocks
};

static ms_slab_range *range_of(ms_block *b) { return (ms_slab_range *)(void *)b; }
static int bin_of(size_t size) { return 63 - __builtin_clzll(size); }

static void list(ms_slabs *s, ms_slab_range *r)
{
    ms_slab_range **bin = &s->free[bin_of(r->block.size)];
    r->free = true;
    r->free_before = NULL;
    if ((r->free_after = *bin)) (*bin)->free_before = r;
    *bin = r;
}

static void unlist(ms_slabs *s, ms_slab_range *r)
{
    if (r->free_before) r->free_before->free_after = r->free_after;
    else s->free[bin_of(r->block.size)] = r->free_after;
    if (r->free_after) r->free_after->free_before = r->free_before;
    r->free = false;
}

static ms_slab_range *record_new(ms_slabs *s)
{
    enum { SLAB = 64 };
    if (!s->unused) {
        ms_slab_range *all = calloc(SLAB, sizeof *all);
        for (int i = 0; all && i < SLAB; i++) {
            all[i].after = s->unused;
            s->unused = &all[i];
        }
    }
    ms_slab_range *r = s->unused;
    if (r) s->unused = r->after;
    return r;
}

static void drop_range(ms_slabs *s, ms_slab_range *r)
{
    r->after = s->unused;
    s->unused = r;
}

// The smallest free range of at least `size` bytes; among equal ones, the range with the lowest address.
static ms_slab_range *best_fit(const ms_slabs *s, size_t size, bool lasting)
{
    ms_slab_range *best = NULL;
    for (int b = bin_of(size); b < MS_SLAB_BINS && !best; b++)
        for (ms_slab_range *r = s->free[b]; r; r = r->free_after) {
            if (r->block.size < size || r->lasting != lasting) continue;
            if (!best || r->block.size < best->block.size ||
                (r->block.size == best->block.size && (char *)r->block.data < (char *)best->block.data))
                best = r;
        }
    return best;
}

ms_block *ms__slab_cut(ms_slabs *s, size_t size, bool lasting)
{
    size = (size + MS_SLAB_UNIT - 1) & ~(size_t)(MS_SLAB_UNIT - 1);
    ms_slab_range *r = best_fit(s, size, lasting), *rest;
    if (!r) return NULL;
    if (r->block.size > size && (rest = record_new(s))) {  // without a record the block keeps the whole range
        unlist(s, r);
        *rest = (ms_slab_range) { .before = r, .after = r->after, .base = r->base, .lasting = lasting };
        rest->block.data = (char *)r->block.data + size;
        rest->block.size = r->block.size - size;
        if (r->after) r->after->before = rest;
        r->after = rest;
        r->block.size = size;
        list(s, rest);
    } else unlist(s, r);
    return &r->block;
}

// Merges range b into a, the range just before b.
static void merge_ranges(ms_slabs *s, ms_slab_range *a, ms_slab_range *b)
{
    a->block.size += b->block.size;
    a->after = b->after;
    if (b->after) b->after->before = a;
    drop_range(s, b);
}

void ms__slab_return(ms_slabs *s, ms_block *b)
{
    ms_slab_range *r = range_of(b), *before = r->before, *after = r->after;
    if (after && after->free) {
        unlist(s, after);
        merge_ranges(s, r, after);
    }
    if (before && before->free) {
        unlist(s, before);
        merge_ranges(s, before, r);
        r = before;
    }
    list(s, r);
}

ms_status ms__slab_add(ms_slabs *s, void *base, size_t bytes, bool lasting)
{
    ms_slab_range *r = record_new(s);
    if (!r) return MS_ENOMEM;
    *r = (ms_slab_range) { .block = { .data = base, .size = bytes }, .base = base, .lasting = lasting };
    list(s, r);
    return MS_OK;
}

void *ms__slab_remove(ms_slabs *s, bool (*kept)(const void *base), size_t *bytes)
{
    for (int b = 0; b < MS_SLAB_BINS; b++)
        for (ms_slab_range *r = s->free[b]; r; r = r->free_after)
            if (!r->before && !r->after && !kept(r->base)) {
                unlist(s, r);
                drop_range(s, r);
                *bytes = r->block.size;
                return r->base;
            }
    return NULL;
}

void *ms__slab_base(const ms_block *b) { return ((const ms_slab_range *)(const void *)b)->base; }
