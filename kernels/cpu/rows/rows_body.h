// SPDX-License-Identifier: MIT
// cpu/rows/rows_body.h -- the loops of rows.h; included once per accumulation type, with REAL, R(name) and EXP_NORMAL
// defined.

// The sum of 16 lanes, in a fixed tree.
MS_INLINE REAL R(ms__fold)(REAL *s)
{
    MS_LANES(8, l) s[l] += s[l + 8];
    MS_LANES(4, l) s[l] += s[l + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// Adds TERM(j), j < n, in 64 separate sums, which shortens the chain of dependent additions; then in 16 lanes.
#define SUM_OF(TERM)                                                     \
    REAL s[64] = { 0 };                                                  \
    int64_t j = 0;                                                       \
    for (; j + 64 <= n; j += 64) MS_LANES(64, l) s[l] += TERM(j + l);    \
    MS_LANES(16, l) s[l] = (s[l] + s[l + 16]) + (s[l + 32] + s[l + 48]); \
    for (; j + 16 <= n; j += 16) MS_LANES(16, l) s[l] += TERM(j + l);    \
    for (int64_t l = 0; j + l < n; l++) s[l] += TERM(j + l);             \
    return R(ms__fold)(s);

MS_INLINE REAL R(ms__row_sum)(const REAL *x, int64_t n) {
#define TERM(j) x[j]
    SUM_OF(TERM)
#undef TERM
}

MS_INLINE REAL R(ms__row_dot)(const REAL *x, const REAL *y, int64_t n) {
#define TERM(j) (x[j] * y[j])
    SUM_OF(TERM)
#undef TERM
}

// The sum of (x - m)^2.
MS_INLINE REAL R(ms__row_spread)(const REAL *x, REAL m, int64_t n)
{
#define TERM(j) ((x[j] - m) * (x[j] - m))
    SUM_OF(TERM)
#undef TERM
}
#undef SUM_OF

// The largest element; -inf if n is 0. The result may ignore NaN; the exponentials computed next propagate it.
MS_INLINE REAL R(ms__row_max)(const REAL *x, int64_t n)
{
    REAL s[64];
    int64_t j = 0;
    MS_LANES(64, l) s[l] = -(REAL)INFINITY;
    for (; j + 64 <= n; j += 64) MS_LANES(64, l) s[l] = x[j + l] > s[l] ? x[j + l] : s[l];
    MS_LANES(32, l) s[l] = s[l + 32] > s[l] ? s[l + 32] : s[l];
    MS_LANES(16, l) s[l] = s[l + 16] > s[l] ? s[l + 16] : s[l];
    for (; j + 16 <= n; j += 16) MS_LANES(16, l) s[l] = x[j + l] > s[l] ? x[j + l] : s[l];
    for (int64_t l = 0; j + l < n; l++) s[l] = x[j + l] > s[l] ? x[j + l] : s[l];
    MS_LANES(8, l) s[l] = s[l + 8] > s[l] ? s[l + 8] : s[l];
    MS_LANES(4, l) s[l] = s[l + 4] > s[l] ? s[l + 4] : s[l];
    REAL a = s[2] > s[0] ? s[2] : s[0], b = s[3] > s[1] ? s[3] : s[1];
    return b > a ? b : a;
}

// The exponential of a softmax, whose argument is at most 0. Returns 0 below `lowest`, near which results become
// subnormal. (A subnormal result takes 150 cycles, and every masked score would give one.)
MS_INLINE REAL R(ms__soft_exp)(REAL d)
{
    const REAL lowest = sizeof(REAL) == 4 ? (REAL)-87 : (REAL)-708;
    REAL e = EXP_NORMAL(d < lowest ? lowest : d);
    return d < lowest ? 0 : e;
}

// Prefetches 64 elements.
MS_INLINE void R(ms__fetch)(const REAL *x)
{
    for (int l = 0; l < 64; l += 64 / (int)sizeof(REAL)) __builtin_prefetch(x + l);
}

// y = exp(x - m); x may be y. Returns the sum, added as in ms__row_sum. Prefetches the memory after x, which usually is
// the next row.
MS_INLINE REAL R(ms__row_exp)(REAL *y, const REAL *x, REAL m, int64_t n)
{
    REAL s[64] = { 0 };
    int64_t j = 0;
    for (; j + 64 <= n; j += 64) {
        R(ms__fetch)(x + n + j);
        MS_LANES(64, l) s[l] += y[j + l] = R(ms__soft_exp)(x[j + l] - m);
    }
    MS_LANES(16, l) s[l] = (s[l] + s[l + 16]) + (s[l + 32] + s[l + 48]);
    for (; j + 16 <= n; j += 16) MS_LANES(16, l) s[l] += y[j + l] = R(ms__soft_exp)(x[j + l] - m);
    for (int64_t l = 0; j + l < n; l++) s[l] += y[j + l] = R(ms__soft_exp)(x[j + l] - m);
    return R(ms__fold)(s);
}
