// SPDX-License-Identifier: MIT
// formulas/elementwise.h -- the elementwise formulas. C and nvcc include it once per element type, with REAL and
// R(name) defined, and MS_INTEGER for int64_t. R(ms_exp) and similar functions come from math32.h (our own for float,
// libm's for double).
//
// fwd: the value. bwd: the gradient of the input, from the gradient of the output (g) and a saved input x or output y.
// NaN propagates as in PyTorch: the formulas rely on comparisons with NaN being false.

#ifndef MS_FORMULAS_ONCE
#define MS_FORMULAS_ONCE
#include "formulas/math32.h"
#define MS_SQRT_HALF 0.70710678118654752440
#define MS_SQRT_2_OVER_PI 0.79788456080286535588
#define MS_1_OVER_SQRT_2PI 0.39894228040143267794
#endif

// ---- all types ----

#ifdef MS_INTEGER
// Integers wrap around, as in PyTorch; signed overflow is undefined in C.
MS_FN REAL R(ms_fwd_add)(REAL a, REAL b) { return (REAL)((uint64_t)a + (uint64_t)b); }
MS_FN REAL R(ms_fwd_sub)(REAL a, REAL b) { return (REAL)((uint64_t)a - (uint64_t)b); }
MS_FN REAL R(ms_fwd_mul)(REAL a, REAL b) { return (REAL)((uint64_t)a * (uint64_t)b); }
MS_FN REAL R(ms_fwd_neg)(REAL x) { return (REAL)(0 - (uint64_t)x); }
MS_FN REAL R(ms_fwd_maximum)(REAL a, REAL b) { return a > b ? a : b; }
MS_FN REAL R(ms_fwd_minimum)(REAL a, REAL b) { return a < b ? a : b; }
MS_FN REAL R(ms_fwd_abs)(REAL x) { return x < 0 ? R(ms_fwd_neg)(x) : x; }
MS_FN REAL R(ms_fwd_pow)(REAL a, REAL b)
{
    if (b < 0) return a == 1 ? 1 : a == -1 ? (b & 1 ? -1 : 1) : 0;
    uint64_t r = 1, f = (uint64_t)a;
    for (; b; b >>= 1, f *= f)
        if (b & 1) r *= f;
    return (REAL)r;
}
#else
MS_FN REAL R(ms_fwd_add)(REAL a, REAL b) { return a + b; }
MS_FN REAL R(ms_fwd_sub)(REAL a, REAL b) { return a - b; }
MS_FN REAL R(ms_fwd_mul)(REAL a, REAL b) { return a * b; }
MS_FN REAL R(ms_fwd_neg)(REAL x) { return -x; }
MS_FN REAL R(ms_fwd_abs)(REAL x) { return R(ms_abs)(x); }
MS_FN REAL R(ms_fwd_pow)(REAL a, REAL b) { return R(ms_pow)(a, b); }
MS_FN REAL R(ms_fwd_maximum)(REAL a, REAL b) { return ((a != a) | (a > b)) ? a : b; }
MS_FN REAL R(ms_fwd_minimum)(REAL a, REAL b) { return ((a != a) | (a < b)) ? a : b; }
#endif

MS_FN REAL R(ms_fwd_add_scaled)(REAL a, REAL b, REAL s) { return R(ms_fwd_add)(a, R(ms_fwd_mul)(s, b)); }
MS_FN REAL R(ms_fwd_square)(REAL x) { return R(ms_fwd_mul)(x, x); }
MS_FN REAL R(ms_fwd_cube)(REAL x) { return R(ms_fwd_mul)(R(ms_fwd_mul)(x, x), x); }
MS_FN REAL R(ms_fwd_copy)(REAL x) { return x; }
MS_FN REAL R(ms_fwd_relu)(REAL x) { return x < 0 ? 0 : x; }
MS_FN REAL R(ms_fwd_sign)(REAL x) { return (REAL)((0 < x) - (x < 0)); }
MS_FN REAL R(ms_fwd_clamp)(REAL x, REAL low, REAL high)
{
    REAL t = x < low ? low : x;
    return t > high ? high : t;
}

// ---- floating-point types ----

#ifndef MS_INTEGER
MS_FN REAL R(ms_fwd_div)(REAL a, REAL b) { return a / b; }
MS_FN REAL R(ms_fwd_exp)(REAL x) { return R(ms_exp)(x); }
MS_FN REAL R(ms_fwd_log)(REAL x) { return R(ms_log)(x); }
MS_FN REAL R(ms_fwd_sqrt)(REAL x) { return R(ms_sqrt)(x); }
MS_FN REAL R(ms_fwd_rsqrt)(REAL x) { return 1 / R(ms_sqrt)(x); }
MS_FN REAL R(ms_fwd_sin)(REAL x) { return R(ms_sin)(x); }
MS_FN REAL R(ms_fwd_cos)(REAL x) { return R(ms_cos)(x); }
MS_FN REAL R(ms_fwd_tanh)(REAL x) { return R(ms_tanh)(x); }
MS_FN REAL R(ms_fwd_sigmoid)(REAL x) { return 1 / (1 + R(ms_exp)(-x)); }
MS_FN REAL R(ms_fwd_silu)(REAL x) { return x / (1 + R(ms_exp)(-x)); }
MS_FN REAL R(ms_fwd_reciprocal)(REAL x) { return 1 / x; }
MS_FN REAL R(ms_fwd_gelu)(REAL x) { return (REAL)0.5 * x * (1 + R(ms_erf)(x * (REAL)MS_SQRT_HALF)); }
// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)): one exp and one division.
MS_FN REAL R(ms_fwd_gelu_tanh)(REAL x)
{
    REAL u = (REAL)MS_SQRT_2_OVER_PI * (x + (REAL)0.044715 * x * x * x);
    return x / (1 + R(ms_exp)(-2 * u));
}

MS_FN REAL R(ms_bwd_relu)(REAL g, REAL y) { return y > 0 ? g : 0; }
MS_FN REAL R(ms_bwd_abs)(REAL g, REAL x) { return g * R(ms_fwd_sign)(x); }
MS_FN REAL R(ms_bwd_sqrt)(REAL g, REAL y) { return g / (2 * y); }
MS_FN REAL R(ms_bwd_rsqrt)(REAL g, REAL y) { return (REAL)-0.5 * g * y * y * y; }
MS_FN REAL R(ms_bwd_sin)(REAL g, REAL x) { return g * R(ms_cos)(x); }
MS_FN REAL R(ms_bwd_cos)(REAL g, REAL x) { return -g * R(ms_sin)(x); }
MS_FN REAL R(ms_bwd_tanh)(REAL g, REAL y) { return g * (1 - y * y); }
MS_FN REAL R(ms_bwd_sigmoid)(REAL g, REAL y) { return g * y * (1 - y); }
MS_FN REAL R(ms_bwd_silu)(REAL g, REAL x)
{
    REAL s = 1 / (1 + R(ms_exp)(-x));
    return g * s * (1 + x * (1 - s));
}
MS_FN REAL R(ms_bwd_reciprocal)(REAL g, REAL y) { return -g * y * y; }
MS_FN REAL R(ms_bwd_gelu)(REAL g, REAL x)
{
    REAL cdf = (REAL)0.5 * (1 + R(ms_erf)(x * (REAL)MS_SQRT_HALF));
    return g * (cdf + x * (REAL)MS_1_OVER_SQRT_2PI * R(ms_exp)((REAL)-0.5 * x * x));
}
MS_FN REAL R(ms_bwd_gelu_tanh)(REAL g, REAL x)
{
    REAL x2 = x * x;
    REAL u = (REAL)MS_SQRT_2_OVER_PI * (x + (REAL)0.044715 * x2 * x);
    REAL s = 1 / (1 + R(ms_exp)(-2 * u));  // (1 + tanh u) / 2
    REAL du = (REAL)(2 * MS_SQRT_2_OVER_PI) * (1 + (REAL)(3 * 0.044715) * x2);
    return g * (s + x * s * (1 - s) * du);
}
// d/dx x^p; the constant x^0 has gradient 0 everywhere, also at 0
MS_FN REAL R(ms_bwd_pow_scalar)(REAL g, REAL x, REAL p) { return p == 0 ? 0 : g * p * R(ms_pow)(x, p - 1); }
MS_FN REAL R(ms_bwd_pow_exponent)(REAL g, REAL a, REAL b)
{
    return ((a == 0) & (b >= 0)) ? 0 : g * R(ms_pow)(a, b) * R(ms_log)(a);
}
MS_FN REAL R(ms_bwd_rdiv_scalar)(REAL g, REAL x, REAL s) { return -g * s / (x * x); }
MS_FN REAL R(ms_bwd_rpow_scalar)(REAL g, REAL y, REAL s) { return g * y * R(ms_log)(s); }
MS_FN REAL R(ms_bwd_div_other)(REAL g, REAL a, REAL b) { return -g * a / (b * b); }
// An infinite maximum receives the whole gradient. An input of -inf receives none, even when all inputs are -inf.
MS_FN REAL R(ms_bwd_logsumexp)(REAL g, REAL x, REAL y)
{
    return x == y ? (y < 0 && y - y != 0 ? 0 : g) : g * R(ms_exp)(x - y);
}
// p-norms with finite p other than 0; n is the norm. The gradient at norm 0 is 0. p = 1 and 2 avoid pow.
MS_FN REAL R(ms_bwd_norm_1)(REAL g, REAL x) { return g * R(ms_fwd_sign)(x); }
MS_FN REAL R(ms_bwd_norm_2)(REAL g, REAL x, REAL n) { return n == 0 ? 0 : g * (x / n); }
MS_FN REAL R(ms_bwd_norm_p)(REAL g, REAL x, REAL n, REAL p)
{
    return n == 0 || x == 0 ? 0 : g * R(ms_fwd_sign)(x) * R(ms_pow)(R(ms_abs)(x) / n, p - 1);
}
// Equal inputs share the gradient.
MS_FN REAL R(ms_bwd_maximum)(REAL g, REAL a, REAL b) { return a > b ? g : a == b ? (REAL)0.5 * g : 0; }
MS_FN REAL R(ms_bwd_minimum)(REAL g, REAL a, REAL b) { return a < b ? g : a == b ? (REAL)0.5 * g : 0; }
MS_FN REAL R(ms_bwd_clamp)(REAL g, REAL x, REAL low, REAL high) { return ((x >= low) & (x <= high)) ? g : 0; }
#endif
