// SPDX-License-Identifier: MIT
// shard/layout/layout.h -- which rank owns which bytes of a unit: `rows` divides every parameter along one dimension
// (fully_shard), `flat` divides one padded flat parameter (fsdp.FSDP). Units of both are gathered, resharded and
// reduced at the same points.
#ifndef MS_SHARD_LAYOUT_H
#define MS_SHARD_LAYOUT_H

#include "ops/data.h"
#include "shard/unit.h"

struct layout {
    int kind;      // MS_LAYOUT_*, as scripts see it
    bool extends;  // all-gather extensions are supported
    // true: a whole parameter gathered for the script is made on the unit's device; false: on the shards' device.
    bool whole_on_device;
    // Sets chunk, first, here and the *_at offsets of every parameter, the unit's sizes and its pieces.
    ms_status (*plan)(unit *u);
    // Sets the shape of p's local tensor; returns the number of dimensions.
    int (*local_shape)(const unit_param *p, int64_t *shape);
    // A view of this rank's part of the whole parameter p.
    ms_tensor *(*part)(const unit_param *p, ms_tensor *whole);
    // Gathers all ranks' parts into out, which has the shape of the whole parameter p. Each part is laid out like p's
    // local tensor. Collective.
    ms_status (*gather_whole)(unit_param *p, ms_tensor *part, ms_tensor *out);

    // Returns the number of elements in one rank's block of the gradients of the parameters in `present`; at[k]
    // receives the offset of the k-th parameter's part in that block.
    int64_t (*columns)(unit *u, int n, unit_param **present, int64_t *at);
    // Fills `in` (1-d, a block of `columns` elements for each rank) with the gradients of the parameters in `present`;
    // the padding is 0.
    ms_status (*pack)(unit *u, int n, unit_param **present, ms_tensor *in);
    // Alternative to pack: fills n <= MS_PARTS parts that refer to the gradients, in place where possible; the
    // caller releases their tensors. NULL: not supported.
    ms_status (*parts)(unit *u, int n, unit_param **present, ms_part *parts);
};

extern const layout ms__layout_rows, ms__layout_flat;

// ---- pieces of 1-d tensors, for layouts ----

static inline size_t ms__element_size(int dtype) { return (size_t)ms__dtype_size(dtype); }
static inline int64_t ms__min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ms__max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Copies src to flat, from element `offset` on.
static inline ms_status ms__copy_into(ms_tensor *flat, int64_t offset, ms_tensor *src)
{
    ms_tensor *dst = ms__tensor_on(flat->storage, flat->dtype, src->ndim, src->shape, offset);
    ms_status st = ms__copy(dst, src);
    ms__release(dst);
    return st;
}

// Adds to a list the copy that ms__copy_into would make.
static inline ms_status ms__add_into(ms_copies *c, ms_tensor *flat, int64_t offset, ms_tensor *src)
{
    ms_tensor *dst = ms__tensor_on(flat->storage, flat->dtype, src->ndim, src->shape, offset);
    ms_status st = ms__copies_add(c, dst, src);
    ms__release(dst);
    return st;
}

// Adds to a list the copy that sets n elements of flat to 0, from element `offset` on.
static inline ms_status ms__add_zeros(ms_copies *c, ms_tensor *flat, int64_t offset, int64_t n)
{
    if (n <= 0) return MS_OK;
    ms_tensor *dst = ms__tensor_on(flat->storage, flat->dtype, 1, &n, offset);
    ms_status st = ms__copies_add(c, dst, NULL);
    ms__release(dst);
    return st;
}

#endif
