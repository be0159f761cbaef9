// SPDX-License-Identifier: MIT
// base/base.h -- status and text, clock, interrupt: what every other file stands on.
#ifndef MS_BASE_H
#define MS_BASE_H

#include <stdbool.h>
#include <stdint.h>
#include <stddef.h>
#include <string.h>
#include <stdlib.h>
#include "moonshard.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MS_TRY(expr)                      \
    do {                                  \
        ms_status ms__s = (expr);         \
        if (ms__s != MS_OK) return ms__s; \
    } while (0)
#define MS_LIKELY(x) __builtin_expect(!!(x), 1)
#define MS_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define MS_COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

// CPU dispatch at run time. Put it before a kernel whose loops should vectorise. Off where the toolchain cannot
// (sanitizer builds keep it; valgrind copes): clang 14 and 16 know no such levels.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(MS_NO_CLONES)
#define MS_CLONES 1
#define MS_KERNEL __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define MS_CLONES 0
#define MS_KERNEL
#endif

// Stores the text for ms_error() and returns code. The text names the function or operator, the
// argument, its value and what was expected.
ms_status ms__fail(ms_status code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
// Puts "prefix" in front of the stored text (a caller that knows the context) and returns the code again.
ms_status ms__fail_prefix(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void ms__clear_error(void);
static inline ms_status ms__failure(void) { return (ms_status)ms_error_code(); }  // the code of the stored text
// MS_ENOMEM for what malloc refused: "who: no memory for N bytes (what for)". who is the operator or function at work.
ms_status ms__no_memory(size_t bytes, const char *who, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

int64_t ms__now_ns(void);             // monotonic
void ms__nap(int64_t ns);             // sleeps once; a signal ends it early
ms_status ms__check_interrupt(void);  // MS_EINTR once after ms_interrupt
extern ms_state ms__state;

// FNV-1a.
static inline uint32_t ms__hash(const char *s)
{
    uint32_t h = 2166136261u;
    for (; *s; s++) h = (h ^ (uint8_t)*s) * 16777619u;
    return h;
}

// The same in 64 bits: begins with MS_HASH_START, takes values or bytes one after the other.
#define MS_HASH_START 14695981039346656037ull
static inline uint64_t ms__hash_value(uint64_t h, uint64_t value) { return (h ^ value) * 1099511628211ull; }
static inline uint64_t ms__hash_bytes(uint64_t h, const void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) h = ms__hash_value(h, ((const uint8_t *)p)[i]);
    return h;
}

// Room in *array (a pointer to elements of `size` bytes) for one more than n: its capacity doubles when it is full.
// MS_ENOMEM for who and what (ms__no_memory); then nothing has changed.
ms_status ms__grow(void *array, int *capacity, int n, size_t size, const char *who, const char *what);

// The interned copy of a string: equal strings, equal pointers; never freed.
const char *ms__intern(const char *s);

// Appends to the string in a buffer of n bytes, and cuts off what does not fit.
void ms__append(char *text, size_t n, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

// Text of a shape "[2, 3]" in one of 8 rotating thread-local buffers.
const char *ms__shape_text(int ndim, const int64_t *shape);

#ifdef __cplusplus
}
#endif

#endif
