// SPDX-License-Identifier: MIT
// formulas/gamma.h -- the gamma function's logarithm and its derivatives, in double, for C and nvcc. lgamma: Lanczos's
// approximation with the coefficients of Godfrey (2001). digamma: the asymptotic series from 10 on, and a recurrence
// below. polygamma: Hurwitz's zeta function by Euler and Maclaurin's formula (Abramowitz and Stegun 6.4.10, 23.2.24).
// The reflection formulas (6.1.17, 6.3.7) serve lgamma below 0.5 and digamma below 0; below 12, also for negative
// arguments, polygamma uses its recurrence.
#ifndef MS_FORMULAS_GAMMA
#define MS_FORMULAS_GAMMA

// nvcc must not inline lgamma, digamma and polygamma: a kernel that has many formulas would need more registers for all
// of them. They call no sin, tan or pow, which would take a stack on a GPU.
#ifdef __CUDACC__
#define MS_GAMMA_FN static __host__ __device__ __noinline__ __attribute__((unused))
#else
#define MS_GAMMA_FN MS_FN
#endif

#define MS_PI_F64 3.14159265358979323846

// The distance to the nearest whole number, from -0.5 to 0.5. It is exact also next to 0, where x - floor(x) is not.
MS_FN double ms_from_whole(double x) { return x - __builtin_floor(x + 0.5); }

// sin(pi f) for f from 0 to 1/2, by the series of sine, or of cosine around 1/2, for arguments up to pi / 4.
MS_FN double ms_sine_of_part(double f)
{
    bool near = f <= 0.25;
    double x = MS_PI_F64 * (near ? f : 0.5 - f), y = x * x, sum = 0, term = near ? x : 1;
    for (int k = near ? 2 : 1; k < 20; k += 2) {
        sum += term;
        term *= -y / (k * (k + 1));
    }
    return sum;
}
MS_FN double ms_gamma_logarithm(double x)  // x >= 0.5
{
    double z = x - 1, t = z + 7.5, sum = 0.99999999999980993227684700473478;
    sum += 676.520368121885098567009190444019 / (z + 1);
    sum -= 1259.13921672240287047156078755283 / (z + 2);
    sum += 771.3234287776530788486528258894 / (z + 3);
    sum -= 176.61502916214059906584551354 / (z + 4);
    sum += 12.507343278686904814458936853 / (z + 5);
    sum -= 0.13857109526572011689554707 / (z + 6);
    sum += 9.984369578019570859563e-6 / (z + 7);
    sum += 1.50563273514931155834e-7 / (z + 8);
    return 0.91893853320467274178 + (z + 0.5) * __builtin_log(t) - t + __builtin_log(sum);
}
MS_GAMMA_FN double ms_lgamma_of(double x)
{
    if (x != x) return x;
    double f = __builtin_fabs(ms_from_whole(x));
    if (x > 1e300 || (x <= 0 && f == 0) || x < -1e300) return __builtin_inf();
    if (x >= 0.5) return ms_gamma_logarithm(x);
    return __builtin_log(MS_PI_F64 / ms_sine_of_part(f)) - ms_gamma_logarithm(1 - x);
}

MS_GAMMA_FN double ms_digamma_of(double x)
{
    double less = 0, f = ms_from_whole(x);
    if (x != x || x > 1e300) return x;
    if (x == 0) return __builtin_copysign(__builtin_inf(), -x);
    if (x < 0) {
        if (f == 0) return (x - x) / (x - x);
        double part = __builtin_fabs(f), cotangent = ms_sine_of_part(0.5 - part) / ms_sine_of_part(part);
        less = MS_PI_F64 * (f < 0 ? -cotangent : cotangent);
        x = 1 - x;
    }
    for (; x < 10; x += 1) less += 1 / x;
    double y = 1 / (x * x), series = 1.0 / 12;
    series = 691.0 / 32760 - series * y;
    series = 5.0 / 660 - series * y;
    series = 1.0 / 240 - series * y;
    series = 1.0 / 252 - series * y;
    series = 1.0 / 120 - series * y;
    series = 1.0 / 12 - series * y;
    return __builtin_log(x) - 0.5 / x - series * y - less;
}

// The n-th derivative of digamma: for n >= 1 it is (-1)^(n + 1) n! zeta(n + 1, x).
MS_GAMMA_FN double ms_polygamma_of(double n, double x)
{
    if (n == 0) return ms_digamma_of(x);
    if (x != x) return x;
    if (x - x != 0) return x > 0 ? 0 : (x - x) / (x - x);
    if (x <= 0 && x == __builtin_floor(x)) return __builtin_inf();
    if (x < -1e6) return (x - x) / (x - x);  // nan: the recurrence would take too long
    double s = n + 1, sum = 0, factor = 1;
    double power;
    for (;; x += 1) {
        power = 1 / x;
        for (double k = 1; k < s; k += 1) power /= x;
        if (x >= 12) break;
        sum += power;
    }
    sum += x * power / n + 0.5 * power;
    const double b[8] = { 1.0 / 12,
                          -1.0 / 720,
                          1.0 / 30240,
                          -1.0 / 1209600,
                          1.0 / 47900160,
                          -691.0 / 1307674368000.0,
                          1.0 / 74724249600.0,
                          -3617.0 / 10670622842880000.0 };
    double rising = s;
    power /= x;
    for (int j = 0; j < 8; j++) {
        sum += b[j] * rising * power;
        rising *= (s + 2 * j + 1) * (s + 2 * j + 2);
        power /= x * x;
    }
    for (double k = 2; k <= n; k += 1) factor *= k;
    return (__builtin_fmod(n, 2) == 1 ? factor : -factor) * sum;
}
#endif
