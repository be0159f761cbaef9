// SPDX-License-Identifier: MIT
// tensor/api.c -- public functions on tensors: making them, describing them, replacing their data, pinning CPU memory,
// sharing GPU memory with other processes. ops/read.c reads their values.
#include <math.h>
#include <stdio.h>

#include "device/capture.h"
#include "base/activity.h"
#include "device/device.h"
#include "device/move.h"
#include "device/gpu_pool.h"
#include "device/host_pins.h"
#include "tensor/tensor.h"

static ms_status check_dtype(const char *who, int dtype)
{
    return dtype >= 0 && dtype < MS_DTYPES
               ? MS_OK
               : ms__fail(MS_EINVAL, "%s: unknown dtype %d, expected 0 to %d", who, dtype, MS_DTYPES - 1);
}

static ms_status check_shape(const char *who, int ndim, const int64_t *shape)
{
    if (ndim < 0 || ndim > MS_MAX_DIMS)
        return ms__fail(MS_EINVAL, "%s: shape has %d dimensions, expected 0 to %d", who, ndim, MS_MAX_DIMS);
    for (int d = 0; d < ndim; d++)
        if (shape[d] < 0)
            return ms__fail(MS_EINVAL, "%s: shape %s has a negative size", who, ms__shape_text(ndim, shape));
    return MS_OK;
}

ms_id ms_empty(int dtype, int device, int ndim, const int64_t *shape)
{
    MS_BUSY;
    ms_tensor *t = NULL;
    if (check_dtype("empty", dtype) || check_shape("empty", ndim, shape)) return 0;
    if (ms__tensor_new(&t, dtype, device, ndim, shape, "empty")) return 0;
    return ms__name(t);
}

static void store(void *data, int dtype, int64_t k, double v)
{
    switch (dtype) {
    case MS_F32: ((float *)data)[k] = (float)v; break;
    case MS_F64: ((double *)data)[k] = v; break;
    case MS_F16: ((ms_f16 *)data)[k] = ms_float_to_f16((float)v); break;
    case MS_BF16: ((ms_bf16 *)data)[k] = ms_float_to_bf16((float)v); break;
    case MS_I64: ((int64_t *)data)[k] = (int64_t)v; break;
    case MS_I32: ((int32_t *)data)[k] = (int32_t)(int64_t)v; break;
    case MS_U8: ((uint8_t *)data)[k] = (uint8_t)(int64_t)v; break;
    case MS_I8: ((int8_t *)data)[k] = (int8_t)(int64_t)v; break;
    case MS_I16: ((int16_t *)data)[k] = (int16_t)(int64_t)v; break;
    case MS_BOOL: ((uint8_t *)data)[k] = v != 0; break;
    }
}

// Makes a tensor on the CPU whose values the caller stores. A captured step does not make it again: the caller calls
// name_constant once the values are there.
static ms_status constant_tensor(ms_tensor **t, int dtype, int ndim, const int64_t *shape)
{
    MS_TRY(check_dtype("tensor", dtype));
    MS_TRY(check_shape("tensor", ndim, shape));
    ms_captured *step = ms__capture_suspend();
    ms_status st = ms__tensor_new(t, dtype, MS_CPU, ndim, shape, "tensor");
    ms__capture_resume(step);
    return st;
}
static ms_id name_constant(ms_tensor *t)
{
    if (MS_UNLIKELY(ms__capturing != NULL) && ms__capture_constant(&t)) return 0;
    return ms__name(t);
}

ms_id ms_from_data(int dtype, int ndim, const int64_t *shape, const double *values)
{
    MS_BUSY;
    ms_tensor *t;
    if (constant_tensor(&t, dtype, ndim, shape)) return 0;
    for (int64_t k = 0; k < t->numel; k++) {
        double v = values[k];
        if (!ms__holds(dtype, v)) {
            bool whole = v == floor(v) && !isinf(v);
            ms__fail(MS_EINVAL,
                     whole ? "tensor: %.17g at position %lld is out of range for %s"
                           : "tensor: %.17g at position %lld is not a whole number, but the dtype is %s",
                     v, (long long)k + 1, ms__dtype_name(dtype));
            ms__release(t);
            return 0;
        }
        store(t->storage->data, dtype, k, v);
    }
    return name_constant(t);
}

ms_id ms_from_int64(int ndim, const int64_t *shape, const int64_t *values)
{
    MS_BUSY;
    ms_tensor *t;
    if (constant_tensor(&t, MS_I64, ndim, shape)) return 0;
    if (t->numel) memcpy(t->storage->data, values, (size_t)t->numel * sizeof *values);
    return name_constant(t);
}

// Makes a contiguous tensor on memory that the tensor does not own. NULL with the error set on failure.
static ms_tensor *on_memory(void *data, int device, int dtype, int ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) n *= shape[d];
    if (!data && n > 0)
        return ms__null(ms__fail(MS_EINVAL, "from_pointer: the pointer is NULL, but shape %s has elements",
                                 ms__shape_text(ndim, shape)));
    ms_storage *s;
    if (ms__storage_new(&s, device, 0, "from_pointer")) return NULL;
    s->data = data;
    s->bytes = (size_t)n * (size_t)ms__dtype_size(dtype);
    ms_tensor *t = ms__tensor_on(s, dtype, ndim, shape, 0);
    ms__storage_release(s);
    return t;
}

ms_id ms_from_pointer(void *data, int dtype, int ndim, const int64_t *shape)
{
    if (check_dtype("from_pointer", dtype) || check_shape("from_pointer", ndim, shape)) return 0;
    ms_tensor *t = on_memory(data, MS_CPU, dtype, ndim, shape);
    return t ? ms__name(t) : 0;
}

ms_status ms_pin(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    if (ms__device(t) != MS_CPU)
        return ms__fail(MS_EINVAL, "pin_memory: %s given, expected a tensor on the CPU", ms__tensor_text(t));
    if (ms_cuda_count() > 0) ms__host_pin(t->storage->block);
    return MS_OK;
}

int ms_is_pinned(ms_id id)
{
    const ms_tensor *t = ms__tensor(id);
    return t && ms__device(t) == MS_CPU && t->storage->block && ms__host_pinned(t->storage->block);
}

ms_status ms_tensor_info(ms_id id, ms_info *out)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    out->dtype = t->dtype;
    out->device = ms__device(t);
    out->ndim = t->ndim;
    out->requires_grad = t->requires_grad;
    out->is_leaf = t->node == NULL;
    out->is_contiguous = ms__is_contiguous(t);
    out->version = (int32_t)t->version->count;
    out->is_param = t->is_param;
    out->sharded = t->sharded;
    out->has_grad = ms__tensor_observer.has_grad(t);
    out->numel = t->numel;
    out->offset = t->offset;
    for (int d = 0; d < t->ndim; d++) {
        out->shape[d] = t->shape[d];
        out->stride[d] = t->stride[d];
    }
    return MS_OK;
}

ms_id ms_detach(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return 0;
    if (t->sharded)
        return ms__no_id(ms__fail(MS_ESTATE, "detach: parameter '%s' is sharded; use to_local() or full_tensor()",
                                  t->name ? t->name : "?"));
    ms_tensor *same = ms__tensor_alias(t);
    same->tape = MS_OFF_TAPE;
    return ms__name(same);
}

double ms_storage_key(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    return t && t->storage->refs > 1 ? (double)(uintptr_t)t->storage : 0;
}

ms_id ms_view_alike(ms_id id, ms_id copy)
{
    ms_tensor *t = ms__tensor(id), *c = ms__tensor(copy);
    if (!t || !c) return 0;
    if (c->storage->bytes != t->storage->bytes || ms__device(c) != ms__device(t))
        return ms__no_id(
            ms__fail(MS_EINVAL,
                     "view_alike: %s given, expected a copy of the storage of %s, with its size and on its device",
                     ms__tensor_text(c), ms__tensor_text(t)));
    ms_tensor *v = ms__tensor_view(c, t->ndim, t->shape, t->stride, t->offset);
    v->dtype = t->dtype;
    v->is_view = t->is_view;
    v->tape = MS_OFF_TAPE;
    return ms__name(v);
}

ms_status ms_set_data(ms_id id, ms_id src)
{
    ms_tensor *t = ms__tensor(id), *s = ms__tensor(src);
    if (!t || !s) return ms__failure();
    if (ms__recording) return ms__capture_refuse("it assigns a tensor's data; assign it outside of the step");
    if (t->node)
        return ms__fail(MS_EINVAL,
                        "set_data: the tensor is the result of an operator; only the data of leaves can be replaced");
    if (t->sharded || t->unit_param)
        return ms__fail(MS_ESTATE, "set_data: parameter '%s' belongs to a sharded unit; its data cannot be replaced",
                        t->name ? t->name : "?");
    ms__tensor_point(t, s);
    if (t->is_param) ms__storage_hold(t->storage, MS_MEMORY_PARAMETERS);
    t->version->count++;
    return MS_OK;
}

int ms_same_storage(ms_id a, ms_id b)
{
    ms_tensor *s = ms__tensor(a), *t = ms__tensor(b);
    return s && t && s->storage == t->storage;
}

int ms_storage_is_shared(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    return t && t->storage->refs > 1;
}

ms_id ms_param_new(ms_id id, int requires_grad)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return 0;
    if (requires_grad && !ms__is_float(t->dtype))
        return ms__no_id(
            ms__fail(MS_EINVAL,
                     "Parameter: dtype %s cannot require gradients; floating point expected (or requires_grad = false)",
                     ms__dtype_name(t->dtype)));
    ms_tensor *p = ms__tensor_alias(t);
    p->is_view = false;
    p->is_param = true;
    ms__storage_hold(p->storage, MS_MEMORY_PARAMETERS);
    p->requires_grad = requires_grad != 0;
    return ms__name_unscoped(p);
}

ms_status ms_set_name(ms_id id, const char *name)
{
    ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    t->name = name ? ms__intern(name) : NULL;
    return MS_OK;
}
