// SPDX-License-Identifier: MIT
// rows/sparse.c -- positions of sparse tensors: int64 [D, N], one column per value. Coalescing is not an operator,
// because the shape of its result depends on the values.
#include "device/capture.h"
#include "cpu/cpu.h"
#include "rows/ops.h"

// A column of the positions. place: the index of its element in the tensor's row-major order; at: the column's number.
typedef struct column {
    int64_t place, at;
} column;

static int by_row_place(const void *a, const void *b)
{
    const column *x = a, *y = b;
    if (x->place != y->place) return x->place < y->place ? -1 : 1;
    return x->at < y->at ? -1 : 1;  // columns at one position keep their order, so sums repeat bitwise
}

static ms_status check_sparse_positions(const ms_tensor *t)
{
    if (t->dtype != MS_I64 || t->ndim != 2 || t->shape[0] > MS_MAX_DIMS || ms__device_type(ms__device(t)) != MS_CPU)
        return ms__fail(MS_EINVAL,
                        "sparse_coo: indices must be int64 [dimensions, values] on the cpu, of at most %d dimensions, "
                        "got %s",
                        MS_MAX_DIMS, ms__tensor_text(t));
    return MS_OK;
}

// Computes the row-major index of every column; checks positions against the sizes.
static ms_status places_of(column *out, const ms_tensor *t, const int64_t *sizes)
{
    const int64_t *x = ms__data(t);
    int64_t n = t->shape[1], cells = 1;
    for (int64_t d = 0; d < t->shape[0]; d++)
        if (__builtin_mul_overflow(cells, sizes[d] > 0 ? sizes[d] : 1, &cells))
            return ms__fail(MS_EINVAL, "sparse_coo: shape %s has too many elements for int64 positions",
                            ms__shape_text((int)t->shape[0], sizes));
    for (int64_t k = 0; k < n; k++) {
        int64_t place = 0;
        for (int64_t d = 0; d < t->shape[0]; d++) {
            int64_t i = x[d * t->stride[0] + k * t->stride[1]];
            if (i < 0 || i >= sizes[d])
                return ms__fail(MS_EINVAL,
                                "sparse_coo: index %lld of value %lld is outside dimension %lld of size %lld: indices "
                                "count from 0",
                                (long long)i, (long long)k + 1, (long long)d + 1, (long long)sizes[d]);
            place = place * sizes[d] + i;
        }
        out[k] = (column) { place, k };
    }
    return MS_OK;
}

ms_status ms_sparse_coalesce(ms_id indices, const int64_t *sizes, ms_id *unique, ms_id *places)
{
    ms_tensor *t = ms__tensor(indices), *u = NULL, *p = NULL;
    if (!t) return ms_error_code();
    if (ms__recording) return ms__capture_refuse("sparse tensors cannot be captured: their shapes depend on values");
    MS_TRY(check_sparse_positions(t));
    MS_TRY(ms__storage_sync(t->storage, false));
    int64_t n = t->shape[1], dims = t->shape[0], m = 0;
    column *c = malloc((size_t)(n ? n : 1) * sizeof *c);
    if (!c) return ms__no_memory((size_t)n * sizeof *c, "coalesce", "%lld positions", (long long)n);
    ms_status st = places_of(c, t, sizes);
    if (st == MS_OK && unique) {
        qsort(c, (size_t)n, sizeof *c, by_row_place);
        for (int64_t k = 0; k < n; k++) m += k == 0 || c[k].place != c[k - 1].place;
        st = ms__tensor_new(&u, MS_I64, MS_CPU, 2, (int64_t[]) { dims, m }, "coalesce");
        if (st == MS_OK) st = ms__tensor_new(&p, MS_I64, MS_CPU, 1, &n, "coalesce");
    }
    if (st == MS_OK && unique) {
        int64_t *out = ms__data(u), *where = ms__data(p), at = -1;
        const int64_t *x = ms__data(t);
        for (int64_t k = 0; k < n; k++) {
            if (k == 0 || c[k].place != c[k - 1].place) {
                at++;
                for (int64_t d = 0; d < dims; d++) out[d * m + at] = x[d * t->stride[0] + c[k].at * t->stride[1]];
            }
            where[c[k].at] = at;
        }
        *unique = ms__name(u);
        *places = ms__name(p);
    } else {
        ms__release(u);
        ms__release(p);
    }
    free(c);
    return st;
}
