// SPDX-License-Identifier: MIT
// tensor/tensor.h -- tensors: views of storages (tensor/storage.h), named by ids (tensor/ids.h).
//
// A *storage* is bytes, resident or vacated. A *tensor* is a view of a storage (offset, shape, strides, dtype, shared
// version counter). A *parameter* is a leaf tensor that lives as long as its owner and may be re-pointed at other
// views.
//
// Reference counts are plain ints: only the engine thread touches them.
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
    uint32_t count, tape;  // changes in place; those of them that the tape recorded
} ms_counter;

#define MS_OFF_TAPE UINT32_MAX  // tape of a view without gradients: from detach(), or made under no_grad

typedef struct ms_tensor {
    int refs;
    uint8_t dtype, ndim;
    bool requires_grad;  // a leaf that requires a gradient, or a tensor with a node
    bool is_param;
    bool sharded;       // a sharded parameter: operators refuse it
    bool is_view;       // made by a view operator (in-place writes reach its base)
    int16_t out_index;  // index among the node's outputs
    bool unreduced;     // a unit parameter's grad that is whole and not reduced over ranks yet (shard/layout/flat.c)
    int64_t shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];  // strides in elements
    int64_t numel, offset;                            // elements
    ms_storage *storage;
    ms_counter *version;
    ms_node *node;     // that computed it; NULL for leaves
    ms_leaf *leaf;     // grad and hooks of a leaf; made on demand
    void *unit_param;  // the shard engine's record of it, or NULL
    const char *name;  // interned, or NULL
    uint32_t slot;     // of its id; 0: it has no id
    uint32_t tape;     // of a view: its counter's `tape` at its creation
} ms_tensor;

// ---- tensors ----------------------------------------------------------------------------------
// A new tensor with its own storage, contiguous, uninitialised. what: operator or purpose, for errors.
ms_status ms__tensor_new(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape, const char *what);
ms_status ms__tensor_like(ms_tensor **out, const ms_tensor *t, const char *what);  // shape, dtype, device; contiguous
// Allocates the headers of n views, whose creation cannot fail.
ms_status ms__tensor_reserve(int n, const char *what);
// A view of t's storage (shares the version counter). shape and stride may be t's own.
ms_tensor *ms__tensor_view(const ms_tensor *t, int ndim, const int64_t *shape, const int64_t *stride, int64_t offset);
ms_tensor *ms__tensor_alias(const ms_tensor *t);  // same view, no graph
// A contiguous tensor on s with a new version counter.
ms_tensor *ms__tensor_on(ms_storage *s, int dtype, int ndim, const int64_t *shape, int64_t offset);
// Re-points t at another tensor's storage, view and dtype. t keeps its version counter, which is not incremented.
void ms__tensor_point(ms_tensor *t, const ms_tensor *at);
ms_tensor *ms__retain(ms_tensor *t);  // NULL allowed
void ms__release(ms_tensor *t);       // NULL allowed
static inline void ms__drop(ms_tensor **t)
{
    ms_tensor *old = *t;
    *t = NULL;
    ms__release(old);
}
// Returns status; drops *t if it is a failure.
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
// "float32 [2, 3] cpu" in a rotating buffer.
const char *ms__tensor_text(const ms_tensor *t);

// Calls into autograd: autograd/graph.c sets them when the library is loaded.
typedef struct {
    void (*leaf_drop)(ms_tensor *t);  // t, which has a leaf, is being freed
    void (*node_release)(ms_node *n);
    bool (*has_grad)(const ms_tensor *t);
} ms_tensor_observer;
extern ms_tensor_observer ms__tensor_observer;

#ifdef __cplusplus
}
#endif

#include "tensor/ids.h"

#endif
