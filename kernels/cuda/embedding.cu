// SPDX-License-Identifier: MIT
// cuda/embedding.cu -- reads and writes by position: embedding, index_select, index_add_, gather, scatter_,
// scatter_add_, scatter_reduce. Sums are computed in the order of the positions, without atomics, so they repeat
// bitwise. A position out of range cannot stop the call: the kernel records the error, and the host raises it when it
// next waits for the device.
#include "cuda/segments.h"
#include "cuda/sort.h"
#include "formulas/order.h"

// A line of positions in [0, limit). complaint: the error (MS_COMPLAINT_*) recorded for a position out of range.
struct positions {
    int64_t length, limit, step;  // step: from one to the next, in elements
    int id_type, complaint;
    const void *ids;
    ms_complaint *errors;
};
// The k-th element of ids. If it is out of range: records the error and returns -1.
static __device__ inline int64_t position(const positions &q, int64_t k)
{
    int64_t at = load_position(q.id_type, q.ids, k);
    if (in_range(at, q.limit)) return at;
    complain(q.errors, q.complaint, at, q.limit);
    return -1;
}

// What is done for line l and number k, with the position p = ids[l, k]. TAKE: to[l, k] = from[l, p]. PUT: to[l, p] =
// from[l, k]. ADD: to[l, p] += from[l, k]. REDUCE + kind (MS_REDUCE_PROD, _MAX or _MIN of formulas/order.h): to[l, p]
// is combined with from[l, k].
enum { TAKE, PUT, ADD, REDUCE };
// Lines along dimension d, in which positions select elements.
struct job : positions {
    int ndim;                                                // number of other dimensions, merged where possible
    int64_t lines, shape[MS_MAX_DIMS];                       // number of lines; sizes of the other dimensions
    int64_t x[MS_MAX_DIMS], y[MS_MAX_DIMS], p[MS_MAX_DIMS];  // strides of from, to, ids, in elements
    int64_t xd, yd;                                          // strides of from and to along d
    int dtype;
    const void *from;
    void *to;
};

// ---- rows: adjacent lines with the same positions ----

// A thread moves or adds one element of each of up to WIDE adjacent lines. There are `outer` groups of `inner` adjacent
// lines, and `packs` threads for each position of a group.
struct row_sizes {
    int64_t outer, inner, packs;
};
static row_sizes row_sizes_of(const job &q)
{
    row_sizes s = { 1, q.shape[q.ndim - 1], up(q.shape[q.ndim - 1], WIDE) };
    for (int d = 0; d < q.ndim - 1; d++) s.outer *= q.shape[d];
    return s;
}
// What a thread works on: position number k of a group, for lines j to j + WIDE - 1 of the group; x and y: the offsets
// of the group in `from` and in `to`.
struct row_part {
    int64_t k, j, x, y;
};
static __device__ __forceinline__ row_part embedding_row_part(const job &q, const row_sizes &s, int64_t i)
{
    int64_t row = i / s.packs, group = row / q.length;
    return { row - group * q.length, (i - row * s.packs) * WIDE, offset_of(group, q.ndim - 1, q.shape, q.x),
             offset_of(group, q.ndim - 1, q.shape, q.y) };
}

// Rows whose position is out of range become 0. S: an unsigned integer of the elements' size.
template <class S> __global__ void take_rows_kernel(job q, row_sizes s)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= s.outer * q.length * s.packs) return;
    row_part r = embedding_row_part(q, s, i);
    int64_t at = position(q, r.k * q.step);
    S *to = (S *)q.to + r.y + r.k * q.yd + r.j;
    if (at >= 0) return move_pack(to, (const S *)q.from + r.x + at * q.xd + r.j, s.inner - r.j);
    for (int e = 0; e < WIDE && r.j + e < s.inner; e++) to[e] = 0;
}
static ms_status take_rows(const char *what, int index, const job &q)
{
    row_sizes s = row_sizes_of(q);
    grid n = grid_of(s.outer * q.length * s.packs);
    int size = ms__dtype_size(q.dtype);
    return launch(what, index,
                  size == 2   ? take_rows_kernel<uint16_t>
                  : size == 4 ? take_rows_kernel<uint32_t>
                              : take_rows_kernel<uint64_t>,
                  n.blocks, n.threads, q, s);
}

// The entries to sort: the numbers k of the ids, by the ids as keys. Ids out of range come last, as one id.
struct read_id {
    positions q;
    __device__ entry operator()(int64_t k) const
    {
        int64_t id = load_position(q.id_type, q.ids, k * q.step);
        return { (int32_t)(in_range(id, q.limit) ? id : q.limit), (int32_t)k };
    }
};

// What a row of the result becomes. STORE_SUM: the sum of the rows of its id. ADD_SUM: itself plus that sum, which is
// rounded first. ADD_ROWS: itself plus each of the rows of its id in turn, rounded after each.
enum { STORE_SUM, ADD_SUM, ADD_ROWS };
struct row_sum {
    int how;
    int64_t padding;  // the id whose gradients are left out; negative: none
};
template <class S> static __device__ __forceinline__ real_of<S> rounded(real_of<S> v)
{
    S one;
    store_one(&one, v);
    return one_of(&one);
}
// Adds up the rows of each id in the order of their positions. The threads of the id's first sorted entry do this;
// those of its other entries return. The loads of several entries' rows are in flight together.
template <class S> __global__ void add_rows_kernel(job q, row_sizes s, const entry *sorted, row_sum f)
{
    typedef real_of<S> T;
    enum { AHEAD = sizeof(S) == 8 ? 2 : 4 };
    int64_t i = GLOBAL_INDEX;
    if (i >= s.outer * q.length * s.packs) return;
    row_part r = embedding_row_part(q, s, i);
    int32_t id = sorted[r.k].key;
    if (r.k > 0 && sorted[r.k - 1].key == id) return;
    if (id == q.limit) position(q, sorted[r.k].at * q.step);  // records the error
    if (id == q.limit || id == f.padding) return;
    const S *from = (const S *)q.from + r.x;
    S *to = (S *)q.to + r.y + id * q.yd;
    T sum[WIDE] = {}, v[AHEAD][WIDE] = {};
    if (f.how == ADD_ROWS) read_pack(to, r.j, s.inner, (T)0, sum);
    bool wide = r.j + WIDE <= s.inner && is_wide(from + r.j) && q.xd * (int64_t)sizeof(S) % 16 == 0, more = true;
    int64_t own = sorted[r.k].at;
    for (int64_t k = r.k; more; k += AHEAD) {
        bool mine[AHEAD];
        int64_t at[AHEAD];
        UNROLL
        for (int a = 0; a < AHEAD; a++) {
            entry e = sorted[k + a < q.length ? k + a : r.k];
            mine[a] = k + a < q.length && e.key == id;
            at[a] = mine[a] ? e.at : own;  // past the id's last entry: this row again, from the cache
        }
        if (wide) {
            UNROLL
            for (int a = 0; a < AHEAD; a++) load_wide(from + at[a] * q.xd + r.j, v[a]);
        } else UNROLL
        for (int a = 0; a < AHEAD; a++) read_pack(from + at[a] * q.xd, r.j, s.inner, (T)0, v[a]);
        UNROLL
        for (int a = 0; a < AHEAD; a++) {
            more = more && mine[a];
            UNROLL
            for (int e = 0; e < WIDE; e++) {
                T one = sum[e] + v[a][e];
                if (more) sum[e] = f.how == ADD_ROWS ? rounded<S>(one) : one;
            }
        }
    }
    if (f.how == ADD_SUM) {  // the sum is rounded before it is added, as a separate gradient is
        read_pack(to, r.j, s.inner, (T)0, v[0]);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum[e] = v[0][e] + rounded<S>(sum[e]);
    }
    write_pack(to, r.j, s.inner, sum);
}
static bool can_sort(const positions &q) { return q.length <= MOST_SORTED && q.limit < INT32_MAX; }
static ms_status add_embedding_rows(ms_call *c, const job &q, const row_sum &f)
{
    scratch room;
    row_sizes s = row_sizes_of(q);
    grid n = grid_of(s.outer * q.length * s.packs);
    sort_sizes sizes = sort_sizes_of(q.length, q.limit);
    int index = index_of(c->out[0]);
    const entry *sorted;
    if (n.blocks == 0) return MS_OK;
    MS_TRY(room.alloc(c, ms__device(c->out[0]), sort_bytes(sizes)));
    MS_TRY(sort_entries(c->op->name, index, sizes, read_id { q }, room.data, &sorted));
    return launch(c->op->name, index, TYPED_KERNEL(q.dtype, add_rows_kernel), n.blocks, n.threads, q, s, sorted, f);
}

// ---- embedding ----

// Describes a look-up: the ids select rows of a table [rows, width].
static job lookup_of(const ms_tensor *table, const ms_tensor *ids)
{
    int64_t width = table->shape[1];
    job q = {};
    q.ndim = 1;
    q.lines = q.shape[0] = width;
    q.x[0] = q.y[0] = q.step = 1;
    q.xd = q.yd = width;
    q.length = ids->numel;
    q.limit = table->shape[0];
    q.dtype = table->dtype, q.id_type = ids->dtype, q.ids = ms__data(ids);
    q.complaint = MS_COMPLAINT_EMBEDDING;
    q.errors = ms__complaints(index_of(table));
    return q;
}
static ms_status run_embedding(ms_call *c)
{
    held_inputs h;
    int index = index_of(c->out[0]);
    MS_TRY(h.hold(c));
    MS_TRY(ms__cuda_use(index));
    job q = lookup_of(h.in[0], h.in[1]);
    q.from = ms__data(h.in[0]), q.to = ms__data(c->out[0]);
    return take_rows(c->op->name, index, q);
}
// Inputs: gradient, ids, and the gradient that the table already has, if the result is to be added to it.
static ms_status run_embedding_backward(ms_call *c)
{
    held_inputs h;
    ms_tensor *o = c->out[0];
    bool more = c->n_in == 3;
    MS_TRY(h.hold(c, 2));
    if (!more) MS_TRY(ms__cuda_fill_tensor(o, 0));
    MS_TRY(ms__cuda_use(index_of(o)));
    job q = lookup_of(o, h.in[1]);
    q.from = ms__data(h.in[0]), q.to = ms__data(o);
    if (!can_sort(q))
        return ms__fail(MS_EUNSUPPORTED,
                        "%s: %lld ids of a table of %lld rows, expected at most %lld ids and fewer than 2^31 - 1 rows",
                        c->op->name, (long long)q.length, (long long)q.limit, (long long)MOST_SORTED);
    return add_embedding_rows(c, q, { more ? ADD_SUM : STORE_SUM, c->i[0] });
}

// ---- along any dimension: elements that are not adjacent, or that each have a position of their own ----

// Copies an element of a dtype that is computed as T: of 2 or 4 bytes for float, 8 for double, 1 to 8 for int64.
template <class T>
static __device__ inline void move_element(int size, void *to, int64_t i, const void *from, int64_t j)
{
    constexpr bool wide = sizeof(T) == 8, any = std::is_integral_v<T>;
    if (wide && (!any || size == 8)) ((uint64_t *)to)[i] = ((const uint64_t *)from)[j];
    else if (any && size == 1) ((uint8_t *)to)[i] = ((const uint8_t *)from)[j];
    else if (size == 2) ((uint16_t *)to)[i] = ((const uint16_t *)from)[j];
    else ((uint32_t *)to)[i] = ((const uint32_t *)from)[j];
}
// Copies element `from` of q.from to element `to` of q.to, or combines the two there. T is not float with REDUCE.
template <class T> static __device__ inline void write_one(const job &q, int how, int64_t to, int64_t from)
{
    if (how < ADD) return move_element<T>(ms__dtype_size(q.dtype), q.to, to, q.from, from);
    T a = load<T>(q.dtype, q.to, to), b = load<T>(q.dtype, q.from, from);
    if (how == ADD) a += b;
    else if constexpr (std::is_integral_v<T>) a = ms_reduce_i64(how - REDUCE, a, b);
    else if constexpr (std::is_same_v<T, double>) a = ms_reduce_f64(how - REDUCE, a, b);
    store<T>(q.dtype, q.to, to, a);
}
// TAKE uses one thread per element, the others one thread per line, so that values for one place are combined in order.
template <class T> __global__ void index_kernel(job q, int how)
{
    int64_t i = GLOBAL_INDEX, k0 = 0, k1 = q.length;
    if (i >= (how == TAKE ? q.lines * q.length : q.lines)) return;
    if (how == TAKE) {
        k0 = i % q.length;
        k1 = k0 + 1;
        i /= q.length;
    }
    int64_t x = 0, y = 0, p = 0;
    ROLLED
    for (int d = q.ndim - 1; d >= 0; d--) {
        int64_t r = i % q.shape[d];
        i /= q.shape[d];
        x += r * q.x[d], y += r * q.y[d], p += r * q.p[d];
    }
    for (int64_t k = k0; k < k1; k++) {
        int64_t at = position(q, p + k * q.step);
        if (at < 0) continue;
        int64_t from = x + (how == TAKE ? at : k) * q.xd, to = y + (how == TAKE ? k : at) * q.yd;
        write_one<T>(q, how, to, from);
    }
}

// PUT, ADD and REDUCE where lines are too few for a thread each: the elements of all lines are sorted by the place in
// `to` that they name, which keeps their order.
struct read_place {
    job q;
    __device__ entry operator()(int64_t i) const
    {
        int64_t line = i / q.length, k = i - line * q.length;
        int64_t at = load_position(q.id_type, q.ids, offset_of(line, q.ndim, q.shape, q.p) + k * q.step);
        bool fits = in_range(at, q.limit);
        return { (int32_t)(fits ? line * q.limit + at : q.lines * q.limit), (int32_t)i };
    }
};
// A thread per sorted entry. With ADD and REDUCE the thread of a place's first entry combines all elements of that
// place; with PUT the thread of its last entry stores that entry's element.
template <class T> __global__ void place_kernel(job q, int how, const entry *sorted)
{
    int64_t i = GLOBAL_INDEX, n = q.lines * q.length;
    if (i >= n) return;
    int32_t place = sorted[i].key;
    if (place == q.lines * q.limit) {
        int64_t line = sorted[i].at / q.length, k = sorted[i].at - line * q.length;
        position(q, offset_of(line, q.ndim, q.shape, q.p) + k * q.step);  // records the error
        return;
    }
    if (how == PUT ? i + 1 < n && sorted[i + 1].key == place : i > 0 && sorted[i - 1].key == place) return;
    int64_t line = place / q.limit, at = place - line * q.limit;
    int64_t x = offset_of(line, q.ndim, q.shape, q.x), to = offset_of(line, q.ndim, q.shape, q.y) + at * q.yd;
    for (; i < n && sorted[i].key == place; i++) {
        int64_t from = x + (sorted[i].at - line * q.length) * q.xd;
        write_one<T>(q, how, to, from);
    }
}
// Whether the places can be sorted and sorting pays: few lines of many elements.
static bool sorts_places(const job &q, int how)
{
    int64_t n = q.lines * q.length;
    return how != TAKE && q.lines < ENOUGH * 64 && q.length > 1 && n * ms__dtype_size(q.dtype) >= LARGE &&
           n <= MOST_SORTED && q.limit < INT32_MAX / q.lines;
}
static ms_status place_sorted(ms_call *c, const job &q, int how)
{
    scratch room;
    sort_sizes sizes = sort_sizes_of(q.lines * q.length, q.lines * q.limit);
    int index = index_of(c->out[0]);
    const entry *sorted;
    grid n = grid_of(sizes.n);
    bool real = q.dtype <= MS_BF16;
    MS_TRY(room.alloc(c, ms__device(c->out[0]), sort_bytes(sizes)));
    MS_TRY(sort_entries(c->op->name, index, sizes, read_place { q }, room.data, &sorted));
    return launch(c->op->name, index,
                  q.dtype == MS_F64 || (real && how >= REDUCE) ? place_kernel<double>
                  : real                                       ? place_kernel<float>
                                                               : place_kernel<int64_t>,
                  n.blocks, n.threads, q, how, sorted);
}
static int64_t size_of_dim(const ms_tensor *t, int d) { return t->ndim ? t->shape[d] : 1; }

// Adds a dimension of the lines; merges it with the last one if both can be traversed with one stride.
static void add_gather_dim(job *q, int64_t size, int64_t x, int64_t y, int64_t p)
{
    int d = q->ndim - 1;
    q->lines *= size;
    if (size == 1) return;
    if (d >= 0 && q->x[d] == x * size && q->y[d] == y * size && q->p[d] == p * size) q->shape[d] *= size;
    else q->shape[d = q->ndim++] = size;
    q->x[d] = x, q->y[d] = y, q->p[d] = p;
}
// Inputs: tensor, positions, source (except for TAKE). one: the positions are 1-d and the same for all lines; otherwise
// they have the shape of the result, or of the used part of the source.
static ms_status run_index(ms_call *c, int how, bool one)
{
    const ms_tensor *whole = c->in[0], *ids = c->in[1], *x = how == TAKE ? whole : c->in[2], *over = one ? whole : ids;
    ms_tensor *y = c->out[0];
    int index = index_of(y), d = whole->ndim == 0 ? 0 : (int)(c->i[0] < 0 ? c->i[0] + whole->ndim : c->i[0]);
    job q = {};
    MS_TRY(ms__cuda_use(index));
    q.lines = 1;
    for (int k = 0; k < over->ndim; k++)
        if (k != d) add_gather_dim(&q, over->shape[k], x->stride[k], y->stride[k], one ? 0 : ids->stride[k]);
    q.xd = x->ndim ? x->stride[d] : 0, q.yd = y->ndim ? y->stride[d] : 0;
    q.step = ids->ndim ? ids->stride[one ? 0 : d] : 0;
    q.length = one ? ids->numel : size_of_dim(ids, d);
    q.limit = size_of_dim(whole, d);
    q.dtype = y->dtype, q.id_type = ids->dtype;
    q.from = ms__data(x), q.ids = ms__data(ids), q.to = ms__data(y);
    q.complaint = MS_COMPLAINT_POSITION;
    q.errors = ms__complaints(index);
    bool real = y->dtype <= MS_BF16;
    int last = q.ndim - 1;
    if (one && last >= 0 && q.shape[last] >= WIDE && q.x[last] == 1 && q.y[last] == 1) {
        if (how == TAKE && ms__dtype_size(q.dtype) > 1) return take_rows(c->op->name, index, q);
        if (how == ADD && real && can_sort(q)) return add_embedding_rows(c, q, { ADD_ROWS, -1 });
    }
    if (sorts_places(q, how)) return place_sorted(c, q, how);
    int64_t n = q.length == 0 ? 0 : how == TAKE ? q.lines * q.length : q.lines;
    return launch(c->op->name, index,
                  y->dtype == MS_F64 || (real && how >= REDUCE) ? index_kernel<double>
                  : real                                        ? index_kernel<float>
                                                                : index_kernel<int64_t>,
                  up(n, BLOCK), BLOCK, q, how);
}
static ms_status run_index_select(ms_call *c) { return run_index(c, TAKE, true); }
static ms_status run_index_add_(ms_call *c) { return run_index(c, ADD, true); }
static ms_status run_gather(ms_call *c) { return run_index(c, TAKE, false); }
static ms_status run_scatter_(ms_call *c) { return run_index(c, PUT, false); }
static ms_status run_scatter_add_(ms_call *c) { return run_index(c, ADD, false); }
static ms_status run_scatter_reduce(ms_call *c)
{
    MS_TRY(ms__cuda_copy_tensor(c->out[0], c->in[0]));
    return run_index(c, REDUCE + (int)c->i[1], false);
}

extern const ms_cuda_kernel ms__cuda_embedding[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_embedding[] = { ROW(embedding) ROW(embedding_backward) ROW(index_select) ROW(
    index_add_) ROW(gather) ROW(scatter_) ROW(scatter_add_) ROW(scatter_reduce) { NULL, NULL } };
