// SPDX-License-Identifier: MIT
// cuda/cublaslt.h -- the part of cublasLt.h that kernels/cuda/product/product.cu uses, for the emulated GPU. The
// stand-in library (cublaslt.cpp) implements it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cublaslt_values.h"
#include "shim.h"

#define CUBLAS_VER_MAJOR 13

#define VALUE(name, value) name = value,
enum cublasStatus_t { MS_CUBLAS_STATUSES(VALUE) };
enum cudaDataType_t { MS_CUDA_TYPES(VALUE) };
enum cublasComputeType_t { MS_CUBLAS_COMPUTE_TYPES(VALUE) };
enum cublasOperation_t { MS_CUBLAS_OPERATIONS(VALUE) };
enum cublasLtMatmulDescAttributes_t { MS_CUBLASLT_DESC(VALUE) };
enum cublasLtMatrixLayoutAttribute_t { MS_CUBLASLT_LAYOUT(VALUE) };
enum cublasLtMatmulPreferenceAttributes_t { MS_CUBLASLT_PREF(VALUE) };
enum cublasLtEpilogue_t { MS_CUBLASLT_EPILOGUES(VALUE) };
#undef VALUE

struct cublasLtContext;
struct cublasLtMatmulDescOpaque_t;
struct cublasLtMatrixLayoutOpaque_t;
struct cublasLtMatmulPreferenceOpaque_t;
typedef cublasLtContext *cublasLtHandle_t;
typedef cublasLtMatmulDescOpaque_t *cublasLtMatmulDesc_t;
typedef cublasLtMatrixLayoutOpaque_t *cublasLtMatrixLayout_t;
typedef cublasLtMatmulPreferenceOpaque_t *cublasLtMatmulPreference_t;
struct cublasLtMatmulAlgo_t {
    uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
};

extern "C" {
#define MS_LT __attribute__((visibility("default"))) cublasStatus_t
MS_LT cublasLtCreate(cublasLtHandle_t *handle);
MS_LT cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale);
MS_LT cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc);
MS_LT cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t what, const void *value,
                                     size_t bytes);
MS_LT cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows, uint64_t cols,
                                 int64_t ld);
MS_LT cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout);
MS_LT cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t what,
                                       const void *value, size_t bytes);
MS_LT cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *pref);
MS_LT cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t pref);
MS_LT cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t pref, cublasLtMatmulPreferenceAttributes_t what,
                                           const void *value, size_t bytes);
MS_LT cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                     cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                     cublasLtMatmulPreference_t pref, int want,
                                     cublasLtMatmulHeuristicResult_t *results, int *found);
MS_LT cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                     cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                     const void *c, cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                     const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes, cudaStream_t stream);
}
