// SPDX-License-Identifier: MIT
// base/isa.c -- MOONSHARD_ISA=v1|v2|v3|v4 limits the instruction set of kernels compiled with target_clones (v2: as v1,
// because no clone is made for it).
//
// The clones' resolvers run while the library is being relocated, before any constructor. They read libgcc's
// __cpu_features2, which __cpu_indicator_init fills. The linker wraps that function (--wrap in CMakeLists.txt), and the
// wrapper here clears the bits of higher levels. libc must not be called that early, so the environment is read with
// raw system calls.
#include "base/base.h"

#if MS_CLONES

#include <fcntl.h>
#include <sys/syscall.h>

#define EARLY \
    __attribute__((no_sanitize("address", "undefined", "thread"), optimize("no-tree-loop-distribute-patterns")))

extern unsigned __cpu_features2[];
int __real___cpu_indicator_init(void);
int __wrap___cpu_indicator_init(void);

EARLY static long call3(long n, long a, long b, long c)
{
    long r;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return r;
}

// The digit after MOONSHARD_ISA=v; 0 if unset or invalid.
EARLY static int asked_level(void)
{
    static const char key[] = "MOONSHARD_ISA=v", path[] = "/proc/self/environ";
    char buf[4096];
    int level = 0, at = 0;
    bool start = true;
    long n, fd = call3(SYS_open, (long)path, O_RDONLY, 0);
    if (fd < 0) return 0;
    while ((n = call3(SYS_read, fd, (long)buf, sizeof buf)) > 0)
        for (long k = 0; k < n; k++) {
            char c = buf[k];
            if (start && at == (int)sizeof key - 1) level = c >= '1' && c <= '4' ? c - '0' : 0, start = false;
            else if (start && c == key[at]) at++;
            else start = false;
            if (c == 0) start = true, at = 0;
        }
    call3(SYS_close, fd, 0, 0);
    return level;
}

// GCC 12 and later: bits 0, 1 and 2 of __cpu_features2[2] mean x86-64-v2, -v3 and -v4.
enum { WORD = 2, V3 = 1 << 1, V4 = 1 << 2 };
static int level = -1;

EARLY int __wrap___cpu_indicator_init(void)
{
    int r = __real___cpu_indicator_init();
    if (level < 0) level = asked_level();
    if (level > 0 && level < 4) __cpu_features2[WORD] &= ~(unsigned)V4;
    if (level > 0 && level < 3) __cpu_features2[WORD] &= ~(unsigned)V3;
    return r;
}

const char *ms_cpu_isa(void)
{
    __wrap___cpu_indicator_init();
    return __cpu_features2[WORD] & V4 ? "v4" : __cpu_features2[WORD] & V3 ? "v3" : "v1";
}

#elif defined(__aarch64__)
const char *ms_cpu_isa(void) { return "neon"; }  // every 64-bit ARM processor has it, with fused multiply-adds
#else
const char *ms_cpu_isa(void) { return "v1"; }
#endif
