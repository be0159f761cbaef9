// SPDX-License-Identifier: MIT
// cuda/conv.cu -- conv2d, as on the CPU (cpu/product/conv.c): images are unfolded to matrices (im2col), as many at a
// time as fit in ROOM bytes, and one batched product per group computes the output. For a 1 x 1 kernel (with stride 1
// and no padding) the images are the matrices. A bias is stored as an additional column of the weight and a row of
// ones, so that half types round once. Gradients of x and w accumulate in float32 or float64, those of w in the order
// of the images; gradients of the bias in float64.
//
// Sizes: C = input channels of a group, K = C x kernel elements, L = output positions, M = output channels of a group.
#include "rows/conv.h"
#include "cuda/product.h"

// Bytes for the unfolded matrices of one round; a single image may need more. Few in the emulator, so that specs take
// several rounds.
#ifdef MS_EMULATED
enum { ROOM = 4 << 10 };
#else
enum { ROOM = 64 << 20 };
#endif

// `count` images from image `first` on, restricted to the channels of a group. last: no more images follow.
struct images {
    int64_t group, first, count;
    bool last;
};

// Unfolds images, each to `rows` rows by L columns: K rows, and with a bias one more, of ones.
template <class T>
__global__ void unfold_kernel(ms_conv v, images some, int64_t rows, int dtype, const void *x, void *cols)
{
    int64_t i = GLOBAL_INDEX, L = v.oh * v.ow, C = v.in / v.groups, kernel = v.kh * v.kw;
    if (i >= some.count * rows * L) return;
    int64_t l = i % L, r = i / L % rows, n = some.first + i / L / rows;
    T value = 1;
    if (r < C * kernel) {
        int64_t h = l / v.ow * v.sh - v.top + r / v.kw % v.kh * v.dh, w = l % v.ow * v.sw - v.left + r % v.kw * v.dw;
        bool inside = h >= 0 && h < v.h && w >= 0 && w < v.w;
        value = inside ? load<T>(dtype, x, ((n * v.in + some.group * C + r / kernel) * v.h + h) * v.w + w) : 0;
    }
    store<T>(dtype, cols, i, value);
}

// The gradient of every element of these images: the sum over the kernel elements that read it, in order.
template <class T> __global__ void fold_kernel(ms_conv v, images some, const T *cols, int dtype, void *dx)
{
    int64_t i = GLOBAL_INDEX, L = v.oh * v.ow, C = v.in / v.groups, K = C * v.kh * v.kw;
    if (i >= some.count * C * v.h * v.w) return;
    int64_t w = i % v.w, h = i / v.w % v.h, c = i / v.w / v.h % C, n = i / v.w / v.h / C;
    T sum = 0;
    for (int64_t e = 0; e < v.kh * v.kw; e++) {
        int64_t y = h + v.top - e / v.kw * v.dh, x = w + v.left - e % v.kw * v.dw;
        if (y < 0 || x < 0 || y % v.sh || x % v.sw || y / v.sh >= v.oh || x / v.sw >= v.ow) continue;
        sum += cols[(n * K + c * v.kh * v.kw + e) * L + y / v.sh * v.ow + x / v.sw];
    }
    store<T>(dtype, dx, (((some.first + n) * v.in + some.group * C + c) * v.h + h) * v.w + w, sum);
}

// Stores the weight with the bias as an additional column.
template <class T>
__global__ void widen_kernel(int64_t K, int64_t count, int dtype, const void *w, const void *b, void *wide)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= count) return;
    int64_t o = i / (K + 1), k = i % (K + 1);
    store<T>(dtype, wide, i, k < K ? load<T>(dtype, w, o * K + k) : load<T>(dtype, b, o));
}

// Adds the n partial results of each image to sums, in order. The call for the last images stores the group's part of
// dw.
template <class T>
__global__ void add_parts_kernel(int64_t n, images some, const T *parts, T *sums, int dtype, void *dw)
{
    int64_t i = GLOBAL_INDEX;
    if (i >= n) return;
    T sum = some.first == 0 ? 0 : sums[i];
    for (int64_t k = 0; k < some.count; k++) sum += parts[k * n + i];
    if (some.last) store<T>(dtype, dw, some.group * n + i, sum);
    else sums[i] = sum;
}

// The gradient of the bias: the sum of g over images and positions, one block per output channel.
__global__ void bias_kernel(ms_conv v, int dtype, const void *g, void *db)
{
    __shared__ double shared[BLOCK];
    int64_t o = blockIdx.x, L = v.oh * v.ow;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < v.n * L; i += BLOCK)
        sum += load<double>(dtype, g, (i / L * v.out + o) * L + i % L);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) store<double>(dtype, db, o, sum);
}

// A convolution: its sizes, and the number of images processed at a time.
struct conv_job {
    const char *what;
    int index, device, dtype;
    ms_conv v;
    int64_t C, M, K, L, at_once;
    bool pointwise;
};
static conv_job job_of(const ms_call *c, const ms_tensor *x, const ms_tensor *w)
{
    conv_job j = {
        c->op->name, index_of(x), ms__device(x), (int)x->dtype, ms__conv_of(x, w, c->i), 0, 0, 0, 0, 0, false
    };
    j.C = j.v.in / j.v.groups, j.M = j.v.out / j.v.groups, j.K = j.C * j.v.kh * j.v.kw, j.L = j.v.oh * j.v.ow;
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

static ms_status unfold(const conv_job *j, const images &some, int64_t rows, const void *x, void *cols)
{
    return launch(j->what, j->index, REAL_KERNEL(j->dtype, unfold_kernel), up(some.count * rows * j->L, BLOCK), BLOCK,
                  j->v, some, rows, j->dtype, x, cols);
}

// A batched product, one per image, each m x n over k; the caller sets the operands.
static product of_images(const conv_job *j, int64_t images, int64_t m, int64_t n, int64_t k)
{
    product p = product_of(j->what, j->dtype, m, n, k);
    p.nb = 1;
    p.batch[0] = images;
    return p;
}
static const void *element(const conv_job *j, const void *data, int64_t at)
{
    return (const char *)data + at * ms__dtype_size(j->dtype);
}

// ---- forward ----

static ms_status forward(const conv_job *j, const void *x, const void *w, int64_t rows, void *cols, void *y)
{
    const ms_conv &v = j->v;
    for (int64_t g = 0; g < v.groups; g++)
        for (int64_t first = 0; first < v.n; first += j->at_once) {
            images some = images_of(j, g, first);
            product p = of_images(j, some.count, j->M, j->L, rows);
            if (cols) MS_TRY(unfold(j, some, rows, x, cols));
            p.a = element(j, w, g * j->M * rows), p.a_rs = rows, p.a_cs = 1;
            p.b = cols ? cols : element(j, x, (first * v.in + g * j->C) * j->L), p.b_rs = j->L, p.b_cs = 1;
            p.b_bs[0] = (cols ? rows : v.in) * j->L;
            p.c = (void *)element(j, y, (first * v.out + g * j->M) * j->L), p.c_bs[0] = v.out * j->L;
            MS_TRY(ms__cuda_product(j->index, &p));
        }
    return MS_OK;
}

static ms_status run_conv2d(ms_call *c)
{
    held_inputs h;
    scratch cols, wide;
    ms_tensor *y = c->out[0];
    conv_job j = job_of(c, c->in[0], c->in[1]);
    bool bias = c->n_in > 2 && c->in[2];
    int64_t rows = j.K + bias, size = ms__dtype_size(j.dtype), count = j.v.out * rows;
    if (y->numel == 0) return MS_OK;
    MS_TRY(h.hold(c));
    take_images(&j, rows * j.L * size);
    if (bias || !j.pointwise) MS_TRY(cols.alloc(c, j.device, j.at_once * rows * j.L * size));
    if (bias) {
        MS_TRY(wide.alloc(c, j.device, count * size));
        MS_TRY(launch(j.what, j.index, REAL_KERNEL(j.dtype, widen_kernel), up(count, BLOCK), BLOCK, j.K, count, j.dtype,
                      ms__data(h.in[1]), ms__data(h.in[2]), (void *)wide.data));
    }
    return forward(&j, ms__data(h.in[0]), bias ? wide.data : ms__data(h.in[1]), rows, cols.data, ms__data(y));
}

// ---- backward ----

// dw = gradient columns^T, summed over images. parts: `at_once` partial results, followed by the sums.
template <class T>
static ms_status weight_gradient(const conv_job *j, const void *gradient, const void *x, void *cols, T *parts,
                                 ms_tensor *dw)
{
    const ms_conv &v = j->v;
    int64_t n = j->M * j->K;
    for (int64_t g = 0; g < v.groups; g++)
        for (int64_t first = 0; first < v.n; first += j->at_once) {
            images some = images_of(j, g, first);
            product p = of_images(j, some.count, j->M, j->K, j->L);
            if (!j->pointwise) MS_TRY(unfold(j, some, j->K, x, cols));
            p.c_type = sizeof(T) == 8 ? MS_F64 : MS_F32;
            p.a = element(j, gradient, (first * v.out + g * j->M) * j->L), p.a_rs = j->L, p.a_cs = 1,
            p.a_bs[0] = v.out * j->L;
            p.b = j->pointwise ? element(j, x, (first * v.in + g * j->C) * j->L) : cols, p.b_rs = 1, p.b_cs = j->L;
            p.b_bs[0] = (j->pointwise ? v.in : j->K) * j->L;
            p.c = parts, p.c_bs[0] = n;
            MS_TRY(ms__cuda_product(j->index, &p));
            MS_TRY(launch(j->what, j->index, add_parts_kernel<T>, up(n, BLOCK), BLOCK, n, some, (const T *)parts,
                          parts + j->at_once * n, (int)dw->dtype, ms__data(dw)));
        }
    return MS_OK;
}

// dx = weight^T gradient, folded.
template <class T>
static ms_status input_gradient(const conv_job *j, const void *gradient, const void *w, T *cols, ms_tensor *dx)
{
    const ms_conv &v = j->v;
    for (int64_t g = 0; g < v.groups; g++)
        for (int64_t first = 0; first < v.n; first += j->at_once) {
            images some = images_of(j, g, first);
            product p = of_images(j, some.count, j->K, j->L, j->M);
            p.a = element(j, w, g * j->M * j->K), p.a_rs = 1, p.a_cs = j->K;
            p.b = element(j, gradient, (first * v.out + g * j->M) * j->L), p.b_rs = j->L, p.b_cs = 1,
            p.b_bs[0] = v.out * j->L;
            if (j->pointwise) {
                p.c = (void *)element(j, ms__data(dx), (first * v.in + g * j->C) * j->L), p.c_bs[0] = v.in * j->L;
                MS_TRY(ms__cuda_product(j->index, &p));
                continue;
            }
            p.c_type = sizeof(T) == 8 ? MS_F64 : MS_F32;
            p.c = cols, p.c_bs[0] = j->K * j->L;
            MS_TRY(ms__cuda_product(j->index, &p));
            MS_TRY(launch(j->what, j->index, fold_kernel<T>, up(some.count * j->C * v.h * v.w, BLOCK), BLOCK, v, some,
                          (const T *)cols, j->dtype, ms__data(dx)));
        }
    return MS_OK;
}

template <class T> static ms_status backward(ms_call *c, conv_job *j, const held_inputs &h)
{
    const ms_tensor *g = h.in[0], *x = h.in[1], *w = h.in[2];
    ms_tensor *dx = ms__grad_out(c, 0), *dw = ms__grad_out(c, 1), *db = ms__grad_out(c, 2);
    const ms_conv &v = j->v;
    int64_t n = j->M * j->K;
    scratch cols, parts;
    if (db) MS_TRY(launch_blocks(j->what, j->index, bias_kernel, v.out, BLOCK, v, j->dtype, ms__data(g), ms__data(db)));
    if (dw && v.n == 0) MS_TRY(ms__cuda_fill_tensor(dw, 0));
    if (dx && j->M == 0) MS_TRY(ms__cuda_fill_tensor(dx, 0));
    if (n == 0 || v.n == 0) return MS_OK;
    take_images(j, (int64_t)sizeof(T) * (j->K * j->L > n ? j->K * j->L : n));
    if (!j->pointwise) MS_TRY(cols.alloc(c, j->device, j->at_once * j->K * j->L * (int64_t)sizeof(T)));
    if (dw) {
        MS_TRY(parts.alloc(c, j->device, (j->at_once + 1) * n * (int64_t)sizeof(T)));
        MS_TRY(weight_gradient<T>(j, ms__data(g), ms__data(x), cols.data, (T *)parts.data, dw));
    }
    return dx ? input_gradient<T>(j, ms__data(g), ms__data(w), (T *)cols.data, dx) : MS_OK;
}

// Inputs: gradient, x, w. The last integer is the mask (rows/grad.h). Outputs: those of dx, dw, db that the mask names.
static ms_status run_conv2d_backward(ms_call *c)
{
    held_inputs h;
    conv_job j = job_of(c, c->in[1], c->in[2]);
    MS_TRY(h.hold(c));
    return j.dtype == MS_F64 ? backward<double>(c, &j, h) : backward<float>(c, &j, h);
}

extern const ms_cuda_kernel ms__cuda_conv[];
const ms_cuda_kernel ms__cuda_conv[] = { { "conv2d", run_conv2d },
                                         { "conv2d_backward", run_conv2d_backward },
                                         { NULL, NULL } };
