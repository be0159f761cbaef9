// SPDX-License-Identifier: MIT
// formulas/math32.h -- float exp, log, tanh, erf, erfc, erfinv, sine, cosine and tangent without branches or tables, so
// that loops vectorise (tanh-GELU takes 0.35 ns per element; 9.9 ns with libm's functions). They use only + - * /, sqrt
// and explicit fma, so that every ISA level and device gives the same bits (level v1 has no fma and calls libm's fmaf,
// which is slow). spec/kernels/math32_spec.lua bounds their errors over samples of their arguments: exp and log 1 ulp,
// erf 1.03 ulp (1.0283 is the largest over all arguments from 5e-7 to 5), tanh, sine and cosine 3 ulp, tangent and
// erfinv 4 ulp, erfc 5 ulp. Only the sine, cosine and tangent of far arguments (ms_is_far) take a branch.
#ifndef MS_MATH32_H
#define MS_MATH32_H

#include "tensor/dtype.h"

MS_FN int32_t ms__float_int(float f) { return (int32_t)ms__float_bits(f); }
MS_FN float ms__int_float(int32_t i) { return ms__bits_float((uint32_t)i); }

#define MS_FMA(a, b, c) __builtin_fmaf(a, b, c)

// 2^n for n in [-126, 127]
MS_FN float ms_pow2i_f32(int32_t n) { return ms__int_float((int32_t)((uint32_t)(n + 127) << 23)); }

// From Cephes' expf: e^x = p 2^n, with p near 1. For NaN, p is NaN and n arbitrary.
MS_FN float ms__exp_parts_f32(float x, int32_t *n)
{
    float shifted = MS_FMA(x, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    *n = (int32_t)(ms__float_bits(shifted) - 0x4b400000u);
    float k = shifted - 12582912.0f;
    float r = MS_FMA(k, 2.12194440e-4f, MS_FMA(k, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = MS_FMA(p, r, 1.3981999507e-3f);
    p = MS_FMA(p, r, 8.3334519073e-3f);
    p = MS_FMA(p, r, 4.1665795894e-2f);
    p = MS_FMA(p, r, 1.6666665459e-1f);
    p = MS_FMA(p, r, 5.0000001201e-1f);
    return MS_FMA(p, r * r, r) + 1.0f;
}
// The scale is applied in two halves, so that subnormal results round once and overflow gives infinity. NaN propagates
// through the comparisons and the polynomial.
MS_FN float ms_exp_f32(float x)
{
    int32_t n;
    x = x < -104.0f ? -104.0f : x;
    float p = ms__exp_parts_f32(x > 89.0f ? 89.0f : x, &n);
    int32_t half = n >> 1;
    return p * ms_pow2i_f32(half) * ms_pow2i_f32(n - half);
}
// The same for x in [-87, 88], where no result is subnormal or infinite, with less work.
MS_FN float ms_exp_normal_f32(float x)
{
    int32_t n;
    float p = ms__exp_parts_f32(x, &n);
    return p * ms_pow2i_f32(n);
}

// From Cephes' logf: x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
MS_FN float ms_log_f32(float x)
{
    int tiny = x < 1.17549435e-38f;
    float y = tiny ? x * 8388608.0f : x;  // scale subnormals by 2^23
    int32_t bits = ms__float_int(y);
    int32_t e = ((bits >> 23) & 0xff) - 126 - (tiny ? 23 : 0);
    float m = ms__int_float((bits & 0x007fffff) | 0x3f000000);  // m is in [1/2, 1)
    int low = m < 0.707106781186547524f;
    e -= low;
    m = (low ? m + m : m) - 1.0f;
    float z = m * m;
    float p = 7.0376836292e-2f;
    p = MS_FMA(p, m, -1.1514610310e-1f);
    p = MS_FMA(p, m, 1.1676998740e-1f);
    p = MS_FMA(p, m, -1.2420140846e-1f);
    p = MS_FMA(p, m, 1.4249322787e-1f);
    p = MS_FMA(p, m, -1.6668057665e-1f);
    p = MS_FMA(p, m, 2.0000714765e-1f);
    p = MS_FMA(p, m, -2.4999993993e-1f);
    p = MS_FMA(p, m, 3.3333331174e-1f);
    p = p * m * z;
    float fe = (float)e;
    p = MS_FMA(fe, -2.12194440e-4f, p);
    p = MS_FMA(-0.5f, z, p);
    float r = MS_FMA(fe, 0.693359375f, m + p);
    r = x == 0.0f ? ms__bits_float(0xff800000u) : r;
    r = x < 0.0f ? ms__bits_float(0x7fc00000u) : r;
    return x < ms__bits_float(0x7f800000u) ? r : x;  // log(inf) = inf, log(NaN) = NaN
}

MS_FN float ms_abs_f32(float x) { return ms__bits_float(ms__float_bits(x) & 0x7fffffffu); }
MS_FN float ms_copysign_f32(float x, float s)
{
    return ms__bits_float((ms__float_bits(x) & 0x7fffffffu) | (ms__float_bits(s) & 0x80000000u));
}

// From Cephes' tanhf: an odd polynomial near 0, elsewhere 1 - 2 / (exp(2x) + 1).
MS_FN float ms_tanh_f32(float x)
{
    float a = ms_abs_f32(x), z = x * x;
    float p = -5.70498872745e-3f;
    p = MS_FMA(p, z, 2.06390887954e-2f);
    p = MS_FMA(p, z, -5.37397155531e-2f);
    p = MS_FMA(p, z, 1.33314422036e-1f);
    p = MS_FMA(p, z, -3.33332819422e-1f);
    p = MS_FMA(p * z, x, x);
    float q = 1.0f - 2.0f / (ms_exp_f32(a + a) + 1.0f);
    return a < 0.625f ? p : ms_copysign_f32(q, x);
}

// Two-piece erf by N. Juffa.
MS_FN float ms_erf_f32(float x)
{
    float t = ms_abs_f32(x), s = x * x;
    t = t > 4.0f ? 4.0f : t;
    float st = t * t;
    float r = MS_FMA(-1.72853470e-5f, t, 3.83197126e-4f);
    float u = MS_FMA(-3.88396438e-3f, t, 2.42546219e-2f);
    r = MS_FMA(r, st, u);
    r = MS_FMA(r, t, -1.06777877e-1f);
    r = MS_FMA(r, t, -6.34846687e-1f);
    r = MS_FMA(r, t, -1.28717512e-1f);
    r = MS_FMA(r, t, -t);
    r = 1.0f - ms_exp_f32(r);
    float p = -5.96761703e-4f;
    p = MS_FMA(p, s, 4.99119423e-3f);
    p = MS_FMA(p, s, -2.67681349e-2f);
    p = MS_FMA(p, s, 1.12819925e-1f);
    p = MS_FMA(p, s, -3.76125336e-1f);
    p = MS_FMA(p, s, 1.28379166e-1f);
    p = MS_FMA(p, x, x);
    return t > 0.927734375f ? ms_copysign_f32(r, x) : p;
}
// erfc(a) exp(a^2) (1 + 2 a), a polynomial in q = (a - 4) / (a + 4) (Shepherd and Laframboise, Math. Comp. 36, 1981),
// here interpolated at Chebyshev's points; exp gets the rest of a^2, too. Below 0.5: 1 - erf.
MS_FN float ms_erfc_f32(float x)
{
    float a = ms_abs_f32(x);
    a = a > 10.1f ? 10.1f : a;
    float q = (a - 4.0f) / (a + 4.0f), square = a * a, rest = MS_FMA(a, a, -square), e = ms_exp_f32(-square);
    float p = -0.0006469644394f;
    p = MS_FMA(p, q, -0.001152284133f);
    p = MS_FMA(p, q, 0.005028204267f);
    p = MS_FMA(p, q, -0.01602506217f);
    p = MS_FMA(p, q, 0.03722821935f);
    p = MS_FMA(p, q, -0.06635254431f);
    p = MS_FMA(p, q, 0.09372050579f);
    p = MS_FMA(p, q, -0.1010381692f);
    p = MS_FMA(p, q, 0.06809787261f);
    p = MS_FMA(p, q, 0.01537964686f);
    p = MS_FMA(p, q, -0.1396211314f);
    p = MS_FMA(p, q, 1.232995119f);
    p = MS_FMA(e, -rest, e) * p / (1.0f + 2.0f * a);
    float near = 1.0f - ms_erf_f32(x);
    p = x < 0 ? 2.0f - p : p;
    return a < 0.5f ? near : p;
}

// Sine and cosine of r + q pi/2, with r in [-pi/4, pi/4].
MS_FN void ms__sincos_quarter_f32(float r, int32_t q, float *sine, float *cosine)
{
    float z = r * r;
    float s = MS_FMA(MS_FMA(MS_FMA(-1.9515295891e-4f, z, 8.3321608736e-3f), z, -1.6666654611e-1f) * z, r, r);
    float c = MS_FMA(MS_FMA(2.443315711809948e-5f, z, -1.388731625493765e-3f), z, 4.166664568298827e-2f);
    c = MS_FMA(c * z, z, MS_FMA(-0.5f, z, 1.0f));
    int odd = q & 1;
    float a = odd ? c : s, b = odd ? s : c;
    *sine = q & 2 ? -a : a;
    *cosine = (q + 1) & 2 ? -b : b;
}
// Functions of an angle x take `far`: 0 promises that x is not far, and the function then has no branch. The loops of
// the CPU look for far arguments first (cpu/elementwise/elementwise.c); the GPU passes 1.
MS_FN int ms_is_far_f32(float x) { return ms_abs_f32(x) > 1048576.0f; }
MS_FN int ms_is_far_f64(double x) { return (void)x, 0; }
// Reduces |x| > 2^20 as Payne and Hanek do. x = m 2^(s-3): the product of m and 2^(s-3) 2/pi is formed modulo 4 in
// fixed point, from the 128 bits of 2/pi whose products with m are below 4. Infinity and NaN give NaN.
MS_FN double ms__reduce_far_f32(float x, int32_t *q)
{
    const uint64_t t0 = 0x0517cc1b727220a9u, t1 = 0x4fe13abe8fa9a6eeu;  // 2/pi, 59 bits of t0 after the point
    const uint64_t t2 = 0x06db14acc9e21c82u, t3 = 0x0ff28b1d5ef5de2bu;
    uint32_t bits = ms__float_bits(x);
    int s = (int)((bits >> 23) & 0xff) - 147, shift = s & 63;
    uint64_t m = (bits & 0x007fffffu) | 0x00800000u;
    uint64_t a = s < 64 ? t0 : t1, b = s < 64 ? t1 : t2, c = s < 64 ? t2 : t3;
    uint64_t high = a << shift | b >> 1 >> (63 - shift), low = b << shift | c >> 1 >> (63 - shift);
    uint64_t turn = m * high + (m * (low >> 32) >> 32);  // quarters of a turn modulo 4, 62 bits after the point
    uint64_t quarters = (turn + ((uint64_t)1 << 61)) >> 62;
    double r = (double)(int64_t)(turn - (quarters << 62)) * 3.4061215800865545893e-19;  // pi/2 2^-62
    *q = x < 0 ? -(int32_t)quarters : (int32_t)quarters;
    return x - x != 0 ? (double)(x - x) : x < 0 ? -r : r;
}
MS_FN void ms_sincos_f32(float x, int far, float *sine, float *cosine)
{
    double d = (double)x, t = d * 0.63661977236758134308;  // 2 / pi
    double shifted = t + 6755399441055744.0;               // 1.5 * 2^52
    double k = shifted - 6755399441055744.0;
    double r = d - k * 1.57079632673412561417e+00 - k * 6.07710050650619224932e-11;
    int64_t bits;
    memcpy(&bits, &shifted, 8);
    int32_t q = (int32_t)bits;
    if (far && ms_is_far_f32(x)) r = ms__reduce_far_f32(x, &q);
    ms__sincos_quarter_f32((float)r, q, sine, cosine);
}
// Sine and cosine of 2 pi u, u in [0, 1), for Box-Muller: the reduction of u is exact.
MS_FN void ms_sincos_turn_f32(float u, float *sine, float *cosine)
{
    float t = u * 4.0f, shifted = t + 12582912.0f;
    float r = (t - (shifted - 12582912.0f)) * 1.57079632679489662f;
    ms__sincos_quarter_f32(r, ms__float_int(shifted), sine, cosine);
}
MS_FN float ms_sin_f32(float x, int far)
{
    float s, c;
    ms_sincos_f32(x, far, &s, &c);
    return s;
}
MS_FN float ms_cos_f32(float x, int far)
{
    float s, c;
    ms_sincos_f32(x, far, &s, &c);
    return c;
}
MS_FN float ms_sqrt_f32(float x) { return __builtin_sqrtf(x); }
MS_FN float ms_pow_f32(float x, float y) { return __builtin_powf(x, y); }

// log(1 + x) and e^x - 1 by Kahan's method: the rounding error of 1 + x, or of e^x, cancels in the quotient.
MS_FN float ms_log1p_f32(float x)
{
    float u = 1.0f + x, d = u - 1.0f, y = ms_log_f32(u);
    return d == 0.0f || u - u != 0.0f ? (d == 0.0f ? x : y) : y * (x / d);
}
MS_FN float ms_expm1_f32(float x)
{
    float u = ms_exp_f32(x), d = u - 1.0f;
    float y = d * (x / ms_log_f32(u));
    return u == 1.0f ? x : u - u != 0.0f || d == -1.0f ? d : y;
}
MS_FN float ms_tan_f32(float x, int far)
{
    float s, c;
    ms_sincos_f32(x, far, &s, &c);
    return s / c;
}
// M. Giles, "Approximating the erfinv function" (2010), single precision; for |x| < 1.
MS_FN float ms_erfinv_f32(float x)
{
    float w = -ms_log_f32((1.0f - x) * (1.0f + x)), a = w - 2.5f, b = __builtin_sqrtf(w) - 3.0f;
    float p = 2.81022636e-08f, q = -0.000200214257f;
    p = 3.43273939e-07f + p * a;
    q = 0.000100950558f + q * b;
    p = -3.5233877e-06f + p * a;
    q = 0.00134934322f + q * b;
    p = -4.39150654e-06f + p * a;
    q = -0.00367342844f + q * b;
    p = 0.00021858087f + p * a;
    q = 0.00573950773f + q * b;
    p = -0.00125372503f + p * a;
    q = -0.0076224613f + q * b;
    p = -0.00417768164f + p * a;
    q = 0.00943887047f + q * b;
    p = 0.246640727f + p * a;
    q = 1.00167406f + q * b;
    p = 1.50140941f + p * a;
    q = 2.83297682f + q * b;
    return (w < 5.0f ? p : q) * x;
}
// exp(2 a) - 1 = t: tanh a = t / (t + 2).
MS_FN double ms_tanh_f64(double x)
{
    double a = __builtin_fabs(x), t = __builtin_expm1(a > 22 ? 44 : 2 * a);
    return __builtin_copysign(t / (t + 2), x);
}
MS_FN double ms_erf_f64(double x) { return __builtin_erf(x); }
// As ms_erfc_f32.
MS_FN double ms_erfc_f64(double x)
{
    double a = __builtin_fabs(x);
    if (a < 0.5) return 1 - __builtin_erf(x);
    a = a > 27.3 ? 27.3 : a;
    double q = (a - 4) / (a + 4), square = a * a, rest = __builtin_fma(a, a, -square), e = __builtin_exp(-square);
    double p = 1.2171211811686396e-9;
    p = __builtin_fma(p, q, 1.7260876537593279e-9);
    p = __builtin_fma(p, q, -1.40964969400340176e-8);
    p = __builtin_fma(p, q, -1.76253862724748102e-8);
    p = __builtin_fma(p, q, 1.10299969641516361e-7);
    p = __builtin_fma(p, q, 7.43154078324628468e-8);
    p = __builtin_fma(p, q, -8.25865649680204717e-7);
    p = __builtin_fma(p, q, 2.94005205171039304e-7);
    p = __builtin_fma(p, q, 5.71009707002765277e-6);
    p = __builtin_fma(p, q, -0.0000112221123165658662);
    p = __builtin_fma(p, q, -0.0000243993887787898677);
    p = __builtin_fma(p, q, 0.000150621703567825021);
    p = __builtin_fma(p, q, -0.000199256642744363887);
    p = __builtin_fma(p, q, -0.000757773295771152369);
    p = __builtin_fma(p, q, 0.00503196996827368822);
    p = __builtin_fma(p, q, -0.0161977340565681294);
    p = __builtin_fma(p, q, 0.0371675155385824549);
    p = __builtin_fma(p, q, -0.0663303658123396213);
    p = __builtin_fma(p, q, 0.0937328349982813196);
    p = __builtin_fma(p, q, -0.101039066036298268);
    p = __builtin_fma(p, q, 0.0680970542546946015);
    p = __builtin_fma(p, q, 0.0153796521026196271);
    p = __builtin_fma(p, q, -0.139621116840562529);
    p = __builtin_fma(p, q, 1.23299511862555251);
    p = __builtin_fma(e, -rest, e) * p / (1 + 2 * a);
    return x < 0 ? 2 - p : p;
}
// For |x| < 1, by Newton's method. For |x| below 0.75 it solves erf(y) = x, from the float result. Otherwise it solves
// log erfc(y) = log(1 - |x|), because erf loses digits near 1: it begins at sqrt(-log(1 - |x|)), which is above the
// result, and each step descends towards it, because log erfc is concave.
MS_FN double ms_erfinv_f64(double x)
{
    double size = __builtin_fabs(x);
    if (size < 0.75) {
        double y = (double)ms_erfinv_f32((float)x);
        for (int k = 0; k < 3; k++) y -= (__builtin_erf(y) - x) / (1.12837916709551257390 * __builtin_exp(-y * y));
        return y;
    }
    double log_rest = __builtin_log(1 - size), y = __builtin_sqrt(-log_rest);
    for (int k = 0; k < 5; k++) {
        double rest = ms_erfc_f64(y);
        y += (__builtin_log(rest) - log_rest) * rest / (1.12837916709551257390 * __builtin_exp(-y * y));
    }
    return __builtin_copysign(y, x);
}

// double serves gradient checks, where speed does not matter, so its functions are libm's (which has no erfinv; tanh
// and erfc of CUDA's library differ by more than 2 ulp from others'); so are the float functions that training seldom
// uses.
MS_FN double ms_exp_f64(double x) { return __builtin_exp(x); }
MS_FN double ms_log_f64(double x) { return __builtin_log(x); }
MS_FN double ms_sin_f64(double x, int far) { return (void)far, __builtin_sin(x); }
MS_FN double ms_cos_f64(double x, int far) { return (void)far, __builtin_cos(x); }
MS_FN double ms_sqrt_f64(double x) { return __builtin_sqrt(x); }
MS_FN double ms_pow_f64(double x, double y) { return __builtin_pow(x, y); }
MS_FN double ms_abs_f64(double x) { return __builtin_fabs(x); }
MS_FN double ms_log1p_f64(double x) { return __builtin_log1p(x); }
MS_FN double ms_expm1_f64(double x) { return __builtin_expm1(x); }
MS_FN double ms_tan_f64(double x, int far) { return (void)far, __builtin_tan(x); }
MS_FN double ms_copysign_f64(double x, double s) { return __builtin_copysign(x, s); }
#define MS_LIBM(name)                                                       \
    MS_FN float ms_##name##_f32(float x) { return __builtin_##name##f(x); } \
    MS_FN double ms_##name##_f64(double x) { return __builtin_##name(x); }
#define MS_LIBM2(name)                                                                  \
    MS_FN float ms_##name##_f32(float x, float y) { return __builtin_##name##f(x, y); } \
    MS_FN double ms_##name##_f64(double x, double y) { return __builtin_##name(x, y); }
MS_LIBM(floor)
MS_LIBM(ceil)
MS_LIBM(trunc)
MS_LIBM(rint)
MS_LIBM(exp2)
MS_LIBM(log2)
MS_LIBM(log10)
MS_LIBM(sinh)
MS_LIBM(cosh)
MS_LIBM(asin)
MS_LIBM(acos)
MS_LIBM(atan)
MS_LIBM(asinh)
MS_LIBM(acosh)
MS_LIBM(atanh)
MS_LIBM2(fmod)
MS_LIBM2(atan2)
MS_LIBM2(hypot)

#endif
