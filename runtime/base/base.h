// SPDX-License-Identifier: MIT
// base/base.h -- status and error text, clock, interrupt, hashes, interned strings, growing arrays, macros.
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

// Compiles a function for x86-64, x86-64-v3 and x86-64-v4; the version is selected at load time. For kernels whose
// loops should vectorise. Disabled with clang: versions 14 and 16 do not know these levels.
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
// Adds a prefix to the stored text, for a caller that knows the context. Returns the stored code.
ms_status ms__fail_prefix(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void ms__clear_error(void);
static inline ms_status ms__failure(void) { return (ms_status)ms_error_code(); }  // the code of the stored error
// Fails with MS_ENOMEM after malloc failed: "who: no memory for N bytes (purpose)". who is the operator or function.
ms_status ms__no_memory(size_t bytes, const char *who, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
// For functions that return a pointer, an id or a handle: return NULL or 0 after a failure has stored its error.
static inline void *ms__null(ms_status reported)
{
    (void)reported;
    return NULL;
}
static inline double ms__no_id(ms_status reported)
{
    (void)reported;
    return 0;
}

// A number for a script. LuaJIT takes a NaN whose sign or payload bits it does not know for a value of another type, as
// nil or a pointer, and the FFI passes them through: every floating-point number of a tensor that leaves the engine
// goes through here.
static inline double ms__for_script(double v) { return v == v ? v : __builtin_nan(""); }

int64_t ms__now_ns(void);             // monotonic clock
void ms__nap(int64_t ns);             // sleeps; a signal ends it early
ms_status ms__check_interrupt(void);  // returns MS_EINTR once after ms_interrupt
extern ms_state ms__state;

// The FNV-1a hash of a string.
static inline uint32_t ms__hash(const char *s)
{
    uint32_t h = 2166136261u;
    for (; *s; s++) h = (h ^ (uint8_t)*s) * 16777619u;
    return h;
}

// FNV-1a with 64 bits: start with MS_HASH_START, then add values or bytes.
#define MS_HASH_START 14695981039346656037ull
static inline uint64_t ms__hash_value(uint64_t h, uint64_t value) { return (h ^ value) * 1099511628211ull; }
static inline uint64_t ms__hash_bytes(uint64_t h, const void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) h = ms__hash_value(h, ((const uint8_t *)p)[i]);
    return h;
}

// Makes room in *array (a pointer to elements of `size` bytes) for more than n elements: doubles the capacity of a full
// array. On MS_ENOMEM nothing has changed; who and what are for its text (ms__no_memory).
ms_status ms__grow(void *array, int *capacity, int n, size_t size, const char *who, const char *what);

// The interned copy of a string: equal strings give the same pointer. Never freed. "" if there is no memory.
const char *ms__intern(const char *s);

// Appends to the string in a buffer of n bytes; truncates text that does not fit.
void ms__append(char *text, size_t n, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

// The shape as text, "[2, 3]", in one of 8 thread-local buffers that are reused in turn.
const char *ms__shape_text(int ndim, const int64_t *shape);

#ifdef __cplusplus
}
#endif

#endif
