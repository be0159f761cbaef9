// SPDX-License-Identifier: MIT
// tensor/tensor.h -- tensors: views of storages (tensor/storage.h), named by ids (tensor/ids.h).
//
// A *storage* is a sequence of bytes, resident or vacated. A *tensor* is a view of a storage (offset, shape, strides,
// dtype, shared version counter). A *parameter* is a leaf tensor that lives as long as its owner and can be made a view
// of other storages.
//
// Reference counts are plain ints, because only the engine thread accesses them.
#ifndef MS_TENSOR_H
#define MS_TENSOR_H

#include "base/base.h"
#include "tensor/dtype.h"
#include "tensor/storage.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ms_node ms_node;
typedef struct ms_hook ms_hook;
typedef struct ms_leaf ms_leaf;

typedef struct ms_counter {
    int refs;
    uint32_t count, tape;  // count: number of changes in place; tape: how many of them the tape recorded
    bool collective;       // a collective that the script called has written the values (ms_grad_set_local)
} ms_counter;

#define MS_OFF_TAPE UINT32_MAX  // value of `tape` for a view without gradients: from detach(), or made under no_grad

typedef struct ms_tensor {
    int refs;
    uint8_t dtype, ndim;
    bool requires_grad;  // a leaf that requires a gradient, or a tensor with a node
    bool is_param;
    bool sharded;       // has no values, as a sharded parameter: operators refuse it
    bool is_view;       // made by a view operator (writes in place change its base, too)
    int16_t out_index;  // its index among the node's outputs
    bool unreduced;     // the grad of a unit's parameter, whole and not yet reduced over ranks (views/classic.c)
    bool rank_local;    // the grad of a parameter that nn.DDP has not reduced yet (ms_grad_set_local)
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];  // strides in elements
    int64_t numel, offset;                            // in elements
    ms_storage *storage;
    ms_counter *version;
    ms_node *node;     // the node that computed it; NULL for leaves
    ms_leaf *leaf;     // grad and hooks of a leaf; made when needed
    void *unit_param;  // the shard engine's record of the parameter; NULL: not managed
    const char *name;  // interned, or NULL
    uint32_t slot;     // slot of its id; 0: the tensor has no id
    uint32_t tape;     // for a view: its counter's `tape` when the view was made
} ms_tensor;

// ---- tensors ----------------------------------------------------------------------------------
// Makes a contiguous, uninitialised tensor with its own storage. what: operator or purpose, for errors.
ms_status ms__tensor_new(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape, const char *what);
// Makes a contiguous, uninitialised tensor with t's shape, dtype and device.
ms_status ms__tensor_like(ms_tensor **out, const ms_tensor *t, const char *what);
// Allocates the headers of n views, so that making these cannot fail.
ms_status ms__tensor_reserve(int n, const char *what);
// A view of t's storage (shares the version counter). shape and stride may be t's own.
ms_tensor *ms__tensor_view(const ms_tensor *t, int ndim, const int64_t *shape, const int64_t *stride, int64_t offset);
ms_tensor *ms__tensor_alias(const ms_tensor *t);  // the same view, without graph
// Makes a contiguous tensor on s with a new version counter.
ms_tensor *ms__tensor_on(ms_storage *s, int dtype, int ndim, const int64_t *shape, int64_t offset);
// Makes t a view like `at`: the same storage, shape, strides and dtype. t keeps its version counter, which is not
// incremented.
void ms__tensor_point(ms_tensor *t, const ms_tensor *at);
ms_tensor *ms__retain(ms_tensor *t);  // t may be NULL
void ms__release(ms_tensor *t);       // t may be NULL
static inline void ms__drop(ms_tensor **t)
{
    ms_tensor *old = *t;
    *t = NULL;
    ms__release(old);
}
// Returns status. If it is a failure, releases *t.
static inline ms_status ms__or_drop(ms_status status, ms_tensor **t)
{
    if (MS_UNLIKELY(status != MS_OK)) ms__drop(t);
    return status;
}
bool ms__is_contiguous(const ms_tensor *t);
static inline bool ms__has_shape(const ms_tensor *t, int ndim, const int64_t *shape)
{
    return t->ndim == ndim && memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) == 0;
}
static inline int ms__device(const ms_tensor *t) { return t->storage->device; }
static inline size_t ms__nbytes(const ms_tensor *t) { return (size_t)t->numel * (size_t)ms__dtype_size(t->dtype); }
static inline void *ms__data(const ms_tensor *t)
{
    return (char *)t->storage->data + (size_t)t->offset * (size_t)ms__dtype_size(t->dtype);
}
// Returns a text such as "float32 [2, 3] cpu", in one of several buffers that are reused in turn.
const char *ms__tensor_text(const ms_tensor *t);

// Functions of autograd; autograd/graph.c sets them when the library is loaded.
typedef struct {
    void (*leaf_drop)(ms_tensor *t);  // called when t is freed, if it has a leaf
    void (*node_release)(ms_node *n);
    bool (*has_grad)(const ms_tensor *t);
} ms_tensor_observer;
extern ms_tensor_observer ms__tensor_observer;

#ifdef __cplusplus
}
#endif

#include "tensor/ids.h"

#endif
