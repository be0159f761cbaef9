// SPDX-License-Identifier: MIT
// formulas/elementwise.h -- the elementwise formulas. C and nvcc include it once per element type, with REAL and
// R(name) defined, and MS_INTEGER for int64_t. R(ms_exp) and similar functions come from math32.h.
//
// fwd: the value. bwd: the gradient of the input, from the gradient of the output (g) and a saved input x or output y.
// NaN propagates as in PyTorch, in gradients too: the formulas rely on comparisons with NaN being false.

#ifndef MS_FORMULAS_ONCE
#define MS_FORMULAS_ONCE
#include "formulas/gamma.h"
#include "formulas/math32.h"
#define MS_SQRT_HALF 0.70710678118654752440
#define MS_SQRT_2_OVER_PI 0.79788456080286535588
#define MS_1_OVER_SQRT_2PI 0.39894228040143267794
#define MS_2_OVER_SQRT_PI 1.12837916709551257390
#define MS_LN_2 0.69314718055994530942
#define MS_LN_10 2.30258509299404568402
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
MS_FN REAL R(ms_fwd_clamp)(REAL x, REAL low, REAL high)
{
    REAL t = x < low ? low : x;
    return t > high ? high : t;
}
MS_FN REAL R(ms_fwd_floor)(REAL x) { return x; }
MS_FN REAL R(ms_fwd_ceil)(REAL x) { return x; }
MS_FN REAL R(ms_fwd_trunc)(REAL x) { return x; }
MS_FN REAL R(ms_fwd_round)(REAL x) { return x; }
// Division by 0 gives 0: an error cannot be raised for one element. The quotient of the lowest integer and -1 wraps.
MS_FN REAL R(ms_fwd_fmod)(REAL a, REAL b) { return b == 0 || b == -1 ? 0 : a % b; }
MS_FN REAL R(ms_fwd_remainder)(REAL a, REAL b)
{
    REAL m = R(ms_fwd_fmod)(a, b);
    return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}
MS_FN REAL R(ms_fwd_floor_divide)(REAL a, REAL b)
{
    if (b == 0 || b == -1) return b == 0 ? 0 : R(ms_fwd_neg)(a);
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
#else
MS_FN REAL R(ms_fwd_add)(REAL a, REAL b) { return a + b; }
MS_FN REAL R(ms_fwd_sub)(REAL a, REAL b) { return a - b; }
MS_FN REAL R(ms_fwd_mul)(REAL a, REAL b) { return a * b; }
MS_FN REAL R(ms_fwd_neg)(REAL x) { return -x; }
MS_FN REAL R(ms_fwd_abs)(REAL x) { return R(ms_abs)(x); }
MS_FN REAL R(ms_fwd_pow)(REAL a, REAL b) { return R(ms_pow)(a, b); }
MS_FN REAL R(ms_fwd_floor)(REAL x) { return R(ms_floor)(x); }
MS_FN REAL R(ms_fwd_ceil)(REAL x) { return R(ms_ceil)(x); }
MS_FN REAL R(ms_fwd_trunc)(REAL x) { return R(ms_trunc)(x); }
MS_FN REAL R(ms_fwd_round)(REAL x) { return R(ms_rint)(x); }
MS_FN REAL R(ms_fwd_fmod)(REAL a, REAL b) { return R(ms_fmod)(a, b); }
MS_FN REAL R(ms_fwd_remainder)(REAL a, REAL b)
{
    REAL m = R(ms_fmod)(a, b);
    return ((m != 0) & ((m < 0) != (b < 0))) ? m + b : m;
}
// Computed from the remainder, because a / b may round up to the next whole number.
MS_FN REAL R(ms_fwd_floor_divide)(REAL a, REAL b)
{
    if (b == 0) return a / b;
    REAL m = R(ms_fmod)(a, b), q = (a - m) / b;
    if ((m != 0) & ((m < 0) != (b < 0))) q -= 1;
    return q == 0 ? R(ms_copysign)(0, a / b) : R(ms_rint)(q);
}
MS_FN REAL R(ms_fwd_maximum)(REAL a, REAL b) { return ((a != a) | (a > b)) ? a : b; }
MS_FN REAL R(ms_fwd_minimum)(REAL a, REAL b) { return ((a != a) | (a < b)) ? a : b; }
MS_FN REAL R(ms_fwd_clamp)(REAL x, REAL low, REAL high)
{
    REAL t = ((x < low) | (low != low)) ? low : x;
    return ((t > high) | (high != high)) ? high : t;
}
#endif

MS_FN REAL R(ms_fwd_add_scaled)(REAL a, REAL b, REAL s) { return R(ms_fwd_add)(a, R(ms_fwd_mul)(s, b)); }
MS_FN REAL R(ms_fwd_square)(REAL x) { return R(ms_fwd_mul)(x, x); }
MS_FN REAL R(ms_fwd_cube)(REAL x) { return R(ms_fwd_mul)(R(ms_fwd_mul)(x, x), x); }
MS_FN REAL R(ms_fwd_copy)(REAL x) { return x; }
MS_FN REAL R(ms_fwd_relu)(REAL x) { return x < 0 ? 0 : x; }
MS_FN REAL R(ms_fwd_sign)(REAL x) { return (REAL)((0 < x) - (x < 0)); }

// ---- floating-point types; `far`: formulas/math32.h ----

#ifndef MS_INTEGER
MS_FN REAL R(ms_fwd_div)(REAL a, REAL b) { return a / b; }
MS_FN REAL R(ms_fwd_exp)(REAL x) { return R(ms_exp)(x); }
MS_FN REAL R(ms_fwd_log)(REAL x) { return R(ms_log)(x); }
MS_FN REAL R(ms_fwd_sqrt)(REAL x) { return R(ms_sqrt)(x); }
MS_FN REAL R(ms_fwd_rsqrt)(REAL x) { return 1 / R(ms_sqrt)(x); }
MS_FN REAL R(ms_fwd_sin)(REAL x, int far) { return R(ms_sin)(x, far); }
MS_FN REAL R(ms_fwd_cos)(REAL x, int far) { return R(ms_cos)(x, far); }
MS_FN REAL R(ms_fwd_tanh)(REAL x) { return R(ms_tanh)(x); }
MS_FN REAL R(ms_fwd_sigmoid)(REAL x) { return 1 / (1 + R(ms_exp)(-x)); }
MS_FN REAL R(ms_fwd_silu)(REAL x) { return x / (1 + R(ms_exp)(-x)); }
MS_FN REAL R(ms_fwd_reciprocal)(REAL x) { return 1 / x; }
MS_FN REAL R(ms_fwd_exp2)(REAL x) { return R(ms_exp2)(x); }
MS_FN REAL R(ms_fwd_expm1)(REAL x) { return R(ms_expm1)(x); }
MS_FN REAL R(ms_fwd_log2)(REAL x) { return R(ms_log2)(x); }
MS_FN REAL R(ms_fwd_log10)(REAL x) { return R(ms_log10)(x); }
MS_FN REAL R(ms_fwd_log1p)(REAL x) { return R(ms_log1p)(x); }
MS_FN REAL R(ms_fwd_erf)(REAL x) { return R(ms_erf)(x); }
MS_FN REAL R(ms_fwd_erfc)(REAL x) { return R(ms_erfc)(x); }
MS_FN REAL R(ms_fwd_erfinv)(REAL x)
{
    return R(ms_abs)(x) < 1 ? R(ms_erfinv)(x) : R(ms_abs)(x) == 1 ? x / (x - x) : (x - x) / (x - x);
}
MS_FN REAL R(ms_fwd_tan)(REAL x, int far) { return R(ms_tan)(x, far); }
MS_FN REAL R(ms_fwd_asin)(REAL x) { return R(ms_asin)(x); }
MS_FN REAL R(ms_fwd_acos)(REAL x) { return R(ms_acos)(x); }
MS_FN REAL R(ms_fwd_atan)(REAL x) { return R(ms_atan)(x); }
MS_FN REAL R(ms_fwd_sinh)(REAL x) { return R(ms_sinh)(x); }
MS_FN REAL R(ms_fwd_cosh)(REAL x) { return R(ms_cosh)(x); }
MS_FN REAL R(ms_fwd_asinh)(REAL x) { return R(ms_asinh)(x); }
MS_FN REAL R(ms_fwd_acosh)(REAL x) { return R(ms_acosh)(x); }
MS_FN REAL R(ms_fwd_atanh)(REAL x) { return R(ms_atanh)(x); }
MS_FN REAL R(ms_fwd_frac)(REAL x) { return x - R(ms_trunc)(x); }
MS_FN REAL R(ms_fwd_atan2)(REAL a, REAL b) { return R(ms_atan2)(a, b); }
MS_FN REAL R(ms_fwd_hypot)(REAL a, REAL b) { return R(ms_hypot)(a, b); }
MS_FN REAL R(ms_fwd_copysign)(REAL a, REAL b) { return R(ms_copysign)(a, b); }
MS_FN REAL R(ms_fwd_xlogy)(REAL a, REAL b) { return ((a == 0) & (b == b)) ? 0 : a * R(ms_log)(b); }
MS_FN REAL R(ms_fwd_prelu)(REAL x, REAL w) { return x > 0 ? x : w * x; }
// The logarithms of p and 1 - p, at least -100.
MS_FN REAL R(ms_log_of_one)(REAL p) { return R(ms_fwd_maximum)(R(ms_log)(p), -100); }
MS_FN REAL R(ms_log_of_zero)(REAL p) { return R(ms_fwd_maximum)(R(ms_log1p)(-p), -100); }
MS_FN REAL R(ms_fwd_binary_cross_entropy)(REAL p, REAL y)
{
    return (y - 1) * R(ms_log_of_zero)(p) - y * R(ms_log_of_one)(p);
}
// Two equal infinities give that infinity, not NaN.
MS_FN REAL R(ms_fwd_logaddexp)(REAL a, REAL b)
{
    REAL high = R(ms_fwd_maximum)(a, b);
    return a == b && a - a != 0 ? a : high + R(ms_log1p)(R(ms_exp)(-R(ms_abs)(a - b)));
}
// Exact at w = 0 and w = 1.
MS_FN REAL R(ms_fwd_lerp)(REAL a, REAL b, REAL w) { return w < (REAL)0.5 ? a + w * (b - a) : b - (b - a) * (1 - w); }
// Activations and the gamma functions; s and t are the activations' parameters, n is the order of polygamma.
MS_FN REAL R(ms_fwd_elu)(REAL x, REAL s, REAL t) { return t * (x > 0 ? x : s * R(ms_expm1)(x)); }
MS_FN REAL R(ms_fwd_lgamma)(REAL x) { return (REAL)ms_lgamma_of((double)x); }
MS_FN REAL R(ms_fwd_digamma)(REAL x) { return (REAL)ms_digamma_of((double)x); }
MS_FN REAL R(ms_fwd_polygamma)(REAL x, REAL n) { return (REAL)ms_polygamma_of((double)n, (double)x); }
MS_FN REAL R(ms_fwd_celu)(REAL x, REAL s) { return x > 0 ? x : s * R(ms_expm1)(x / s); }
MS_FN REAL R(ms_fwd_softplus)(REAL x, REAL s, REAL t) { return x * s > t ? x : R(ms_log1p)(R(ms_exp)(x * s)) / s; }
// tanh(log(1 + e)) = e (e + 2) / (e (e + 2) + 2), where e = exp(x): one exp and one division.
MS_FN REAL R(ms_fwd_mish)(REAL x)
{
    REAL e = R(ms_exp)(x), n = e * (e + 2);
    return x > 20 ? x : x * (n / (n + 2));
}
MS_FN REAL R(ms_fwd_hardsigmoid)(REAL x) { return R(ms_fwd_clamp)(x + 3, 0, 6) / 6; }
MS_FN REAL R(ms_fwd_hardswish)(REAL x) { return x * R(ms_fwd_clamp)(x + 3, 0, 6) / 6; }
MS_FN REAL R(ms_fwd_logit)(REAL x, REAL low, REAL high)
{
    REAL p = R(ms_fwd_clamp)(x, low, high);
    return R(ms_log)(p / (1 - p));
}
MS_FN REAL R(ms_fwd_softsign)(REAL x) { return x / (1 + R(ms_abs)(x)); }
MS_FN REAL R(ms_fwd_logsigmoid)(REAL x) { return R(ms_fwd_minimum)(x, 0) - R(ms_log1p)(R(ms_exp)(-R(ms_abs)(x))); }
MS_FN REAL R(ms_fwd_gelu)(REAL x) { return (REAL)0.5 * x * (1 + R(ms_erf)(x * (REAL)MS_SQRT_HALF)); }
// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)): one exp and one division.
MS_FN REAL R(ms_fwd_gelu_tanh)(REAL x)
{
    REAL u = (REAL)MS_SQRT_2_OVER_PI * (x + (REAL)0.044715 * x * x * x);
    return x / (1 + R(ms_exp)(-2 * u));
}

MS_FN REAL R(ms_bwd_relu)(REAL g, REAL y) { return y <= 0 ? 0 : g; }
MS_FN REAL R(ms_bwd_abs)(REAL g, REAL x) { return g * R(ms_fwd_sign)(x); }
MS_FN REAL R(ms_bwd_sqrt)(REAL g, REAL y) { return g / (2 * y); }
MS_FN REAL R(ms_bwd_rsqrt)(REAL g, REAL y) { return (REAL)-0.5 * g * y * y * y; }
MS_FN REAL R(ms_bwd_sin)(REAL g, REAL x, int far) { return g * R(ms_cos)(x, far); }
MS_FN REAL R(ms_bwd_cos)(REAL g, REAL x, int far) { return -g * R(ms_sin)(x, far); }
MS_FN REAL R(ms_bwd_tanh)(REAL g, REAL y) { return g * (1 - y * y); }
MS_FN REAL R(ms_bwd_sigmoid)(REAL g, REAL y) { return g * y * (1 - y); }
MS_FN REAL R(ms_bwd_silu)(REAL g, REAL x)
{
    REAL s = 1 / (1 + R(ms_exp)(-x));
    return g * s * (1 + x * (1 - s));
}
MS_FN REAL R(ms_bwd_reciprocal)(REAL g, REAL y) { return -g * y * y; }
MS_FN REAL R(ms_bwd_exp2)(REAL g, REAL y) { return g * y * (REAL)MS_LN_2; }
MS_FN REAL R(ms_bwd_expm1)(REAL g, REAL y) { return g * (y + 1); }
MS_FN REAL R(ms_bwd_log2)(REAL g, REAL x) { return g / (x * (REAL)MS_LN_2); }
MS_FN REAL R(ms_bwd_log10)(REAL g, REAL x) { return g / (x * (REAL)MS_LN_10); }
MS_FN REAL R(ms_bwd_log1p)(REAL g, REAL x) { return g / (1 + x); }
MS_FN REAL R(ms_bwd_erf)(REAL g, REAL x) { return g * (REAL)MS_2_OVER_SQRT_PI * R(ms_exp)(-x * x); }
MS_FN REAL R(ms_bwd_erfc)(REAL g, REAL x) { return -R(ms_bwd_erf)(g, x); }
MS_FN REAL R(ms_bwd_erfinv)(REAL g, REAL y) { return g / (REAL)MS_2_OVER_SQRT_PI * R(ms_exp)(y * y); }
MS_FN REAL R(ms_bwd_tan)(REAL g, REAL y) { return g * (1 + y * y); }
MS_FN REAL R(ms_bwd_asin)(REAL g, REAL x) { return g / R(ms_sqrt)((1 - x) * (1 + x)); }
MS_FN REAL R(ms_bwd_acos)(REAL g, REAL x) { return -R(ms_bwd_asin)(g, x); }
MS_FN REAL R(ms_bwd_atan)(REAL g, REAL x) { return g / (1 + x * x); }
MS_FN REAL R(ms_bwd_sinh)(REAL g, REAL x) { return g * R(ms_cosh)(x); }
MS_FN REAL R(ms_bwd_cosh)(REAL g, REAL x) { return g * R(ms_sinh)(x); }
MS_FN REAL R(ms_bwd_asinh)(REAL g, REAL x) { return g / R(ms_sqrt)(1 + x * x); }
MS_FN REAL R(ms_bwd_acosh)(REAL g, REAL x) { return g / R(ms_sqrt)((x - 1) * (x + 1)); }
MS_FN REAL R(ms_bwd_atanh)(REAL g, REAL x) { return g / ((1 - x) * (1 + x)); }
MS_FN REAL R(ms_bwd_logit)(REAL g, REAL x, REAL low, REAL high)
{
    REAL v = x * (1 - x);
    return ((x < low) | (x > high)) ? 0 : v < 0 ? R(ms_sqrt)(v) : g / v;  // outside of [0, 1] NaN, as the value
}
MS_FN REAL R(ms_bwd_leaky_relu)(REAL g, REAL x, REAL s) { return x > 0 ? g : s * g; }
MS_FN REAL R(ms_bwd_elu)(REAL g, REAL x, REAL s, REAL t) { return g * t * (x > 0 ? 1 : s * R(ms_exp)(x)); }
MS_FN REAL R(ms_bwd_lgamma)(REAL g, REAL x) { return g * R(ms_fwd_digamma)(x); }
MS_FN REAL R(ms_bwd_digamma)(REAL g, REAL x) { return g * R(ms_fwd_polygamma)(x, 1); }
MS_FN REAL R(ms_bwd_polygamma)(REAL g, REAL x, REAL n) { return g * R(ms_fwd_polygamma)(x, n + 1); }
MS_FN REAL R(ms_bwd_celu)(REAL g, REAL x, REAL s) { return x > 0 ? g : g * R(ms_exp)(x / s); }
MS_FN REAL R(ms_bwd_softplus)(REAL g, REAL x, REAL s, REAL t) { return x * s > t ? g : g / (1 + R(ms_exp)(-x * s)); }
MS_FN REAL R(ms_bwd_mish)(REAL g, REAL x)
{
    REAL e = R(ms_exp)(x), n = e * (e + 2), d = n + 2;
    return x > 20 ? g : g * ((n + x * (4 * e * (e + 1)) / d) / d);
}
MS_FN REAL R(ms_bwd_hardsigmoid)(REAL g, REAL x) { return ((x > -3) & (x < 3)) ? g / 6 : 0; }
MS_FN REAL R(ms_bwd_hardswish)(REAL g, REAL x) { return x <= -3 ? 0 : x >= 3 ? g : g * (x / 3 + (REAL)0.5); }
MS_FN REAL R(ms_bwd_softsign)(REAL g, REAL x)
{
    REAL d = 1 + R(ms_abs)(x);
    return g / (d * d);
}
MS_FN REAL R(ms_bwd_logsigmoid)(REAL g, REAL x) { return g / (1 + R(ms_exp)(x)); }
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
// d/dx x^p; the constant x^0 has gradient 0 everywhere, also at 0. Squares are common, and libm's pow takes 10 ns.
MS_FN REAL R(ms_bwd_pow_scalar)(REAL g, REAL x, REAL p)
{
    return p == 2 ? g * p * x : p == 0 ? 0 : g * p * R(ms_pow)(x, p - 1);
}
MS_FN REAL R(ms_bwd_second_pow)(REAL g, REAL a, REAL b)
{
    return ((a == 0) & (b >= 0)) ? 0 : g * R(ms_pow)(a, b) * R(ms_log)(a);
}
MS_FN REAL R(ms_bwd_first_pow)(REAL g, REAL a, REAL b) { return R(ms_bwd_pow_scalar)(g, a, b); }
MS_FN REAL R(ms_bwd_rdiv_scalar)(REAL g, REAL x, REAL s) { return -g * (s / x / x); }
MS_FN REAL R(ms_bwd_rpow_scalar)(REAL g, REAL y, REAL s) { return ((s == 0) & (y <= 1)) ? 0 : g * y * R(ms_log)(s); }
MS_FN REAL R(ms_bwd_div_other)(REAL g, REAL a, REAL b) { return -g * (a / b / b); }  // b * b may overflow
// An input of +inf receives the whole gradient. An input of -inf receives none, even when all inputs are -inf.
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
MS_FN REAL R(ms_bwd_first_maximum)(REAL g, REAL a, REAL b) { return a < b ? 0 : a == b ? (REAL)0.5 * g : g; }
MS_FN REAL R(ms_bwd_first_minimum)(REAL g, REAL a, REAL b) { return a > b ? 0 : a == b ? (REAL)0.5 * g : g; }
MS_FN REAL R(ms_bwd_second_maximum)(REAL g, REAL a, REAL b) { return R(ms_bwd_first_maximum)(g, b, a); }
MS_FN REAL R(ms_bwd_second_minimum)(REAL g, REAL a, REAL b) { return R(ms_bwd_first_minimum)(g, b, a); }
MS_FN REAL R(ms_bwd_first_fmod)(REAL g, REAL a, REAL b) { return (void)a, (void)b, g; }
MS_FN REAL R(ms_bwd_second_fmod)(REAL g, REAL a, REAL b) { return -g * R(ms_trunc)(a / b); }
MS_FN REAL R(ms_bwd_first_remainder)(REAL g, REAL a, REAL b) { return (void)a, (void)b, g; }
MS_FN REAL R(ms_bwd_second_remainder)(REAL g, REAL a, REAL b) { return -g * R(ms_fwd_floor_divide)(a, b); }
// The gradient at the origin is 0.
MS_FN REAL R(ms_bwd_first_atan2)(REAL g, REAL a, REAL b)
{
    // b / (a^2 + b^2), of numbers divided by the larger one: no overflow, and the same bits on every device.
    REAL m = R(ms_fwd_maximum)(R(ms_abs)(a), R(ms_abs)(b)), x = a / m, y = b / m;
    return m == 0 ? 0 : g * (m - m == 0 ? y / (x * x + y * y) / m : y / m);
}
MS_FN REAL R(ms_bwd_second_atan2)(REAL g, REAL a, REAL b) { return R(ms_bwd_first_atan2)(g, b, -a); }
MS_FN REAL R(ms_bwd_first_hypot)(REAL g, REAL a, REAL b) { return g * a / R(ms_hypot)(a, b); }
MS_FN REAL R(ms_bwd_second_hypot)(REAL g, REAL a, REAL b) { return g * b / R(ms_hypot)(a, b); }
MS_FN REAL R(ms_bwd_first_copysign)(REAL g, REAL a, REAL b)
{
    return a == 0 ? 0 : g * R(ms_fwd_sign)(a) * R(ms_copysign)(1, b);
}
MS_FN REAL R(ms_bwd_second_copysign)(REAL g, REAL a, REAL b) { return (void)g, (void)a, (void)b, 0; }
MS_FN REAL R(ms_bwd_first_xlogy)(REAL g, REAL a, REAL b) { return ((a == 0) & (b <= 0)) ? 0 : g * R(ms_log)(b); }
MS_FN REAL R(ms_bwd_second_xlogy)(REAL g, REAL a, REAL b) { return g * a / b; }
MS_FN REAL R(ms_bwd_first_prelu)(REAL g, REAL x, REAL w) { return x > 0 ? g : w * g; }
MS_FN REAL R(ms_bwd_second_prelu)(REAL g, REAL x, REAL w) { return (void)w, x > 0 ? 0 : g * x; }
MS_FN REAL R(ms_bwd_first_binary_cross_entropy)(REAL g, REAL p, REAL y)
{
    return g * (p - y) / R(ms_fwd_maximum)(p * (1 - p), (REAL)1e-12);
}
MS_FN REAL R(ms_bwd_second_binary_cross_entropy)(REAL g, REAL p, REAL y)
{
    return (void)y, g * (R(ms_log_of_zero)(p) - R(ms_log_of_one)(p));
}
MS_FN REAL R(ms_bwd_first_logaddexp)(REAL g, REAL a, REAL b) { return g / (1 + R(ms_exp)(b - a)); }
MS_FN REAL R(ms_bwd_second_logaddexp)(REAL g, REAL a, REAL b) { return g / (1 + R(ms_exp)(a - b)); }
MS_FN REAL R(ms_bwd_clamp)(REAL g, REAL x, REAL low, REAL high) { return ((x >= low) & (x <= high)) ? g : 0; }
#endif
