// SPDX-License-Identifier: MIT
// cpu/rows/rows_body.h -- the loops of rows.h; included once per accumulation type, with REAL, INT (an integer of the
// same size), R(name) and EXP defined.

typedef REAL R(ms_lanes) __attribute__((vector_size(16 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
typedef INT R(ms_ints) __attribute__((vector_size(16 * sizeof(REAL))));
#define V R(ms_lanes)

// A macro, because the ABI of a function that returns a vector depends on the instruction set.
#define LANES_AT(x) (*(const V *)(x))

// The sum of the 16 lanes, in a fixed tree.
MS_INLINE REAL R(ms__fold)(const V *p)
{
    V s = *p;
    typedef REAL half __attribute__((vector_size(8 * sizeof(REAL))));
    typedef REAL quarter __attribute__((vector_size(4 * sizeof(REAL))));
    half a = __builtin_shufflevector(s, s, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(s, s, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// Adds four vectors at a time into separate sums, which shortens the chain of dependent additions; then one vector at a
// time. TERM(j) is a vector.
#define SUM_OF(TERM)                                 \
    V s = { 0 }, s1 = { 0 }, s2 = { 0 }, s3 = { 0 }; \
    int64_t j = 0;                                   \
    for (; j + 64 <= n; j += 64) {                   \
        s += TERM(j);                                \
        s1 += TERM(j + 16);                          \
        s2 += TERM(j + 32);                          \
        s3 += TERM(j + 48);                          \
    }                                                \
    s = (s + s1) + (s2 + s3);                        \
    for (; j + 16 <= n; j += 16) s += TERM(j);

MS_INLINE REAL R(ms__row_sum)(const REAL *x, int64_t n)
{
#define TERM(j) LANES_AT(x + (j))
    SUM_OF(TERM)
#undef TERM
    for (int64_t l = 0; j + l < n; l++) s[l] += x[j + l];
    return R(ms__fold)(&s);
}

MS_INLINE REAL R(ms__row_dot)(const REAL *x, const REAL *y, int64_t n)
{
#define TERM(j) (LANES_AT(x + (j)) * LANES_AT(y + (j)))
    SUM_OF(TERM)
#undef TERM
    for (int64_t l = 0; j + l < n; l++) s[l] += x[j + l] * y[j + l];
    return R(ms__fold)(&s);
}

// The sum of (x - m)^2.
MS_INLINE REAL R(ms__row_spread)(const REAL *x, REAL m, int64_t n)
{
#define TERM(j) ((LANES_AT(x + (j)) - m) * (LANES_AT(x + (j)) - m))
    SUM_OF(TERM)
#undef TERM
    for (int64_t l = 0; j + l < n; l++) s[l] += (x[j + l] - m) * (x[j + l] - m);
    return R(ms__fold)(&s);
}
#undef SUM_OF

// The largest element; -inf if n is 0. The result may ignore NaN; the exponentials computed next propagate it.
MS_INLINE REAL R(ms__row_max)(const REAL *x, int64_t n)
{
    REAL m = -(REAL)INFINITY;
    int64_t j = 0;
    if (n >= 16) {
#define LARGER(s, a)                                                      \
    do {                                                                  \
        V other_ = (a);                                                   \
        R(ms_ints) more_ = other_ > s;                                    \
        s = (V)((more_ & (R(ms_ints))other_) | (~more_ & (R(ms_ints))s)); \
    } while (0)
        V s = LANES_AT(x), s1 = s, s2 = s, s3 = s;
        for (j = 16; j + 64 <= n; j += 64) {
            LARGER(s, LANES_AT(x + j));
            LARGER(s1, LANES_AT(x + j + 16));
            LARGER(s2, LANES_AT(x + j + 32));
            LARGER(s3, LANES_AT(x + j + 48));
        }
        LARGER(s, s1);
        LARGER(s2, s3);
        LARGER(s, s2);
        for (; j + 16 <= n; j += 16) LARGER(s, LANES_AT(x + j));
        LARGER(s, __builtin_shufflevector(s, s, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6,
                                          7));  // the same tree as in ms__fold
        LARGER(s, __builtin_shufflevector(s, s, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3));
        LARGER(s, __builtin_shufflevector(s, s, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1));
        LARGER(s, __builtin_shufflevector(s, s, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0));
#undef LARGER
        m = s[0] > m ? s[0] : m;
    }
    for (; j < n; j++) m = x[j] > m ? x[j] : m;
    return m;
}

// The exponential of a softmax, whose argument is at most 0. Returns 0 below `lowest`, near which results become
// subnormal. (A subnormal result takes 150 cycles, and every masked score would give one.)
MS_INLINE REAL R(ms__soft_exp)(REAL d)
{
    const REAL lowest = sizeof(REAL) == 4 ? (REAL)-87 : (REAL)-708;
    REAL e = EXP(d < lowest ? lowest : d);
    return d < lowest ? 0 : e;
}

// y = exp(x - m); x may be y. Returns the sum, added as in ms__row_sum. Prefetches the memory after x, which usually is
// the next row.
MS_INLINE REAL R(ms__row_exp)(REAL *y, const REAL *x, REAL m, int64_t n)
{
    V s = { 0 }, s1 = { 0 }, s2 = { 0 }, s3 = { 0 };
    int64_t j = 0;
    for (; j + 64 <= n; j += 64) {
        for (int64_t l = 0; l < 64; l += 64 / (int64_t)sizeof(REAL)) __builtin_prefetch(x + n + j + l);
        for (int64_t l = j; l < j + 64; l++) y[l] = R(ms__soft_exp)(x[l] - m);
        s += LANES_AT(y + j);
        s1 += LANES_AT(y + j + 16);
        s2 += LANES_AT(y + j + 32);
        s3 += LANES_AT(y + j + 48);
    }
    s = (s + s1) + (s2 + s3);
    for (; j + 16 <= n; j += 16) {
        for (int64_t l = j; l < j + 16; l++) y[l] = R(ms__soft_exp)(x[l] - m);
        s += LANES_AT(y + j);
    }
    for (int64_t l = 0; j + l < n; l++) s[l] += y[j + l] = R(ms__soft_exp)(x[j + l] - m);
    return R(ms__fold)(&s);
}
#undef V
#undef LANES_AT
