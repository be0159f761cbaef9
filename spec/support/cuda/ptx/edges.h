// SPDX-License-Identifier: MIT
// ptx/edges.h -- compares a translated instruction with its reference on all combinations of edge values, for
// spec/cuda/ptx_forms_spec.lua.
#pragma once
#include <stdio.h>
#include "reference.h"
#include "runtime.h"

static const uint64_t two[] = { 0, 1 }, ints[] = { 0,
                                                   1,
                                                   2,
                                                   3,
                                                   7,
                                                   15,
                                                   16,
                                                   31,
                                                   32,
                                                   33,
                                                   63,
                                                   64,
                                                   65,
                                                   127,
                                                   128,
                                                   255,
                                                   256,
                                                   0x3ff,
                                                   0x400,
                                                   0x5555,
                                                   0x7bff,
                                                   0x7c00,
                                                   0xfc00,
                                                   0x7fff,
                                                   0x8000,
                                                   0x8001,
                                                   0xaaaa,
                                                   0xfffe,
                                                   0xffff,
                                                   0x10000,
                                                   0x12345678,
                                                   0x7fffffff,
                                                   0x80000000,
                                                   0x80000001,
                                                   0xfffffffe,
                                                   0xffffffff,
                                                   0x100000000,
                                                   0x123456789abcdef0,
                                                   0x7fffffffffffffff,
                                                   0x8000000000000000,
                                                   0x8000000000000001,
                                                   0xfedcba9876543210,
                                                   0xfffffffffffffffe,
                                                   0xffffffffffffffff };
static const uint64_t floats[] = { 0,          0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000, 0x7fc00000,
                                   0xffc00001, 1,          0x80000001, 0x7fffff,   0x807fffff, 0x800000,   0x80800000,
                                   0x7f7fffff, 0xff7fffff, 0x3f800001, 0x3f7fffff, 0x3f000000, 0xbf000000, 0x3fc00000,
                                   0x40200000, 0xc0200000, 0x406ccccd, 0x4effffff, 0x4f000000, 0xcf000000, 0xcf000001,
                                   0x4f800000, 0x5f000000, 0xdf000000, 0x5f800000, 0x477fe000, 0x477ff000, 0x33800000,
                                   0x33000000, 0x33000001, 0x387fe000, 0x38801000, 0x7f000000, 0x7e800001, 0x00200000,
                                   0x34000000, 0x42b17218, 0xc2ce8ed0, 0x3eaaaaab, 0x3f808000, 0x3f818000, 0x7f7f8000 };
static const uint64_t doubles[] = { 0,
                                    0x8000000000000000,
                                    0x3ff0000000000000,
                                    0xbff0000000000000,
                                    0x7ff0000000000000,
                                    0xfff0000000000000,
                                    0x7ff8000000000000,
                                    1,
                                    0x8000000000000001,
                                    0xfffffffffffff,
                                    0x10000000000000,
                                    0x8010000000000000,
                                    0x7fefffffffffffff,
                                    0xffefffffffffffff,
                                    0x3ff0000000000001,
                                    0x3fefffffffffffff,
                                    0x3fe0000000000000,
                                    0xbfe0000000000000,
                                    0x3ff8000000000000,
                                    0x4004000000000000,
                                    0xc004000000000000,
                                    0x400d99999999999a,
                                    0x41dfffffffc00000,
                                    0x41e0000000000000,
                                    0xc1e0000000000000,
                                    0xc1e0000000200000,
                                    0x41efffffffe00000,
                                    0x41f0000000000000,
                                    0x43e0000000000000,
                                    0xc3e0000000000000,
                                    0x43f0000000000000,
                                    0x43efffffffffffff,
                                    0x3690000000000000,
                                    0x369fffffffffffff,
                                    0x36a8000000000000,
                                    0x380fffffe0000000,
                                    0x47efffffe0000000,
                                    0x47effffff0000000,
                                    0x3ca0000000000000,
                                    0x3fd5555555555555,
                                    0x40862e42fefa39ef,
                                    0x7fe0000000000001 };
#define LIST(x)                 \
    {                           \
        x, sizeof x / sizeof *x \
    }
static const struct list {
    const uint64_t *of;
    size_t n;
} lists[] = { LIST(two), LIST(ints), LIST(floats), LIST(doubles) };
struct form {
    const char *name;
    ptx_kernel *run;
    int (*expected)(const uint64_t *, uint64_t *);
    int n, list[4], nan;
};

static int same(const struct form *f, const uint64_t *got, const uint64_t *want)
{
    if (f->nan) {  // the ISA leaves the NaN of a double open
        double x, y;
        memcpy(&x, got, 8), memcpy(&y, want, 8);
        if (x != x && y != y) return 1;
    }
    return got[0] == want[0] && got[1] == want[1];
}
static void test(const struct form *f, int carries)
{
    struct ptx_thread t = { 0 };
    uint64_t in[5] = { 0 }, got[2], want[2];
    const void *const in_at = in, *const out_at = got, *const arguments[2] = { &in_at, &out_at };
    size_t all = 1, cases = 0;
    for (int k = 0; k < f->n; k++) all *= lists[f->list[k]].n;
    size_t step = all > 200000 ? all / 200000 * 2 + 1 : 1;
    for (size_t c = 0; c < all; c += step)
        for (in[4] = 0; in[4] < (uint64_t)carries; in[4]++) {
            size_t rest = c;
            for (int k = 0; k < f->n; rest /= lists[f->list[k++]].n)
                in[k] = lists[f->list[k]].of[rest % lists[f->list[k]].n];
            got[0] = got[1] = want[0] = want[1] = 0;
            if (!f->expected(in, want)) continue;
            f->run(&t, arguments);
            cases++;
            if (same(f, got, want)) continue;
            printf("%s of %llx %llx %llx %llx, carry %llu: %llx %llx, expected %llx %llx\n", f->name,
                   (unsigned long long)in[0], (unsigned long long)in[1], (unsigned long long)in[2],
                   (unsigned long long)in[3], (unsigned long long)in[4], (unsigned long long)got[0],
                   (unsigned long long)got[1], (unsigned long long)want[0], (unsigned long long)want[1]);
            return;
        }
    printf("%s right %zu\n", f->name, cases);
}
