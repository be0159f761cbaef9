// SPDX-License-Identifier: MIT
// ptx/functions.h -- the functions of the mathematical library that kernels call. In the mode `compare` g++'s kernels
// call CUDA's, as nvcc compiled them from functions.cu: then both kernels must give the same bits. CMakeLists.txt wraps
// the functions that are named here.
#ifndef MS_PTX_FUNCTIONS_H
#define MS_PTX_FUNCTIONS_H

// Of doubles and of floats, with 1 and with 2 arguments. sincos is sin and cos.
#define MS_ANGLES(X) X(acos) X(asin) X(atan) X(cos) X(sin) X(tan) X(acosh) X(asinh) X(atanh) X(cosh) X(sinh)
#define MS_POWERS(X) X(erf) X(exp) X(exp2) X(expm1) X(log) X(log10) X(log1p) X(log2)
#define MS_DOUBLES_1(X) MS_ANGLES(X) MS_POWERS(X)
#define MS_DOUBLES_2(X) X(atan2) X(hypot) X(pow)
#define MS_FLOATS_1(X) \
    X(acosf) X(acoshf) X(asinf) X(asinhf) X(atanf) X(atanhf) X(coshf) X(exp2f) X(log10f) X(log2f) X(sinhf)
#define MS_FLOATS_2(X) X(atan2f) X(hypotf) X(powf)

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
