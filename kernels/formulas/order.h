// SPDX-License-Identifier: MIT
// formulas/order.h -- comparisons of sort, topk, searchsorted and scatter_reduce, shared by CPU and GPU. Keys are
// unsigned integers that compare as the numbers do: -0 equals 0, and NaN is larger than every number, as in PyTorch.
#ifndef MS_FORMULAS_ORDER
#define MS_FORMULAS_ORDER

#include "tensor/dtype.h"

MS_FN uint32_t ms_key_f32(float x)
{
    uint32_t u = ms__float_bits(x + 0.0f);  // -0 + 0 is 0
    u ^= u >> 31 ? 0xffffffffu : 0x80000000u;
    return x != x ? 0xffffffffu : u;
}
MS_FN uint64_t ms_key_f64(double x)
{
    uint64_t u;
    double y = x + 0.0;
    memcpy(&u, &y, 8);
    u ^= u >> 63 ? ~(uint64_t)0 : (uint64_t)1 << 63;
    return x != x ? ~(uint64_t)0 : u;
}
MS_FN uint64_t ms_key_i64(int64_t x) { return (uint64_t)x ^ (uint64_t)1 << 63; }

// Whether v is inserted behind boundary b of a sorted list: if b is smaller than v or, with `right`, equal to it. As in
// PyTorch, NaN is inserted behind all boundaries, and every number behind a boundary NaN.
MS_FN int ms_after_f64(double b, double v, int right) { return right ? !(b > v) : !(b >= v); }
MS_FN int ms_after_i64(int64_t b, int64_t v, int right) { return right ? b <= v : b < v; }

// The kinds of scatter_reduce. If either operand is NaN, the result is NaN.
enum { MS_REDUCE_PROD, MS_REDUCE_MAX, MS_REDUCE_MIN };
MS_FN double ms_reduce_f64(int kind, double a, double b)
{
    if (kind == MS_REDUCE_PROD) return a * b;
    int take = kind == MS_REDUCE_MAX ? b > a : b < a;
    return (take | (b != b)) ? b : a;
}
MS_FN int64_t ms_reduce_i64(int kind, int64_t a, int64_t b)
{
    if (kind == MS_REDUCE_PROD) return (int64_t)((uint64_t)a * (uint64_t)b);
    return (kind == MS_REDUCE_MAX ? b > a : b < a) ? b : a;
}

#endif
