// SPDX-License-Identifier: MIT
// cpu/elementwise/loops.c -- the elementwise engine (loops.h): conversions and iteration over strided operands.
#include "cpu/elementwise/loops.h"

// ---- conversions: every dtype to and from every computing type ----

#define ID(x) (x)
#define TRUTH(x) ((x) != 0)
#define NOT0_F16(x) (((x).bits & 0x7fffu) != 0)
// Conversions out of int64's range are undefined in C. NaN and numbers out of range become INT64_MIN, as on x86.
#define TO_I64(x) ((x) >= -0x1p63 && (x) < 0x1p63 ? (int64_t)(x) : INT64_MIN)
#define F16_I64(x) TO_I64(ms_f16_to_float(x))
#define BF16_I64(x) TO_I64(ms_bf16_to_float(x))
#define D_F16(x) ms_float_to_f16((float)(x))
#define D_BF16(x) ms_float_to_bf16((float)(x))

#define LOAD(name, src_t, dst_t, conv)                                                              \
    static MS_KERNEL void load_##name(int64_t n, void *dst, const char *src, int64_t stride)        \
    {                                                                                               \
        dst_t *restrict d = dst;                                                                    \
        if (stride == (int64_t)sizeof(src_t)) {                                                     \
            const src_t *restrict s = (const src_t *)src;                                           \
            for (int64_t k = 0; k < n; k++) d[k] = (dst_t)conv(s[k]);                               \
        } else if (stride == 0) {                                                                   \
            dst_t v = (dst_t)conv(*(const src_t *)src);                                             \
            for (int64_t k = 0; k < n; k++) d[k] = v;                                               \
        } else {                                                                                    \
            for (int64_t k = 0; k < n; k++) d[k] = (dst_t)conv(*(const src_t *)(src + k * stride)); \
        }                                                                                           \
    }
#define STORE(name, dst_t, src_t, conv)                                                       \
    static MS_KERNEL void store_##name(int64_t n, char *dst, int64_t stride, const void *src) \
    {                                                                                         \
        const src_t *restrict s = src;                                                        \
        if (stride == (int64_t)sizeof(dst_t)) {                                               \
            dst_t *restrict d = (dst_t *)dst;                                                 \
            for (int64_t k = 0; k < n; k++) d[k] = conv(s[k]);                                \
        } else {                                                                              \
            for (int64_t k = 0; k < n; k++) *(dst_t *)(dst + k * stride) = conv(s[k]);        \
        }                                                                                     \
    }
// The same for conversions between numbers and int64 for which AVX2 has no instruction: 64 elements that are all
// NEAR(x) go through int32 instead.
#define NEAR_F32(x) ((x) > -0x1p31f && (x) < 0x1p31f)
#define NEAR_I64(x) ((x) == (int32_t)(x))
#define BY_I32(dst_t, NEAR, conv)                                             \
    int64_t k = 0;                                                            \
    for (; k + 64 <= n; k += 64) {                                            \
        int far = 0;                                                          \
        for (int l = 0; l < 64; l++) far |= !NEAR(s[k + l]);                  \
        if (far)                                                              \
            for (int l = 0; l < 64; l++) d[k + l] = conv(s[k + l]);           \
        else                                                                  \
            for (int l = 0; l < 64; l++) d[k + l] = (dst_t)(int32_t)s[k + l]; \
    }                                                                         \
    for (; k < n; k++) d[k] = conv(s[k]);
#define LOAD_BY_I32(name, src_t, dst_t, NEAR, conv)                                                 \
    static MS_KERNEL void load_##name(int64_t n, void *dst, const char *src, int64_t stride)        \
    {                                                                                               \
        dst_t *restrict d = dst;                                                                    \
        const src_t *restrict s = (const src_t *)src;                                               \
        if (stride == (int64_t)sizeof(src_t)) {                                                     \
            BY_I32(dst_t, NEAR, (dst_t)conv)                                                        \
        } else                                                                                      \
            for (int64_t k = 0; k < n; k++) d[k] = (dst_t)conv(*(const src_t *)(src + k * stride)); \
    }
#define STORE_BY_I32(name, dst_t, src_t, NEAR, conv)                                          \
    static MS_KERNEL void store_##name(int64_t n, char *dst, int64_t stride, const void *src) \
    {                                                                                         \
        const src_t *restrict s = src;                                                        \
        dst_t *restrict d = (dst_t *)dst;                                                     \
        if (stride == (int64_t)sizeof(dst_t)) {                                               \
            BY_I32(dst_t, NEAR, conv)                                                         \
        } else                                                                                \
            for (int64_t k = 0; k < n; k++) *(dst_t *)(dst + k * stride) = conv(s[k]);        \
    }
#define F32_I32(x) ((int32_t)TO_I64(x))
#define F32_U8(x) ((uint8_t)TO_I64(x))
#define F32_I8(x) ((int8_t)TO_I64(x))
#define F32_I16(x) ((int16_t)TO_I64(x))
#define I8(x) ((int8_t)(x))
#define I16(x) ((int16_t)(x))
#define I32(x) ((int32_t)(x))
#define U8(x) ((uint8_t)(x))
#define F32(x) ((float)(x))
#define F64(x) ((double)(x))

// clang-format off
LOAD(f32_f32, float, float, ID)      LOAD(f32_f64, float, double, ID)     LOAD_BY_I32(f32_i64, float, int64_t, NEAR_F32, TO_I64)
LOAD(f32_b, float, uint8_t, TRUTH)
LOAD(f64_f32, double, float, ID)     LOAD(f64_f64, double, double, ID)    LOAD(f64_i64, double, int64_t, TO_I64)   LOAD(f64_b, double, uint8_t, TRUTH)
LOAD(f16_f32, ms_f16, float, ms_f16_to_float)    LOAD(f16_f64, ms_f16, double, ms_f16_to_float)
LOAD(f16_i64, ms_f16, int64_t, F16_I64)          LOAD(f16_b, ms_f16, uint8_t, NOT0_F16)
LOAD(bf16_f32, ms_bf16, float, ms_bf16_to_float) LOAD(bf16_f64, ms_bf16, double, ms_bf16_to_float)
LOAD(bf16_i64, ms_bf16, int64_t, BF16_I64)       LOAD(bf16_b, ms_bf16, uint8_t, NOT0_F16)
LOAD_BY_I32(i64_f32, int64_t, float, NEAR_I64, ID)    LOAD(i64_f64, int64_t, double, ID)   LOAD(i64_i64, int64_t, int64_t, ID)      LOAD(i64_b, int64_t, uint8_t, TRUTH)
LOAD(i32_f32, int32_t, float, ID)    LOAD(i32_f64, int32_t, double, ID)   LOAD(i32_i64, int32_t, int64_t, ID)      LOAD(i32_b, int32_t, uint8_t, TRUTH)
LOAD(u8_f32, uint8_t, float, ID)     LOAD(u8_f64, uint8_t, double, ID)    LOAD(u8_i64, uint8_t, int64_t, ID)       LOAD(u8_b, uint8_t, uint8_t, TRUTH)
LOAD(i8_f32, int8_t, float, ID)      LOAD(i8_f64, int8_t, double, ID)     LOAD(i8_i64, int8_t, int64_t, ID)
LOAD(i16_f32, int16_t, float, ID)    LOAD(i16_f64, int16_t, double, ID)   LOAD(i16_i64, int16_t, int64_t, ID)      LOAD(i16_b, int16_t, uint8_t, TRUTH)

STORE(f32_f32, float, float, ID)     STORE(f32_f64, float, double, F32)   STORE_BY_I32(f32_i64, float, int64_t, NEAR_I64, F32)      STORE(f32_b, float, uint8_t, F32)
STORE(f64_f32, double, float, F64)   STORE(f64_f64, double, double, ID)   STORE(f64_i64, double, int64_t, F64)     STORE(f64_b, double, uint8_t, F64)
STORE(f16_f32, ms_f16, float, ms_float_to_f16)    STORE(f16_f64, ms_f16, double, D_F16)
STORE(f16_i64, ms_f16, int64_t, D_F16)            STORE(f16_b, ms_f16, uint8_t, D_F16)
STORE(bf16_f32, ms_bf16, float, ms_float_to_bf16) STORE(bf16_f64, ms_bf16, double, D_BF16)
STORE(bf16_i64, ms_bf16, int64_t, D_BF16)         STORE(bf16_b, ms_bf16, uint8_t, D_BF16)
STORE_BY_I32(i64_f32, int64_t, float, NEAR_F32, TO_I64)   STORE(i64_f64, int64_t, double, TO_I64)  STORE(i64_i64, int64_t, int64_t, ID)  STORE(i64_b, int64_t, uint8_t, ID)
STORE_BY_I32(i32_f32, int32_t, float, NEAR_F32, F32_I32)  STORE(i32_f64, int32_t, double, F32_I32) STORE(i32_i64, int32_t, int64_t, I32) STORE(i32_b, int32_t, uint8_t, ID)
STORE_BY_I32(u8_f32, uint8_t, float, NEAR_F32, F32_U8)    STORE(u8_f64, uint8_t, double, F32_U8)   STORE(u8_i64, uint8_t, int64_t, U8)   STORE(u8_b, uint8_t, uint8_t, ID)
STORE_BY_I32(i8_f32, int8_t, float, NEAR_F32, F32_I8)     STORE(i8_f64, int8_t, double, F32_I8)    STORE(i8_i64, int8_t, int64_t, I8)
STORE_BY_I32(i16_f32, int16_t, float, NEAR_F32, F32_I16)  STORE(i16_f64, int16_t, double, F32_I16) STORE(i16_i64, int16_t, int64_t, I16) STORE(i16_b, int16_t, uint8_t, ID)
STORE(b_f32, uint8_t, float, TRUTH)      STORE(b_f64, uint8_t, double, TRUTH)     STORE(b_i64, uint8_t, int64_t, TRUTH)
    // clang-format on

    typedef void (*load_fn)(int64_t, void *, const char *, int64_t);
typedef void (*store_fn)(int64_t, char *, int64_t, const void *);

void ms__load(int cls, int dtype, int64_t n, void *dst, const char *src, int64_t stride)
{
    static const load_fn table[MS_DTYPES][MS_CLASSES] = {
        [MS_F32] = { load_f32_f32, load_f32_f64, load_f32_i64, load_f32_b },
        [MS_F64] = { load_f64_f32, load_f64_f64, load_f64_i64, load_f64_b },
        [MS_F16] = { load_f16_f32, load_f16_f64, load_f16_i64, load_f16_b },
        [MS_BF16] = { load_bf16_f32, load_bf16_f64, load_bf16_i64, load_bf16_b },
        [MS_I64] = { load_i64_f32, load_i64_f64, load_i64_i64, load_i64_b },
        [MS_I32] = { load_i32_f32, load_i32_f64, load_i32_i64, load_i32_b },
        [MS_U8] = { load_u8_f32, load_u8_f64, load_u8_i64, load_u8_b },
        [MS_BOOL] = { load_u8_f32, load_u8_f64, load_u8_i64, load_u8_b },
        [MS_I8] = { load_i8_f32, load_i8_f64, load_i8_i64, load_u8_b },
        [MS_I16] = { load_i16_f32, load_i16_f64, load_i16_i64, load_i16_b },
    };
    table[dtype][cls](n, dst, src, stride);
}

void ms__store(int cls, int dtype, int64_t n, char *dst, int64_t stride, const void *src)
{
    static const store_fn table[MS_DTYPES][MS_CLASSES] = {
        [MS_F32] = { store_f32_f32, store_f32_f64, store_f32_i64, store_f32_b },
        [MS_F64] = { store_f64_f32, store_f64_f64, store_f64_i64, store_f64_b },
        [MS_F16] = { store_f16_f32, store_f16_f64, store_f16_i64, store_f16_b },
        [MS_BF16] = { store_bf16_f32, store_bf16_f64, store_bf16_i64, store_bf16_b },
        [MS_I64] = { store_i64_f32, store_i64_f64, store_i64_i64, store_i64_b },
        [MS_I32] = { store_i32_f32, store_i32_f64, store_i32_i64, store_i32_b },
        [MS_U8] = { store_u8_f32, store_u8_f64, store_u8_i64, store_u8_b },
        [MS_BOOL] = { store_b_f32, store_b_f64, store_b_i64, store_u8_b },
        [MS_I8] = { store_i8_f32, store_i8_f64, store_i8_i64, store_u8_b },
        [MS_I16] = { store_i16_f32, store_i16_f64, store_i16_i64, store_i16_b },
    };
    table[dtype][cls](n, dst, stride, src);
}

// ---- iteration over operands ----

// Converts a row, for a cast: directly if either side is adjacent numbers of the computing type, else through a buffer.
static void convert_row(const ms_loop *l, int64_t n, char *const *at)
{
    int cls = l->cls[0];
    const int64_t *stride = l->inner;
    if (l->direct[0]) {
        ms__load(cls, l->dtype[1], n, at[0], at[1], stride[1]);
        return;
    }
    if (l->direct[1]) {
        ms__store(cls, l->dtype[0], n, at[0], stride[0], at[1]);
        return;
    }
    double buffer[MS_CHUNK];
    for (int64_t first = 0; first < n; first += MS_CHUNK) {
        int64_t m = n - first < MS_CHUNK ? n - first : MS_CHUNK;
        if (stride[1] != 0 || first == 0) ms__load(cls, l->dtype[1], m, buffer, at[1] + first * stride[1], stride[1]);
        ms__store(cls, l->dtype[0], m, at[0] + first * stride[0], stride[0], buffer);
    }
}

static void run_row(const ms_loop *l, int64_t n, char *const *at)
{
    void *x[MS_LOOP_MAX] = { 0 };
    double buffer[MS_LOOP_MAX][MS_CHUNK];
    for (int64_t first = 0; first < n; first += MS_CHUNK) {
        int64_t m = n - first < MS_CHUNK ? n - first : MS_CHUNK;
        for (int k = 0; k < l->n; k++) {
            if (l->direct[k]) {
                x[k] = at[k] + first * l->inner[k];
                continue;
            }
            x[k] = buffer[k];
            // A broadcast element is loaded once.
            if (k > 0 && (l->inner[k] != 0 || first == 0))
                ms__load(l->cls[k], l->dtype[k], m, buffer[k], at[k] + first * l->inner[k], l->inner[k]);
        }
        l->fn(m, x, l->p);
        if (!l->direct[0]) ms__store(l->cls[0], l->dtype[0], m, at[0] + first * l->inner[0], l->inner[0], buffer[0]);
    }
}

static inline void run_loop_rows(const ms_loop *l, int64_t n, char *const *at)
{
    if (MS_LIKELY(l->all)) l->fn(n, (void *const *)at, l->p);
    else if (l->fn) run_row(l, n, at);
    else convert_row(l, n, at);
}

static void run_range(void *arg, int64_t first, int64_t last, int64_t block)
{
    (void)block;
    const ms_loop *l = arg;
    int inner = l->ndim - 1;
    char *at[MS_LOOP_MAX] = { 0 };
    if (l->ndim <= 1) {
        for (int k = 0; k < l->n; k++) at[k] = l->data[k] + first * l->inner[k];
        run_loop_rows(l, last - first, at);
        return;
    }
    int64_t index[MS_MAX_DIMS], rest = first;
    for (int d = inner; d >= 0; d--) {
        index[d] = rest % l->shape[d];
        rest /= l->shape[d];
    }
    for (int k = 0; k < l->n; k++) {
        at[k] = l->data[k];
        for (int d = 0; d <= inner; d++) at[k] += index[d] * l->stride[k][d];
    }
    while (first < last) {
        int64_t m = l->shape[inner] - index[inner];
        if (m > last - first) m = last - first;
        run_loop_rows(l, m, at);
        first += m;
        for (int k = 0; k < l->n; k++) at[k] -= index[inner] * l->stride[k][inner];
        index[inner] = 0;
        for (int d = inner - 1; d >= 0; d--) {
            for (int k = 0; k < l->n; k++) at[k] += l->stride[k][d];
            if (++index[d] < l->shape[d]) break;
            for (int k = 0; k < l->n; k++) at[k] -= l->shape[d] * l->stride[k][d];
            index[d] = 0;
        }
    }
}

static void swap_dimensions(ms_loop *l, int a, int b)
{
    int64_t size = l->shape[a];
    l->shape[a] = l->shape[b], l->shape[b] = size;
    for (int k = 0; k < l->n; k++) {
        int64_t stride = l->stride[k][a];
        l->stride[k][a] = l->stride[k][b], l->stride[k][b] = stride;
    }
}

// Sorts dimensions by the output's strides.
static void sort_dimensions(ms_loop *l)
{
    for (int d = 1; d < l->ndim; d++)
        for (int e = d; e > 0 && llabs(l->stride[0][e - 1]) < llabs(l->stride[0][e]); e--) swap_dimensions(l, e - 1, e);
}

// Drops dimensions of size 1 and merges adjacent dimensions that every operand can traverse with one stride. A short
// last dimension is swapped with a much longer one, because each row costs tens of nanoseconds.
static int64_t collapse(ms_loop *l)
{
    int nd = 0;
    int64_t numel = 1;
    for (int d = 0; d < l->ndim; d++) {
        int64_t size = l->shape[d];
        numel *= size;
        if (size == 1) continue;
        bool join = nd > 0;
        for (int k = 0; join && k < l->n; k++) join = l->stride[k][nd - 1] == l->stride[k][d] * size;
        int at = join ? nd - 1 : nd++;
        l->shape[at] = join ? l->shape[at] * size : size;
        for (int k = 0; k < l->n; k++) l->stride[k][at] = l->stride[k][d];
    }
    l->ndim = nd;
    if (nd > 1 && l->shape[nd - 1] < 16) {
        int best = nd - 1;
        for (int d = 0; d < nd - 1; d++)
            if (l->shape[d] > 4 * l->shape[best]) best = d;
        if (best != nd - 1) swap_dimensions(l, best, nd - 1);
    }
    return numel;
}

void ms__loop_run(ms_loop *l)
{
    int64_t numel = collapse(l);
    if (numel == 0) return;
    l->all = l->fn != NULL;
    for (int k = 0; k < l->n; k++) {
        l->inner[k] = l->ndim ? l->stride[k][l->ndim - 1] : 0;
        l->direct[k] =
            l->dtype[k] == ms__class_dtype(l->cls[k]) && (l->inner[k] == ms__class_size(l->cls[k]) || numel == 1);
        l->all = l->all && l->direct[k];
    }
    if (numel < 32768) run_range(l, 0, numel, 0);
    else ms__parallel(numel, 16384, run_range, l);
}

// An inline ms__is_contiguous for tensors with at least one element.
static inline bool is_dense(const ms_tensor *t)
{
    int64_t n = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] != 1 && t->stride[d] != n) return false;
        n *= t->shape[d];
    }
    return true;
}

// ---- loops for captured steps ----

ms_dense_loop *ms__loop_asked;

// Describes in *ms__loop_asked a loop over `operands` operands of n elements. fn: computes the whole loop
// in one call; NULL if no function does. A call with a second loop cannot be repeated by one function: fn becomes NULL.
static void describe_row(int operands, char *const *at, int64_t n, ms_loop_fn fn, const double *p)
{
    ms_dense_loop *l = ms__loop_asked;
    bool second = l->operands > 0;
    *l = (ms_dense_loop) { .fn = second ? NULL : fn, .n = n, .operands = operands, .scalars = p != NULL };
    for (int k = 0; k < operands && at; k++) l->x[k] = at[k];
    if (p) memcpy(l->p, p, sizeof l->p);
}

static ms_status repeat_loop(void *args)
{
    ms_dense_loop *l = args;
    l->fn(l->n, l->x, l->scalars ? l->p : NULL);
    return MS_OK;
}

// Whether one of the call's tensors begins at `at`.
static bool is_operand(const ms_call *c, const void *at)
{
    bool found = ms__data(c->out[0]) == at;
    for (int k = 0; k < c->n_in; k++) found = found || (c->in[k] && ms__data(c->in[k]) == at);
    return found;
}

bool ms__cpu_prepare_loop(ms_call *c, ms_prepared *p)
{
    _Static_assert(sizeof(ms_dense_loop) <= MS_PREPARED, "a dense loop must fit");
    ms_dense_loop l = { 0 };
    ms__loop_asked = &l;
    ms_status st = c->op->run[MS_CPU](c);
    ms__loop_asked = NULL;
    bool simple = st == MS_OK && l.fn && l.x[0] == ms__data(c->out[0]);
    for (int k = 0; k < l.operands; k++) simple = simple && is_operand(c, l.x[k]);  // not a copy made for this call
    if (!simple) return false;
    p->run = repeat_loop;
    p->bytes = sizeof l;
    memcpy(p->args, &l, sizeof l);
    return true;
}

// ---- loops ----

// If operand k of a large loop, x, lies across the output's rows, so that each element of a row is in a cache line of
// its own, lets the loop read a copy of it in the output's order, which is made in tiles (copy.c). Returns the copy;
// NULL if there is no need, or no memory.
static ms_tensor *turn_operand(ms_loop *l, int k, ms_tensor *x)
{
    enum { LINE = 64, LEAST = 32768 };
    int64_t size = ms__dtype_size(x->dtype), stride[MS_MAX_DIMS], numel = 1;
    int inner = l->ndim - 1;
    bool across = false;
    if (x->numel < LEAST || llabs(l->stride[k][inner]) < LINE || l->stride[0][inner] != ms__dtype_size(l->dtype[0]))
        return NULL;
    for (int d = 0; d <= inner; d++) {
        numel *= l->shape[d];
        stride[d] = l->stride[k][d] / size;
        across |= stride[d] == 1 && l->shape[d] * size >= LINE;
    }
    ms_tensor *copy = NULL;
    if (!across || numel != x->numel || ms__tensor_new(&copy, x->dtype, MS_CPU, l->ndim, l->shape, "copy") != MS_OK)
        return NULL;
    ms_tensor *view = ms__tensor_view(x, l->ndim, l->shape, stride, x->offset);
    ms_status st = ms__copy_data(copy, view);
    ms__release(view);
    if (st != MS_OK) {
        ms__release(copy);
        return NULL;
    }
    l->data[k] = ms__data(copy);
    for (int d = 0; d <= inner; d++) l->stride[k][d] = copy->stride[d] * size;
    return copy;
}

void ms__loop(int n, ms_tensor *const *x, const uint8_t *cls, ms_loop_fn fn, const double *p)
{
    const ms_tensor *o = x[0];
    if (o->numel == 0) return;
    // Common cases first: contiguous operands of the computing type, whose shapes equal the output's shape or its last
    // dimensions (a bias).
    if (o->numel < 32768 && fn && is_dense(o)) {
        char *at[MS_LOOP_MAX] = { 0 };
        int64_t row = o->numel, step[MS_LOOP_MAX] = { 0 };
        int k = 0;
        for (; k < n; k++) {
            const ms_tensor *t = x[k];
            if (t->dtype != ms__class_dtype(cls[k]) || t->ndim > o->ndim || (k > 0 && !is_dense(t))) break;
            bool suffix = true;
            for (int d = t->ndim - 1, e = o->ndim - 1; d >= 0; d--, e--) suffix = suffix & (t->shape[d] == o->shape[e]);
            if (!suffix) break;
            if (t->numel == o->numel) step[k] = ms__class_size(cls[k]);
            else if (t->numel >= 8 && (row == o->numel || row == t->numel)) row = t->numel;
            else break;
            at[k] = ms__data(t);
        }
        if (MS_UNLIKELY(ms__loop_asked != NULL)) {
            describe_row(n, at, row, k == n && row == o->numel ? fn : NULL, p);
            return;
        }
        if (k == n) {
            fn(row, (void *const *)at, p);
            for (int64_t first = row; first < o->numel; first += row) {
                for (k = 0; k < n; k++) at[k] += row * step[k];
                fn(row, (void *const *)at, p);
            }
            return;
        }
    }
    if (MS_UNLIKELY(ms__loop_asked != NULL)) {
        describe_row(n, NULL, 0, NULL, p);
        return;
    }
    ms_loop l;
    l.n = n;
    l.ndim = o->ndim;
    l.fn = fn;
    l.p = p;
    memcpy(l.shape, o->shape, (size_t)o->ndim * 8);
    for (int k = 0; k < n; k++) {
        const ms_tensor *t = x[k];
        int size = ms__dtype_size(t->dtype), lead = o->ndim - t->ndim;
        l.data[k] = ms__data(t);
        l.dtype[k] = t->dtype;
        l.cls[k] = cls[k];
        for (int d = 0; d < o->ndim; d++)
            l.stride[k][d] = d < lead || (t->shape[d - lead] == 1 && o->shape[d] != 1) ? 0 : t->stride[d - lead] * size;
    }
    sort_dimensions(&l);
    ms_tensor *copy[MS_LOOP_MAX] = { NULL };
    for (int k = 1; k < n; k++) copy[k] = turn_operand(&l, k, x[k]);
    ms__loop_run(&l);
    for (int k = 1; k < n; k++) ms__release(copy[k]);
}
