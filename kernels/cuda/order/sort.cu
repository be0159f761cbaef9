// SPDX-License-Identifier: MIT
// cuda/order/sort.cu -- sort and topk: stable, by the keys of formulas/order.h, with the sort of cuda/sort.h. As many
// lines as have at most MOST_SORTED elements in all are sorted together: by the low 4 bytes of the keys, then, if keys
// have 8 bytes, by the high 4 bytes, then by the number of the line.
#include "cuda/sort.h"
#include "formulas/order.h"

// The lines along a dimension: element k of line l is at x[offset of l + k * step], in elements.
struct sort_lines {
    int ndim, dtype;
    int64_t n, step, shape[MS_MAX_DIMS], stride[MS_MAX_DIMS];
    const void *x;
    uint64_t flip;  // all ones: the largest first
};
static __device__ inline int64_t element_place(const sort_lines &l, int64_t i)
{
    int64_t line = i / l.n;
    return (i - line * l.n) * l.step + (l.ndim ? offset_of(line, l.ndim, l.shape, l.stride) : 0);
}
// The key of element i, counted line by line.
static __device__ inline uint64_t key_of(const sort_lines &l, int64_t i)
{
    int64_t at = element_place(l, i);
    switch (l.dtype) {
    case MS_F64: return ms_key_f64(load<double>(l.dtype, l.x, at)) ^ l.flip;
    case MS_I64: return ms_key_i64(load<int64_t>(l.dtype, l.x, at)) ^ l.flip;
    case MS_F32:
    case MS_F16:
    case MS_BF16: return (ms_key_f32(load<float>(l.dtype, l.x, at)) ^ l.flip) & 0xffffffffu;
    default: return (((uint64_t)load<int64_t>(l.dtype, l.x, at) + 0x80000000u) ^ l.flip) & 0xffffffffu;
    }
}
// Reads what entries are sorted by: 32 bits of the keys from bit `shift` on, or the number of the line. The entries
// come in the order of `from`, or, if it is NULL, in that of the elements.
struct read_part {
    sort_lines l;
    const entry *from;
    int64_t first;  // the number of the first element of the lines that are sorted
    int shift;      // the first of the 32 bits of the keys; -1: reads the number of the line
    __device__ entry operator()(int64_t i) const
    {
        int32_t at = from ? from[i].at : (int32_t)i;
        if (shift < 0) return { (int32_t)(at / l.n), at };
        return { (int32_t)(uint32_t)(key_of(l, first + at) >> shift), at };
    }
};
// The results: the first k elements of each line and their positions; both tensors are contiguous.
struct sort_results {
    int64_t lines, first_line, k, inner;  // inner: product of the sizes of the later dimensions
    void *values;
    int64_t *positions;
};
__global__ void write_sorted_kernel(sort_lines l, const entry *sorted, sort_results r)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= r.lines * r.k) return;
    int64_t line = i / r.k, k = i - line * r.k, number = r.first_line + line;
    int64_t at = sorted[line * l.n + k].at - line * l.n;
    int64_t to = (number / r.inner * r.k + k) * r.inner + number % r.inner;
    int64_t from = element_place(l, number * l.n + at);
    switch (ms__dtype_size(l.dtype)) {
    case 1: ((uint8_t *)r.values)[to] = ((const uint8_t *)l.x)[from]; break;
    case 2: ((uint16_t *)r.values)[to] = ((const uint16_t *)l.x)[from]; break;
    case 4: ((uint32_t *)r.values)[to] = ((const uint32_t *)l.x)[from]; break;
    default: ((uint64_t *)r.values)[to] = ((const uint64_t *)l.x)[from]; break;
    }
    r.positions[to] = at;
}

static ms_status sort_call(ms_call *c, int64_t k, bool largest)
{
    const ms_tensor *x = c->in[0];
    const char *what = c->op->name;
    int index = index_of(x), d = x->ndim ? (int)(c->i[0] < 0 ? c->i[0] + x->ndim : c->i[0]) : 0;
    if (c->out[0]->numel == 0) return MS_OK;
    sort_lines l = {};
    sort_results r = {};
    l.n = x->ndim ? x->shape[d] : 1, l.step = x->ndim ? x->stride[d] : 1, l.dtype = x->dtype, l.x = ms__data(x);
    l.flip = largest ? ~(uint64_t)0 : 0;
    r.inner = 1;
    for (int e = 0; e < x->ndim; e++) {
        if (e == d) continue;
        l.shape[l.ndim] = x->shape[e], l.stride[l.ndim++] = x->stride[e];
        if (e > d) r.inner *= x->shape[e];
    }
    if (l.n > MOST_SORTED)
        return ms__fail(MS_EUNSUPPORTED,
                        "%s: dimension %d of %s has %lld elements, at most %lld are supported on a GPU", what, d + 1,
                        ms__tensor_text(x), (long long)l.n, (long long)MOST_SORTED);
    int64_t lines = x->numel / l.n, most = MOST_SORTED / l.n, group = lines < most ? lines : most;
    int wide = x->dtype == MS_F64 || x->dtype == MS_I64;
    sort_sizes by_key = sort_sizes_of(group * l.n, 0xffffffff);
    int64_t bytes = (sort_bytes(by_key) + 15) / 16 * 16;
    scratch room;
    MS_TRY(room.alloc(c, ms__device(x), 2 * bytes));
    r.k = k, r.values = ms__data(c->out[0]), r.positions = (int64_t *)ms__data(c->out[1]);
    for (r.first_line = 0; r.first_line < lines; r.first_line += group) {
        r.lines = lines - r.first_line < group ? lines - r.first_line : group;
        int64_t n = r.lines * l.n, first = r.first_line * l.n;
        int last = r.lines > 1 ? 3 : 2;  // the number of the line is the last key
        const entry *sorted = NULL;
        for (int pass = 0, used = 0; pass < last; pass++) {
            if (pass == 1 && !wide) continue;
            read_part read = { l, sorted, first, pass == 2 ? -1 : 32 * pass };
            MS_TRY(sort_entries(what, index, sort_sizes_of(n, pass == 2 ? r.lines - 1 : 0xffffffff), read,
                                room.data + used++ % 2 * bytes, &sorted));
        }
        int64_t threads = r.lines * k;
        grid g = grid_of(threads);
        MS_TRY(launch(what, index, write_sorted_kernel, g.blocks, g.threads, l, sorted, r));
    }
    return MS_OK;
}
static ms_status run_sort(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d = x->ndim ? (int)(c->i[0] < 0 ? c->i[0] + x->ndim : c->i[0]) : 0;
    return sort_call(c, x->ndim ? x->shape[d] : 1, c->n_i > 1 && c->i[1]);
}
static ms_status run_topk(ms_call *c) { return sort_call(c, c->i[1], c->n_i < 3 || c->i[2]); }

extern const ms_cuda_kernel ms__cuda_sort[];
const ms_cuda_kernel ms__cuda_sort[] = { { "sort", run_sort }, { "topk", run_topk }, { NULL, NULL } };
