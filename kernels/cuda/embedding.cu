// SPDX-License-Identifier: MIT
// cuda/embedding.cu -- reads and writes by position: embedding, index_select, index_add_, gather, scatter_,
// scatter_add_. Sums are computed in the order of the positions, without atomics, so they repeat bitwise. A position
// out of range cannot stop the call: the kernel records the error, and the host raises it when it next waits.
#include "cuda/cuda.h"

enum { THREADS = 256 };

// A checked position, or -1.
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

__global__ void embedding_kernel(int64_t n, int64_t width, int64_t rows, int dtype, const void *w, int id_type,
                                 const void *ids, void *out, ms_complaint *c)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= n * width) return;
    int64_t k = i / width, j = i - k * width, row = position(id_type, ids, k, rows, MS_COMPLAINT_EMBEDDING, c);
    if (row >= 0) move_bytes(ms__dtype_size(dtype), out, i, w, row * width + j);
    else store<float>(dtype, out, i, 0);
}
static ms_status run_embedding(ms_call *c)
{
    ms_tensor *w = NULL, *ids = NULL, *o = c->out[0];
    int index = index_of(o);
    ms_status st = ms__contiguous(&w, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&ids, c->in[1]);
    if (st == MS_OK) st = ms__cuda_use(index);
    if (st == MS_OK)
        st = launch(c->op->name, index, embedding_kernel, up(o->numel, THREADS), THREADS, ids->numel, w->shape[1],
                    w->shape[0], (int)w->dtype, (const void *)ms__data(w), (int)ids->dtype, (const void *)ms__data(ids),
                    ms__data(o), ms__complaints(index));
    if (ids) ms__release(ids);
    if (w) ms__release(w);
    return st;
}

// next[k]: the next position with the same id; n if there is none. first[k]: whether no earlier position has this id.
__global__ void chain_kernel(int64_t n, int id_type, const void *ids, int64_t *next, uint8_t *first)
{
    int64_t k = GLOBAL_INDEX;
    if (k >= n) return;
    int64_t id = load<int64_t>(id_type, ids, k), j = k + 1;
    while (j < n && load<int64_t>(id_type, ids, j) != id) j++;
    next[k] = j;
    for (j = k - 1; j >= 0 && load<int64_t>(id_type, ids, j) != id;) j--;
    first[k] = j < 0;
}
// Adds up the gradients of each id along its chain, one thread per column. Only threads of an id's first position work.
template <class T>
__global__ void embedding_backward_kernel(int64_t n, int64_t width, int64_t rows, int64_t padding, int dtype,
                                          const void *g, int id_type, const void *ids, const int64_t *next,
                                          const uint8_t *first, void *out, bool more, ms_complaint *c)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= n * width) return;
    int64_t k = i / width, j = i - k * width;
    if (!first[k]) return;
    int64_t row = position(id_type, ids, k, rows, MS_COMPLAINT_EMBEDDING, c);
    if (row < 0 || row == padding) return;
    T sum = 0;
    for (; k < n; k = next[k]) sum += load<T>(dtype, g, k * width + j);
    if (more) {  // the sum is rounded before it is added, as a separate gradient would be
        T rounded = dtype == MS_F16    ? (T)ms_f16_to_float(ms_float_to_f16((float)sum))
                    : dtype == MS_BF16 ? (T)ms_bf16_to_float(ms_float_to_bf16((float)sum))
                                       : sum;
        sum = load<T>(dtype, out, row * width + j) + rounded;
    }
    store<T>(dtype, out, row * width + j, sum);
}
static ms_status run_embedding_backward(ms_call *c)
{
    ms_tensor *g = NULL, *ids = NULL, *o = c->out[0];
    ms_block *room = NULL;
    int index = index_of(o), dtype = o->dtype;
    int64_t n = c->in[1]->numel, width = o->shape[1];
    const char *what = c->op->name;
    ms_status st = ms__contiguous(&g, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&ids, c->in[1]);
    bool more = c->n_in == 3;  // whether to add to a gradient that the table already has
    if (st == MS_OK && !more) st = ms__cuda_fill_tensor(o, 0);
    if (st == MS_OK && n && o->numel) {
        st = ms__alloc(&room, ms__device(o), (size_t)n * 9, what);
        int64_t *next = room ? (int64_t *)room->data : NULL;
        uint8_t *first = (uint8_t *)(next + n);
        if (st == MS_OK)
            st = launch(what, index, chain_kernel, up(n, THREADS), THREADS, n, (int)ids->dtype,
                        (const void *)ms__data(ids), next, first);
        if (st == MS_OK)
            st = launch(what, index, REAL_KERNEL(dtype, embedding_backward_kernel), up(n * width, THREADS), THREADS, n,
                        width, o->shape[0], c->i[0], dtype, ms__data(g), (int)ids->dtype, ms__data(ids), next, first,
                        ms__data(o), more, ms__complaints(index));
        if (room) ms__free(room);
    }
    if (ids) ms__release(ids);
    if (g) ms__release(g);
    return st;
}

// ---- along one dimension: a thread per line, so that values for one place are added in order ----

struct job {
    int ndim;                      // number of dimensions of the lines: all but d
    int64_t lines, length, limit;  // positions per line; size of the indexed dimension
    int64_t shape[MS_MAX_DIMS], x[MS_MAX_DIMS], y[MS_MAX_DIMS], p[MS_MAX_DIMS];  // strides in elements
    int64_t xd, yd, pd;                                                          // strides along d
    int dtype, id_type;
    const void *from, *ids;
    void *to;
    ms_complaint *complaint;
};
enum { TAKE, PUT, ADD };  // y[l, k] = x[l, p]; y[l, p] = x[l, k]; y[l, p] += x[l, k]

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
