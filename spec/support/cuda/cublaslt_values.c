// SPDX-License-Identifier: MIT
// cublaslt_values.c -- checks at compile time that the stand-in's enumerators and sizes equal the toolkit's, if any.
#include "cublaslt_values.h"
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>

#define SAME(name, value) _Static_assert((int)name == value, #name);
MS_CUBLAS_STATUSES(SAME)
MS_CUDA_TYPES(SAME)
MS_CUBLAS_COMPUTE_TYPES(SAME)
MS_CUBLAS_OPERATIONS(SAME)
MS_CUBLASLT_DESC(SAME)
MS_CUBLASLT_LAYOUT(SAME)
MS_CUBLASLT_PREF(SAME)
MS_CUBLASLT_EPILOGUES(SAME)
_Static_assert(sizeof(cublasLtMatmulAlgo_t) == 64, "an algorithm");
_Static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == 64 + 8 + 4 + 4 + 16, "a result of the heuristic");
#endif
