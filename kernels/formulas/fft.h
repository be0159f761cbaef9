// SPDX-License-Identifier: MIT
// formulas/fft.h -- Fourier transforms of any length by Stockham's algorithm (Van Loan, "Computational frameworks for
// the fast Fourier transform", 1992), which needs no reordering. Included once for float and once for double, by C and
// by nvcc, with REAL and R(name).
//
// A length n whose prime factors are at most MS_FFT_LARGEST takes a pass for each factor (4, or a prime). A pass of
// radix r, with s interleaved transforms of `size` elements each, reads a[k] = x[q + s (p + k m)], where m = size / r,
// and writes y[q + s (r p + t)] = w(size)^(p t) sum over k of w(r)^(t k) a[k], for p < m and q < s; then size is
// divided by r and s multiplied by it. w(n) = exp(-2 pi i / n), or its conjugate for an inverse transform.
//
// Other lengths (Bluestein 1970): with c[j] = exp(-pi i j^2 / n), or its conjugate for an inverse transform, X[k] =
// c[k] sum over j of (x[j] c[j]) conj(c[k - j]). The sum is a convolution, which is computed by transforms of a power
// of 2 of at least 2 n - 1 elements.
#ifndef MS_FFT_PLAN
#define MS_FFT_PLAN
enum { MS_FFT_LARGEST = 13, MS_FFT_PASSES = 64 };
typedef struct ms_fft_plan {
    int64_t n;
    int passes, radix[MS_FFT_PASSES];
} ms_fft_plan;

// Factors n > 0. False if a prime factor is larger than MS_FFT_LARGEST.
static inline bool ms_fft_factor(ms_fft_plan *p, int64_t n)
{
    const int radices[] = { 4, 2, 3, 5, 7, 11, 13 };
    p->n = n;
    p->passes = 0;
    for (int k = 0; k < 7; k++)
        for (; n % radices[k] == 0; n /= radices[k]) p->radix[p->passes++] = radices[k];
    return n == 1;
}
// The length of the transforms of Bluestein's convolution.
static inline int64_t ms_fft_padded(int64_t n)
{
    int64_t m = 1;
    while (m < 2 * n - 1) m *= 2;
    return m;
}
// j^2 mod 2 n, for 0 <= j < n < 2^31.
MS_FN int64_t ms_fft_square(int64_t j, int64_t n) { return (int64_t)((uint64_t)j * (uint64_t)j % (uint64_t)(2 * n)); }

// Whether element k of half a transform of length n stands for two: itself and element n - k, its conjugate.
MS_FN int ms_fft_twice(int64_t k, int64_t n) { return k > 0 && 2 * k != n; }
#endif

// b[t] = sum over k of w(r)^(t k) a[k], in place. wr, wi: w(r)^k for k < r. sign: -1, or 1 for an inverse transform.
MS_FN void R(ms_fft_butterfly)(int r, REAL sign, REAL *re, REAL *im, const REAL *wr, const REAL *wi)
{
    if (r == 2) {
        REAL a = re[0] - re[1], b = im[0] - im[1];
        re[0] += re[1];
        im[0] += im[1];
        re[1] = a;
        im[1] = b;
        return;
    }
    if (r == 4) {
        REAL sr = re[0] + re[2], si = im[0] + im[2], dr = re[0] - re[2], di = im[0] - im[2];
        REAL tr = re[1] + re[3], ti = im[1] + im[3], er = sign * (im[1] - im[3]), ei = sign * (re[3] - re[1]);
        re[0] = sr + tr;
        im[0] = si + ti;
        re[1] = dr - er;
        im[1] = di - ei;
        re[2] = sr - tr;
        im[2] = si - ti;
        re[3] = dr + er;
        im[3] = di + ei;
        return;
    }
    // An odd prime: elements k and r - k have conjugate factors, and so have the sums t and r - t.
    int half = r / 2;
    REAL first_re = re[0], first_im = im[0], br[MS_FFT_LARGEST], bi[MS_FFT_LARGEST];
    for (int k = 1; k <= half; k++) {
        REAL a = re[r - k], b = im[r - k];
        re[r - k] = re[k] - a;
        im[r - k] = im[k] - b;
        re[k] += a;
        im[k] += b;
        re[0] += re[k];
        im[0] += im[k];
    }
    for (int t = 1; t <= half; t++) {
        REAL x = first_re, y = first_im, u = 0, v = 0;
        for (int k = 1; k <= half; k++) {
            REAL c = wr[t * k % r], s = wi[t * k % r];
            x += re[k] * c;
            y += im[k] * c;
            u += im[r - k] * s;
            v += re[r - k] * s;
        }
        br[t] = x - u;
        bi[t] = y + v;
        br[r - t] = x + u;
        bi[r - t] = y - v;
    }
    for (int t = 1; t < r; t++) {
        re[t] = br[t];
        im[t] = bi[t];
    }
}
