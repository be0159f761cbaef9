// SPDX-License-Identifier: MIT
// ptx/runtime.h -- what the C of a translated kernel needs (translate.lua), and its contract with the emulated GPU that
// launches it (launcher.h).
#ifndef MS_PTX_RUNTIME_H
#define MS_PTX_RUNTIME_H
#include <stdint.h>

// What a thread of a block does together with others. `line` is that of the instruction in the PTX.
struct ptx_machine {
    void (*barrier)(int line);
    void (*warp_barrier)(uint32_t mask, int line);
    uint32_t (*shuffle)(uint32_t mask, uint32_t value, int from, int line);
    void (*mma)(int bf16, float *d, const uint32_t *a, const uint32_t *b, int line);
    void (*load_matrices)(int n, int transposed, uint32_t *r, const void *row, int line);
    void (*copy)(void *to, const void *from, int bytes, int read, int line);
    void (*commit)(void);
    void (*wait)(int left);
    // An access to be checked: space is 'g' (global), 's' (shared), 'n' (generic), 'l' (local) or 'o' (beyond the local
    // memory); kind is 0 (reads), 1 (writes), 2 (atomic) or 3 (volatile store).
    void (*watch)(char space, const void *at, int bytes, int kind, int line);
};
struct ptx_thread {
    uint32_t tid, ctaid, ntid, nctaid;
    char *shared;        // the block's shared memory, static and dynamic
    int watched;         // whether accesses are reported to machine->watch
    uint64_t perturbed;  // 0: approximations are rounded correctly; otherwise the state of the errors' draws
    const struct ptx_machine *machine;
    uint32_t wide;  // at which lines, modulo 32, numbers are divided as if they were too large for 32 bits
};
// A kernel: the thread, and the addresses of its arguments.
typedef void ptx_kernel(struct ptx_thread *t, const void *const *arguments);

#ifndef __cplusplus
#include <fenv.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

typedef uint8_t u8, b8;
typedef uint16_t u16, b16;
typedef uint32_t u32, b32;
typedef uint64_t u64, b64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef bool pred;
#define INLINE static inline __attribute__((unused))
// A byte for each line of the PTX: whether the block of instructions that begins there ran. The launcher maps a file of
// MOONSHARD_PTX_RAN over them.
#define MARKS(lines) _Alignas(4096) u8 ran[((lines) + 4096) / 4096 * 4096];
#define RAN(line) ran[line] = 1
#define WIDE(line) (t->wide >> (line) % 32 & 1)

INLINE f32 as_f32(u32 v)
{
    f32 r;
    memcpy(&r, &v, 4);
    return r;
}
INLINE f64 as_f64(u64 v)
{
    f64 r;
    memcpy(&r, &v, 8);
    return r;
}
INLINE u32 bits_f32(f32 v)
{
    u32 r;
    memcpy(&r, &v, 4);
    return r;
}
INLINE u64 bits_f64(f64 v)
{
    u64 r;
    memcpy(&r, &v, 8);
    return r;
}
INLINE f32 nan_f32(f32 v) { return v == v ? v : as_f32(0x7fffffff); }
INLINE f64 nan_f64(f64 v) { return v; }

INLINE s32 mul_hi_s32(s32 a, s32 b) { return (s32)((s64)a * b >> 32); }
INLINE u32 mul_hi_u32(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
INLINE s64 mul_hi_s64(s64 a, s64 b) { return (s64)((__int128)a * b >> 64); }
INLINE u64 mul_hi_u64(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
// The ISA leaves the quotient of a division by zero open; GPUs give all ones.
#define DIVIDE(T, S)                                                                                  \
    INLINE T div_##T(T a, T b) { return b == 0 ? (T)-1 : S && b == (T)-1 ? (T)(0 - a) : (T)(a / b); } \
    INLINE T rem_##T(T a, T b) { return b == 0 ? a : S && b == (T)-1 ? 0 : (T)(a % b); }
DIVIDE(s32, 1)
DIVIDE(u32, 0)
DIVIDE(s64, 1)
DIVIDE(u64, 0)
INLINE u32 clz_b32(u32 a) { return a ? (u32)__builtin_clz(a) : 32; }
INLINE u32 clz_b64(u64 a) { return a ? (u32)__builtin_clzll(a) : 64; }
INLINE u32 add_cc(u32 *cc, u32 a, u32 b, u32 carry)
{
    u64 sum = (u64)a + b + carry;
    *cc = (u32)(sum >> 32);
    return (u32)sum;
}
INLINE u32 sub_cc(u32 *cc, u32 a, u32 b, u32 borrow)
{
    u64 difference = (u64)a - b - borrow;
    *cc = (u32)(difference >> 32) & 1;
    return (u32)difference;
}
INLINE u64 bfi_b64(u64 a, u64 b, u32 at, u32 n)
{
    at &= 0xff, n &= 0xff;
    if (n == 0 || at > 63) return b;
    u64 mask = (n > 63 ? ~(u64)0 : ((u64)1 << n) - 1) << at;
    return (b & ~mask) | (a << at & mask);
}
INLINE u32 prmt(u32 a, u32 b, u32 selector)
{
    u64 bytes = (u64)b << 32 | a;
    u32 r = 0;
    for (int k = 0; k < 4; k++) {
        u32 s = selector >> 4 * k & 15, byte = (u32)(bytes >> 8 * (s & 7)) & 0xff;
        if (s & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << 8 * k;
    }
    return r;
}
// The number that is not NaN, if one is; -0 is less than +0.
#define LEAST(T, S)                                                                                                   \
    INLINE T min_##T(T a, T b) { return a != a ? nan_##T(b) : b != b ? a : a < b || (a == b && signbit(a)) ? a : b; } \
    INLINE T max_##T(T a, T b) { return a != a ? nan_##T(b) : b != b ? a : a > b || (a == b && !signbit(a)) ? a : b; }
LEAST(f32, 0)
LEAST(f64, 0)

__attribute__((noinline, unused)) static f32 fma_rz(volatile f32 a, volatile f32 b, volatile f32 c)
{
    fesetround(FE_TOWARDZERO);
    volatile f32 r = fmaf(a, b, c);
    fesetround(FE_TONEAREST);
    return r;
}
__attribute__((noinline, unused)) static f32 add_rz(volatile f32 a, volatile f32 b)
{
    fesetround(FE_TOWARDZERO);
    volatile f32 r = a + b;
    fesetround(FE_TONEAREST);
    return r;
}
INLINE f32 ftz(f32 v) { return fabsf(v) < 0x1p-126f ? copysignf(0, v) : v; }
// The top 32 bits of a double, subnormals flushed: what the approximations of double read and give.
INLINE f64 high_f64(f64 v)
{
    if (fabs(v) < 0x1p-1022) return copysign(0, v);
    return as_f64(bits_f64(v) & ~(u64)0xffffffff);
}
INLINE f32 div_approx(f32 a, f32 b)
{
    if (fabsf(b) > 0x1p126f && fabsf(b) < INFINITY)
        return isinf(a) || a != a ? as_f32(0x7fffffff) : copysignf(0, a) * copysignf(1, b);
    return nan_f32(a / b);
}
// Whether approximations are perturbed, and v is so far from overflow and underflow that it may be; then *e is drawn
// from -1 .. 1.
INLINE int perturbs(struct ptx_thread *t, f64 v, f64 least, f64 *e)
{
    if (!t->perturbed || v != v || fabs(v) < least || fabs(v) > 1 / least) return 0;
    t->perturbed = t->perturbed * 6364136223846793005u + 1442695040888963407u;
    *e = (f64)(s64)(t->perturbed >> 11) * 0x1p-52 - 1;
    return 1;
}
// v, which is rounded; or, where approximations are perturbed, a number whose distance from the exact value is at most
// its share `relative` and `ulps` units in the last place.
INLINE f32 approx(struct ptx_thread *t, f32 v, f64 exact, f64 relative, f64 ulps)
{
    f64 e;
    if (v != v) return as_f32(0x7fffffff);
    if (!perturbs(t, v, 0x1p-120, &e)) return v;
    f64 bound = relative * fabs(exact) + ulps * ldexp(1, ilogb(exact) - 23);
    v = (f32)(exact + e * bound);
    return fabs(v - exact) > bound ? nextafterf(v, (f32)exact) : v;
}
// The upper 32 bits of v, subnormals flushed; where approximations are perturbed, the last of these bits errs by 1 at
// most. The ISA bounds this gross approximation only by its width.
INLINE f64 approx_high(struct ptx_thread *t, f64 v)
{
    f64 e;
    u64 bits = bits_f64(high_f64(v));
    if (perturbs(t, v, 0x1p-1000, &e)) bits += (u64)(s64)rint(e * 1.5) << 32;
    return as_f64(bits);
}

// Float to integer: `wide` is 1 if one of the types has 64 bits; then NaN gives the top bit, otherwise 0.
INLINE s64 s64_of(f64 v, int wide)
{
    (void)wide;
    return v != v ? INT64_MIN : v >= 0x1p63 ? INT64_MAX : v < -0x1p63 ? INT64_MIN : (s64)v;
}
INLINE u64 u64_of(f64 v, int wide)
{
    (void)wide;
    return v != v ? (u64)1 << 63 : v >= 0x1p64 ? UINT64_MAX : v <= -1 ? 0 : (u64)v;
}
INLINE s32 s32_of(f64 v, int wide)
{
    return v != v ? wide ? INT32_MIN : 0 : v >= 0x1p31 ? INT32_MAX : v < -0x1p31 ? INT32_MIN : (s32)v;
}
INLINE u32 u32_of(f64 v, int wide)
{
    return v != v ? wide ? (u32)1 << 31 : 0 : v >= 0x1p32 ? UINT32_MAX : v <= -1 ? 0 : (u32)v;
}
INLINE s16 s16_of(f64 v, int wide)
{
    return v != v ? wide ? INT16_MIN : 0 : v >= 0x1p15 ? INT16_MAX : v < -0x1p15 ? INT16_MIN : (s16)v;
}
INLINE u16 u16_of(f64 v, int wide)
{
    return v != v ? wide ? 1 << 15 : 0 : v >= 0x1p16 ? UINT16_MAX : v <= -1 ? 0 : (u16)v;
}

INLINE u16 bf16_of(f32 v)
{
    u32 b = bits_f32(v);
    return v != v ? 0x7fff : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
INLINE u16 f16_of(f32 v)
{
    if (v != v) return 0x7fff;
    u32 b = bits_f32(v), sign = b >> 16 & 0x8000, m = b & 0x7fffffff;
    if (m >= 0x477ff000) return (u16)(sign | 0x7c00);                          // rounds beyond the largest number
    if (m < 0x38800000) return (u16)(sign | (u32)rintf(as_f32(m) * 0x1p24f));  // subnormal: a multiple of 2^-24
    return (u16)(sign | ((m - 0x38000000 + 0xfff + (m >> 13 & 1)) >> 13));
}
INLINE f32 f32_of(u16 h)
{
    u32 sign = (u32)(h & 0x8000) << 16, m = (u32)(h & 0x7fff) << 13;
    f32 v = m < 0x0f800000 ? as_f32(m) * 0x1p112f : as_f32(m + 0x70000000);  // infinities and NaN have no such factor
    return nan_f32(as_f32(bits_f32(v) | sign));
}

// ---- memory ----

INLINE void *global_at(struct ptx_thread *t, u64 at, int bytes, int write, int line)
{
    if (__builtin_expect(t->watched, 0)) t->machine->watch('g', (void *)at, bytes, write, line);
    return (void *)at;
}
INLINE void *generic_at(struct ptx_thread *t, u64 at, int bytes, int write, int line)
{
    if (__builtin_expect(t->watched, 0)) t->machine->watch('n', (void *)at, bytes, write, line);
    return (void *)at;
}
INLINE void *shared_at(struct ptx_thread *t, u64 at, int bytes, int write, int line)
{
    void *p = t->shared + (u32)at;
    if (__builtin_expect(t->watched, 0)) t->machine->watch('s', p, bytes, write, line);
    return p;
}
INLINE void *param_at(struct ptx_thread *t, u64 at, int bytes, int write, int line)
{
    (void)t, (void)bytes, (void)write, (void)line;
    return (void *)at;
}
// memory, size: those of the function's local variables.
INLINE void *local_at(struct ptx_thread *t, u64 at, int bytes, char *memory, int size, int line)
{
    if (__builtin_expect(t->watched, 0)) {
        int inside = at >= (u64)memory && at + (u64)bytes <= (u64)memory + (u64)size;
        t->machine->watch(inside ? 'l' : 'o', (void *)at, bytes, 0, line);
    }
    return (void *)at;
}
// Words of kernels may be of any type (-fno-strict-aliasing).
#define LOAD(T, p, k) (((const T *)(p))[k])
#define STORE(T, p, k, v) (((T *)(p))[k] = (v))

// ---- warps ----

INLINE u32 shuffle(struct ptx_thread *t, char kind, pred *valid, u32 v, u32 b, u32 c, u32 mask, int line)
{
    int lane = (int)(t->tid % 32), clamp = (int)(c & 31), segment = (int)(c >> 8 & 31), by = (int)(b & 31), from;
    int most = (lane & segment) | (clamp & ~segment);
    switch (kind) {
    case 'u':
        from = lane - by;
        *valid = from >= most;
        break;
    case 'd':
        from = lane + by;
        *valid = from <= most;
        break;
    case 'b':
        from = lane ^ by;
        *valid = from <= most;
        break;
    default: from = (lane & segment) | (by & ~segment); *valid = from <= most;
    }
    return t->machine->shuffle(mask, v, *valid ? from : lane, line);
}
#endif
#endif
