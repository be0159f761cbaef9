// SPDX-License-Identifier: MIT
// ops/anomaly.c -- finds the first value of a call's results that is nan or inf. Reads all values of all results, from
// a GPU as well: for debugging only.
#include <math.h>

#include "device/capture.h"
#include "ops/anomaly.h"

int ms__anomaly;

enum { HAS_NAN = 1, HAS_INF = 2 };

static double value_at(const ms_tensor *t, int64_t k)
{
    const void *p = ms__data(t);
    MS_CASE_FLOAT(t->dtype, return (double)((const float *)p)[k], return ((const double *)p)[k],
                  return (double)ms_f16_to_float(((const ms_f16 *)p)[k]),
                  return (double)ms_bf16_to_float(((const ms_bf16 *)p)[k]))
    return 0;
}

// Sets *has to HAS_NAN and HAS_INF if t has such values. first[0], first[1]: the positions of its first nan and inf, in
// row-major order.
static ms_status look(ms_tensor *t, int *has, int64_t first[2])
{
    *has = 0;
    if (!t || !ms__is_float(t->dtype) || t->sharded || t->storage->vacated || ms__is_meta(ms__device(t))) return MS_OK;
    ms_tensor *here;
    MS_TRY(ms__storage_sync(t->storage, false));
    MS_TRY(ms__on_cpu(&here, t, "detect_anomaly"));
    for (int64_t k = 0; k < here->numel && *has != (HAS_NAN | HAS_INF); k++) {
        double x = value_at(here, k);
        int bit = isnan(x) ? HAS_NAN : isinf(x) ? HAS_INF : 0;
        if (bit && !(*has & bit)) first[bit == HAS_INF] = k;
        *has |= bit;
    }
    ms__release(here);
    return MS_OK;
}

// A position as scripts write it: "[2, 1]", counted from 1.
static const char *position_text(const ms_tensor *t, int64_t at)
{
    int64_t place[MS_MAX_DIMS];
    for (int d = t->ndim - 1; d >= 0; d--) {
        place[d] = at % t->shape[d] + 1;
        at /= t->shape[d];
    }
    return ms__shape_text(t->ndim, place);
}

static ms_status found(const ms_values *v, int k, const char *value, int64_t at, int input)
{
    char source[64] = "", number[32] = "";
    if (input) ms__append(source, sizeof source, "one of %s (number %d) has it, too", v->of_inputs, input);
    else ms__append(source, sizeof source, "%s do not have it", v->of_inputs);
    if (v->n_out > 1) ms__append(number, sizeof number, " %d", k + 1);
    return ms__fail(MS_EINVAL, "%s%s, %s, has %s, first at %s; %s", v->what, number, ms__tensor_text(v->out[k]), value,
                    position_text(v->out[k], at), source);
}

ms_status ms__anomaly_check(const ms_values *v)
{
    if (ms__capturing) return MS_OK;
    int given = 0;
    for (int k = 0; k < v->n_f; k++) given |= isnan(v->f[k]) ? HAS_NAN : isinf(v->f[k]) ? HAS_INF : 0;
    for (int k = 0; k < v->n_out; k++) {
        int has, from = 0;
        int64_t first[2], unused[2];
        MS_TRY(look(v->out[k], &has, first));
        has &= ~given;
        if (ms__anomaly < 2) has &= ~HAS_INF;
        if (!has) continue;
        for (int i = 0; i < v->n_in && !from; i++) {
            int also;
            MS_TRY(look(v->in[i], &also, unused));
            if (also & (has & HAS_NAN ? HAS_NAN : HAS_INF)) from = i + 1;
        }
        if (has & HAS_NAN) return found(v, k, "nan", first[0], from);
        if (!from) return found(v, k, "inf", first[1], 0);
    }
    return MS_OK;
}
