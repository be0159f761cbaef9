// SPDX-License-Identifier: MIT
// cpu/product/conv.c -- convolutions on the CPU. oneDNN computes large ones in float32, where it has a fast kernel
// (cpu/product/onednn_conv.c); conv_depthwise.c those whose groups have one input channel. For all others each image is
// unfolded to a matrix with one row per kernel element (im2col), and one matrix product per group computes the output,
// in every float dtype and with the guarantees of products (fixed order of sums, any number of threads). The matrices
// of small images are multiplied side by side, as few as give a product COLUMNS columns or more; their number depends
// on shapes alone. For a kernel of size 1 with stride 1, no padding and no bias, an image that is multiplied alone is
// itself its matrix, and nothing is copied.
//
// A convolution (rows/spatial/conv.h) has three parts: its output, the gradient of its weight, and that of its image. A
// transposed convolution computes the third from its input, and its gradients are the other two.
//
// Sizes: C = input channels of a group, K = C x kernel elements, L = output positions, M = output channels of a group.
// A bias is stored as an additional column of the weight and a row of ones in the matrix, so that half types round
// once. Gradients of half types are computed in float32.
#include "rows/spatial/conv.h"
#include "cpu/product/conv_work.h"
#include "cpu/product/product.h"
#include "rows/grad.h"
#include "rows/ops.h"
#include "cpu/rows/layers.h"
#include "cpu/rows/work.h"

enum { COLUMNS = 512 };

typedef struct job {
    ms_conv v;
    size_t size;  // size of an element in bytes
    int dtype;
    const char *what;  // the operator's name
    int64_t C, M, K, L;
    int64_t at_once;              // the most images that are unfolded at a time, their matrices side by side
    int64_t first, count, group;  // the current images, and the group of channels
    int64_t columns;              // count x L: columns of the current matrices
    const char *x;                // the images
    char *cols;                   // K x columns: the current images, unfolded (im2col)
    char *rows;                   // M x columns: the group's output channels of the current images (move_rows)
    const void *from;
    void *to;  // add_to: `from` is added to `to`; fold: `to` is the gradient of x
} job;

static job conv_job_of(const ms_call *c, ms_conv v, int dtype)
{
    job j = { .v = v, .size = (size_t)ms__dtype_size(dtype), .dtype = dtype, .what = c->op->name };
    j.C = v.in / v.groups, j.M = v.out / v.groups, j.K = j.C * ms__conv_kernel(&v), j.L = ms__conv_positions(&v);
    j.at_once = j.L ? (COLUMNS + j.L - 1) / j.L : 1;
    if (j.at_once > v.n) j.at_once = v.n < 1 ? 1 : v.n;
    return j;
}

// Moves to product k: there is one per group for every `at_once` images. Returns false when there are no more.
static bool next_product(job *j, int64_t k)
{
    j->first = k / j->v.groups * j->at_once;
    j->group = k % j->v.groups;
    j->count = j->v.n - j->first < j->at_once ? j->v.n - j->first : j->at_once;
    j->columns = j->count * j->L;
    return j->first < j->v.n;
}

// Whether the images themselves serve as the unfolded matrices.
static bool is_own_matrix(const job *j) { return j->at_once == 1 && ms__conv_pointwise(&j->v); }

static char *element_at(const job *j, const ms_tensor *t, int64_t at)
{
    return (char *)ms__data(t) + (size_t)at * j->size;
}

// ---- image to columns and back --------------------------------------------------------------------

// The output columns [first, last) that read the image with a column of the kernel: column o reads image column
// o * sw + shift. The remaining columns read padding.
typedef struct span {
    int64_t first, last, shift;
} span;

static span columns_span(const ms_conv *v, int64_t kw)
{
    int64_t shift = kw * v->dw - v->left;
    span s = { shift < 0 ? (-shift + v->sw - 1) / v->sw : 0, v->w > shift ? (v->w - shift + v->sw - 1) / v->sw : 0,
               shift };
    if (s.last > v->ow) s.last = v->ow;
    if (s.first > s.last) s.first = s.last;
    return s;
}

// Writes one row of one image's matrix. Row r has the pixels of channel r / kernel that are multiplied with kernel
// element r % kernel, where `kernel` is the number of kernel elements.
#define UNFOLD_ROW(T)                                                                                    \
    static MS_KERNEL void unfold_##T(const job *j, int64_t image_row)                                    \
    {                                                                                                    \
        const ms_conv *v = &j->v;                                                                        \
        int64_t r = image_row % j->K, n = image_row / j->K, kernel = ms__conv_kernel(v), e = r % kernel; \
        int64_t s = v->sw, ow = v->ow, channel = (j->first + n) * v->in + j->group * j->C + r / kernel;  \
        int64_t z = e / (v->kh * v->kw) * v->dd - v->front, y = e / v->kw % v->kh * v->dh - v->top;      \
        span in = columns_span(v, e % v->kw);                                                            \
        T *restrict to = (T *)j->cols + r * j->columns + n * j->L;                                       \
        for (int64_t od = 0; od < v->od; od++)                                                           \
            for (int64_t oh = 0; oh < v->oh; oh++, to += ow) {                                           \
                int64_t d = od * v->sd + z, h = oh * v->sh + y;                                          \
                bool inside = d >= 0 && d < v->d && h >= 0 && h < v->h;                                  \
                int64_t first = inside ? in.first : ow, last = inside ? in.last : ow;                    \
                const T *x = (const T *)j->x + ((channel * v->d + d) * v->h + h) * v->w + in.shift;      \
                for (int64_t k = 0; k < first; k++) to[k] = 0;                                           \
                if (s == 1)                                                                              \
                    for (int64_t k = first; k < last; k++) to[k] = x[k];                                 \
                else                                                                                     \
                    for (int64_t k = first; k < last; k++) to[k] = x[k * s];                             \
                for (int64_t k = last; k < ow; k++) to[k] = 0;                                           \
            }                                                                                            \
    }
UNFOLD_ROW(uint16_t)
UNFOLD_ROW(uint32_t)
UNFOLD_ROW(uint64_t)

static void unfold(void *arg, int64_t first, int64_t last, int64_t block)
{
    const job *j = arg;
    (void)block;
    for (int64_t r = first / j->L; r < last / j->L; r++) {
        if (j->size == 2) unfold_uint16_t(j, r);
        else if (j->size == 4) unfold_uint32_t(j, r);
        else unfold_uint64_t(j, r);
    }
}

// The gradient of a channel of an image: adds the matrix rows of its kernel elements back to the pixels, in order.
#define FOLD(REAL, name)                                                                                  \
    static MS_KERNEL void name(const job *j, int64_t image_channel)                                       \
    {                                                                                                     \
        const ms_conv *v = &j->v;                                                                         \
        int64_t size = ms__conv_size(v), kernel = ms__conv_kernel(v), c = image_channel % j->C,           \
                n = image_channel / j->C, s = v->sw;                                                      \
        REAL *restrict image = (REAL *)j->to + ((j->first + n) * v->in + j->group * j->C + c) * size;     \
        for (int64_t k = 0; k < size; k++) image[k] = 0;                                                  \
        for (int64_t e = 0; e < kernel; e++) {                                                            \
            const REAL *restrict from = (const REAL *)j->cols + (c * kernel + e) * j->columns + n * j->L; \
            int64_t z = e / (v->kh * v->kw) * v->dd - v->front, y = e / v->kw % v->kh * v->dh - v->top;   \
            span in = columns_span(v, e % v->kw);                                                         \
            for (int64_t od = 0; od < v->od; od++)                                                        \
                for (int64_t oh = 0; oh < v->oh; oh++, from += v->ow) {                                   \
                    int64_t d = od * v->sd + z, h = oh * v->sh + y;                                       \
                    if (d < 0 || d >= v->d || h < 0 || h >= v->h) continue;                               \
                    REAL *to = image + (d * v->h + h) * v->w + in.shift;                                  \
                    if (s == 1)                                                                           \
                        for (int64_t k = in.first; k < in.last; k++) to[k] += from[k];                    \
                    else                                                                                  \
                        for (int64_t k = in.first; k < in.last; k++) to[k * s] += from[k];                \
                }                                                                                         \
        }                                                                                                 \
    }
FOLD(float, fold_f32)
FOLD(double, fold_f64)

static void fold_columns(void *arg, int64_t first, int64_t last, int64_t block)
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

// Returns the unfolded matrices of the current images and group, stored in room; or the image itself when room is NULL.
static const void *unfold_columns(job *j, const ms_tensor *x, void *room)
{
    if (!room) return element_at(j, x, (j->first * j->v.in + j->group * j->C) * ms__conv_size(&j->v));
    j->x = ms__data(x);
    j->cols = room;
    ms__parallel(j->count * j->K * j->L, (j->K * j->L < 8192 ? j->K : (8192 + j->L - 1) / j->L) * j->L, unfold, j);
    return room;
}

// Copies the group's channels of the current images of t [N, out, ...] to j->rows, a matrix M x columns, or, if `back`
// is set, from j->rows to t.
static void move_rows(job *j, const ms_tensor *t, bool back)
{
    for (int64_t n = 0; n < j->count; n++)
        for (int64_t m = 0; m < j->M; m++) {
            char *whole = element_at(j, t, ((j->first + n) * j->v.out + j->group * j->M + m) * j->L),
                 *part = j->rows + (size_t)(m * j->columns + n * j->L) * j->size;
            memcpy(back ? whole : part, back ? part : whole, (size_t)j->L * j->size);
        }
}

// The group's channels of the current images of t, as one matrix M x columns: in place for one image, otherwise copied
// to room.
static char *gather_outputs(job *j, const ms_tensor *t, void *room)
{
    if (j->count == 1) return element_at(j, t, (j->first * j->v.out + j->group * j->M) * j->L);
    j->rows = room;
    move_rows(j, t, false);
    return room;
}

// Allocates *cols, the unfolded matrices and `more` additional rows, unless more is 0 and the images serve as matrices;
// and *rows, the matrix of move_rows, if several images are computed at once.
static ms_status make_columns_room(const job *j, ms_block **cols, ms_block **rows, int64_t more)
{
    size_t wide = (size_t)(j->at_once * j->L) * j->size;
    if (more || !is_own_matrix(j)) MS_TRY(ms__alloc_scratch(cols, (size_t)(j->K + more) * wide, j->what));
    return j->at_once > 1 ? ms__alloc_scratch(rows, (size_t)j->M * wide, j->what) : MS_OK;
}

// Describes a convolution to oneDNN. `result` says which of x (image), w (weight) and y (output) is computed.
static ms_conv_work work_of(const job *j, int result, const ms_tensor *x, const ms_tensor *w, const ms_tensor *y)
{
    return (ms_conv_work) { .v = &j->v,
                            .dtype = j->dtype,
                            .result = result,
                            .operands = { ms__data(x), ms__data(w), ms__data(y) },
                            .room = (size_t)(j->K * j->at_once * j->L) * j->size,
                            .what = j->what };
}

static ms_status directly(const ms_conv_work *c, bool *done)
{
    MS_TRY(ms__conv_depthwise(c, done));
    return *done ? MS_OK : ms__conv_onednn(c, done);
}

// ---- the output -----------------------------------------------------------------------------------

// The weight with the bias as an additional column, O x (K + 1).
static void append_bias(const job *j, char *wide, const ms_tensor *w, const ms_tensor *b)
{
    int64_t K = j->K;
    for (int64_t o = 0; o < j->v.out; o++) {
        memcpy(wide + (size_t)(o * (K + 1)) * j->size, element_at(j, w, o * K), (size_t)K * j->size);
        memcpy(wide + (size_t)(o * (K + 1) + K) * j->size, element_at(j, b, o), j->size);
    }
}

// Fills the last row of the unfolded matrix with ones: the product multiplies it with the bias.
static void fill_ones(const job *j, char *ones)
{
    static const float one = 1;
    for (int64_t k = 0; k < j->columns; k++) {
        if (j->size == 8) ((double *)ones)[k] = 1;
        else if (j->size == 4) ((float *)ones)[k] = one;
        else if (j->dtype == MS_BF16) ((ms_bf16 *)ones)[k] = ms_float_to_bf16(one);
        else ((ms_f16 *)ones)[k] = ms_float_to_f16(one);
    }
}

// y = w columns (+ b, unless it is NULL). All are contiguous, of j's dtype.
static ms_status conv_output(job *j, const ms_tensor *x, const ms_tensor *w, const ms_tensor *b, ms_tensor *y)
{
    ms_block *room = NULL, *rows = NULL, *wide = NULL;
    int64_t K = j->K + (b != NULL);
    bool done;
    if (y->numel == 0) return MS_OK;
    ms_conv_work whole = work_of(j, MS_CONV_OUTPUT, x, w, y);
    if (b) whole.bias = ms__data(b);
    ms_status st = directly(&whole, &done);
    if (st != MS_OK || done) return st;
    st = make_columns_room(j, &room, &rows, b != NULL);
    if (st == MS_OK && b) st = ms__alloc_scratch(&wide, (size_t)(j->v.out * K) * j->size, j->what);
    if (st == MS_OK && b) append_bias(j, wide->data, w, b);
    for (int64_t k = 0; st == MS_OK && next_product(j, k); k++) {
        ms_gemm p = ms__gemm_of(j->what, j->dtype, j->M, j->columns, K);
        p.a_rs = K, p.a_cs = 1, p.b_rs = j->columns, p.b_cs = 1;
        p.a = (const char *)(b ? wide->data : ms__data(w)) + (size_t)(j->group * j->M * K) * j->size;
        p.b = unfold_columns(j, x, room ? room->data : NULL);
        if (b) fill_ones(j, (char *)room->data + (size_t)(j->K * j->columns) * j->size);
        p.c = j->count > 1 ? rows->data : element_at(j, y, (j->first * j->v.out + j->group * j->M) * j->L);
        st = ms__gemm(&p);
        j->rows = p.c;
        if (st == MS_OK && j->count > 1) move_rows(j, y, true);
    }
    if (wide) ms__free(wide);
    if (rows) ms__free(rows);
    if (room) ms__free(room);
    return st;
}

// ---- gradients ------------------------------------------------------------------------------------

// dw = g columns^T, summed over images, in float32 or float64. g is the gradient of the output.
static ms_status conv_weight_gradient(job *j, const ms_tensor *g, const ms_tensor *x, ms_tensor *dw)
{
    ms_block *room = NULL, *rows = NULL, *part = NULL;
    if (dw->numel == 0) return MS_OK;
    if (j->v.n == 0 || j->L == 0) return ms__zero(dw);
    bool done;
    const ms_conv_work whole = work_of(j, MS_CONV_WEIGHT, x, dw, g);
    ms_status st = directly(&whole, &done);
    if (st != MS_OK || done) return st;
    st = make_columns_room(j, &room, &rows, 0);
    if (st == MS_OK && j->v.n > j->at_once) st = ms__alloc_scratch(&part, (size_t)(j->M * j->K) * j->size, j->what);
    for (int64_t k = 0; st == MS_OK && next_product(j, k); k++) {
        char *sum = element_at(j, dw, j->group * j->M * j->K);
        ms_gemm p = ms__gemm_of(j->what, j->dtype, j->M, j->K, j->columns);
        p.a = gather_outputs(j, g, rows ? rows->data : NULL), p.a_rs = j->columns, p.a_cs = 1;
        p.b = unfold_columns(j, x, room ? room->data : NULL), p.b_rs = 1, p.b_cs = j->columns;
        p.c = j->first ? part->data : sum;
        st = ms__gemm(&p);
        if (st != MS_OK || j->first == 0) continue;
        j->from = part->data;
        j->to = sum;
        ms__parallel(j->M * j->K, 32768, add_to, j);
    }
    if (part) ms__free(part);
    if (rows) ms__free(rows);
    if (room) ms__free(room);
    return st;
}

// dx = w^T g, folded, in float32 or float64. g is the gradient of the output.
static ms_status conv_image_gradient(job *j, const ms_tensor *g, const ms_tensor *w, ms_tensor *dx)
{
    ms_block *room = NULL, *rows = NULL;
    if (dx->numel == 0) return MS_OK;
    if (j->M == 0 || j->L == 0) return ms__zero(dx);
    bool done;
    const ms_conv_work whole = work_of(j, MS_CONV_IMAGE, dx, w, g);
    ms_status st = directly(&whole, &done);
    if (st != MS_OK || done) return st;
    st = make_columns_room(j, &room, &rows, 0);
    for (int64_t k = 0; st == MS_OK && next_product(j, k); k++) {
        ms_gemm p = ms__gemm_of(j->what, j->dtype, j->K, j->columns, j->M);
        p.a = element_at(j, w, j->group * j->M * j->K), p.a_rs = 1, p.a_cs = j->K;
        p.b = gather_outputs(j, g, rows ? rows->data : NULL), p.b_rs = j->columns, p.b_cs = 1;
        p.c = room ? room->data : element_at(j, dx, (j->first * j->v.in + j->group * j->C) * ms__conv_size(&j->v));
        st = ms__gemm(&p);
        if (st != MS_OK || !room) continue;
        j->cols = room->data;
        j->to = ms__data(dx);
        ms__parallel(j->count * j->C * ms__conv_size(&j->v), ms__conv_size(&j->v), fold_columns, j);
    }
    if (rows) ms__free(rows);
    if (room) ms__free(room);
    return st;
}

// Sums each channel of g [N, O, S] over images and positions, in double.
static void conv_bias_gradient(ms_tensor *db, const ms_tensor *g)
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
    job j = conv_job_of(c, ms__conv_of(c->in[0], c->in[1], c->i), y->dtype);
    ms_status st = ms__contiguous(&x, c->in[0]);
    if (st == MS_OK) st = ms__contiguous(&w, c->in[1]);
    if (st == MS_OK && c->n_in > 2 && c->in[2]) st = ms__contiguous(&b, c->in[2]);
    if (st == MS_OK) st = conv_output(&j, x, w, b, y);
    ms__release(b);
    ms__release(w);
    ms__release(x);
    return st;
}

// The tensors of a gradient in the dtype that it is computed in, float32 or float64.
typedef struct operands {
    int dtype;
    ms_tensor *g, *x, *w;     // inputs
    ms_tensor *dx, *dw, *db;  // outputs; NULL if they are not needed
} operands;

static ms_status hold_operands(operands *o, ms_call *c)
{
    ms_tensor **in[] = { &o->g, &o->x, &o->w }, **out[] = { &o->dx, &o->dw, &o->db };
    *o = (operands) { .dtype = c->in[0]->dtype == MS_F64 ? MS_F64 : MS_F32 };
    for (int k = 0; k < 3; k++) MS_TRY(ms__as_dtype(in[k], c->in[k], o->dtype));
    for (int k = 0; k < 3; k++) MS_TRY(ms__work_on(out[k], ms__grad_out(c, k), o->dtype, c->op->name));
    return MS_OK;
}

static ms_status release_operands(operands *o, ms_call *c, ms_status st)
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
    ms_status st = hold_operands(&o, c);
    job j = conv_job_of(c, ms__conv_of(c->in[1], c->in[2], c->i), o.dtype);
    if (st == MS_OK && o.db) conv_bias_gradient(o.db, o.g);
    if (st == MS_OK && o.dw) st = conv_weight_gradient(&j, o.g, o.x, o.dw);
    if (st == MS_OK && o.dx) st = conv_image_gradient(&j, o.g, o.w, o.dx);
    return release_operands(&o, c, st);
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
    job j = conv_job_of(c, ms__conv_transposed_of(c->out[0], c->in[1], c->i), dtype);
    ms_status st = ms__as_dtype(&x, c->in[0], dtype);
    if (st == MS_OK) st = ms__as_dtype(&w, c->in[1], dtype);
    if (st == MS_OK && c->n_in > 2 && c->in[2]) st = ms__as_dtype(&b, c->in[2], dtype);
    if (st == MS_OK) st = ms__work_on(&y, c->out[0], dtype, j.what);
    if (st == MS_OK) st = conv_image_gradient(&j, x, w, y);
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
    ms_status st = hold_operands(&o, c);
    job j = conv_job_of(c, ms__conv_transposed_of(c->in[0], c->in[2], c->i), o.dtype);
    if (st == MS_OK && o.db) conv_bias_gradient(o.db, o.g);
    if (st == MS_OK && o.dw) st = conv_weight_gradient(&j, o.x, o.g, o.dw);
    if (st == MS_OK && o.dx) st = conv_output(&j, o.g, o.w, NULL, o.dx);
    return release_operands(&o, c, st);
}
