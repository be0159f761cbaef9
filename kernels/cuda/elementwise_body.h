// SPDX-License-Identifier: MIT
// cuda/elementwise_body.h -- the formulas of rows/elementwise.def for one computing type: included once per type by
// cuda/elementwise.cu, which defines REAL, R(name), and FOR_FLOATS, FOR_DOUBLE and FOR_WHOLE: each keeps or omits the
// formulas that elementwise.def declares for these types.
#include "formulas/elementwise.h"

#define A a
#define B b
#define C c
#define MASK_A (a != 0)
#define MASK_B (b != 0)
#define FAR 1
#define FOR_ANGLE FOR_FLOATS
template <> struct formula<REAL> {
    typedef REAL T;
    // Computes formula `code`. GAMMA: it is a formula that calls a gamma function, otherwise any other.
    template <bool GAMMA = false> static __device__ __forceinline__ T apply(int code, T a, T b, T c, T s, T t)
    {
        switch (code) {
#define FORMULA(name, types, expression) FOR_##types(name, expression)
#define TRUTH FORMULA
#include "rows/elementwise.def"
        default: return a;
        }
    }
};
#undef A
#undef B
#undef C
#undef MASK_A
#undef MASK_B
#undef FAR
#undef FOR_ANGLE
#undef FOR_FLOATS
#undef FOR_DOUBLE
#undef FOR_WHOLE
#undef MS_INTEGER
#undef REAL
#undef R
