// SPDX-License-Identifier: MIT
// ptx/functions.h -- the functions of the mathematical library that kernels call. In the mode `compare` g++'s kernels
// call CUDA's, as nvcc compiled them from functions.cu: then both kernels must give the same bits. CMakeLists.txt wraps
// the functions that are named here.
#ifndef MS_PTX_FUNCTIONS_H
#define MS_PTX_FUNCTIONS_H

// D: of doubles, F: of floats, 1 or 2: arguments. sincos is sin and cos.
#define MS_FUNCTIONS(D1, D2, F1, F2)                                                                                   \
    D1(acos)                                                                                                           \
    D1(acosh)                                                                                                          \
    D1(asin)                                                                                                           \
    D1(asinh)                                                                                                          \
    D1(atan)                                                                                                           \
    D1(atanh)                                                                                                          \
    D1(cos)                                                                                                            \
    D1(cosh)                                                                                                           \
    D1(erf) D1(erfc) D1(exp) D1(exp2) D1(expm1) D1(log) D1(log10) D1(log1p) D1(log2) D1(sin) D1(sinh) D1(tan) D1(tanh) \
        D2(atan2) D2(hypot) D2(pow) F1(acosf) F1(acoshf) F1(asinf) F1(asinhf) F1(atanf) F1(atanhf) F1(coshf) F1(erfcf) \
            F1(exp2f) F1(log10f) F1(log2f) F1(sinhf) F2(atan2f) F2(hypotf) F2(powf)

#if defined(__cplusplus) && !defined(__CUDACC__)
#include <string>
namespace ms_shim
{
extern thread_local bool calls_cudas_library;
// Loads the functions that prepare.lua made in a folder; returns why it cannot, or "".
std::string load_functions(const std::string &folder);
}  // namespace ms_shim
#endif
#endif
