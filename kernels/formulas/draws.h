// SPDX-License-Identifier: MIT
// formulas/draws.h -- random numbers from Philox words, for the CPU's loops and the GPU's kernels. float32 uses only
// basic arithmetic, sqrt, fma and our own log and sincos (except for truncated normal numbers), so that every device
// gives the same bits; float64 uses libm and may differ in the last place.
#ifndef MS_DRAWS_H
#define MS_DRAWS_H

#include "formulas/math32.h"
#include "ops/philox.h"

// Uniform in [low, low + width). limit: the largest number of the result's dtype below low + width. A draw that rounds
// to more than the limit is set to it.
MS_FN float ms_draw_uniform_f32(uint32_t w, float low, float width, float limit)
{
    float v = low + width * ms_uniform_f32(w);
    return v > limit ? limit : v;
}
MS_FN double ms_draw_uniform_f64(uint32_t high, uint32_t low_word, double low, double width, double limit)
{
    double v = low + width * ms_uniform_f64(high, low_word);
    return v > limit ? limit : v;
}
// Two numbers of a normal distribution, by Box-Muller.
MS_FN void ms_draw_normal_f32(uint32_t w0, uint32_t w2, float mean, float std, float *a, float *b)
{
    float u = (float)(int32_t)(w0 >> 1) * 0x1p-31f + 0x1p-32f, s, c;  // (0, 1]
    float r = ms_sqrt_f32(-2.0f * ms_log_f32(u));
    ms_sincos_turn_f32(ms_uniform_f32(w2), &s, &c);
    *a = mean + std * (r * c);
    *b = mean + std * (r * s);
}
MS_FN void ms_draw_normal_f64(const uint32_t w[4], double mean, double std, double out[2])
{
    double u = (double)(((uint64_t)w[0] << 32 | w[1]) >> 11) * 0x1p-53 + 0x1p-54;
    double r = ms_sqrt_f64(-2.0 * ms_log_f64(u)), t = 6.28318530717958647693 * ms_uniform_f64(w[2], w[3]);
    out[0] = mean + std * (r * ms_cos_f64(t, 0));
    out[1] = mean + std * (r * ms_sin_f64(t, 0));
}
// An integer in [low, low + width).
MS_FN int64_t ms_draw_integer(uint32_t high, uint32_t low_word, int64_t low, uint64_t width)
{
    uint64_t u = (uint64_t)high << 32 | low_word;
    return low + (int64_t)((unsigned __int128)u * width >> 64);
}

// A normal distribution restricted to [a, b]. low, high: erf((a - mean) / (std sqrt(2))), and the same of b.
typedef struct ms_truncated {
    double mean, std, a, b, low, high;
} ms_truncated;
// f: mean, std, a, b.
MS_FN ms_truncated ms_truncated_of(const double f[4])
{
    ms_truncated t = { f[0], f[1], f[2], f[3], 0, 0 };
    t.low = ms_erf_f64((t.a - t.mean) / t.std * 0.70710678118654752440);
    t.high = ms_erf_f64((t.b - t.mean) / t.std * 0.70710678118654752440);
    return t;
}
// A random number of distribution t, by inversion: the inverse CDF of a uniform number between CDF(a) and CDF(b). If
// wide is set, two Newton steps refine the float32 estimate.
MS_FN double ms_draw_truncated(uint32_t high_word, uint32_t low_word, const ms_truncated *t, int wide)
{
    double u = ms_uniform_f64(high_word, low_word), x = t->low + (t->high - t->low) * u;
    x = x < -0.9999999 ? -0.9999999 : x > 0.9999999 ? 0.9999999 : x;
    double y = ms_erfinv_f32((float)x);
    if (wide)
        for (int step = 0; step < 2; step++) y -= (ms_erf_f64(y) - x) / (1.12837916709551257390 * ms_exp_f64(-y * y));
    double v = t->mean + t->std * 1.41421356237309504880 * y;
    return v < t->a ? t->a : v > t->b ? t->b : v;
}

#endif
