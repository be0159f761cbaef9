// SPDX-License-Identifier: MIT
// tensor/tensor.c -- tensor objects: views of storages. Structs are recycled through free lists.
#include <stdio.h>

#include "tensor/tensor.h"
#include "base/watched.h"

ms_tensor_observer ms__tensor_observer;

// Some views are made where nothing may fail (a unit makes its parameters views of other storages, a run releases its
// graph). If malloc fails there, their memory comes from this reserve. ms__tensor_new, which may fail, refills the
// reserve and fails if it cannot.
enum { RESERVE = 128 };
static struct {
    ms_tensor *spare;           // free list, linked through node
    ms_counter *spare_version;  // free list, linked through its first bytes
    ms_tensor *reserve[RESERVE];
    ms_counter *reserve_version[RESERVE];
    int n_reserve, n_reserve_version;
} store;

static bool fill_reserve(void)
{
    while (store.n_reserve < RESERVE && (store.reserve[store.n_reserve] = malloc(sizeof **store.reserve)))
        store.n_reserve++;
    while (store.n_reserve_version < RESERVE &&
           (store.reserve_version[store.n_reserve_version] = malloc(sizeof(ms_counter) + sizeof(void *))))
        store.n_reserve_version++;
    return store.n_reserve == RESERVE && store.n_reserve_version == RESERVE;
}

static ms_counter *version_new(void)
{
    ms_counter *v = store.spare_version;
    if (MS_LIKELY(v != NULL)) memcpy(&store.spare_version, v, sizeof(void *));
    else if (!(v = malloc(sizeof(ms_counter) > sizeof(void *) ? sizeof(ms_counter) : sizeof(void *)))) return NULL;
    v->refs = 1;
    v->count = v->tape = 0;
    v->collective = false;
    return v;
}

static void version_release(ms_counter *v)
{
    if (--v->refs > 0) return;
    if (!MS_RECYCLE) {
        free(v);
        return;
    }
    memcpy(v, &store.spare_version, sizeof(void *));
    store.spare_version = v;
}

// A tensor with one reference whose view, storage and version are not set yet.
static ms_tensor *tensor_raw(void)
{
    ms_tensor *t = store.spare;
    if (MS_LIKELY(t != NULL)) store.spare = (ms_tensor *)t->node;
    else if (!(t = malloc(sizeof *t))) return NULL;
    t->refs = 1;
    t->requires_grad = t->is_param = t->sharded = t->is_view = t->unreduced = t->rank_local = false;
    t->out_index = 0;
    t->node = NULL;
    t->leaf = NULL;
    t->unit_param = NULL;
    t->name = NULL;
    t->slot = t->tape = 0;
    ms__live_tensors++;
    return t;
}

static void tensor_recycle(ms_tensor *t)
{
    ms__live_tensors--;
    if (!MS_RECYCLE) {
        free(t);
        return;
    }
    t->node = (ms_node *)store.spare;
    store.spare = t;
}

static void set_contiguous(ms_tensor *t, int ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        t->shape[d] = shape[d];
        t->stride[d] = n;
        n *= shape[d];
    }
    // An empty tensor gets the strides that it would have if its sizes of 0 were 1.
    if (n == 0) {
        int64_t s = 1;
        for (int d = ndim - 1; d >= 0; d--) {
            t->stride[d] = s;
            s *= shape[d] > 0 ? shape[d] : 1;
        }
    }
    t->ndim = (uint8_t)ndim;
    t->numel = n;
}

static ms_status no_header(int64_t n, int dtype, const char *what)
{
    return ms__no_memory(sizeof(ms_tensor) + sizeof(ms_counter), what, "the header of a tensor of %lld %s elements",
                         (long long)n, ms__dtype_name(dtype));
}

ms_status ms__tensor_new(ms_tensor **out, int dtype, int device, int ndim, const int64_t *shape, const char *what)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) {
        if (MS_UNLIKELY(shape[d] < 0))
            return ms__fail(MS_EINVAL, "%s: shape %s has a negative size", what, ms__shape_text(ndim, shape));
        if (MS_UNLIKELY(__builtin_mul_overflow(n, shape[d], &n) || n > (INT64_MAX >> 4)))
            return ms__fail(MS_ENOMEM, "%s: shape %s has more elements than memory can hold", what,
                            ms__shape_text(ndim, shape));
    }
    if (MS_UNLIKELY(store.n_reserve < RESERVE || store.n_reserve_version < RESERVE) && !fill_reserve())
        return no_header(n, dtype, what);
    ms_tensor *t = tensor_raw();
    ms_counter *v = version_new();
    if (MS_UNLIKELY(!t || !v)) {
        if (t) tensor_recycle(t);
        if (v) version_release(v);
        return no_header(n, dtype, what);
    }
    t->dtype = (uint8_t)dtype;
    set_contiguous(t, ndim, shape);
    t->offset = 0;
    ms_status st = ms__storage_new(&t->storage, device, (size_t)t->numel * (size_t)ms__dtype_size(dtype), what);
    if (MS_UNLIKELY(st != MS_OK)) {
        tensor_recycle(t);
        version_release(v);
        return st;
    }
    t->version = v;
    *out = t;
    return MS_OK;
}

ms_status ms__tensor_like(ms_tensor **out, const ms_tensor *t, const char *what)
{
    return ms__tensor_new(out, t->dtype, ms__device(t), t->ndim, t->shape, what);
}

// Called if malloc fails and the reserve is used up. The caller cannot return an error, so the process ends.
static _Noreturn void exhausted(void)
{
    fputs("moonshard: out of memory for a tensor header\n", stderr);
    abort();
}

static ms_tensor *tensor_must(void)
{
    ms_tensor *t = tensor_raw();
    if (MS_LIKELY(t != NULL)) return t;
    if (store.n_reserve == 0) exhausted();
    store.spare = store.reserve[--store.n_reserve];
    store.spare->node = NULL;
    return tensor_raw();
}

static ms_counter *version_must(void)
{
    ms_counter *v = version_new();
    if (MS_LIKELY(v != NULL)) return v;
    if (store.n_reserve_version == 0) exhausted();
    store.spare_version = store.reserve_version[--store.n_reserve_version];
    memset(store.spare_version, 0, sizeof(void *));
    return version_new();
}

ms_status ms__tensor_reserve(int n, const char *what)
{
    bool there = fill_reserve();
    for (int k = RESERVE; there && k < n; k++) {  // headers beyond the reserve go to the free lists
        ms_tensor *t = malloc(sizeof *t);
        ms_counter *v = malloc(sizeof(ms_counter) + sizeof(void *));
        there = t && v;
        if (t) {
            t->node = (ms_node *)store.spare;
            store.spare = t;
        }
        if (v) {
            memcpy(v, &store.spare_version, sizeof(void *));
            store.spare_version = v;
        }
    }
    size_t bytes = (size_t)(n > RESERVE ? n : RESERVE) * (sizeof(ms_tensor) + sizeof(ms_counter) + sizeof(void *));
    return there ? MS_OK : ms__no_memory(bytes, what, "headers of %d tensors", n);
}

ms_tensor *ms__tensor_view(const ms_tensor *t, int ndim, const int64_t *shape, const int64_t *stride, int64_t offset)
{
    ms_tensor *v = tensor_must();
    v->dtype = t->dtype;
    v->ndim = (uint8_t)ndim;
    v->numel = 1;
    for (int d = 0; d < ndim; d++) {
        v->shape[d] = shape[d];
        v->stride[d] = stride[d];
        v->numel *= shape[d];
    }
    v->offset = offset;
    v->storage = ms__storage_retain(t->storage);
    v->version = t->version;
    v->version->refs++;
    v->is_view = true;
    v->tape = t->is_view ? t->tape : t->version->tape;
    return v;
}

ms_tensor *ms__tensor_alias(const ms_tensor *t)
{
    ms_tensor *v = ms__tensor_view(t, t->ndim, t->shape, t->stride, t->offset);
    v->is_view = t->is_view;
    return v;
}

ms_tensor *ms__tensor_on(ms_storage *s, int dtype, int ndim, const int64_t *shape, int64_t offset)
{
    ms_tensor *t = tensor_must();
    t->dtype = (uint8_t)dtype;
    set_contiguous(t, ndim, shape);
    t->offset = offset;
    t->storage = ms__storage_retain(s);
    t->version = version_must();
    return t;
}

void ms__tensor_point(ms_tensor *t, const ms_tensor *at)
{
    ms_storage *old = t->storage;
    t->storage = ms__storage_retain(at->storage);
    ms__storage_release(old);
    t->dtype = at->dtype;
    t->ndim = at->ndim;
    memcpy(t->shape, at->shape, sizeof t->shape);
    memcpy(t->stride, at->stride, sizeof t->stride);
    t->numel = at->numel;
    t->offset = at->offset;
}

ms_tensor *ms__retain(ms_tensor *t)
{
    if (t) t->refs++;
    return t;
}

void ms__release(ms_tensor *t)
{
    if (!t || --t->refs > 0) return;
    ms_node *node = t->node;
    if (t->leaf) ms__tensor_observer.leaf_drop(t);
    ms__storage_release(t->storage);
    version_release(t->version);
    tensor_recycle(t);
    if (node) ms__tensor_observer.node_release(node);
}

bool ms__is_contiguous(const ms_tensor *t)
{
    int64_t n = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] != 1 && t->stride[d] != n) return t->numel == 0;
        n *= t->shape[d];
    }
    return true;
}

const char *ms__tensor_text(const ms_tensor *t)
{
    static __thread char ring[8][192];
    static __thread int turn;
    char *s = ring[turn++ & 7];
    int type = ms__device_type(ms__device(t)), index = ms__index(ms__device(t));
    char device[24];
    if (type == MS_CUDA) snprintf(device, sizeof device, "cuda:%d", index);
    else strcpy(device, type == MS_META ? "meta" : "cpu");
    snprintf(s, 192, "%s %s %s", ms__dtype_name(t->dtype), ms__shape_text(t->ndim, t->shape), device);
    return s;
}
