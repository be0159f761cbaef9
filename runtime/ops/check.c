// SPDX-License-Identifier: MIT
// ops/check.c -- helpers of the operators' check().
#include "ops/check.h"

#include <stdarg.h>
#include <stdio.h>

static void grow_out(ms_call *c, int k)
{
    while (c->n_out <= k) c->out[c->n_out++] = NULL;
}

ms_status ms__call_out(ms_call *c, int k, int dtype, int device, int ndim, const int64_t *shape)
{
    grow_out(c, k);
    return ms__tensor_new(&c->out[k], dtype, device, ndim, shape, c->op->name);
}

ms_status ms__call_out_like(ms_call *c, int k, const ms_tensor *t)
{
    grow_out(c, k);
    return ms__tensor_new(&c->out[k], t->dtype, ms__device(t), t->ndim, t->shape, c->op->name);
}

ms_status ms__call_view(ms_call *c, int k, ms_tensor *view)
{
    grow_out(c, k);
    c->out[k] = view;
    return MS_OK;
}

void ms__call_inplace(ms_call *c, int k, int in)
{
    grow_out(c, k);
    c->out[k] = ms__retain(c->in[in]);
    c->out[k]->version->count++;
}

ms_status ms__call_fail(const ms_call *c, const char *fmt, ...)
{
    char text[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return ms__fail(MS_EINVAL, "%s: %s", ms__op_title(c->op->name), text);
}

ms_status ms__call_dim(const ms_call *c, int64_t d, int ndim, int *out)
{
    int n = ndim ? ndim : 1;  // a 0-dim tensor accepts dimensions 0 and -1
    if (d < -n || d >= n)
        return ms__call_fail(c,
                             "dimension %lld is out of range for a tensor of %d dimension%s "
                             "(expected %d to %d except 0)",
                             (long long)(d >= 0 ? d + 1 : d), ndim, ndim == 1 ? "" : "s", -n, n);
    *out = (int)(d < 0 ? d + n : d);
    return MS_OK;
}

ms_status ms__call_last_dim(ms_call *c, int *out)
{
    if (c->n_i == 0) c->i[c->n_i++] = -1;
    return ms__call_dim(c, c->i[0], c->in[0]->ndim, out);
}

ms_status ms__broadcast(const ms_call *c, const ms_tensor *a, const ms_tensor *b, int *ndim, int64_t *shape)
{
    int n = a->ndim > b->ndim ? a->ndim : b->ndim;
    for (int d = n - 1, i = a->ndim - 1, j = b->ndim - 1; d >= 0; d--, i--, j--) {
        int64_t x = i >= 0 ? a->shape[i] : 1, y = j >= 0 ? b->shape[j] : 1;
        if (MS_UNLIKELY(x != y && x != 1 && y != 1))
            return ms__call_fail(
                c, "shapes %s and %s do not broadcast: dimension %d is %lld and %lld, expected equal sizes or 1",
                ms__shape_text(a->ndim, a->shape), ms__shape_text(b->ndim, b->shape), d + 1, (long long)x,
                (long long)y);
        shape[d] = x == 1 ? y : x;
    }
    *ndim = n;
    return MS_OK;
}
