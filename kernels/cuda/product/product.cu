// SPDX-License-Identifier: MIT
// cuda/product/product.cu -- matrix products: by cuBLASLt if it is installed and supports the dtype, the strides and
// the batch, else by our own kernel.
//
// cuBLASLt is loaded at the first product that uses it (up to 440 ms). MOONSHARD_CUBLAS=off always selects our own
// kernel. The emulator uses a stand-in for cuBLASLt, only with MOONSHARD_CUBLAS=on. float32 is computed in float32 (no
// TF32); half types accumulate in float32 and round once.
#include <dlfcn.h>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "cuda/blocks.h"
#include "cuda/library.h"
#include "cuda/product.h"
#if defined(MS_EMULATED)
#define MS_CUBLAS "libcublasLt_standin.so"
#include "cuda/cublaslt.h"
#elif __has_include(<cublasLt.h>)
#define MS_CUBLAS "libcublasLt.so"
#include <cublasLt.h>
#endif

// ---- GELU ----

#ifdef __CUDACC__
#pragma nv_diag_suppress 177  // formulas that are not used here
#endif
#define REAL float
#define R(name) name##_f32
#include "formulas/elementwise.h"
#undef REAL
#undef R
#define REAL double
#define R(name) name##_f64
#include "formulas/elementwise.h"
#undef REAL
#undef R
static __device__ inline float gelu_of(float x) { return ms_fwd_gelu_tanh_f32(x); }
static __device__ inline double gelu_of(double x) { return ms_fwd_gelu_tanh_f64(x); }
static __device__ inline float gelu_gradient(float g, float x) { return ms_bwd_gelu_tanh_f32(g, x); }
static __device__ inline double gelu_gradient(double g, double x) { return ms_bwd_gelu_tanh_f64(g, x); }

// C's GELU, or its gradient, in a pass of its own. GELU reads aux and writes c; its gradient reads both and writes c.
template <class S> __global__ void gelu_kernel(int64_t n, bool gradient, const S *aux, S *c)
{
    typedef real_of<S> T;
    int64_t i = GLOBAL_INDEX * WIDE;
    T x[WIDE], v[WIDE];
    if (i >= n) return;
    if (gradient) read_two(aux, c, i, n, x, v);
    else read_pack(aux, i, n, (T)0, x);
    UNROLL
    for (int e = 0; e < WIDE; e++) v[e] = gradient ? gelu_gradient(v[e], x[e]) : gelu_of(x[e]);
    write_pack(c, i, n, v);
}
ms_status ms__cuda_gelu(int index, const product *p)
{
    int64_t n = p->m * p->n;
    grid g = grid_of(up(n, WIDE));
#define GELU(S, T)                                                                                     \
    return launch(p->what, index, gelu_kernel<S>, g.blocks, g.threads, n, p->epilogue != PRODUCT_GELU, \
                  (const S *)p->aux, (S *)p->c)
    WITH_FLOAT_TYPE(p->c_type, GELU)
#undef GELU
}

// ---- our own kernel: a block computes a tile of 64 x 64, each of its 256 threads 4 x 4, in steps of 16 along k ----

enum { TILE_M = 64, TILE_N = 64, DEEP = 16 };

// Integers wrap around.
static __device__ inline int64_t mad(int64_t a, int64_t b, int64_t c)
{
    return (int64_t)((uint64_t)a * (uint64_t)b + (uint64_t)c);
}
static __device__ inline float mad(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static __device__ inline double mad(double a, double b, double c) { return __builtin_fma(a, b, c); }

// v, rounded to the dtype, as after a store and a load.
template <class T> static __device__ inline T rounded(int dtype, T v)
{
    if (dtype == MS_F16) return (T)ms_f16_to_float(ms_float_to_f16((float)v));
    return dtype == MS_BF16 ? (T)ms_bf16_to_float(ms_float_to_bf16((float)v)) : v;
}
template <class T> static __device__ inline T with_gelu(const product &p, int c_type, int64_t at, T v)
{
    v = rounded(c_type, v);
    if (p.epilogue == PRODUCT_GELU_GRADIENT) return gelu_gradient(v, load<T>(c_type, p.aux, at));
    store<T>(c_type, p.aux, at, v);
    return gelu_of(v);
}
template <class T, bool GELU> __global__ void product_kernel(product p, int64_t tiles_m, int64_t tiles_n)
{
    constexpr bool F64 = std::is_same_v<T, double>;
    const int a_type = F64 ? MS_F64 : p.a_type, b_type = F64 ? MS_F64 : p.b_type, c_type = F64 ? MS_F64 : p.c_type;
    __shared__ T ta[DEEP][TILE_M + 1], tb[DEEP][TILE_N + 1];
    int64_t block = blockIdx.x, rest = block / (tiles_m * tiles_n), at_a = 0, at_b = 0, at_c = 0;
    int64_t m0 = block / tiles_n % tiles_m * TILE_M, n0 = block % tiles_n * TILE_N;
    ROLLED
    for (int d = p.nb - 1; d >= 0; d--) {
        int64_t q = rest / p.batch[d], r = rest - q * p.batch[d];
        at_a += r * p.a_bs[d];
        at_b += r * p.b_bs[d];
        at_c += r * p.c_bs[d];
        rest = q;
    }
    int t = threadIdx.x, tm = t / 16, tn = t % 16;
    T sum[4][4] = {};
    for (int64_t k0 = 0; k0 < p.k; k0 += DEEP) {
        for (int e = t; e < DEEP * TILE_M; e += BLOCK) {  // neighbouring threads read along the contiguous dimension
            int i = p.a_cs == 1 ? e / DEEP : e % TILE_M, j = p.a_cs == 1 ? e % DEEP : e / TILE_M;
            ta[j][i] =
                m0 + i < p.m && k0 + j < p.k ? load<T>(a_type, p.a, at_a + (m0 + i) * p.a_rs + (k0 + j) * p.a_cs) : 0;
        }
        for (int e = t; e < DEEP * TILE_N; e += BLOCK) {
            int i = p.b_cs == 1 ? e % TILE_N : e / DEEP, j = p.b_cs == 1 ? e / TILE_N : e % DEEP;
            tb[j][i] =
                n0 + i < p.n && k0 + j < p.k ? load<T>(b_type, p.b, at_b + (k0 + j) * p.b_rs + (n0 + i) * p.b_cs) : 0;
        }
        __syncthreads();
        int deep = p.k - k0 < DEEP ? (int)(p.k - k0) : DEEP;
        for (int j = 0; j < deep; j++) {
            T a[4], b[4];
            for (int i = 0; i < 4; i++) a[i] = ta[j][tm * 4 + i];
            for (int i = 0; i < 4; i++) b[i] = tb[j][tn + 16 * i];
            for (int x = 0; x < 4; x++)
                for (int y = 0; y < 4; y++) sum[x][y] = mad(a[x], b[y], sum[x][y]);
        }
        __syncthreads();
    }
    for (int x = 0; x < 4; x++)
        for (int y = 0; y < 4; y++) {
            int64_t i = m0 + tm * 4 + x, j = n0 + tn + 16 * y;
            if (i >= p.m || j >= p.n) continue;
            T v = sum[x][y] * (T)p.alpha;
            if (p.bias) v += load<T>(c_type, p.bias, j);
            int64_t at = at_c + i * p.c_rs + j * p.c_cs;
            if (p.add) v += load<T>(c_type, p.c, at);
            if constexpr (GELU) v = with_gelu(p, c_type, at, v);
            store<T>(c_type, p.c, at, v);
        }
}

static ms_status own_product(int index, const product *p)
{
    int64_t tm = up(p->m, TILE_M), tn = up(p->n, TILE_N), batch = 1;
    for (int d = 0; d < p->nb; d++) batch *= p->batch[d];
    bool wide = p->a_type == MS_F64 || p->b_type == MS_F64, gelu = p->epilogue != PRODUCT_PLAIN;
    auto kernel = wide                  ? gelu ? product_kernel<double, true> : product_kernel<double, false>
                                   : p->a_type > MS_BF16 ? product_kernel<int64_t, false>
                  : gelu                ? product_kernel<float, true>
                                        : product_kernel<float, false>;
    return launch_blocks(p->what, index, kernel, tm * tn * batch, BLOCK, *p, tm, tn);
}

// ---- cuBLASLt ----

#ifdef MS_CUBLAS
// clang-format off
#define FUNCTIONS(X) \
    X(Create) X(MatmulDescCreate) X(MatmulDescDestroy) X(MatmulDescSetAttribute) \
    X(MatrixLayoutCreate) X(MatrixLayoutDestroy) X(MatrixLayoutSetAttribute) \
    X(MatmulPreferenceCreate) X(MatmulPreferenceDestroy) X(MatmulPreferenceSetAttribute) \
    X(MatmulAlgoGetHeuristic) X(Matmul)
// clang-format on
static struct {
    bool tried, there;
#define POINTER(name) decltype(&cublasLt##name) name;
    FUNCTIONS(POINTER)
} lt;
static struct {
    cublasLtHandle_t handle;
    ms_block *workspace;
} per_device[MS_CUDA_DEVICES];
enum { WORKSPACE = 32 << 20, CACHE = 1024 };

static std::mutex lt_lock;           // for `lt`, `per_device` and `cache`
static std::atomic<bool> lt_absent;  // cuBLASLt cannot be used: products go to our own kernel at once

// Opens cuBLASLt. If it is not found, reports the searched folders on stderr.
static void *lt_open(void)
{
    char name[64];
    std::string places;
    snprintf(name, sizeof name, MS_CUBLAS ".%d", CUBLAS_VER_MAJOR);
    void *lib = ms__cuda_library(name, CUBLAS_VER_MAJOR, &places);
    if (lib) return lib;
    fprintf(
        stderr,
        "moonshard: cannot load %s: products on cuda use Moonshard's own kernel, which is many times slower. Install "
        "it, or name its folder in LD_LIBRARY_PATH. Searched: the loader's path,%s\n",
        name, places.c_str());
    return NULL;
}

static bool lt_find(void)
{
    const char *on = getenv("MOONSHARD_CUBLAS");
#ifdef MS_EMULATED
    if (!on) return false;
#endif
    if (on && strcmp(on, "off") == 0) return false;
    void *lib = lt_open();
    if (!lib) return false;
#define FIND(name)                                                                                                    \
    if (!(lt.name = (decltype(&cublasLt##name))dlsym(lib, "cublasLt" #name))) {                                       \
        fprintf(stderr, "moonshard: %s has no function %s: products on cuda use Moonshard's own kernel\n", MS_CUBLAS, \
                "cublasLt" #name);                                                                                    \
        return false;                                                                                                 \
    }
    FUNCTIONS(FIND)
    return true;
}
static bool lt_load(void)
{
    if (!lt.tried) lt_absent = !(lt.there = lt_find());
    lt.tried = true;
    return lt.there;
}

// Reports on stderr, once per process, that cuBLASLt does not support a product. If s is CUBLAS_STATUS_SUCCESS,
// cuBLASLt has found no algorithm.
static void refused(int index, const product *p, const char *call, cublasStatus_t s)
{
    static bool said;
    if (said) return;
    said = true;
    fprintf(stderr,
            "moonshard: %s: cuda:%d: %s does not support the product (status %d; m %lld, n %lld, k %lld): Moonshard's "
            "own kernel computes it. Later products are not reported\n",
            p->what, index, call, (int)s, (long long)p->m, (long long)p->n, (long long)p->k);
}

static cudaDataType_t type_of(int dtype)
{
    return dtype == MS_F32 ? CUDA_R_32F : dtype == MS_F64 ? CUDA_R_64F : dtype == MS_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

// cuBLASLt's matrices are column-major, and a row-major C is a column-major C^T = B^T A^T. Its operands are therefore x
// = B^T (n x k) and y = A^T (k x m). x_turned, y_turned: whether B, A is itself column-major, so that cuBLASLt
// transposes it. align: the alignments in memory, in bytes: of A << 16, B << 8, and C.
struct shape_key {
    int x_type, y_type, c_type, x_turned, y_turned, epilogue, index, align;
    int64_t m, n, k, x_ld, y_ld, c_ld, batch, x_bs, y_bs, c_bs;
};
// How products with one key are run. cuBLASLt's descriptors are kept, because making them takes longer than a launch.
struct plan {
    bool used, none;  // none: there is no algorithm
    shape_key key;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t x, y, c;
    cublasLtMatmulAlgo_t algo;
};
static plan cache[CACHE];

static int plan_slot(const shape_key &key)
{
    uint64_t words[sizeof key / 8], h = MS_HASH_START;
    static_assert(sizeof words == sizeof key, "a key consists of whole words");
    memcpy(words, &key, sizeof key);
    for (uint64_t w : words) h = ms__hash_value(h, w);
    return (int)((h ^ h >> 32) % CACHE);
}

// The layout of a matrix with strides rs and cs: 0 row-major (cs is 1), 1 column-major (rs is 1), -1 neither; a stride
// along a dimension of size 1 does not count. *ld: the leading dimension, which is the other stride.
static int lies(int64_t rows, int64_t cols, int64_t rs, int64_t cs, int64_t *ld)
{
    if ((cs == 1 || cols == 1) && (rows == 1 || rs >= cols)) {
        *ld = rows == 1 ? cols : rs;
        return 0;
    }
    if ((rs == 1 || rows == 1) && (cols == 1 || cs >= rows)) {
        *ld = cols == 1 ? rows : cs;
        return 1;
    }
    return -1;
}
static int alignment(const void *p) { return (int)((uintptr_t)p & 15 ? (uintptr_t)p & 15 & -((uintptr_t)p & 15) : 16); }

static ms_status lt_failed(int index, const product *p, const char *call, cublasStatus_t s)
{
    bool member = strncmp(call, "lt.", 3) == 0;  // LT_TRY passes a whole call of a member of lt
    if (member) call += 3;
    return ms__fail(MS_ESTATE, "%s: cuda:%d: %s%.*s failed with cuBLAS status %d (m %lld, n %lld, k %lld)", p->what,
                    index, member ? "cublasLt" : "", (int)strcspn(call, "("), call, (int)s, (long long)p->m,
                    (long long)p->n, (long long)p->k);
}
#define LT_TRY(expr)                              \
    do {                                          \
        cublasStatus_t s__ = (expr);              \
        if (s__ != CUBLAS_STATUS_SUCCESS) {       \
            st = lt_failed(index, p, #expr, s__); \
            goto out;                             \
        }                                         \
    } while (0)

static void forget_plan(plan *s)
{
    if (s->c) lt.MatrixLayoutDestroy(s->c);
    if (s->y) lt.MatrixLayoutDestroy(s->y);
    if (s->x) lt.MatrixLayoutDestroy(s->x);
    if (s->desc) lt.MatmulDescDestroy(s->desc);
    memset(s, 0, sizeof *s);
}

// Describes a product to cuBLASLt, except for its pointers and its algorithm.
static ms_status describe_product(plan *s, int index, const product *p, const shape_key &key)
{
    ms_status st = MS_OK;
    int x = key.x_turned, y = key.y_turned;
    bool wide = p->a_type == MS_F64;
    cublasOperation_t turned = CUBLAS_OP_T, plain = CUBLAS_OP_N;
    int32_t count = (int32_t)key.batch;
    forget_plan(s);
    s->key = key;
    LT_TRY(
        lt.MatmulDescCreate(&s->desc, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, wide ? CUDA_R_64F : CUDA_R_32F));
    LT_TRY(lt.MatmulDescSetAttribute(s->desc, CUBLASLT_MATMUL_DESC_TRANSA, x ? &turned : &plain, sizeof turned));
    LT_TRY(lt.MatmulDescSetAttribute(s->desc, CUBLASLT_MATMUL_DESC_TRANSB, y ? &turned : &plain, sizeof turned));
    if (key.epilogue != CUBLASLT_EPILOGUE_DEFAULT)
        LT_TRY(lt.MatmulDescSetAttribute(s->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &key.epilogue, sizeof key.epilogue));
    if (p->aux) LT_TRY(lt.MatmulDescSetAttribute(s->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &p->n, sizeof p->n));
    LT_TRY(lt.MatrixLayoutCreate(&s->x, type_of(p->b_type), (uint64_t)(x ? p->k : p->n), (uint64_t)(x ? p->n : p->k),
                                 key.x_ld));
    LT_TRY(lt.MatrixLayoutCreate(&s->y, type_of(p->a_type), (uint64_t)(y ? p->m : p->k), (uint64_t)(y ? p->k : p->m),
                                 key.y_ld));
    LT_TRY(lt.MatrixLayoutCreate(&s->c, type_of(p->c_type), (uint64_t)p->n, (uint64_t)p->m, key.c_ld));
    if (key.batch > 1) {
        cublasLtMatrixLayout_t all[] = { s->x, s->y, s->c };
        int64_t strides[] = { key.x_bs, key.y_bs, key.c_bs };
        for (int i = 0; i < 3; i++) {
            LT_TRY(lt.MatrixLayoutSetAttribute(all[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
            LT_TRY(lt.MatrixLayoutSetAttribute(all[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &strides[i],
                                               sizeof strides[i]));
        }
    }
out:
    return st;
}

// Asks cuBLASLt for the algorithm of a product that has been described.
static ms_status choose_algorithm(plan *s, int index, const product *p)
{
    ms_status st = MS_OK;
    cublasLtMatmulPreference_t pref = NULL;
    cublasLtMatmulHeuristicResult_t best;
    cublasStatus_t answer;
    uint64_t room = WORKSPACE;
    uint32_t a = (uint32_t)s->key.align >> 16, b = (uint32_t)s->key.align >> 8 & 255, c = (uint32_t)s->key.align & 255;
    int found = 0;
    LT_TRY(lt.MatmulPreferenceCreate(&pref));
    LT_TRY(lt.MatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room));
    LT_TRY(lt.MatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &b, sizeof b));
    LT_TRY(lt.MatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &a, sizeof a));
    LT_TRY(lt.MatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c, sizeof c));
    LT_TRY(lt.MatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &c, sizeof c));
    answer =
        lt.MatmulAlgoGetHeuristic(per_device[index].handle, s->desc, s->x, s->y, s->c, s->c, pref, 1, &best, &found);
    s->used = true;
    s->none = answer != CUBLAS_STATUS_SUCCESS || found == 0;
    if (!s->none) s->algo = best.algo;
    else if (!p->row_sums && !p->aux) refused(index, p, "cublasLtMatmulAlgoGetHeuristic", answer);
out:
    if (pref) lt.MatmulPreferenceDestroy(pref);
    return st;
}

// Runs a product that has been described, if it has an algorithm.
static ms_status multiply_planned(plan *s, int index, const product *p, bool *done)
{
    bool wide = p->a_type == MS_F64;
    double alpha64 = p->alpha, beta64 = p->add;
    float alpha32 = (float)p->alpha, beta32 = p->add;
    if (s->none) return MS_OK;
    cublasStatus_t answer =
        lt.Matmul(per_device[index].handle, s->desc, wide ? (void *)&alpha64 : &alpha32, p->b, s->x, p->a, s->y,
                  wide ? (void *)&beta64 : &beta32, p->c, s->c, p->c, s->c, &s->algo, per_device[index].workspace->data,
                  WORKSPACE, ms__cuda_stream(index, MS_STREAM_COMPUTE));
    if (answer == CUBLAS_STATUS_NOT_SUPPORTED || answer == CUBLAS_STATUS_ARCH_MISMATCH) {
        if (!p->row_sums && !p->aux) refused(index, p, "cublasLtMatmul", answer);
        s->none = true;
    } else if (answer != CUBLAS_STATUS_SUCCESS) return lt_failed(index, p, "cublasLtMatmul", answer);
    else *done = true;
    return MS_OK;
}

// Computes a product with at most one batch dimension. *done: whether it was started; false if cuBLASLt is not loaded,
// does not support the layout, the dtypes or `aux`, finds no algorithm or refuses the product.
static ms_status lt_product(int index, const product *p, bool *done)
{
    bool many = p->nb > 0, fresh;
    shape_key key;
    memset(&key, 0, sizeof key);
    *done = false;
    int x = lies(p->k, p->n, p->b_rs, p->b_cs, &key.x_ld), y = lies(p->m, p->k, p->a_rs, p->a_cs, &key.y_ld),
        c = lies(p->m, p->n, p->c_rs, p->c_cs, &key.c_ld);
    if (x < 0 || y < 0 || c != 0 || p->a_type != p->b_type || p->a_type > MS_BF16 || !lt_load()) return MS_OK;
    MS_TRY(ms__cuda_use(index));
    key.x_type = p->b_type, key.y_type = p->a_type, key.c_type = p->c_type;
    // y is cuBLASLt's operand B. The epilogue BGRADB sums it over k, which gives the sums of A's rows.
    const void *vector = p->bias ? p->bias : p->row_sums ? p->row_sums : p->column_sums;
    cublasLtEpilogue_t epilogue =
        p->epilogue == PRODUCT_GELU            ? p->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX
        : p->epilogue == PRODUCT_GELU_GRADIENT ? vector ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU
        : p->bias                              ? CUBLASLT_EPILOGUE_BIAS
        : p->row_sums                          ? CUBLASLT_EPILOGUE_BGRADB
                                               : CUBLASLT_EPILOGUE_DEFAULT;
    // GELU's epilogues support neither float64, nor an aux whose leading dimension is no multiple of 8 or whose address
    // is no multiple of 16.
    if (p->aux && (p->n % 8 || p->a_type == MS_F64 || alignment(p->aux) < 16)) return MS_OK;
    key.x_turned = x, key.y_turned = y, key.epilogue = epilogue, key.index = index;
    // The epilogue accesses the vector as it stores the result, so the result's alignment is the lower of the two.
    int to = alignment(p->c), with = alignment(vector);
    if (with < to) to = with;
    key.align = alignment(p->a) << 16 | alignment(p->b) << 8 | to;
    key.m = p->m, key.n = p->n, key.k = p->k, key.batch = many ? p->batch[0] : 1;
    if (many) key.x_bs = p->b_bs[0], key.y_bs = p->a_bs[0], key.c_bs = p->c_bs[0];

    ms_status st = MS_OK;
    plan *s = &cache[plan_slot(key)];
    if (!per_device[index].handle) LT_TRY(lt.Create(&per_device[index].handle));
    if (!per_device[index].workspace)
        MS_TRY(ms__alloc(&per_device[index].workspace, MS_CUDA | index << 8, WORKSPACE, "cuBLASLt's workspace"));
    fresh = !s->used || memcmp(&s->key, &key, sizeof key) != 0;
    if (fresh) MS_TRY(describe_product(s, index, p, key));
    if (vector) LT_TRY(lt.MatmulDescSetAttribute(s->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector, sizeof vector));
    if (p->aux)
        LT_TRY(lt.MatmulDescSetAttribute(s->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->aux, sizeof p->aux));
    if (fresh) MS_TRY(choose_algorithm(s, index, p));
    st = multiply_planned(s, index, p, done);
out:
    return st;
}

// Merges batch dimensions where the strides allow. The last one is cuBLASLt's batch; a loop covers the others.
static ms_status try_cublas(int index, const product *p, bool *done)
{
    product q = *p;
    int nb = 0;
    for (int d = 0; d < p->nb; d++) {
        if (p->batch[d] == 1) continue;
        if (nb && q.a_bs[nb - 1] == p->a_bs[d] * p->batch[d] && q.b_bs[nb - 1] == p->b_bs[d] * p->batch[d] &&
            q.c_bs[nb - 1] == p->c_bs[d] * p->batch[d]) {
            q.batch[nb - 1] *= p->batch[d];
            q.a_bs[nb - 1] = p->a_bs[d], q.b_bs[nb - 1] = p->b_bs[d], q.c_bs[nb - 1] = p->c_bs[d];
            continue;
        }
        q.batch[nb] = p->batch[d];
        q.a_bs[nb] = p->a_bs[d], q.b_bs[nb] = p->b_bs[d], q.c_bs[nb] = p->c_bs[d];
        nb++;
    }
    int64_t outer = 1;
    for (int d = 0; d < nb - 1; d++) outer *= q.batch[d];
    if (outer > 64) return MS_OK;  // one launch of our own kernel is faster than many small ones
    std::lock_guard<std::mutex> hold(lt_lock);
    for (int64_t k = 0; k < outer; k++) {
        int64_t rest = k, a = 0, b = 0, c = 0;
        for (int d = nb - 2; d >= 0; d--) {
            int64_t r = rest % q.batch[d];
            rest /= q.batch[d];
            a += r * q.a_bs[d], b += r * q.b_bs[d], c += r * q.c_bs[d];
        }
        product one = q;
        one.a = (const char *)p->a + a * ms__dtype_size(p->a_type);
        one.b = (const char *)p->b + b * ms__dtype_size(p->b_type);
        one.c = (char *)p->c + c * ms__dtype_size(p->c_type);
        one.nb = nb ? 1 : 0;
        if (nb) {
            one.batch[0] = q.batch[nb - 1];
            one.a_bs[0] = q.a_bs[nb - 1], one.b_bs[0] = q.b_bs[nb - 1], one.c_bs[0] = q.c_bs[nb - 1];
        }
        MS_TRY(lt_product(index, &one, done));
        if (!*done) return MS_OK;  // our own kernel overwrites the results so far
    }
    return MS_OK;
}
#endif

#ifdef MS_CUBLAS
// For a product whose epilogue cuBLASLt refuses: computes the product alone by cuBLASLt, and GELU in a pass of its own.
// The caller adds up row_sums and column_sums.
static ms_status without_epilogue(int index, const product *p, bool *done)
{
    product q = *p;
    q.epilogue = PRODUCT_PLAIN;
    q.row_sums = q.column_sums = q.aux = NULL;
    if (p->epilogue == PRODUCT_GELU) q.c = p->aux;
    MS_TRY(try_cublas(index, &q, done));
    return *done && p->epilogue ? ms__cuda_gelu(index, p) : MS_OK;
}
#endif

ms_status ms__cuda_product(int index, product *p)
{
    int64_t size = p->m * p->n;
    for (int d = 0; d < p->nb; d++) size *= p->batch[d];
    if (size == 0) return MS_OK;
#ifdef MS_CUBLAS
    bool done = false;
    if (p->k > 0 && !lt_absent.load(std::memory_order_relaxed)) {
        MS_TRY(try_cublas(index, p, &done));
        p->summed = done && (p->row_sums || p->column_sums);
        if (!done && (p->row_sums || p->epilogue)) MS_TRY(without_epilogue(index, p, &done));
    }
    if (done) return MS_OK;
#endif
    return own_product(index, p);
}
