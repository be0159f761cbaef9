// SPDX-License-Identifier: MIT
// cuda/spatial/conv.cu -- convolutions, as on the CPU (cpu/product/conv.c): images are unfolded to matrices (im2col),
// as many at a time as fit in ROOM bytes, and one batched product per group computes their outputs. For a kernel of
// size 1 with stride 1, no padding and no bias, the images are the matrices. A bias is stored as an additional column
// of the weight and a row of ones, so that half types round once. Gradients of x and w accumulate in float32 or
// float64, those of w in a fixed order; gradients of the bias in float64. A transposed convolution is the gradient of
// x, to which its bias is added before it is rounded; its own gradients are the output of a convolution and a gradient
// of w.
//
// Sizes: C = input channels of a group, K = C x kernel elements, L = output positions, M = output channels of a group.
#include "cuda/product.h"
#include "cuda/segments.h"
#include "cuda/spatial/columns.h"

// Bytes for the unfolded matrices of one round; a single image may need more. Few in the emulator, so that specs take
// several rounds.
#ifdef MS_EMULATED
enum { ROOM = 4 << 10 };
#else
enum { ROOM = 64 << 20 };
#endif

// Partial results of n elements: `count` of them, each `step` elements after the one before it.
struct part_list {
    int64_t n, count, step;
};
// Adds the parts of each run of `run` adjacent ones, in order. Used where parts are many and n is small.
template <class T> __global__ void add_runs_kernel(part_list p, int64_t run, const T *parts, T *sums)
{
    int64_t packs = (p.n + WIDE - 1) / WIDE, at = GLOBAL_INDEX / packs, i = (GLOBAL_INDEX - at * packs) * WIDE;
    int64_t first = at * run, last = first + run < p.count ? first + run : p.count;
    T sum[WIDE] = {}, v[WIDE];
    if (first >= p.count) return;
    for (int64_t k = first; k < last; k++) {
        read_pack(parts + k * p.step, i, p.n, (T)0, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum[e] += v[e];
    }
    write_pack(sums + at * p.n, i, p.n, sum);
}
// Adds the parts to sums, in order. The call for the last images stores the group's part of dw.
template <class S>
__global__ void add_parts_kernel(part_list p, images some, const real_of<S> *parts, real_of<S> *sums, S *dw)
{
    typedef real_of<S> T;
    int64_t i = GLOBAL_INDEX * WIDE;
    if (i >= p.n) return;
    T sum[WIDE] = {}, v[WIDE];
    if (some.first) read_pack(sums, i, p.n, (T)0, sum);
    for (int64_t k = 0; k < p.count; k++) {
        read_pack(parts + k * p.step, i, p.n, (T)0, v);
        UNROLL
        for (int e = 0; e < WIDE; e++) sum[e] += v[e];
    }
    if (some.last) write_pack(dw + some.group * p.n, i, p.n, sum);
    else write_pack(sums, i, p.n, sum);
}

// The gradient of the bias: the sum of g over images and positions. Stores it, or with several segments a part for
// each.
template <class S> __global__ void bias_kernel(channel_parts p, const S *g, double *parts, S *db)
{
    __shared__ double shared[BLOCK];
    alignas(16) __shared__ S tile[ROUND];
    channel_part my = channel_part_of(p);
    double sum = 0;
    for (int64_t first = my.from; first < my.to; first += ROUND) {
        fill_tile(tile, p, g, my.c, first, my.to);
        __syncthreads();
        for (int j = threadIdx.x; j < ROUND && first + j < my.to; j += BLOCK) sum += (double)one_of(tile + j);
        __syncthreads();
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x != 0) return;
    if (parts) parts[blockIdx.x] = sum;
    else store_one(db + my.c, sum);
}
// Adds up a channel's parts; a warp per channel.
template <class S> __global__ void bias_join_kernel(channel_parts p, const double *parts, S *db)
{
    int64_t c = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (c >= p.c) return;
    double sum = join_parts(parts + c * p.segments, p.segments);
    if (threadIdx.x % 32 == 0) store_one(db + c, sum);
}

// A convolution: its sizes, and the number of images processed at a time.
struct conv_job : unfolding {
    int device;
    int64_t C, M, K, L, at_once;
    bool pointwise;
};
static conv_job cuda_conv_job_of(const ms_call *c, const ms_conv &v)
{
    const ms_tensor *x = c->in[0];
    conv_job j = { { c->op->name, index_of(x), (int)x->dtype, v }, ms__device(x), 0, 0, 0, 0, 0, false };
    j.C = v.in / v.groups, j.M = v.out / v.groups, j.K = j.C * ms__conv_kernel(&v), j.L = ms__conv_positions(&v);
    j.pointwise = ms__conv_pointwise(&j.v);
    return j;
}
static void take_images(conv_job *j, int64_t bytes_an_image)
{
    j->at_once = bytes_an_image ? ROOM / bytes_an_image : j->v.n;
    if (j->at_once < 1) j->at_once = 1;
    if (j->at_once > j->v.n) j->at_once = j->v.n;
}

static images images_of(const conv_job *j, int64_t group, int64_t first)
{
    int64_t left = j->v.n - first;
    return { group, first, left < j->at_once ? left : j->at_once, left <= j->at_once };
}

// A batched product, one per image, each m x n over k; the caller sets the operands.
static product of_images(const conv_job *j, int64_t images, int64_t m, int64_t n, int64_t k)
{
    product p = product_of(j->what, j->dtype, m, n, k);
    p.nb = 1;
    p.batch[0] = images;
    return p;
}
static const void *conv_element(const conv_job *j, const void *data, int64_t at)
{
    return (const char *)data + at * ms__dtype_size(j->dtype);
}

// ---- forward ----

static ms_status multiply_columns(const conv_job *j, const void *x, const void *w, int64_t rows, void *cols, void *y)
{
    const ms_conv &v = j->v;
    for (int64_t g = 0; g < v.groups; g++)
        for (int64_t first = 0; first < v.n; first += j->at_once) {
            images some = images_of(j, g, first);
            product p = of_images(j, some.count, j->M, j->L, rows);
            if (cols) MS_TRY(ms__cuda_unfold(j, some, rows, x, cols));
            p.a = conv_element(j, w, g * j->M * rows), p.a_rs = rows, p.a_cs = 1;
            p.b = cols ? cols : conv_element(j, x, (first * v.in + g * j->C) * j->L), p.b_rs = j->L, p.b_cs = 1;
            p.b_bs[0] = (cols ? rows : v.in) * j->L;
            p.c = (void *)conv_element(j, y, (first * v.out + g * j->M) * j->L), p.c_bs[0] = v.out * j->L;
            MS_TRY(ms__cuda_product(j->index, &p));
        }
    return MS_OK;
}

// Stores the weight, with the bias as an additional column, in `wide`.
static ms_status append_bias_column(const conv_job *j, const ms_tensor *w, const ms_tensor *bias, ms_tensor *wide)
{
    int64_t shape[] = { j->v.out, j->K }, to[] = { j->K + 1, 1 }, from[] = { j->K, 1 };
    ms_tensor *part[] = { ms__tensor_view(wide, 2, shape, to, 0), ms__tensor_view(w, 2, shape, from, w->offset),
                          ms__tensor_view(wide, 1, shape, to, j->K) };
    ms_status st = ms__cuda_copy_tensor(part[0], part[1]);
    if (st == MS_OK) st = ms__cuda_copy_tensor(part[2], bias);
    for (ms_tensor *t : part) ms__release(t);
    return st;
}

// bias: NULL if there is none.
static ms_status conv_output_call(const ms_call *c, conv_job *j, const ms_tensor *x, const ms_tensor *w,
                                  const ms_tensor *bias, ms_tensor *y)
{
    scratch cols;
    ms_tensor *wide = NULL;
    int64_t rows = j->K + (bias != NULL), size = ms__dtype_size(j->dtype), shape[] = { j->v.out, rows };
    if (y->numel == 0) return MS_OK;
    take_images(j, rows * j->L * size);
    if (bias || !j->pointwise) MS_TRY(cols.alloc(c, j->device, j->at_once * rows * j->L * size));
    if (!bias) return multiply_columns(j, ms__data(x), ms__data(w), rows, cols.data, ms__data(y));
    MS_TRY(ms__tensor_new(&wide, j->dtype, j->device, 2, shape, j->what));
    ms_status st = append_bias_column(j, w, bias, wide);
    if (st == MS_OK) st = multiply_columns(j, ms__data(x), ms__data(wide), rows, cols.data, ms__data(y));
    ms__release(wide);
    return st;
}

static ms_status run_conv(ms_call *c)
{
    held_inputs h;
    conv_job j = cuda_conv_job_of(c, ms__conv_of(c->in[0], c->in[1], c->i));
    MS_TRY(h.hold(c));
    return conv_output_call(c, &j, h.in[0], h.in[1], h.in[2], c->out[0]);
}

// ---- backward ----

static int sums_dtype(const conv_job *j) { return j->dtype == MS_F64 ? MS_F64 : MS_F32; }
static int64_t sums_size(const conv_job *j) { return ms__dtype_size(sums_dtype(j)); }

// Memory of a weight's gradient. parts: partial results of `at_once` images; runs: where the weight is small, sums of
// runs of parts; sums: the sum so far.
struct weight_room {
    scratch parts, runs, sums;
    int64_t n_runs;  // 1: no runs, because the parts are small or the weight alone occupies ENOUGH blocks of threads
    ms_status make(const ms_call *c, const conv_job *j)
    {
        int64_t n = j->M * j->K, bytes = n * sums_size(j);
        n_runs = up(ENOUGH * 64, up(n, WIDE));
        if (n_runs > 64) n_runs = 64;
        if (j->at_once * bytes < LARGE) n_runs = 1;
        MS_TRY(parts.alloc(c, j->device, j->at_once * bytes));
        if (n_runs > 1) MS_TRY(runs.alloc(c, j->device, n_runs * bytes));
        return sums.alloc(c, j->device, bytes);
    }
};
template <class S>
static ms_status add_weight_parts(const conv_job *j, const images &some, const weight_room &room, ms_tensor *dw)
{
    typedef real_of<S> T;
    part_list p = { j->M * j->K, some.count, j->M * j->K };
    const T *parts = (const T *)room.parts.data;
    int64_t packs = up(p.n, WIDE);
    if (room.n_runs > 1 && p.count > 1) {
        int64_t run = up(p.count, room.n_runs);
        p.count = up(p.count, run);
        MS_TRY(launch(j->what, j->index, add_runs_kernel<T>, up(p.count * packs, 64), 64,
                      part_list { p.n, some.count, p.step }, run, parts, (T *)room.runs.data));
        parts = (const T *)room.runs.data;
    }
    grid threads = grid_of(packs);
    return launch(j->what, j->index, add_parts_kernel<S>, threads.blocks, threads.threads, p, some, parts,
                  (T *)room.sums.data, (S *)ms__data(dw));
}

// dw = gradient columns^T, summed over images.
static ms_status columns_weight_gradient(const conv_job *j, const void *gradient, const void *x, void *cols,
                                         const weight_room &room, ms_tensor *dw)
{
    const ms_conv &v = j->v;
    for (int64_t g = 0; g < v.groups; g++)
        for (int64_t first = 0; first < v.n; first += j->at_once) {
            images some = images_of(j, g, first);
            product p = of_images(j, some.count, j->M, j->K, j->L);
            if (!j->pointwise) MS_TRY(ms__cuda_unfold(j, some, j->K, x, cols));
            p.c_type = sums_dtype(j);
            p.a = conv_element(j, gradient, (first * v.out + g * j->M) * j->L), p.a_rs = j->L, p.a_cs = 1,
            p.a_bs[0] = v.out * j->L;
            p.b = j->pointwise ? conv_element(j, x, (first * v.in + g * j->C) * j->L) : cols, p.b_rs = 1, p.b_cs = j->L;
            p.b_bs[0] = (j->pointwise ? v.in : j->K) * j->L;
            p.c = room.parts.data, p.c_bs[0] = j->M * j->K;
            MS_TRY(ms__cuda_product(j->index, &p));
#define ADD_PARTS(S, T) MS_TRY(add_weight_parts<S>(j, some, room, dw))
            WITH_FLOAT_TYPE(dw->dtype, ADD_PARTS)
#undef ADD_PARTS
        }
    return MS_OK;
}

// dx = weight^T gradient, folded, plus the bias of a transposed convolution, unless it is NULL.
static ms_status fold_image_gradient(const conv_job *j, const void *gradient, const void *w, void *cols,
                                     const ms_tensor *bias, ms_tensor *dx)
{
    const ms_conv &v = j->v;
    for (int64_t g = 0; g < v.groups; g++)
        for (int64_t first = 0; first < v.n; first += j->at_once) {
            images some = images_of(j, g, first);
            product p = of_images(j, some.count, j->K, j->L, j->M);
            p.a = conv_element(j, w, g * j->M * j->K), p.a_rs = 1, p.a_cs = j->K;
            p.b = conv_element(j, gradient, (first * v.out + g * j->M) * j->L), p.b_rs = j->L, p.b_cs = 1,
            p.b_bs[0] = v.out * j->L;
            if (cols) {
                p.c_type = sums_dtype(j);
                p.c = cols, p.c_bs[0] = j->K * j->L;
            } else
                p.c = (void *)conv_element(j, ms__data(dx), (first * v.in + g * j->C) * j->L), p.c_bs[0] = v.in * j->L;
            MS_TRY(ms__cuda_product(j->index, &p));
            if (cols) MS_TRY(ms__cuda_fold(j, some, sums_dtype(j), cols, data_of(bias), ms__data(dx)));
        }
    return MS_OK;
}

template <class S> static ms_status bias_typed(const ms_call *c, const conv_job *j, const planes &z, const S *g, S *db)
{
    channel_parts p = channel_parts_of(z, sizeof(S), 1);
    scratch parts;
    if (p.segments > 1) MS_TRY(parts.alloc(c, j->device, p.c * p.segments * (int64_t)sizeof(double)));
    double *sums = (double *)parts.data;
    MS_TRY(launch_blocks(j->what, j->index, bias_kernel<S>, p.c * p.segments, BLOCK, p, g, sums, db));
    if (p.segments == 1) return MS_OK;
    return launch_blocks(j->what, j->index, bias_join_kernel<S>, up(p.c, WARPS), BLOCK, p, (const double *)sums, db);
}
static ms_status sum_bias_gradient(const ms_call *c, const conv_job *j, const ms_tensor *g, ms_tensor *db)
{
    planes z = { g->shape[0], g->shape[1], 1 };
    for (int d = 2; d < g->ndim; d++) z.s *= g->shape[d];
#define BIAS(S, T) return bias_typed(c, j, z, (const S *)ms__data(g), (S *)ms__data(db))
    WITH_FLOAT_TYPE(j->dtype, BIAS)
#undef BIAS
}

// Computes dw from the gradient of the output, g, and the image x.
static ms_status weight(const ms_call *c, conv_job *j, const ms_tensor *g, const ms_tensor *x, ms_tensor *dw)
{
    int64_t n = j->M * j->K, size = sums_size(j);
    scratch cols;
    weight_room room;
    if (dw->numel == 0) return MS_OK;
    if (j->v.n == 0 || j->L == 0) return ms__cuda_fill_tensor(dw, 0);
    take_images(j, size * (j->K * j->L > n ? j->K * j->L : n));
    if (!j->pointwise) MS_TRY(cols.alloc(c, j->device, j->at_once * j->K * j->L * size));
    MS_TRY(room.make(c, j));
    return columns_weight_gradient(j, ms__data(g), ms__data(x), cols.data, room, dw);
}

// Computes dx from the gradient of the output, g, and the weight; bias: of a transposed convolution, or NULL.
static ms_status image(const ms_call *c, conv_job *j, const ms_tensor *g, const ms_tensor *w, const ms_tensor *bias,
                       ms_tensor *dx)
{
    scratch cols;
    if (dx->numel == 0) return MS_OK;
    if (j->L == 0 || (j->M == 0 && !bias)) return ms__cuda_fill_tensor(dx, 0);
    take_images(j, sums_size(j) * j->K * j->L);
    if (bias || !j->pointwise) MS_TRY(cols.alloc(c, j->device, j->at_once * j->K * j->L * sums_size(j)));
    return fold_image_gradient(j, ms__data(g), ms__data(w), cols.data, bias, dx);
}

// Inputs: gradient, x, w. The last integer is the mask (rows/grad.h). Outputs: those of dx, dw, db that the mask
// selects.
static ms_status run_conv_backward(ms_call *c)
{
    held_inputs h;
    conv_job j = cuda_conv_job_of(c, ms__conv_of(c->in[1], c->in[2], c->i));
    ms_tensor *dx = ms__grad_out(c, 0), *dw = ms__grad_out(c, 1), *db = ms__grad_out(c, 2);
    MS_TRY(h.hold(c));
    if (db) MS_TRY(sum_bias_gradient(c, &j, h.in[0], db));
    if (dw) MS_TRY(weight(c, &j, h.in[0], h.in[1], dw));
    return dx ? image(c, &j, h.in[0], h.in[2], NULL, dx) : MS_OK;
}

// ---- transposed convolution ----

static ms_status run_conv_transpose(ms_call *c)
{
    held_inputs h;
    conv_job j = cuda_conv_job_of(c, ms__conv_transposed_of(c->out[0], c->in[1], c->i));
    MS_TRY(h.hold(c));
    return image(c, &j, h.in[0], h.in[1], h.in[2], c->out[0]);
}

// Inputs and outputs as those of run_conv_backward.
static ms_status run_conv_transpose_backward(ms_call *c)
{
    held_inputs h;
    conv_job j = cuda_conv_job_of(c, ms__conv_transposed_of(c->in[0], c->in[2], c->i));
    ms_tensor *dx = ms__grad_out(c, 0), *dw = ms__grad_out(c, 1), *db = ms__grad_out(c, 2);
    MS_TRY(h.hold(c));
    if (db) MS_TRY(sum_bias_gradient(c, &j, h.in[0], db));
    if (dw) MS_TRY(weight(c, &j, h.in[1], h.in[0], dw));
    return dx ? conv_output_call(c, &j, h.in[0], h.in[2], NULL, dx) : MS_OK;
}

extern const ms_cuda_kernel ms__cuda_conv[];
const ms_cuda_kernel ms__cuda_conv[] = { { "conv1d", run_conv },
                                         { "conv2d", run_conv },
                                         { "conv3d", run_conv },
                                         { "conv_backward", run_conv_backward },
                                         { "conv_transpose1d", run_conv_transpose },
                                         { "conv_transpose2d", run_conv_transpose },
                                         { "conv_transpose3d", run_conv_transpose },
                                         { "conv_transpose_backward", run_conv_transpose_backward },
                                         { NULL, NULL } };
