// SPDX-License-Identifier: MIT
// formulas/scan.h -- scans: cumprod, cummax, cummin, logcumsumexp and the gradients of two of them. Included once for
// double and once for int64_t, by C and by nvcc, with REAL and R(name); MS_SCAN_WHOLE is set for int64_t.
//
// Element k becomes a state; R(ms_scan_join) combines the states of two adjacent ranges, the left one first, and is
// associative; result k is computed from the state of all elements up to k. Gradients are scanned from the end:
//   cumprod        y[k] = x[0] ... x[k]. With S[k] = g[k] + x[k + 1] S[k + 1], the gradient is S[k] y[k - 1]. No
//                  division, so zeros need no case of their own.
//   logcumsumexp   the gradient is the sum over j >= k of g[j] exp(x[k] - y[j]).
#ifndef MS_FORMULAS_SCAN_KINDS
#define MS_FORMULAS_SCAN_KINDS
typedef enum { MS_SCAN_PROD, MS_SCAN_MAX, MS_SCAN_MIN, MS_SCAN_LOG, MS_SCAN_PROD_BACK, MS_SCAN_LOG_BACK } ms_scan_kind;
// What is read for element k: p and, for gradients, q make the state; gradients also need r for the result. p: x, but y
// for LOG_BACK; q: g; r: y for PROD_BACK, x for LOG_BACK. PROD_BACK reads the p of the element before, in the order of
// the scan, and the r of the element after.
#endif

// The state of a range of elements. PROD: v is the product. MAX, MIN: v is the extreme, which is element `at`. LOG:
// w exp(v) is the sum of exp(x), and v is the largest x. LOG_BACK: w exp(v) is the sum of g exp(-y), and v is the
// largest -y. PROD_BACK: the map from S to w + v S.
typedef struct {
    REAL v, w;
    int64_t at;
} R(ms_scan);

MS_FN R(ms_scan) R(ms_scan_element)(int kind, REAL p, REAL q, int64_t at)
{
    R(ms_scan) s = { p, q, at };
#ifndef MS_SCAN_WHOLE
    if (kind == MS_SCAN_LOG) s.w = 1;
    if (kind == MS_SCAN_LOG_BACK) {
        s.v = -p;
        if (s.v > (REAL)1.7e308) s.v = -s.v, s.w = 0;  // y is -inf: so is every x up to here
    }
#else
    (void)kind;
#endif
    return s;
}

MS_FN R(ms_scan) R(ms_scan_join)(int kind, R(ms_scan) a, R(ms_scan) b)
{
    R(ms_scan) s = b;
    switch (kind) {
#ifdef MS_SCAN_WHOLE
    case MS_SCAN_PROD: s.v = (REAL)((uint64_t)a.v * (uint64_t)b.v); break;
    case MS_SCAN_MAX: return b.v >= a.v ? b : a;
    case MS_SCAN_MIN: return b.v <= a.v ? b : a;
#else
    case MS_SCAN_PROD: s.v = a.v * b.v; break;
    case MS_SCAN_MAX: return ((b.v >= a.v) | (b.v != b.v)) ? b : a;  // NaN stays
    case MS_SCAN_MIN: return ((b.v <= a.v) | (b.v != b.v)) ? b : a;
    case MS_SCAN_PROD_BACK:
        s.v = a.v * b.v;
        s.w = b.w + b.v * a.w;
        break;
    default:
        s.v = a.v > b.v ? a.v : b.v;
        // Equal exponents need no exp: two equal infinities would give exp(NaN).
        s.w = a.w * (a.v == s.v ? 1 : R(ms_exp)(a.v - s.v)) + b.w * (b.v == s.v ? 1 : R(ms_exp)(b.v - s.v));
#endif
    }
    return s;
}

MS_FN REAL R(ms_scan_result)(int kind, R(ms_scan) s, REAL r)
{
#ifndef MS_SCAN_WHOLE
    if (kind == MS_SCAN_LOG) return s.v + R(ms_log)(s.w);
    if (kind == MS_SCAN_PROD_BACK) return s.w * r;
    if (kind == MS_SCAN_LOG_BACK) return s.w * R(ms_exp)(s.v + r);
#else
    (void)kind;
    (void)r;
#endif
    return s.v;
}
