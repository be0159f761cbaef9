// SPDX-License-Identifier: MIT
// cuda/embedding.cu -- reads and writes by position: embedding, index_select, index_add_, gather, scatter_,
// scatter_add_. Sums are computed in the order of the positions, without atomics, so they repeat bitwise. A position
// out of range cannot stop the call: the kernel records the error, and the host raises it when it next waits for the
// device.
#include "cuda/cuda.h"

enum { THREADS = 256 };

// Position k of ids. If it is not in [0, limit): records this error in *c and returns -1.
static __device__ inline int64_t position(int dtype, const void *ids, int64_t k, int64_t limit, int what,
                                          ms_complaint *c)
{
    int64_t at = load<int64_t>(dtype, ids, k);
    if (at >= 0 && at < limit) return at;
    complain(c, what, at, limit);
    return -1;
}

static __device__ inline void move_bytes(int size, void *to, int64_t i, const void *from, int64_t j)
{
    switch (size) {
    case 1: ((uint8_t *)to)[i] = ((const uint8_t *)from)[j]; break;
    case 2: ((uint16_t *)to)[i] = ((const uint16_t *)from)[j]; break;
    case 4: ((uint32_t *)to)[i] = ((const uint32_t *)from)[j]; break;
    default: ((uint64_t *)to)[i] = ((const uint64_t *)from)[j]; break;
    }
}

// ---- embedding ----

// n ids, each of a row of a table [rows, width].
struct lookup {
    int64_t n, rows, width;
    int dtype, id_type;
    const void *ids;
    ms_complaint *complaint;
};
static lookup lookup_of(const ms_tensor *table, const ms_tensor *ids)
{
    return { ids->numel,
             table->shape[0],
             table->shape[1],
             table->dtype,
             ids->dtype,
             ms__data(ids),
             ms__complaints(index_of(table)) };
}
// The row that id k names; -1 if there is no such row.
static __device__ inline int64_t row_of(const lookup &q, int64_t k)
{
    return position(q.id_type, q.ids, k, q.rows, MS_COMPLAINT_EMBEDDING, q.complaint);
}

__global__ void embedding_kernel(lookup q, const void *w, void *out)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= q.n * q.width) return;
    int64_t k = i / q.width, j = i - k * q.width, row = row_of(q, k);
    if (row >= 0) move_bytes(ms__dtype_size(q.dtype), out, i, w, row * q.width + j);
    else store<float>(q.dtype, out, i, 0);
}
static ms_status run_embedding(ms_call *c)
{
    ms_tensor *w = NULL, *ids = NULL, *o = c->out[0];
    int index = index_of(o);
    ms_status st = ms__contiguous(&w, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&ids, c->in[1]);
    if (st == MS_OK) st = ms__cuda_use(index);
    if (st == MS_OK)
        st = launch(c->op->name, index, embedding_kernel, up(o->numel, THREADS), THREADS, lookup_of(w, ids),
                    (const void *)ms__data(w), ms__data(o));
    if (ids) ms__release(ids);
    if (w) ms__release(w);
    return st;
}

// next[k]: the next position with the same id; n if there is none. first[k]: whether no earlier position has this id.
struct chains {
    int64_t *next;
    uint8_t *first;
};
// Every position is compared with all others, a tile in shared memory at a time. The blocks are small, so that 8,192
// positions occupy 128 multiprocessors.
enum { CHAIN = 64, TILE = 256 };
__global__ void chain_kernel(lookup q, chains c)
{
    __shared__ int64_t tile[TILE];
    int64_t k = GLOBAL_INDEX, id = k < q.n ? load<int64_t>(q.id_type, q.ids, k) : 0, next = q.n;
    bool first = true;
    for (int64_t from = 0; from < q.n; from += TILE) {
        int n = q.n - from < TILE ? (int)(q.n - from) : TILE;
        for (int j = threadIdx.x; j < n; j += CHAIN) tile[j] = load<int64_t>(q.id_type, q.ids, from + j);
        __syncthreads();
        for (int j = 0; j < n; j++) {
            if (tile[j] != id) continue;
            if (from + j < k) first = false;
            else if (from + j > k && from + j < next) next = from + j;
        }
        __syncthreads();
    }
    if (k >= q.n) return;
    c.next[k] = next;
    c.first[k] = first;
}
// Adds up the gradients of each id along its chain: one thread per column of the id's first position; the threads of
// other positions return. more: add the sum to the gradient in `out`, otherwise store it.
template <class T>
__global__ void embedding_backward_kernel(lookup q, chains c, int64_t padding, const void *g, void *out, bool more)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= q.n * q.width) return;
    int64_t k = i / q.width, j = i - k * q.width;
    if (!c.first[k]) return;
    int64_t row = row_of(q, k);
    if (row < 0 || row == padding) return;
    T sum = 0;
    for (; k < q.n; k = c.next[k]) sum += load<T>(q.dtype, g, k * q.width + j);
    if (more) {  // the sum is rounded before it is added, as a separate gradient would be
        T rounded = q.dtype == MS_F16    ? (T)ms_f16_to_float(ms_float_to_f16((float)sum))
                    : q.dtype == MS_BF16 ? (T)ms_bf16_to_float(ms_float_to_bf16((float)sum))
                                         : sum;
        sum = load<T>(q.dtype, out, row * q.width + j) + rounded;
    }
    store<T>(q.dtype, out, row * q.width + j, sum);
}
static ms_status run_embedding_backward(ms_call *c)
{
    ms_tensor *g = NULL, *ids = NULL, *o = c->out[0];
    ms_block *room = NULL;
    int index = index_of(o);
    int64_t n = c->in[1]->numel;
    const char *what = c->op->name;
    ms_status st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&ids, c->in[1]);
    bool more = c->n_in == 3;  // whether to add to a gradient that the table already has
    if (st == MS_OK && !more) st = ms__cuda_fill_tensor(o, 0);
    if (st == MS_OK && n && o->numel) {
        st = ms__alloc(&room, ms__device(o), (size_t)n * 9, what);
        if (st == MS_OK) {
            lookup q = lookup_of(o, ids);
            chains chain = { (int64_t *)room->data, (uint8_t *)room->data + 8 * n };
            st = launch_blocks(what, index, chain_kernel, up(n, CHAIN), CHAIN, q, chain);
            if (st == MS_OK)
                st = launch(what, index, REAL_KERNEL(q.dtype, embedding_backward_kernel), up(n * q.width, THREADS),
                            THREADS, q, chain, c->i[0], ms__data(g), ms__data(o), more);
            ms__free(room);
        }
    }
    if (ids) ms__release(ids);
    if (g) ms__release(g);
    return st;
}

// ---- along one dimension: a thread per line, so that values for one place are added in order ----

struct job {
    int ndim;                      // number of dimensions of the lines: all but d
    int64_t lines, length, limit;  // positions per line; size of the indexed dimension
    int64_t shape[MS_MAX_DIMS], x[MS_MAX_DIMS], y[MS_MAX_DIMS], p[MS_MAX_DIMS];  // strides of from, to, ids: elements
    int64_t xd, yd, pd;                                                          // their strides along d
    int dtype, id_type;
    const void *from, *ids;
    void *to;
    ms_complaint *complaint;
};
enum { TAKE, PUT, ADD };  // with p = ids[l, k]: to[l, k] = from[l, p]; to[l, p] = from[l, k]; to[l, p] += from[l, k]

// TAKE uses one thread per element, PUT and ADD one thread per line.
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
    for (int d = q.ndim - 1; d >= 0; d--) {
        int64_t r = i % q.shape[d];
        i /= q.shape[d];
        x += r * q.x[d], y += r * q.y[d], p += r * q.p[d];
    }
    for (int64_t k = k0; k < k1; k++) {
        int64_t at = position(q.id_type, q.ids, p + k * q.pd, q.limit, MS_COMPLAINT_POSITION, q.complaint);
        if (at < 0) continue;
        int64_t from = x + (how == TAKE ? at : k) * q.xd, to = y + (how == TAKE ? k : at) * q.yd;
        if (how == ADD) store<T>(q.dtype, q.to, to, load<T>(q.dtype, q.to, to) + load<T>(q.dtype, q.from, from));
        else move_bytes(ms__dtype_size(q.dtype), q.to, to, q.from, from);
    }
}
static int64_t size_of(const ms_tensor *t, int d) { return t->ndim ? t->shape[d] : 1; }

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
    for (int k = 0; k < over->ndim; k++) {
        if (k == d) continue;
        q.shape[q.ndim] = over->shape[k];
        q.x[q.ndim] = x->stride[k], q.y[q.ndim] = y->stride[k], q.p[q.ndim] = one ? 0 : ids->stride[k];
        q.lines *= over->shape[k];
        q.ndim++;
    }
    q.xd = x->ndim ? x->stride[d] : 0, q.yd = y->ndim ? y->stride[d] : 0;
    q.pd = ids->ndim ? ids->stride[one ? 0 : d] : 0;
    q.length = one ? ids->numel : size_of(ids, d);
    q.limit = size_of(whole, d);
    q.dtype = y->dtype;
    q.id_type = ids->dtype;
    q.from = ms__data(x), q.ids = ms__data(ids), q.to = ms__data(y);
    q.complaint = ms__complaints(index);
    int64_t n = q.length == 0 ? 0 : how == TAKE ? q.lines * q.length : q.lines;
    if (y->dtype == MS_F64) return launch(c->op->name, index, index_kernel<double>, up(n, THREADS), THREADS, q, how);
    if (y->dtype <= MS_BF16) return launch(c->op->name, index, index_kernel<float>, up(n, THREADS), THREADS, q, how);
    return launch(c->op->name, index, index_kernel<int64_t>, up(n, THREADS), THREADS, q, how);
}
static ms_status run_index_select(ms_call *c) { return run_index(c, TAKE, true); }
static ms_status run_index_add_(ms_call *c) { return run_index(c, ADD, true); }
static ms_status run_gather(ms_call *c) { return run_index(c, TAKE, false); }
static ms_status run_scatter_(ms_call *c) { return run_index(c, PUT, false); }
static ms_status run_scatter_add_(ms_call *c) { return run_index(c, ADD, false); }

extern const ms_cuda_kernel ms__cuda_embedding[];
#define ROW(name) { #name, run_##name },
const ms_cuda_kernel ms__cuda_embedding[] = { ROW(embedding) ROW(embedding_backward) ROW(index_select) ROW(index_add_)
                                                  ROW(gather) ROW(scatter_) ROW(scatter_add_) { NULL, NULL } };
