// SPDX-License-Identifier: MIT
// ops/read.c -- public functions that read a tensor: its values as numbers, its address, a copy of its whole storage.
#include "base/activity.h"
#include "device/capture.h"
#include "device/device.h"
#include "device/move.h"
#include "ops/op.h"

static double load_number(const void *data, int dtype, int64_t k)
{
    switch (dtype) {
    case MS_F32: return ms__for_script(((const float *)data)[k]);
    case MS_F64: return ms__for_script(((const double *)data)[k]);
    case MS_F16: return ms__for_script(ms_f16_to_float(((const ms_f16 *)data)[k]));
    case MS_BF16: return ms__for_script(ms_bf16_to_float(((const ms_bf16 *)data)[k]));
    case MS_I64: return (double)((const int64_t *)data)[k];
    case MS_I32: return ((const int32_t *)data)[k];
    case MS_I8: return ((const int8_t *)data)[k];
    case MS_I16: return ((const int16_t *)data)[k];
    default: return ((const uint8_t *)data)[k];
    }
}

// Waits for the tensor's bytes. Fails for a tensor without bytes: sharded, vacated or on meta.
static ms_status readable(ms_tensor *t, const char *who)
{
    if (MS_UNLIKELY(ms__recording != NULL))
        return ms__capture_refuse("%s reads values of %s, and a captured step repeats its work without the script; "
                                  "return the tensor from the step and read it outside",
                                  who, ms__tensor_text(t));
    if (t->sharded)
        return ms__fail(MS_ESTATE, "%s: parameter '%s' is sharded; use to_local() or full_tensor()", who,
                        t->name ? t->name : "?");
    if (ms__is_meta(ms__device(t))) return ms__fail(MS_EINVAL, "%s: a tensor on device meta has no values", who);
    return ms__storage_sync(t->storage, false);
}

void *ms_data_ptr(ms_id id)
{
    ms_tensor *t = ms__tensor(id);
    if (!t || readable(t, "data_ptr")) return NULL;
    return ms__data(t);
}

// Makes *out, owned by the caller: t contiguous on the CPU, to be read into a buffer for `capacity` elements.
static ms_status elements_to_read(ms_tensor **out, ms_tensor *t, double capacity)
{
    MS_TRY(readable(t, "tolist"));
    if ((double)t->numel > capacity)
        return ms__fail(MS_EINVAL, "tolist: the tensor has %lld elements, but the buffer holds %.0f",
                        (long long)t->numel, capacity);
    return ms__on_cpu(out, t, "tolist");
}

ms_status ms_read(ms_id id, double *out, double capacity)
{
    MS_BUSY;
    ms_tensor *t = ms__tensor(id), *c;
    if (!t) return ms__failure();
    MS_TRY(elements_to_read(&c, t, capacity));
    const void *data = ms__data(c);
    for (int64_t k = 0; k < c->numel; k++) out[k] = load_number(data, c->dtype, k);
    ms__release(c);
    return MS_OK;
}

ms_status ms_read_int64(ms_id id, int64_t *out, double capacity)
{
    MS_BUSY;
    ms_tensor *t = ms__tensor(id), *c;
    if (!t) return ms__failure();
    if (t->dtype != MS_I64) return ms__fail(MS_EINVAL, "tolist: %s is not int64", ms__tensor_text(t));
    MS_TRY(elements_to_read(&c, t, capacity));
    if (c->numel) memcpy(out, ms__data(c), (size_t)c->numel * sizeof *out);
    ms__release(c);
    return MS_OK;
}

ms_status ms_item(ms_id id, double *out)
{
    MS_BUSY;
    ms_tensor *t = ms__tensor(id);
    if (!t) return ms__failure();
    if (t->numel != 1)
        return ms__fail(MS_EINVAL, "item: the tensor has %lld elements, shape %s; exactly 1 expected",
                        (long long)t->numel, ms__shape_text(t->ndim, t->shape));
    MS_TRY(readable(t, "item"));
    if (ms__is_cuda(ms__device(t))) {
        double bytes;
        MS_TRY(ms__move(MS_CPU, &bytes, ms__device(t), ms__data(t), (size_t)ms__dtype_size(t->dtype)));
        *out = load_number(&bytes, t->dtype, 0);
        return MS_OK;
    }
    *out = load_number(ms__data(t), t->dtype, 0);
    return MS_OK;
}

ms_id ms_storage_copy(ms_id id)
{
    ms_tensor *t = ms__tensor(id), *copy = NULL;
    if (!t) return 0;
    int64_t bytes = (int64_t)t->storage->bytes;
    ms_tensor *all = ms__tensor_on(t->storage, MS_U8, 1, &bytes, 0);
    ms_status st = ms__op1(&copy, ms__op_by_name("clone"), all);
    ms__release(all);
    return st == MS_OK ? ms__name(copy) : 0;
}
