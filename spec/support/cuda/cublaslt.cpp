// SPDX-License-Identifier: MIT
// cublaslt.cpp -- a stand-in for cuBLASLt, for the emulated GPU: libcublasLt_standin.so. It refuses what the library
// refuses, with the same status, and computes the rest in plain loops on the stream.
//
// It is stricter in some points, so that a wrong caller cannot be right by chance: an algorithm serves only the problem
// for which the heuristic returned it, needs every alignment that its preference allowed (up to 16 bytes) and the whole
// workspace, and overwrites the workspace; matrices of a batched result may not overlap. Of the epilogues it computes
// BIAS; BGRADB, if the product is neither batched nor float64; and GELU_AUX, GELU_AUX_BIAS, DGELU and DGELU_BGRAD, if
// the product is not batched and all matrices have half types.
#include "cublaslt.h"
#include "cuda/cuda.h"
#define REAL float
#define R(name) name##_f32
#include "formulas/elementwise.h"

namespace
{

enum : uint32_t { HANDLE = 0x6c744801, DESC, LAYOUT, PREF, ALGO };
enum { ROOM = 1 << 16 };  // bytes of workspace that an algorithm requests, if its preference allows that many

struct desc_state {
    uint32_t is;
    cublasComputeType_t compute;
    cudaDataType_t scale;
    int32_t turn_a, turn_b;
    uint32_t epilogue;
    const void *bias = nullptr;
    void *aux = nullptr;
    int64_t aux_ld = 0;
};
struct layout_state {
    uint32_t is;
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld, stride;
    int32_t batch;
};
struct pref_state {
    uint32_t is;
    uint64_t room;
    uint32_t align[4];
};
struct algo_state {
    uint64_t problem;  // fingerprint of the problem that the algorithm serves
    uint64_t room;
    uint32_t is, align[4];
};
static_assert(sizeof(algo_state) <= sizeof(cublasLtMatmulAlgo_t));
struct handle_state {
    uint32_t is;
};

// Counters that specs read, and statuses that they set, through LuaJIT's FFI.
struct counts {
    double heuristics, products, refused;
} counted;
struct {
    int heuristic, matmul;  // the status that all following calls return; 0: the real one
} planted;

template <class S> cublasStatus_t create(void *out, const S &s)
{
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    *(S **)out = new S(s);
    return CUBLAS_STATUS_SUCCESS;
}
template <class S> cublasStatus_t destroy(void *p, uint32_t is)
{
    S *s = (S *)p;
    if (!s || s->is != is) return CUBLAS_STATUS_INVALID_VALUE;
    s->is = 0;
    delete s;
    return CUBLAS_STATUS_SUCCESS;
}
template <class T> cublasStatus_t set(T &field, const void *value, size_t bytes)
{
    if (!value || bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

int dtype_of(cudaDataType_t t)
{
    return t == CUDA_R_32F ? MS_F32 : t == CUDA_R_64F ? MS_F64 : t == CUDA_R_16F ? MS_F16 : MS_BF16;
}
bool turned(int32_t op) { return op != CUBLAS_OP_N; }
bool is_half(cudaDataType_t t) { return t == CUDA_R_16F || t == CUDA_R_16BF; }

struct problem {
    desc_state d;
    layout_state a, b, c, out;
    int64_t m, n, k;
};

// Copies the problem's parts to *p. Returns the status with which the library accepts or refuses the problem.
cublasStatus_t accept(const void *desc, const void *a, const void *b, const void *c, const void *out, problem *p)
{
    if (!desc || !a || !b || !c || !out) return CUBLAS_STATUS_INVALID_VALUE;
    p->d = *(const desc_state *)desc;
    const void *given[] = { a, b, c, out };
    layout_state *all[] = { &p->a, &p->b, &p->c, &p->out };
    if (p->d.is != DESC) return CUBLAS_STATUS_INVALID_VALUE;
    for (int i = 0; i < 4; i++) {
        *all[i] = *(const layout_state *)given[i];
        const layout_state &l = *all[i];
        if (l.is != LAYOUT || l.rows == 0 || l.cols == 0 || l.batch < 1) return CUBLAS_STATUS_INVALID_VALUE;
        if (l.ld < (int64_t)l.rows || l.batch != ((const layout_state *)a)->batch) return CUBLAS_STATUS_INVALID_VALUE;
    }
    bool ta = turned(p->d.turn_a), tb = turned(p->d.turn_b);
    uint64_t m = ta ? p->a.cols : p->a.rows, k = ta ? p->a.rows : p->a.cols, n = tb ? p->b.rows : p->b.cols;
    if ((tb ? p->b.cols : p->b.rows) != k || p->c.rows != m || p->c.cols != n) return CUBLAS_STATUS_INVALID_VALUE;
    if (p->out.rows != m || p->out.cols != n) return CUBLAS_STATUS_INVALID_VALUE;
    p->m = (int64_t)m, p->n = (int64_t)n, p->k = (int64_t)k;
    if (p->out.batch > 1 && p->out.stride < p->out.ld * (p->n - 1) + p->m) return CUBLAS_STATUS_INVALID_VALUE;
    if (p->a.stride < 0 || p->b.stride < 0 || p->c.stride < 0) return CUBLAS_STATUS_INVALID_VALUE;

    bool wide = p->d.compute == CUBLAS_COMPUTE_64F;
    if (p->d.scale != (wide ? CUDA_R_64F : CUDA_R_32F)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (p->a.type != p->b.type || p->c.type != p->out.type || (p->a.type == CUDA_R_64F) != wide)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    bool half = p->a.type == CUDA_R_16F || p->a.type == CUDA_R_16BF;
    if (p->out.type != p->a.type && !(half && p->out.type == CUDA_R_32F)) return CUBLAS_STATUS_NOT_SUPPORTED;

    switch (p->d.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT: return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_EPILOGUE_BIAS: return p->d.bias ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    case CUBLASLT_EPILOGUE_BGRADB:
        if (p->out.batch > 1 || wide) return CUBLAS_STATUS_NOT_SUPPORTED;
        return p->d.bias ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        if (!p->d.bias) return CUBLAS_STATUS_INVALID_VALUE;
        // fall through
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_DGELU:
        if (!p->d.aux || p->d.aux_ld < p->m) return CUBLAS_STATUS_INVALID_VALUE;
        if (p->d.aux_ld % 8 || p->out.batch > 1 || !is_half(p->a.type) || !is_half(p->out.type))
            return CUBLAS_STATUS_NOT_SUPPORTED;
        return CUBLAS_STATUS_SUCCESS;
#define EXISTS(name, value) case value:
        MS_CUBLASLT_EPILOGUES_LATER(EXISTS)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

uint64_t fingerprint(const problem &p)
{
    int64_t all[] = { p.d.compute, p.d.scale, p.d.turn_a, p.d.turn_b, p.d.epilogue, p.m, p.n, p.k, p.d.aux_ld };
    uint64_t hash = 1469598103934665603ull;
    auto mix = [&](int64_t v) { hash = (hash ^ (uint64_t)v) * 1099511628211ull; };
    for (int64_t v : all) mix(v);
    for (const layout_state *l : { &p.a, &p.b, &p.c, &p.out }) mix(l->type), mix(l->ld), mix(l->batch), mix(l->stride);
    return hash;
}

// Forward: stores v in aux and returns GELU of v. Backward: returns v times the derivative of GELU at aux.
template <class T> T with_gelu(const problem &p, int64_t at, T v)
{
    int type = dtype_of(p.out.type);
    if (p.d.epilogue == CUBLASLT_EPILOGUE_DGELU || p.d.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD)
        return (T)ms_bwd_gelu_tanh_f32((float)v, load<float>(type, p.d.aux, at));
    store<T>(type, p.d.aux, at, v);
    return (T)ms_fwd_gelu_tanh_f32((float)v);
}

template <class T>
void compute(const problem &p, T alpha, const void *a, const void *b, T beta, const void *c, void *out)
{
    int at = dtype_of(p.a.type), bt = dtype_of(p.b.type), ct = dtype_of(p.out.type);
    int64_t a_row = turned(p.d.turn_a) ? p.a.ld : 1, a_col = turned(p.d.turn_a) ? 1 : p.a.ld;
    int64_t b_row = turned(p.d.turn_b) ? p.b.ld : 1, b_col = turned(p.d.turn_b) ? 1 : p.b.ld;
    for (int64_t batch = 0; batch < p.out.batch; batch++)
        for (int64_t j = 0; j < p.n; j++)
            for (int64_t i = 0; i < p.m; i++) {
                T sum = 0;
                for (int64_t l = 0; l < p.k; l++)
                    sum += load<T>(at, a, batch * p.a.stride + i * a_row + l * a_col) *
                           load<T>(bt, b, batch * p.b.stride + l * b_row + j * b_col);
                T v = alpha * sum;
                if (beta != 0) v += beta * load<T>(ct, c, batch * p.c.stride + j * p.c.ld + i);
                if (p.d.epilogue == CUBLASLT_EPILOGUE_BIAS || p.d.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
                    v += load<T>(ct, p.d.bias, i);
                if (p.d.aux) v = with_gelu(p, j * p.d.aux_ld + i, v);
                store<T>(ct, out, batch * p.out.stride + j * p.out.ld + i, v);
            }
    for (int64_t i = 0; p.d.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD && i < p.m; i++) {
        T sum = 0;
        for (int64_t j = 0; j < p.n; j++) sum += load<T>(ct, out, j * p.out.ld + i);
        store<T>(ct, (void *)p.d.bias, i, sum);
    }
    for (int64_t j = 0; p.d.epilogue == CUBLASLT_EPILOGUE_BGRADB && j < p.n; j++) {
        T sum = 0;
        for (int64_t l = 0; l < p.k; l++) sum += load<T>(bt, b, l * b_row + j * b_col);
        store<T>(ct, (void *)p.d.bias, j, sum);
    }
}

cublasStatus_t refuse(cublasStatus_t s)
{
    counted.refused++;
    return s;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) const counts *ms_standin_counts() { return &counted; }
// From now on the heuristic and the product return these statuses; 0: the status of the call itself.
__attribute__((visibility("default"))) void ms_standin_plant(int heuristic, int matmul)
{
    planted = { heuristic, matmul };
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) { return create(h, handle_state { HANDLE }); }
__attribute__((visibility("default"))) cublasStatus_t cublasLtDestroy(cublasLtHandle_t h)
{
    return destroy<handle_state>(h, HANDLE);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute, cudaDataType_t scale)
{
    return create(d, desc_state { DESC, compute, scale, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT });
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return destroy<desc_state>(d, DESC); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t what,
                                              const void *v, size_t n)
{
    desc_state *d = (desc_state *)desc;
    if (!d || d->is != DESC) return CUBLAS_STATUS_INVALID_VALUE;
    switch (what) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(d->turn_a, v, n);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(d->turn_b, v, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(d->epilogue, v, n);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(d->bias, v, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return set(d->aux, v, n);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return set(d->aux_ld, v, n);
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type, uint64_t rows, uint64_t cols,
                                          int64_t ld)
{
    return create(l, layout_state { LAYOUT, type, rows, cols, ld, 0, 1 });
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return destroy<layout_state>(l, LAYOUT); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t what,
                                                const void *v, size_t n)
{
    layout_state *l = (layout_state *)layout;
    if (!l || l->is != LAYOUT) return CUBLAS_STATUS_INVALID_VALUE;
    switch (what) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return set(l->batch, v, n);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return set(l->stride, v, n);
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    return create(p, pref_state { PREF, 0, { 256, 256, 256, 256 } });
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return destroy<pref_state>(p, PREF); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref,
                                                    cublasLtMatmulPreferenceAttributes_t what, const void *v, size_t n)
{
    pref_state *p = (pref_state *)pref;
    if (!p || p->is != PREF) return CUBLAS_STATUS_INVALID_VALUE;
    switch (what) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(p->room, v, n);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return set(p->align[0], v, n);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return set(p->align[1], v, n);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return set(p->align[2], v, n);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return set(p->align[3], v, n);
    default: return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t out, cublasLtMatmulPreference_t pref, int want,
                                              cublasLtMatmulHeuristicResult_t *results, int *found)
{
    problem p;
    counted.heuristics++;
    if (planted.heuristic) return refuse((cublasStatus_t)planted.heuristic);
    if (!h || ((handle_state *)h)->is != HANDLE) return refuse(CUBLAS_STATUS_NOT_INITIALIZED);
    if (!pref || ((pref_state *)pref)->is != PREF || want < 1 || !results || !found)
        return refuse(CUBLAS_STATUS_INVALID_VALUE);
    *found = 0;
    cublasStatus_t s = accept(desc, a, b, c, out, &p);
    if (s != CUBLAS_STATUS_SUCCESS) return refuse(s);
    const pref_state *asked = (const pref_state *)pref;
    algo_state algo = { fingerprint(p), asked->room >= ROOM ? (uint64_t)ROOM : 0, ALGO, {} };
    for (int i = 0; i < 4; i++) {
        uint32_t n = asked->align[i], element = (uint32_t)ms__dtype_size(dtype_of(i < 2 ? p.a.type : p.out.type));
        if (n < element || n & (n - 1)) return refuse(CUBLAS_STATUS_NOT_SUPPORTED);
        algo.align[i] = n < 16 ? n : 16;
    }
    memset(results, 0, sizeof *results);
    memcpy(&results->algo, &algo, sizeof algo);
    results->workspaceSize = algo.room;
    results->wavesCount = 1;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                              const void *c, cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t lo,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes, cudaStream_t stream)
{
    problem p;
    algo_state by;
    if (planted.matmul) return refuse((cublasStatus_t)planted.matmul);
    if (!h || ((handle_state *)h)->is != HANDLE) return refuse(CUBLAS_STATUS_NOT_INITIALIZED);
    if (!alpha || !beta || !a || !b || !c || !out || !algo) return refuse(CUBLAS_STATUS_INVALID_VALUE);
    cublasStatus_t s = accept(desc, la, lb, lc, lo, &p);
    if (s != CUBLAS_STATUS_SUCCESS) return refuse(s);
    memcpy(&by, algo, sizeof by);
    if (by.is != ALGO || by.problem != fingerprint(p)) return refuse(CUBLAS_STATUS_INVALID_VALUE);
    if (bytes < by.room || (by.room && (!workspace || (uintptr_t)workspace % 16)))
        return refuse(CUBLAS_STATUS_INVALID_VALUE);
    const void *pointers[] = { a, b, c, out };
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)pointers[i] % by.align[i]) return refuse(CUBLAS_STATUS_NOT_SUPPORTED);
    if (p.d.epilogue != CUBLASLT_EPILOGUE_DEFAULT && (uintptr_t)p.d.bias % by.align[3])
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED);
    if ((uintptr_t)p.d.aux % 16) return refuse(CUBLAS_STATUS_NOT_SUPPORTED);

    bool wide = p.d.compute == CUBLAS_COMPUTE_64F;
    double x = wide ? *(const double *)alpha : *(const float *)alpha;
    double y = wide ? *(const double *)beta : *(const float *)beta;
    auto job = [=] {
        memset(workspace, 0xff, by.room);
        if (wide) compute<double>(p, x, a, b, y, c, out);
        else compute<float>(p, (float)x, a, b, (float)y, c, out);
    };
    counted.products++;
    if (stream) ms_shim::push(stream, job);
    else job();
    return CUBLAS_STATUS_SUCCESS;
}
}
