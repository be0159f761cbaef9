// SPDX-License-Identifier: MIT
// cpu/product/conv.c -- conv2d on the CPU. Each image is unfolded to a matrix with one row per kernel element (im2col),
// and one matrix product per group computes the output, in every dtype and with the guarantees of products (fixed order
// of sums, any number of threads). For a 1 x 1 kernel with stride 1, no padding and no bias, the image itself is that
// matrix, and nothing is copied. oneDNN's convolutions lack float64 and sum in a different order; convolutions do not
// limit the speed of the example models.
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
    const char *x;  // channels of the image that belong to this group
    char *cols;     // K x L
    const void *from;
    void *to;  // add_to: from is added to it; fold: the gradient of x's channels
} job;

// ---- image to columns and back --------------------------------------------------------------------

// Writes row r of the matrix: the pixels of channel r / (kh kw) that are multiplied with kernel element r % (kh kw).
static void unfold_row(const job *j, int64_t r)
{
    const ms_conv *v = &j->v;
    int64_t c = r / (v->kh * v->kw), kh = r / v->kw % v->kh, kw = r % v->kw, shift = kw * v->dw - v->left;
    const char *image = j->x + (size_t)(c * v->h * v->w) * j->size;
    char *to = j->cols + (size_t)(r * v->oh * v->ow) * j->size;
    for (int64_t oh = 0; oh < v->oh; oh++, to += (size_t)v->ow * j->size) {
        int64_t h = oh * v->sh - v->top + kh * v->dh;
        if (h < 0 || h >= v->h) {
            memset(to, 0, (size_t)v->ow * j->size);
            continue;
        }
        const char *row = image + (size_t)(h * v->w) * j->size;
        // Output columns [first, last) read the image: column o reads image column o * sw + shift. The remaining
        // columns read padding.
        int64_t first = shift < 0 ? (-shift + v->sw - 1) / v->sw : 0,
                last = v->w > shift ? (v->w - shift + v->sw - 1) / v->sw : 0;
        if (last > v->ow) last = v->ow;
        if (first > last) first = last;
        memset(to, 0, (size_t)first * j->size);
        memset(to + (size_t)last * j->size, 0, (size_t)(v->ow - last) * j->size);
        if (first == last) continue;
        const char *at = row + (size_t)(first * v->sw + shift) * j->size;
        int64_t n = last - first, s = v->sw;
        if (s == 1) memcpy(to + (size_t)first * j->size, at, (size_t)n * j->size);
        else if (j->size == 8)
            for (int64_t k = 0; k < n; k++) ((uint64_t *)to)[first + k] = ((const uint64_t *)at)[k * s];
        else if (j->size == 4)
            for (int64_t k = 0; k < n; k++) ((uint32_t *)to)[first + k] = ((const uint32_t *)at)[k * s];
        else
            for (int64_t k = 0; k < n; k++) ((uint16_t *)to)[first + k] = ((const uint16_t *)at)[k * s];
    }
}

static void unfold(void *arg, int64_t first, int64_t last, int64_t block)
{
    const job *j = arg;
    int64_t L = j->v.oh * j->v.ow;
    (void)block;
    for (int64_t r = first / L; r < last / L; r++) unfold_row(j, r);
}

// The gradient of a channel of the image: adds the matrix rows of its kernel elements back to the pixels, in order.
#define FOLD(REAL, name)                                                                                            \
    static void name(const job *j, int64_t c)                                                                       \
    {                                                                                                               \
        const ms_conv *v = &j->v;                                                                                   \
        REAL *image = (REAL *)j->to + c * v->h * v->w;                                                              \
        for (int64_t k = 0; k < v->h * v->w; k++) image[k] = 0;                                                     \
        for (int64_t e = 0; e < v->kh * v->kw; e++) {                                                               \
            const REAL *from = (const REAL *)j->cols + (c * v->kh * v->kw + e) * v->oh * v->ow;                     \
            int64_t kh = e / v->kw, shift = e % v->kw * v->dw - v->left;                                            \
            int64_t first = shift < 0 ? (-shift + v->sw - 1) / v->sw : 0,                                           \
                    last = v->w > shift ? (v->w - shift + v->sw - 1) / v->sw : 0;                                   \
            if (last > v->ow) last = v->ow;                                                                         \
            for (int64_t oh = 0; oh < v->oh; oh++) {                                                                \
                int64_t h = oh * v->sh - v->top + kh * v->dh;                                                       \
                if (h < 0 || h >= v->h) continue;                                                                   \
                for (int64_t o = first; o < last; o++) image[h * v->w + o * v->sw + shift] += from[oh * v->ow + o]; \
            }                                                                                                       \
        }                                                                                                           \
    }
FOLD(float, fold_f32)
FOLD(double, fold_f64)

static void fold(void *arg, int64_t first, int64_t last, int64_t block)
{
    const job *j = arg;
    int64_t each = j->v.h * j->v.w;
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
static const void *columns(job *j, const void *x, void *room, int64_t n, int64_t g)
{
    const ms_conv *v = &j->v;
    int64_t C = v->in / v->groups, L = v->oh * v->ow, K = C * v->kh * v->kw;
    j->x = (const char *)x + (size_t)((n * v->in + g * C) * v->h * v->w) * j->size;
    if (!room) return j->x;
    j->cols = room;
    ms__parallel(K * L, (K * L < 8192 ? K : (8192 + L - 1) / L) * L, unfold, j);
    return room;
}

// ---- forward --------------------------------------------------------------------------------------

// The weight with the bias as an additional column, O x (K + 1), and the row of ones that multiplies this column.
static void widen(const job *j, char *wide, char *ones, const ms_tensor *w, const ms_tensor *b)
{
    static const float one = 1;
    int64_t K = w->numel / j->v.out, L = j->v.oh * j->v.ow;
    for (int64_t o = 0; o < j->v.out; o++) {
        memcpy(wide + (size_t)(o * (K + 1)) * j->size, (const char *)ms__data(w) + (size_t)(o * K) * j->size,
               (size_t)K * j->size);
        memcpy(wide + (size_t)(o * (K + 1) + K) * j->size, (const char *)ms__data(b) + (size_t)o * j->size, j->size);
    }
    for (int64_t k = 0; k < L; k++) {
        if (j->size == 8) ((double *)ones)[k] = 1;
        else if (j->size == 4) ((float *)ones)[k] = one;
        else if (j->dtype == MS_BF16) ((ms_bf16 *)ones)[k] = ms_float_to_bf16(one);
        else ((ms_f16 *)ones)[k] = ms_float_to_f16(one);
    }
}

ms_status ms__cpu_conv2d(ms_call *c)
{
    ms_tensor *x = NULL, *w = NULL, *b = NULL, *y = c->out[0];
    ms_block *room = NULL, *wide = NULL;
    job j = { .v = ms__conv_of(c->in[0], c->in[1], c->i), .size = (size_t)ms__dtype_size(y->dtype), .dtype = y->dtype };
    const ms_conv *v = &j.v;
    int64_t C = v->in / v->groups, M = v->out / v->groups, K = C * v->kh * v->kw, L = v->oh * v->ow;
    bool bias = c->n_in > 2 && c->in[2], copy = bias || !ms__conv_pointwise(v);
    if (y->numel == 0) return MS_OK;
    ms_status st = ms__contiguous(&x, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&w, c->in[1]);
    if (st == MS_OK && bias) st = ms__contiguous(&b, c->in[2]);
    if (st == MS_OK && copy) st = ms__alloc(&room, MS_CPU, (size_t)((K + bias) * L) * j.size, "conv2d");
    if (st == MS_OK && bias) st = ms__alloc(&wide, MS_CPU, (size_t)(v->out * (K + 1)) * j.size, "conv2d");
    if (st == MS_OK && bias) widen(&j, wide->data, (char *)room->data + (size_t)(K * L) * j.size, w, b);
    for (int64_t k = 0; k < v->n * v->groups && st == MS_OK; k++) {
        int64_t n = k / v->groups, g = k % v->groups;
        ms_gemm p = ms__gemm_of("conv2d", j.dtype, M, L, K + bias);
        p.a_rs = K + bias, p.a_cs = 1, p.b_rs = L, p.b_cs = 1;
        p.a = (const char *)(bias ? wide->data : ms__data(w)) + (size_t)(g * M * (K + bias)) * j.size;
        p.b = columns(&j, ms__data(x), room ? room->data : NULL, n, g);
        p.c = (char *)ms__data(y) + (size_t)((n * v->out + g * M) * L) * j.size;
        st = ms__gemm(&p);
    }
    if (wide) ms__free(wide);
    if (room) ms__free(room);
    ms__release(b);
    ms__release(w);
    ms__release(x);
    return st;
}

// ---- backward -------------------------------------------------------------------------------------

// Sums each channel of g over images and positions, in double.
static void bias_gradient(const ms_conv *v, ms_tensor *db, const ms_tensor *g)
{
    int64_t L = v->oh * v->ow;
    for (int64_t o = 0; o < v->out; o++) {
        double sum = 0;
        for (int64_t n = 0; n < v->n; n++) {
            int64_t at = (n * v->out + o) * L;
            if (g->dtype == MS_F64)
                for (int64_t k = 0; k < L; k++) sum += ((const double *)ms__data(g))[at + k];
            else
                for (int64_t k = 0; k < L; k++) sum += ((const float *)ms__data(g))[at + k];
        }
        if (db->dtype == MS_F64) ((double *)ms__data(db))[o] = sum;
        else ((float *)ms__data(db))[o] = (float)sum;
    }
}

// Inputs: gradient, x, w. The last integer is the mask of needed gradients. dx = folded W^T g; dw = g columns^T, summed
// over images.
ms_status ms__cpu_conv2d_backward(ms_call *c)
{
    ms_tensor *g = NULL, *x = NULL, *w = NULL, *dx = NULL, *dw = NULL, *db = NULL;
    ms_block *room = NULL, *part = NULL;
    int dtype = c->in[0]->dtype == MS_F64 ? MS_F64 : MS_F32;
    job j = { .v = ms__conv_of(c->in[1], c->in[2], c->i), .size = (size_t)ms__dtype_size(dtype), .dtype = dtype };
    const ms_conv *v = &j.v;
    int64_t C = v->in / v->groups, M = v->out / v->groups, K = C * v->kh * v->kw, L = v->oh * v->ow;
    bool copy = !ms__conv_pointwise(v);
    ms_status st = ms__as_dtype(&g, c->in[0], dtype);
    if (st == MS_OK) st = ms__as_dtype(&x, c->in[1], dtype);
    if (st == MS_OK) st = ms__as_dtype(&w, c->in[2], dtype);
    if (st == MS_OK) st = ms__work_on(&dx, ms__grad_out(c, 0), dtype, c->op->name);
    if (st == MS_OK) st = ms__work_on(&dw, ms__grad_out(c, 1), dtype, c->op->name);
    if (st == MS_OK) st = ms__work_on(&db, ms__grad_out(c, 2), dtype, c->op->name);
    if (st == MS_OK && dw && v->n == 0) st = ms__zero(dw);
    if (st == MS_OK && dx && M == 0) st = ms__zero(dx);
    if (st == MS_OK && K * L > 0) st = ms__alloc(&room, MS_CPU, (size_t)(K * L) * j.size, "conv2d_backward");
    if (st == MS_OK && dw && v->n > 1) st = ms__alloc(&part, MS_CPU, (size_t)(M * K) * j.size + 1, "conv2d_backward");
    if (st == MS_OK && db) bias_gradient(v, db, g);
    for (int64_t k = 0; k < v->n * v->groups && st == MS_OK && K * L > 0 && M > 0; k++) {
        int64_t n = k / v->groups, group = k % v->groups;
        const char *gradient = (const char *)ms__data(g) + (size_t)((n * v->out + group * M) * L) * j.size;
        if (dw) {
            char *sum = (char *)ms__data(dw) + (size_t)(group * M * K) * j.size;
            ms_gemm p = ms__gemm_of("conv2d_backward", dtype, M, K, L);
            p.a = gradient, p.a_rs = L, p.a_cs = 1;
            p.b = columns(&j, ms__data(x), copy ? room->data : NULL, n, group), p.b_rs = 1, p.b_cs = L;
            p.c = n ? part->data : sum;
            st = ms__gemm(&p);
            if (st != MS_OK) break;
            if (n) {
                j.from = part->data;
                j.to = sum;
                ms__parallel(M * K, 32768, add_to, &j);
            }
        }
        if (dx) {
            char *image = (char *)ms__data(dx) + (size_t)((n * v->in + group * C) * v->h * v->w) * j.size;
            ms_gemm p = ms__gemm_of("conv2d_backward", dtype, K, L, M);
            p.a = (const char *)ms__data(w) + (size_t)(group * M * K) * j.size, p.a_rs = 1, p.a_cs = K;
            p.b = gradient, p.b_rs = L, p.b_cs = 1;
            p.c = copy ? room->data : image;
            st = ms__gemm(&p);
            if (st != MS_OK || !copy) continue;
            j.cols = room->data;
            j.to = image;
            ms__parallel(C * v->h * v->w, v->h * v->w, fold, &j);
        }
    }
    st = ms__put_back(ms__grad_out(c, 2), db, st);
    st = ms__put_back(ms__grad_out(c, 1), dw, st);
    st = ms__put_back(ms__grad_out(c, 0), dx, st);
    if (part) ms__free(part);
    if (room) ms__free(room);
    ms__release(w);
    ms__release(x);
    ms__release(g);
    return st;
}
