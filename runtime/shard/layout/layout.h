// SPDX-License-Identifier: MIT
// shard/layout/layout.h -- which rank owns which bytes of a unit: `rows` cuts every parameter along one dimension
// (fully_shard), `flat` is one padded flat parameter (fsdp.FSDP). The schedule does not know which.
#ifndef MS_SHARD_LAYOUT_H
#define MS_SHARD_LAYOUT_H

#include "shard/unit.h"

struct layout {
    int kind;              // MS_LAYOUT_*, for scripts
    bool extends;          // all-gather extensions can be used
    bool whole_on_device;  // a whole gathered for the script is made on the unit's device, not beside the shards
    // Sets chunk, first, here, *_at of every parameter, the sizes and the pieces.
    ms_status (*plan)(unit *u);
    // Shape of p's local tensor.
    int (*local_shape)(const unit_param *p, int64_t *shape);
    // A view of this rank's part of p's whole.
    ms_tensor *(*part)(const unit_param *p, ms_tensor *whole);
    // Gathers all ranks' parts into out, which has the shape of the whole p. Each part is laid out like p's local
    // tensor. Collective.
    ms_status (*gather_whole)(unit_param *p, ms_tensor *part, ms_tensor *out);

    // Elements of one rank's block of a gradient for the listed parameters, and where each one's part begins in it.
    int64_t (*columns)(unit *u, int n, unit_param **present, int64_t *at);
    // Fills in (1-d, W * columns) with the gradients of these parameters, padding with zeros.
    ms_status (*pack)(unit *u, int n, unit_param **present, ms_tensor *in);
    // Fills n <= MS_PARTS parts instead: gradients in place, whose tensors the caller releases. NULL: not supported.
    ms_status (*parts)(unit *u, int n, unit_param **present, ms_part *parts);
};

extern const layout ms__layout_rows, ms__layout_flat;

// ---- pieces of 1-d tensors, for layouts ----

static inline int64_t ms__min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ms__max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Copies src to the elements of flat from offset on.
static inline ms_status ms__copy_into(ms_tensor *flat, int64_t offset, ms_tensor *src)
{
    ms_tensor *dst = ms__tensor_on(flat->storage, flat->dtype, src->ndim, src->shape, offset);
    ms_status st = ms__copy(dst, src);
    ms__release(dst);
    return st;
}

static inline ms_status ms__zero_zone(ms_tensor *flat, int64_t offset, int64_t n)
{
    if (n <= 0) return MS_OK;
    ms_tensor *dst = ms__tensor_on(flat->storage, flat->dtype, 1, &n, offset);
    ms_status st = ms__zero(dst);
    ms__release(dst);
    return st;
}

#endif
