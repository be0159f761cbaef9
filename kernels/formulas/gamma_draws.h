// SPDX-License-Identifier: MIT
// formulas/gamma_draws.h -- random numbers of the gamma distribution with rate 1, of Poisson's, and the gradient of the
// former. The draws use only + - * /, sqrt and the functions below, which are made of these, so that every device gives
// the same bits. Element k of a call uses the blocks k | t << 48 of Philox, where t counts its attempts;
// the calls of a process have different offsets.
#ifndef MS_FORMULAS_GAMMA_DRAWS
#define MS_FORMULAS_GAMMA_DRAWS

#include <string.h>
#include "formulas/gamma.h"
#include "ops/philox.h"

enum { MS_DRAW_TRIES = 128 };  // an attempt fails with a probability below 1/4

// Element k of a float32 or, if wide is set, float64 array.
MS_FN double ms_draw_read(const void *p, int wide, int64_t k)
{
    return wide ? ((const double *)p)[k] : (double)((const float *)p)[k];
}

MS_FN uint64_t ms__bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}
MS_FN double ms__double_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

// ---- functions of doubles, without branches or tables, so that loops vectorise ----------------------------

// log(x) of a positive normal number: x = m 2^e with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh((m - 1) / (m + 1)).
MS_FN double ms_draw_log(double x)
{
    const uint64_t one = 0x3ff0000000000000u, root = 0x3fe6a09e667f3bcdu;  // 1 and sqrt(1/2)
    uint64_t bits = ms__bits_of(x), e = (bits + (one - root)) >> 52;       // the exponent plus 1023
    double m = ms__double_of(bits - (e << 52) + one);
    double k = ms__double_of(e | 0x4330000000000000u) - (4503599627370496.0 + 1023.0);
    double s = (m - 1) / (m + 1), y = s * s, p = 1.0 / 21;
    p = p * y + 1.0 / 19;
    p = p * y + 1.0 / 17;
    p = p * y + 1.0 / 15;
    p = p * y + 1.0 / 13;
    p = p * y + 1.0 / 11;
    p = p * y + 1.0 / 9;
    p = p * y + 1.0 / 7;
    p = p * y + 1.0 / 5;
    p = p * y + 1.0 / 3;
    p = p * y;
    return k * 6.93147180369123816490e-01 + (2 * s + (2 * s * p + k * 1.90821492927058770002e-10));
}

// e^x; 0 below -745, infinite above 710. 2^n is applied in two halves, so that subnormal results round once.
MS_FN double ms_draw_exp(double x)
{
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    x = x < -750 ? -750 : x > 720 ? 720 : x;
    double n = x * 1.44269504088896338700 + magic, k = n - magic;
    double h = k * 0.5 + magic, low = k - (h - magic) + magic;
    double r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10, p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r * r + r + 1;
    // The low bits of h and low are the two halves of n.
    return p * ms__double_of((ms__bits_of(h) + 1023) << 52) * ms__double_of((ms__bits_of(low) + 1023) << 52);
}

// cos(2 pi (w + 1/2) / 2^32).
MS_FN double ms_draw_cosine(uint32_t w)
{
    uint32_t q = (w + 0x20000000u) >> 30;  // the nearest quarter turn
    double f = (double)(int32_t)(w - (q << 30)) + 0.5, x = f * (1.57079632679489661923 * 0x1p-30), y = x * x;
    double s = -1.0 / 1307674368000, c = 1.0 / 20922789888000;
    s = s * y + 1.0 / 6227020800;
    s = s * y - 1.0 / 39916800;
    s = s * y + 1.0 / 362880;
    s = s * y - 1.0 / 5040;
    s = s * y + 1.0 / 120;
    s = s * y - 1.0 / 6;
    s = x + x * (y * s);
    c = c * y - 1.0 / 87178291200;
    c = c * y + 1.0 / 479001600;
    c = c * y - 1.0 / 3628800;
    c = c * y + 1.0 / 40320;
    c = c * y - 1.0 / 720;
    c = c * y + 1.0 / 24;
    c = c * y - 0.5;
    c = 1 + y * c;
    double v = q & 1 ? s : c;
    return (q + 1) & 2 ? -v : v;
}

// A number in (0, 1) of 52 random bits.
MS_FN double ms_draw_open(uint32_t high, uint32_t low)
{
    uint64_t bits = (uint64_t)high << 20 | low >> 12;
    return ms__double_of(bits | 0x3ff0000000000000u) - (1 - 0x1p-53);
}

// log(n!) for n >= 0: Stirling's series, for small n of (n + 8)!.
MS_FN double ms_draw_log_factorial(double n)
{
    double m = n < 10 ? n : 10;
    double product = (m + 1) * (m + 2) * (m + 3) * (m + 4) * (m + 5) * (m + 6) * (m + 7) * (m + 8);
    product = n < 10 ? product : 1;
    m = n < 10 ? n + 8 : n;
    double y = 1 / (m * m), p = -1.0 / 1680;
    p = p * y + 1.0 / 1260;
    p = p * y - 1.0 / 360;
    p = p * y + 1.0 / 12;
    return (m + 0.5) * ms_draw_log(m) - m + 0.91893853320467274178 + p / m - ms_draw_log(product);
}

// ---- gamma samples, by rejection (Marsaglia & Tsang 2000) -----------------------------------------------

typedef struct ms_gamma_try {
    double z, u, v;  // a normal number, a uniform one, and (1 + c z)^3
    int quick;       // accepted by the squeeze, which needs no logarithm
} ms_gamma_try;

// Marsaglia & Tsang's d for concentration a, or a + 1 if a < 1: a sample for a is one for a + 1 times u^(1/a), with u
// uniform in (0, 1).
MS_FN double ms_gamma_d(double a) { return (a < 1 ? a + 1 : a) - 1.0 / 3; }

MS_FN ms_gamma_try ms_gamma_try_of(double d, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3)
{
    ms_gamma_try t;
    t.z = __builtin_sqrt(-2 * ms_draw_log(ms_draw_open(w0, w1))) * ms_draw_cosine(w2);
    t.u = ((double)w3 + 0.5) * 0x1p-32;
    double x = 1 + t.z / __builtin_sqrt(9 * d), square = t.z * t.z;
    t.v = x * x * x;
    t.quick = (x > 0) & (t.u < 1 - 0.0331 * (square * square));
    return t;
}

// Element k's gamma sample for concentration d + 1/3. from: the number of the first attempt.
MS_FN double ms_gamma_number(double d, uint64_t seed, uint64_t offset, uint64_t k, int from)
{
    double v = 1;
    for (int t = from; t < MS_DRAW_TRIES; t++) {
        uint32_t w[4];
        ms_philox(seed, offset, k | (uint64_t)t << 48, &w[0], &w[1], &w[2], &w[3]);
        ms_gamma_try next = ms_gamma_try_of(d, w[0], w[1], w[2], w[3]);
        v = next.v;
        if (next.quick) break;
        if (v > 0 && ms_draw_log(next.u) < 0.5 * (next.z * next.z) + d - d * v + d * ms_draw_log(v)) break;
    }
    return d * v;
}

// Element k's draw for concentration a, or the draw's logarithm. x: ms_gamma_number for a or, if a < 1, for a + 1; w0,
// w1: words of block k | 1 << 63. A negative concentration or nan gives nan, an infinite one infinity.
MS_FN double ms_gamma_draw(double a, double x, uint32_t w0, uint32_t w1, int logarithm)
{
    double boost = a < 1 ? ms_draw_log(ms_draw_open(w0, w1)) / a : 0;
    double y = logarithm ? ms_draw_log(x) + boost : x * ms_draw_exp(boost);
    y = a >= 0 ? y : a - a + (a - a) / (a - a);
    return a > 1.7976931348623157e308 ? a : y;
}
MS_FN uint64_t ms_gamma_boost_block(uint64_t k) { return k | (uint64_t)1 << 63; }

// ---- the gradient of log x for the concentration a -------------------------------------------------------

// The implicit gradient (Figurnov, Mohamed & Mnih 2018): dx/da = -(dP(a, x)/da) / density(x), with P the distribution
// function. With u_n = x^n / (a (a + 1) ... (a + n)), P(a, x) / density = x * sum u_n, and d log(x) / da = sum u_n
// (digamma(a + n + 1) - log x). The terms rise until a + n reaches x, then fall like those of a normal density with the
// variance max(a, x). For a from 500 on, x = a + z sqrt(a) + (z^2 - 1) / 3 + (z^3 - 7 z) / (36 sqrt(a)) (Cornish &
// Fisher 1938), differentiated at a fixed z, which Wilson & Hilferty's cube root gives: its relative error is below
// 1e-4.
MS_FN double ms_gamma_slope(double a, double log)
{
    double x = __builtin_exp(log);
    if (a >= 500) {
        double root = __builtin_sqrt(a), t = __builtin_exp((log - __builtin_log(a)) / 3);
        double z = (t - 1 + 1 / (a * 9)) * root * 3;
        return (z / (root * 2) - (z * z * z - z * 7) / (a * root * 72) + 1) / x;
    }
    double over = x > a ? x - a : 0, terms = over + 9 * __builtin_sqrt(x > a ? x : a) + 30;
    double u = 1 / a, n = a + 1, digamma = ms_digamma_of(a + 1), sum = u * (digamma - log);
    for (double k = 0; k < terms; k += 1) {
        double part = 1 / n;
        u *= x * part;
        digamma += part;
        n += 1;
        double term = u * (digamma - log);
        sum += term;
        if (n > x && __builtin_fabs(term) < 1e-17 * __builtin_fabs(sum)) break;
    }
    return sum;
}

// The derivative by a of the draw x (0 for x = 0) or, if `logarithm` is set, of the draw's logarithm x.
MS_FN double ms_gamma_gradient(double a, double x, int logarithm)
{
    if (logarithm) return ms_gamma_slope(a, x);
    return x > 0 ? x * ms_gamma_slope(a, __builtin_log(x)) : 0;
}

// ---- Poisson's numbers -------------------------------------------------------------------------------------

// A number for a rate below 10, by inversion: subtracts the probabilities of 0, 1, 2, ... from a uniform number until
// it is negative; the result is the number of subtractions before the last. At most 80. none: the probability of 0.
MS_FN double ms_poisson_low(double rate, double none, uint32_t w0, uint32_t w1)
{
    double rest = ms_draw_open(w0, w1), p = none, k = 0;
    for (rest -= p; rest >= 0 && k < 80; rest -= p) {
        k += 1;
        p *= rate * (1 / k);
    }
    return k;
}

// A try at a number for a rate of 10 or more, by transformed rejection (Hoermann 1993, algorithm PTRS); -1: rejected.
MS_FN double ms_poisson_try(double rate, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3)
{
    double b = 0.931 + 2.53 * __builtin_sqrt(rate), a = 0.02483 * b - 0.059;
    double u = ms_draw_open(w0, w1) - 0.5, v = ms_draw_open(w2, w3), us = 0.5 - __builtin_fabs(u);
    double k = __builtin_floor((2 * a / us + b) * u + rate + 0.43), n = k < 0 ? 0 : k;
    double ratio = ms_draw_log(v * (1.1239 + 1.1328 / (b - 3.4)) / (a / (us * us) + b));
    int quick = (us >= 0.07) & (v <= 0.9277 - 3.6224 / (b - 2));
    int possible = (k >= 0) & ((us >= 0.013) | (v <= us));
    int fits = ratio <= n * ms_draw_log(rate) - rate - ms_draw_log_factorial(n);
    return quick | (possible & fits) ? k : -1;
}
MS_FN double ms_poisson_high(double rate, uint64_t seed, uint64_t offset, uint64_t k, int from)
{
    for (int t = from; t < MS_DRAW_TRIES; t++) {
        uint32_t w[4];
        ms_philox(seed, offset, k | (uint64_t)t << 48, &w[0], &w[1], &w[2], &w[3]);
        double n = ms_poisson_try(rate, w[0], w[1], w[2], w[3]);
        if (n >= 0) return n;
    }
    return __builtin_floor(rate);
}
// The result for a rate that has no distribution: nan if the rate is negative or nan, infinity if it is infinite.
MS_FN double ms_poisson_none(double rate) { return rate > 0 ? rate : rate - rate + (rate - rate) / (rate - rate); }
MS_FN int ms_poisson_is_low(double rate) { return (rate >= 0) & (rate < 10); }
MS_FN int ms_poisson_is_high(double rate) { return (rate >= 10) & (rate <= 1.7976931348623157e308); }
#endif
