// SPDX-License-Identifier: MIT
// ptx/reference.h -- a second implementation of PTX instructions, for spec/cuda/ptx_forms_spec.lua: integers in 128
// bits, numbers in float128, each result rounded once at the end. Nothing of runtime.h is used.
#pragma once
#include <quadmath.h>
#include <stdint.h>
#include <string.h>

typedef __int128 I;
typedef unsigned __int128 U;
typedef __float128 Q;

static Q q_of_f32(uint64_t v)
{
    uint32_t low = (uint32_t)v;
    float f;
    memcpy(&f, &low, 4);
    return f;
}
static Q q_of_f64(uint64_t v)
{
    double d;
    memcpy(&d, &v, 8);
    return d;
}
// q, or if it is the rounded value of q + e, with an odd last bit: rounding that once more is as rounding q + e.
static Q odd(Q q, Q e)
{
    U bits;
    if (e == 0 || q != q || e != e || isinfq(q)) return q;
    memcpy(&bits, &q, 16);
    if (bits & 1) return q;
    bits += (q > 0) == (e > 0) ? 1 : (U)-1;
    memcpy(&q, &bits, 16);
    return q;
}
static Q sum(Q a, Q b)
{
    Q s = a + b, part = s - a;
    return odd(s, isinfq(s) ? 0 : (a - (s - part)) + (b - part));
}
static uint64_t to_f32(Q q)  // to the nearest, ties to even; a NaN is 0x7fffffff
{
    float f = (float)q;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return q != q ? 0x7fffffff : bits;
}
static uint64_t to_f32_rz(Q q)
{
    float f = (float)q;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (q != q) return 0x7fffffff;
    return fabsq(f) > fabsq(q) ? bits - 1 : bits;  // also the largest number in place of an infinity
}
static uint64_t to_f64(Q q)
{
    double d = (double)q;
    uint64_t bits;
    memcpy(&bits, &d, 8);
    return bits;
}
static Q flushed(Q q) { return fabsq(q) < 0x1p-126Q ? copysignq(0, q) : q; }
static Q flushed64(Q q)  // to the upper 32 bits of a double
{
    uint64_t bits = to_f64(fabsq(q) < 0x1p-1022Q ? copysignq(0, q) : q) & ~(uint64_t)0xffffffff;
    return q_of_f64(bits);
}
// A number of `fraction` bits after the first, and exponents from `least` on, in 16 bits.
static uint64_t half(Q q, int fraction, int least, int most)
{
    if (q != q) return 0x7fff;
    int e;
    uint64_t sign = signbitq(q) ? 0x8000 : 0, first = (uint64_t)1 << fraction;
    Q m = fabsq(q);
    if (m == 0) return sign;
    if (isinfq(q)) return sign | (uint64_t)(most - least + 2) << fraction;
    (void)frexpq(m, &e);
    e = e - 1 < least ? least : e - 1;
    uint64_t inf = (uint64_t)(most - least + 2) << fraction;
    if (e > most) return sign | inf;
    uint64_t n = (uint64_t)rintq(scalbnq(m, fraction - e));  // of units in the last place
    uint64_t bits = n < first ? n : n - first + ((uint64_t)(e - least + 1) << fraction);
    return sign | (bits > inf ? inf : bits);
}
static Q of_half(I bits)
{
    int e = (int)(bits >> 10 & 31), fraction = (int)(bits & 1023);
    Q q = e == 31 ? (fraction ? nanq("") : HUGE_VALQ) : scalbnq((e ? 1024 : 0) + fraction, (e ? e : 1) - 25);
    return bits >> 15 & 1 ? -q : q;
}
static uint64_t saturated(Q q, int bits, int sign, int nan_is_zero)
{
    if (q != q) return nan_is_zero ? 0 : (uint64_t)1 << (bits - 1);
    Q most = scalbnq(1, bits - sign) - 1, least = sign ? -scalbnq(1, bits - 1) : 0;
    return (uint64_t)(I)(q > most ? most : q < least ? least : q);
}
static Q least_of(Q a, Q b, int most)
{
    if (a != a || b != b) return a != a ? b : a;
    if (a == b) return !!signbitq(a) == most ? b : a;
    return (a < b) != most ? a : b;
}
static U shifted(I a, unsigned by, int bits, int left)
{
    if (by > 127) by = 127;
    return left ? ((int)by >= bits ? 0 : (U)a << by) : (U)(a >> by);
}
static U leading(U a, int bits)
{
    int n = 0;
    while (n < bits && !(a >> (bits - 1 - n) & 1)) n++;
    return (U)n;
}
static U inserted(U a, U b, unsigned at, unsigned n)
{
    at &= 255, n &= 255;
    for (unsigned k = 0; k < n && at + k < 64; k++) b = (b & ~((U)1 << (at + k))) | ((a >> k & 1) << (at + k));
    return b;
}
static U permuted(U a, U b, U selector)
{
    U all = b << 32 | a, out = 0;
    for (int k = 0; k < 4; k++) {
        unsigned s = (unsigned)(selector >> 4 * k) & 15, byte = (unsigned)(all >> (s % 8 * 8)) & 255;
        out |= (U)(s < 8 ? byte : byte >> 7 ? 255 : 0) << 8 * k;
    }
    return out;
}
