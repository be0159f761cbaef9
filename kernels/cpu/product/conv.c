// SPDX-License-Identifier: MIT
// cpu/product/conv.c -- convolutions on the CPU. Each image is unfolded to a matrix with one row per kernel element
// (im2col), and one matrix product per group computes the output, in every dtype and with the guarantees of products
// (fixed order of sums, any number of threads). For a kernel of size 1 with stride 1, no padding and no bias, the image
// itself is that matrix, and nothing is copied. oneDNN's convolutions lack float64, and are no faster
// (docs/performance.md).
//
// A convolution (rows/spatial/conv.h) has three parts: its output, the gradient of its weight, and that of its image. A
// transposed convolution computes the third from its input, and its gradients are the other two.
//
// Sizes: C = input channels of a group, K = C x kernel elements, L = output positions, M = output channels of a group.
// A bias is stored as an additional column of the weight and a row of ones in the matrix, so that half types round
// once. Gradients of half types are computed in float32.
#include "rows/spatial/conv.h"
#include "cpu/product/product.h"
#include "rows/grad.h"
#include "rows/ops.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/work.h"

typedef struct job {
    ms_conv v;
    size_t size;  // size of an element in bytes
    int dtype;
    const char *what;  // the operator's name
    int64_t C, M, K, L;
    const char *x;  // channels of the image that belong to this group
    char *cols;     // K x L
    const void *from;
    void *to;  // add_to: from is added to it; fold: the gradient of x's channels
} job;

static job job_of(const ms_call *c, ms_conv v, int dtype)
{
    job j = { .v = v, .size = (size_t)ms__dtype_size(dtype), .dtype = dtype, .what = c->op->name };
    j.C = v.in / v.groups, j.M = v.out / v.groups, j.K = j.C * ms__conv_kernel(&v), j.L = ms__conv_positions(&v);
    return j;
}

// The number at element `at` of a tensor, by address.
static char *element(const job *j, const ms_tensor *t, int64_t at)
{
    return (char *)ms__data(t) + (size_t)at * j->size;
}

// ---- image to columns and back --------------------------------------------------------------------

// The output columns [first, last) that read the image with a column of the kernel: column o reads image column
// o * sw + shift. The remaining columns read padding.
typedef struct span {
    int64_t first, last, shift;
} span;

static span span_of(const ms_conv *v, int64_t kw)
{
    int64_t shift = kw * v->dw - v->left;
    span s = { shift < 0 ? (-shift + v->sw - 1) / v->sw : 0, v->w > shift ? (v->w - shift + v->sw - 1) / v->sw : 0,
               shift };
    if (s.last > v->ow) s.last = v->ow;
    if (s.first > s.last) s.first = s.last;
    return s;
}

// The row of the image, of d x h rows, that output row (od, oh) reads with a kernel element; -1 in the padding.
static int64_t row_of(const ms_conv *v, int64_t e, int64_t od, int64_t oh)
{
    int64_t d = od * v->sd - v->front + e / (v->kh * v->kw) * v->dd,
            h = oh * v->sh - v->top + e / v->kw % v->kh * v->dh;
    return d < 0 || d >= v->d || h < 0 || h >= v->h ? -1 : d * v->h + h;
}

// Writes row r of the matrix: the pixels of channel r / kernel that are multiplied with kernel element r % kernel.
static void unfold_row(const job *j, int64_t r)
{
    const ms_conv *v = &j->v;
    int64_t kernel = ms__conv_kernel(v), e = r % kernel, s = v->sw;
    span in = span_of(v, e % v->kw);
    const char *image = j->x + (size_t)(r / kernel * ms__conv_size(v)) * j->size;
    char *to = j->cols + (size_t)(r * j->L) * j->size;
    for (int64_t o = 0; o < v->od * v->oh; o++, to += (size_t)v->ow * j->size) {
        int64_t row = row_of(v, e, o / v->oh, o % v->oh), n = in.last - in.first;
        if (row < 0 || n == 0) {
            memset(to, 0, (size_t)v->ow * j->size);
            continue;
        }
        memset(to, 0, (size_t)in.first * j->size);
        memset(to + (size_t)in.last * j->size, 0, (size_t)(v->ow - in.last) * j->size);
        const char *at = image + (size_t)(row * v->w + in.first * s + in.shift) * j->size;
        if (s == 1) memcpy(to + (size_t)in.first * j->size, at, (size_t)n * j->size);
        else if (j->size == 8)
            for (int64_t k = 0; k < n; k++) ((uint64_t *)to)[in.first + k] = ((const uint64_t *)at)[k * s];
        else if (j->size == 4)
            for (int64_t k = 0; k < n; k++) ((uint32_t *)to)[in.first + k] = ((const uint32_t *)at)[k * s];
        else
            for (int64_t k = 0; k < n; k++) ((uint16_t *)to)[in.first + k] = ((const uint16_t *)at)[k * s];
    }
}

static void unfold(void *arg, int64_t first, int64_t last, int64_t block)
{
    const job *j = arg;
    (void)block;
    for (int64_t r = first / j->L; r < last / j->L; r++) unfold_row(j, r);
}

// The gradient of a channel of the image: adds the matrix rows of its kernel elements back to the pixels, in order.
#define FOLD(REAL, name)                                                               \
    static void name(const job *j, int64_t c)                                          \
    {                                                                                  \
        const ms_conv *v = &j->v;                                                      \
        int64_t size = ms__conv_size(v), kernel = ms__conv_kernel(v);                  \
        REAL *image = (REAL *)j->to + c * size;                                        \
        for (int64_t k = 0; k < size; k++) image[k] = 0;                               \
        for (int64_t e = 0; e < kernel; e++) {                                         \
            const REAL *from = (const REAL *)j->cols + (c * kernel + e) * j->L;        \
            span in = span_of(v, e % v->kw);                                           \
            for (int64_t o = 0; o < v->od * v->oh; o++, from += v->ow) {               \
                int64_t row = row_of(v, e, o / v->oh, o % v->oh);                      \
                if (row < 0) continue;                                                 \
                REAL *to = image + row * v->w + in.shift;                              \
                for (int64_t k = in.first; k < in.last; k++) to[k * v->sw] += from[k]; \
            }                                                                          \
        }                                                                              \
    }
FOLD(float, fold_f32)
FOLD(double, fold_f64)

static void fold(void *arg, int64_t first, int64_t last, int64_t block)
{
    const job *j = arg;
    int64_t each = ms__conv_size(&j->v);
    (void)block;
    for (int64_t c = first / each; c < last / each; c++) {
        if (j->dtype == MS_F64) fold_f64(j, c);
        else fold_f32(j, c);
    }
}

static void add_to(void *arg, int64_t first, int64_t last, int64_t block)
{
    const job *j = arg;
    (void)block;
    if (j->dtype == MS_F64)
        for (int64_t k = first; k < last; k++) ((double *)j->to)[k] += ((const double *)j->from)[k];
    else
        for (int64_t k = first; k < last; k++) ((float *)j->to)[k] += ((const float *)j->from)[k];
}

// Returns the unfolded matrix of image n, group g, stored in room; or the image itself when room is NULL.
static const void *columns(job *j, const ms_tensor *x, void *room, int64_t n, int64_t g)
{
    j->x = element(j, x, (n * j->v.in + g * j->C) * ms__conv_size(&j->v));
    if (!room) return j->x;
    j->cols = room;
    ms__parallel(j->K * j->L, (j->K * j->L < 8192 ? j->K : (8192 + j->L - 1) / j->L) * j->L, unfold, j);
    return room;
}

// ---- the output -----------------------------------------------------------------------------------

// The weight with the bias as an additional column, O x (K + 1), and the row of ones that multiplies this column.
static void widen(const job *j, char *wide, char *ones, const ms_tensor *w, const ms_tensor *b)
{
    static const float one = 1;
    int64_t K = j->K;
    for (int64_t o = 0; o < j->v.out; o++) {
        memcpy(wide + (size_t)(o * (K + 1)) * j->size, element(j, w, o * K), (size_t)K * j->size);
        memcpy(wide + (size_t)(o * (K + 1) + K) * j->size, element(j, b, o), j->size);
    }
    for (int64_t k = 0; k < j->L; k++) {
        if (j->size == 8) ((double *)ones)[k] = 1;
        else if (j->size == 4) ((float *)ones)[k] = one;
        else if (j->dtype == MS_BF16) ((ms_bf16 *)ones)[k] = ms_float_to_bf16(one);
        else ((ms_f16 *)ones)[k] = ms_float_to_f16(one);
    }
}

// y = w columns (+ b, unless it is NULL). All are contiguous, of j's dtype.
static ms_status output(job *j, const ms_tensor *x, const ms_tensor *w, const ms_tensor *b, ms_tensor *y)
{
    const ms_conv *v = &j->v;
    ms_block *room = NULL, *wide = NULL;
    int64_t K = j->K + (b != NULL);
    if (y->numel == 0) return MS_OK;
    ms_status st = MS_OK;
    if (b || !ms__conv_pointwise(v)) st = ms__alloc(&room, MS_CPU, (size_t)(K * j->L) * j->size, j->what);
    if (st == MS_OK && b) st = ms__alloc(&wide, MS_CPU, (size_t)(v->out * K) * j->size, j->what);
    if (st == MS_OK && b) widen(j, wide->data, (char *)room->data + (size_t)(j->K * j->L) * j->size, w, b);
    for (int64_t k = 0; k < v->n * v->groups && st == MS_OK; k++) {
        int64_t n = k / v->groups, g = k % v->groups;
        ms_gemm p = ms__gemm_of(j->what, j->dtype, j->M, j->L, K);
        p.a_rs = K, p.a_cs = 1, p.b_rs = j->L, p.b_cs = 1;
        p.a = (const char *)(b ? wide->data : ms__data(w)) + (size_t)(g * j->M * K) * j->size;
        p.b = columns(j, x, room ? room->data : NULL, n, g);
        p.c = element(j, y, (n * v->out + g * j->M) * j->L);
        st = ms__gemm(&p);
    }
    if (wide) ms__free(wide);
    if (room) ms__free(room);
    return st;
}

// ---- gradients ------------------------------------------------------------------------------------

// dw = g columns^T, summed over images. g is the gradient of the output. float32 or float64.
static ms_status weight_gradient(job *j, const ms_tensor *g, const ms_tensor *x, ms_tensor *dw)
{
    const ms_conv *v = &j->v;
    ms_block *room = NULL, *part = NULL;
    if (dw->numel == 0) return MS_OK;
    if (v->n == 0 || j->L == 0) return ms__zero(dw);
    ms_status st = MS_OK;
    if (!ms__conv_pointwise(v)) st = ms__alloc(&room, MS_CPU, (size_t)(j->K * j->L) * j->size, j->what);
    if (st == MS_OK && v->n > 1) st = ms__alloc(&part, MS_CPU, (size_t)(j->M * j->K) * j->size, j->what);
    for (int64_t k = 0; k < v->n * v->groups && st == MS_OK; k++) {
        int64_t n = k / v->groups, group = k % v->groups;
        char *sum = element(j, dw, group * j->M * j->K);
        ms_gemm p = ms__gemm_of(j->what, j->dtype, j->M, j->K, j->L);
        p.a = element(j, g, (n * v->out + group * j->M) * j->L), p.a_rs = j->L, p.a_cs = 1;
        p.b = columns(j, x, room ? room->data : NULL, n, group), p.b_rs = 1, p.b_cs = j->L;
        p.c = n ? part->data : sum;
        st = ms__gemm(&p);
        if (st != MS_OK || n == 0) continue;
        j->from = part->data;
        j->to = sum;
        ms__parallel(j->M * j->K, 32768, add_to, j);
    }
    if (part) ms__free(part);
    if (room) ms__free(room);
    return st;
}

// dx = w^T g, folded. float32 or float64.
static ms_status image_gradient(job *j, const ms_tensor *g, const ms_tensor *w, ms_tensor *dx)
{
    const ms_conv *v = &j->v;
    ms_block *room = NULL;
    if (dx->numel == 0) return MS_OK;
    if (j->M == 0 || j->L == 0) return ms__zero(dx);
    if (!ms__conv_pointwise(v)) MS_TRY(ms__alloc(&room, MS_CPU, (size_t)(j->K * j->L) * j->size, j->what));
    ms_status st = MS_OK;
    for (int64_t k = 0; k < v->n * v->groups && st == MS_OK; k++) {
        int64_t n = k / v->groups, group = k % v->groups;
        char *image = element(j, dx, (n * v->in + group * j->C) * ms__conv_size(v));
        ms_gemm p = ms__gemm_of(j->what, j->dtype, j->K, j->L, j->M);
        p.a = element(j, w, group * j->M * j->K), p.a_rs = 1, p.a_cs = j->K;
        p.b = element(j, g, (n * v->out + group * j->M) * j->L), p.b_rs = j->L, p.b_cs = 1;
        p.c = room ? room->data : image;
        st = ms__gemm(&p);
        if (st != MS_OK || !room) continue;
        j->cols = room->data;
        j->to = image;
        ms__parallel(j->C * ms__conv_size(v), ms__conv_size(v), fold, j);
    }
    if (room) ms__free(room);
    return st;
}

// Sums each channel of g [N, O, S] over images and positions, in double.
static void bias_gradient(ms_tensor *db, const ms_tensor *g)
{
    int64_t N = g->shape[0], O = g->shape[1], S = 1;
    for (int d = 2; d < g->ndim; d++) S *= g->shape[d];
    for (int64_t o = 0; o < O; o++) {
        double sum = 0;
        for (int64_t n = 0; n < N; n++) {
            int64_t at = (n * O + o) * S;
            if (g->dtype == MS_F64)
                for (int64_t k = 0; k < S; k++) sum += ((const double *)ms__data(g))[at + k];
            else
                for (int64_t k = 0; k < S; k++) sum += ((const float *)ms__data(g))[at + k];
        }
        if (db->dtype == MS_F64) ((double *)ms__data(db))[o] = sum;
        else ((float *)ms__data(db))[o] = (float)sum;
    }
}

// ---- operators ------------------------------------------------------------------------------------

ms_status ms__cpu_conv(ms_call *c)
{
    ms_tensor *x = NULL, *w = NULL, *b = NULL, *y = c->out[0];
    job j = job_of(c, ms__conv_of(c->in[0], c->in[1], c->i), y->dtype);
    ms_status st = ms__contiguous(&x, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&w, c->in[1]);
    if (st == MS_OK && c->n_in > 2 && c->in[2]) st = ms__contiguous(&b, c->in[2]);
    if (st == MS_OK) st = output(&j, x, w, b, y);
    ms__release(b);
    ms__release(w);
    ms__release(x);
    return st;
}

// The tensors of a gradient in the dtype that it is computed in, float32 or float64.
typedef struct operands {
    int dtype;
    ms_tensor *g, *x, *w;     // inputs
    ms_tensor *dx, *dw, *db;  // outputs; NULL: not needed
} operands;

static ms_status hold(operands *o, ms_call *c)
{
    ms_tensor **in[] = { &o->g, &o->x, &o->w }, **out[] = { &o->dx, &o->dw, &o->db };
    *o = (operands) { .dtype = c->in[0]->dtype == MS_F64 ? MS_F64 : MS_F32 };
    for (int k = 0; k < 3; k++) MS_TRY(ms__as_dtype(in[k], c->in[k], o->dtype));
    for (int k = 0; k < 3; k++) MS_TRY(ms__work_on(out[k], ms__grad_out(c, k), o->dtype, c->op->name));
    return MS_OK;
}

static ms_status let_go(operands *o, ms_call *c, ms_status st)
{
    ms_tensor *out[] = { o->dx, o->dw, o->db };
    for (int k = 0; k < 3; k++) st = ms__put_back(ms__grad_out(c, k), out[k], st);
    ms__release(o->g);
    ms__release(o->x);
    ms__release(o->w);
    return st;
}

// Inputs: gradient, x, w. The last integer is the mask of needed gradients.
ms_status ms__cpu_conv_backward(ms_call *c)
{
    operands o;
    ms_status st = hold(&o, c);
    job j = job_of(c, ms__conv_of(c->in[1], c->in[2], c->i), o.dtype);
    if (st == MS_OK && o.db) bias_gradient(o.db, o.g);
    if (st == MS_OK && o.dw) st = weight_gradient(&j, o.g, o.x, o.dw);
    if (st == MS_OK && o.dx) st = image_gradient(&j, o.g, o.w, o.dx);
    return let_go(&o, c, st);
}

// Adds b[channel] to every element of y [N, C, S].
static void add_bias(ms_tensor *y, const ms_tensor *b)
{
    int64_t C = y->shape[1], rows = y->shape[0] * C, S = rows ? y->numel / rows : 0;
    for (int64_t r = 0; r < rows; r++) {
        if (y->dtype == MS_F64)
            for (int64_t k = 0; k < S; k++) ((double *)ms__data(y))[r * S + k] += ((const double *)ms__data(b))[r % C];
        else
            for (int64_t k = 0; k < S; k++) ((float *)ms__data(y))[r * S + k] += ((const float *)ms__data(b))[r % C];
    }
}

ms_status ms__cpu_conv_transpose(ms_call *c)
{
    ms_tensor *x = NULL, *w = NULL, *b = NULL, *y = NULL;
    int dtype = c->in[0]->dtype == MS_F64 ? MS_F64 : MS_F32;
    job j = job_of(c, ms__conv_transposed_of(c->out[0], c->in[1], c->i), dtype);
    ms_status st = ms__as_dtype(&x, c->in[0], dtype);
    if (st == MS_OK) st = ms__as_dtype(&w, c->in[1], dtype);
    if (st == MS_OK && c->n_in > 2 && c->in[2]) st = ms__as_dtype(&b, c->in[2], dtype);
    if (st == MS_OK) st = ms__work_on(&y, c->out[0], dtype, j.what);
    if (st == MS_OK) st = image_gradient(&j, x, w, y);
    if (st == MS_OK && b) add_bias(y, b);
    st = ms__put_back(c->out[0], y, st);
    ms__release(b);
    ms__release(w);
    ms__release(x);
    return st;
}

// Inputs: gradient, x, w. The last integer is the mask of needed gradients.
ms_status ms__cpu_conv_transpose_backward(ms_call *c)
{
    operands o;
    ms_status st = hold(&o, c);
    job j = job_of(c, ms__conv_transposed_of(c->in[0], c->in[2], c->i), o.dtype);
    if (st == MS_OK && o.db) bias_gradient(o.db, o.g);
    if (st == MS_OK && o.dw) st = weight_gradient(&j, o.x, o.g, o.dw);
    if (st == MS_OK && o.dx) st = output(&j, o.g, o.w, NULL, o.dx);
    return let_go(&o, c, st);
}
