// SPDX-License-Identifier: MIT
// null/product.c -- cuBLASLt: every product is accepted, and counted.
#define _GNU_SOURCE
#include <dlfcn.h>

#include <cuda_runtime_api.h>
#if __has_include(<cublasLt.h>)  // as in product.cu
#define MS_CUBLAS 1
#include <cublasLt.h>
#endif

#include "null.h"

#ifdef MS_CUBLAS
typedef struct {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t batch;
} layout;
typedef struct {
    cublasOperation_t turned;
    const void *aux;  // a matrix of the result's shape that the epilogue reads or writes
} description;

static cublasStatus_t lt_Create(cublasLtHandle_t *h)
{
    static char handle;
    *h = (cublasLtHandle_t)(void *)&handle;
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute, cudaDataType_t scale)
{
    (void)compute, (void)scale;
    *d = calloc(1, sizeof(description));
    return *d ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}
static cublasStatus_t lt_MatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what,
                                                const void *v, size_t n)
{
    (void)n;
    if (what == CUBLASLT_MATMUL_DESC_TRANSA) memcpy(&((description *)d)->turned, v, sizeof(cublasOperation_t));
    if (what == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER) memcpy(&((description *)d)->aux, v, sizeof(void *));
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType_t type, uint64_t rows,
                                            uint64_t cols, int64_t ld)
{
    (void)ld;
    layout *made = malloc(sizeof *made);
    if (!made) return CUBLAS_STATUS_ALLOC_FAILED;
    *made = (layout) { type, rows, cols, 1 };
    *l = (cublasLtMatrixLayout_t)(void *)made;
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t what,
                                                  const void *v, size_t n)
{
    int32_t batch;
    (void)n;
    if (what == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) {
        memcpy(&batch, v, sizeof batch);
        ((layout *)(void *)l)->batch = batch;
    }
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    return (*p = malloc(1)) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}
static cublasStatus_t lt_MatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                      cublasLtMatmulPreferenceAttributes_t what, const void *v,
                                                      size_t n)
{
    (void)p, (void)what, (void)v, (void)n;
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_destroy(void *p)
{
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t lt_MatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                                cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                cublasLtMatrixLayout_t o, cublasLtMatmulPreference_t p, int n,
                                                cublasLtMatmulHeuristicResult_t *results, int *found)
{
    (void)h, (void)d, (void)a, (void)b, (void)c, (void)o, (void)p;
    memset(results, 0, (size_t)n * sizeof *results);
    *found = n > 0;
    return CUBLAS_STATUS_SUCCESS;
}

static void operand(ms_null_launch *l, const void *p, const layout *x)
{
    int size = x->type == CUDA_R_64F ? 8 : x->type == CUDA_R_32F ? 4 : 2;
    size_t bytes = (size_t)x->rows * x->cols * (size_t)x->batch * (size_t)size;
    ms__null_note(p, bytes, size);
    l->bytes[size == 2 ? 0 : size == 4 ? 1 : 2] += (double)bytes;
}
static cublasStatus_t lt_Matmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha, const void *a,
                                cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                                const void *c, cublasLtMatrixLayout_t lc, void *out, cublasLtMatrixLayout_t lo,
                                const cublasLtMatmulAlgo_t *algo, void *room, size_t bytes, cudaStream_t stream)
{
    const layout *x = (const layout *)(const void *)la, *o = (const layout *)(const void *)lo;
    (void)h, (void)alpha, (void)c, (void)algo, (void)room, (void)bytes, (void)stream;
    uint64_t deep = ((description *)(void *)d)->turned == CUBLAS_OP_N ? x->cols : x->rows;
    double flops = 2.0 * (double)o->rows * (double)o->cols * (double)deep * (double)o->batch;
    ms__null_totals.products++;
    ms__null_totals.flops += flops;
    ms_null_launch *l = ms__null_launch("product");
    l->flops = flops;
    operand(l, a, x);
    operand(l, b, (const layout *)(const void *)lb);
    operand(l, out, o);
    const void *aux = ((description *)(void *)d)->aux;
    if (aux) operand(l, aux, o);
    bool adds = o->type == CUDA_R_64F ? *(const double *)beta != 0 : *(const float *)beta != 0;
    if (adds) operand(l, c, (const layout *)(const void *)lc);
    return CUBLAS_STATUS_SUCCESS;
}

#endif

// The plugin's objects find cuBLASLt with dlopen and dlsym. The linker (--wrap) replaces their calls of dlopen, dlsym
// and dlclose by calls of the following functions.
static char library;
extern void *__real_dlopen(const char *name, int flags);
extern void *__real_dlsym(void *lib, const char *name);
extern int __real_dlclose(void *lib);
void *__wrap_dlopen(const char *name, int flags)
{
    if (name && strstr(name, "libcudnn.so")) return NULL;  // cuDNN needs a GPU
    return name && strstr(name, "libcublasLt.so") ? &library : __real_dlopen(name, flags);
}
int __wrap_dlclose(void *lib) { return lib == &library ? 0 : __real_dlclose(lib); }
void *__wrap_dlsym(void *lib, const char *name)
{
    static const struct {
        const char *name;
        void *f;
    } functions[] = {
        { "", NULL },
#ifdef MS_CUBLAS
#define LT(name) { "cublasLt" #name, (void *)lt_##name }
        LT(Create),
        LT(MatmulDescCreate),
        LT(MatmulDescSetAttribute),
        LT(MatrixLayoutCreate),
        LT(MatrixLayoutSetAttribute),
        LT(MatmulPreferenceCreate),
        LT(MatmulPreferenceSetAttribute),
        LT(MatmulAlgoGetHeuristic),
        LT(Matmul),
        { "cublasLtMatmulDescDestroy", (void *)lt_destroy },
        { "cublasLtMatrixLayoutDestroy", (void *)lt_destroy },
        { "cublasLtMatmulPreferenceDestroy", (void *)lt_destroy },
#endif
    };
    if (lib != &library) return __real_dlsym(lib, name);
    for (int k = 0; k < MS_COUNT(functions); k++)
        if (strcmp(functions[k].name, name) == 0) return functions[k].f;
    return NULL;
}
