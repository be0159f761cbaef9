// SPDX-License-Identifier: MIT
// probe.c -- rates of this machine for benchmarks: copies, multiply-adds, reads and writes of a disk.
//
// Each rate of multiply-adds is the best of several short slices, because the machine is shared. Every function uses
// one thread; if all ranks call it at the same time, it measures the rate of each with all of them active.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Seconds in which a thread that sleeps in a read learns that another has written to its pipe: half of the best round
// trip. Returns 0 if there are no pipes or threads.
static void *echo(void *arg)
{
    const int *fd = arg;
    char c;
    while (read(fd[0], &c, 1) == 1 && write(fd[3], &c, 1) == 1) {}
    return NULL;
}

EXPORT double probe_handover(int rounds)
{
    int fd[4];  // two pipes: to the other thread, and back
    pthread_t other;
    if (pipe(fd) != 0) return 0;
    if (pipe(fd + 2) != 0 || pthread_create(&other, NULL, echo, fd) != 0) return 0;
    double best = 1;
    char c = 0;
    for (int k = 0; k < rounds; k++) {
        double t = now();
        if (write(fd[1], &c, 1) != 1 || read(fd[2], &c, 1) != 1) break;
        t = now() - t;
        if (t < best) best = t;
    }
    close(fd[1]);
    pthread_join(other, NULL);
    close(fd[0]), close(fd[2]), close(fd[3]);
    return best / 2;
}

// A sink that the compiler cannot optimise away.
static volatile float sink;

enum { ROUNDS = 20000, CHAINS = 16 };  // 16 independent chains: two execution ports with a latency of 4 need at least 8

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static double slice_v4(void)
{
    __m512 a[CHAINS], m = _mm512_set1_ps(0.999f), c = _mm512_set1_ps(0.001f);
    for (int k = 0; k < CHAINS; k++) a[k] = _mm512_set1_ps((float)k);
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 16
        for (int k = 0; k < CHAINS; k++) a[k] = _mm512_fmadd_ps(a[k], m, c);
    }
    float s = 0;
    for (int k = 0; k < CHAINS; k++) s += _mm512_reduce_add_ps(a[k]);
    sink = s;
    return 2.0 * 16 * CHAINS * ROUNDS;
}

__attribute__((target("avx512f,avx512bf16"))) static double slice_bf16(void)
{
    __m512 a[CHAINS];
    __m512bh m = (__m512bh)_mm512_set1_epi16(0x3c00), c = (__m512bh)_mm512_set1_epi16(0x3c01);
    for (int k = 0; k < CHAINS; k++) a[k] = _mm512_set1_ps((float)k);
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 16
        for (int k = 0; k < CHAINS; k++) a[k] = _mm512_dpbf16_ps(a[k], m, c);
    }
    float s = 0;
    for (int k = 0; k < CHAINS; k++) s += _mm512_reduce_add_ps(a[k]);
    sink = s;
    return 2.0 * 32 * CHAINS * ROUNDS;
}

// Tiles (AMX): 16 x 16 sums of 32 products each per instruction, if the system grants access to their registers.
__attribute__((target("amx-tile,amx-bf16"))) static double slice_amx(void)
{
    struct {
        uint8_t palette, start, zero[14];
        uint16_t columns[16];
        uint8_t rows[16];
    } config = { .palette = 1 };
    static uint16_t numbers[16 * 32];
    for (int k = 0; k < 16 * 32; k++) numbers[k] = 0x3c00;
    for (int k = 0; k < 8; k++) {
        config.columns[k] = 64;
        config.rows[k] = 16;
    }
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, numbers, 64);
    _tile_loadd(5, numbers, 64);
    _tile_loadd(6, numbers, 64);
    _tile_loadd(7, numbers, 64);
    for (int r = 0; r < ROUNDS / 4; r++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    float out[16 * 16];
    _tile_stored(0, out, 64);
    _tile_release();
    sink = out[0];
    return 2.0 * 16 * 16 * 32 * 4 * (ROUNDS / 4);
}

static int have_amx(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d = 0;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    return d >> 22 & 1 && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

__attribute__((target("avx2,fma"))) static double slice_v3(void)
{
    __m256 a[12], m = _mm256_set1_ps(0.999f), c = _mm256_set1_ps(0.001f);
    for (int k = 0; k < 12; k++) a[k] = _mm256_set1_ps((float)k);
    for (int r = 0; r < ROUNDS; r++) {
#pragma GCC unroll 12
        for (int k = 0; k < 12; k++) a[k] = _mm256_fmadd_ps(a[k], m, c);
    }
    float s = 0;
    for (int k = 0; k < 12; k++) s += a[k][0];
    sink = s;
    return 2.0 * 8 * 12 * ROUNDS;
}
#endif

static double slice_any(void)
{
    float a[CHAINS];
    for (int k = 0; k < CHAINS; k++) a[k] = (float)k;
    for (int r = 0; r < ROUNDS; r++)
        for (int k = 0; k < CHAINS; k++) a[k] = a[k] * 0.999f + 0.001f;
    float s = 0;
    for (int k = 0; k < CHAINS; k++) s += a[k];
    sink = s;
    return 2.0 * CHAINS * ROUNDS;
}

static double best_rate(double (*slice)(void), double seconds)
{
    double best = 0, end = now() + seconds;
    slice();  // a processor may power up its units for wide registers only on use, which takes time
    do {
        double t = now(), flops = slice();
        t = now() - t;
        if (flops / t > best) best = flops / t;
    } while (now() < end);
    return best;
}

// Whether MOONSHARD_ISA allows a level of x86-64: a roof is that of the level that the kernels use.
#if defined(__x86_64__)
static int allowed(int level)
{
    const char *limit = getenv("MOONSHARD_ISA");
    return !limit || limit[0] != 'v' || limit[1] >= '0' + level;
}
#endif

// Floating-point operations per second of fused multiply-adds, on one thread.
EXPORT double probe_fma_float32(double seconds)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (allowed(4) && __builtin_cpu_supports("avx512f")) return best_rate(slice_v4, seconds);
    if (allowed(3) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return best_rate(slice_v3, seconds);
#endif
    return best_rate(slice_any, seconds);
}

// The rate of bfloat16 products summed in float32 by vector instructions; 0 if the processor has none of these.
EXPORT double probe_fma_bfloat16(double seconds)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (allowed(4) && __builtin_cpu_supports("avx512bf16")) return best_rate(slice_bf16, seconds);
#endif
    (void)seconds;
    return 0;
}

// The rate of bfloat16 products summed in float32 by the tile unit (AMX); 0 if the processor has none.
EXPORT double probe_amx_bfloat16(double seconds)
{
#if defined(__x86_64__)
    if (allowed(4) && have_amx()) return best_rate(slice_amx, seconds);
#endif
    (void)seconds;
    return 0;
}

// Seconds of one copy of `bytes` (read and written once each). The caller repeats it, synchronises ranks, and takes
// best and median.
EXPORT double probe_copy(void *to, const void *from, double bytes)
{
    double t = now();
    memcpy(to, from, (size_t)bytes);
    return now() - t;
}

typedef struct reader {
    const uint64_t *from;
    size_t lines;
    uint64_t sum;
} reader;

// Reads cache lines as integers (a sum of floats would wait for its own latency), in the faster of two ways: in order,
// with prefetches; on AMD's processors as four streams, which these fetch ahead by themselves (Zen 2: 24 and 15 GB/s).
static void *read_lines(void *arg)
{
    reader *r = arg;
    uint64_t s[8] = { 0 };
    size_t k = 0;
#ifdef __x86_64__
    size_t part = r->lines / 4;
    __builtin_cpu_init();
    for (; __builtin_cpu_is("amd") && k < part; k++)
        for (int q = 0; q < 8; q++)
            for (size_t p = 0; p < 4; p++) s[q] += r->from[8 * (k + p * part) + (size_t)q];
    k *= 4;
#endif
    for (; k < r->lines; k++) {
        __builtin_prefetch(r->from + 8 * k + 1024);
        for (int q = 0; q < 8; q++) s[q] += r->from[8 * k + q];
    }
    for (int q = 0; q < 8; q++) r->sum += s[q];
    return NULL;
}

// Seconds to read `bytes` once, divided between threads.
EXPORT double probe_read(const void *from, double bytes, int threads)
{
    enum { MOST = 64 };
    reader list[MOST] = { 0 };
    pthread_t other[MOST];
    size_t lines = (size_t)bytes / 64;
    if (threads > MOST) threads = MOST;
    double t = now();
    for (int k = 0; k < threads; k++) {
        size_t first = lines * (size_t)k / (size_t)threads, last = lines * (size_t)(k + 1) / (size_t)threads;
        list[k] = (reader) { (const uint64_t *)from + 8 * first, last - first, 0 };
        if (k > 0 && pthread_create(&other[k], NULL, read_lines, &list[k]) != 0) return -1;
    }
    read_lines(&list[0]);
    for (int k = 1; k < threads; k++) pthread_join(other[k], NULL);
    t = now() - t;
    for (int k = 0; k < threads; k++) sink = (float)list[k].sum;
    return t;
}

// Memory for copies: page-aligned, touched by this thread, filled with numbers that do not compress.
EXPORT void *probe_memory(double bytes)
{
    size_t n = ((size_t)bytes + 4095) & ~(size_t)4095;
    uint64_t *p = aligned_alloc(4096, n ? n : 4096), x = 88172645463325252u;
    for (size_t k = 0; p && k < n / 8; k++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        p[k] = x;
    }
    return p;
}

EXPORT void probe_free(void *p) { free(p); }
EXPORT double probe_now(void) { return now(); }

// Seconds to write (and sync) or read a file of `bytes` past the page cache, sequentially in chunks; < 0 if that fails,
// for example because the file system does not support O_DIRECT.
EXPORT double probe_direct(const char *path, double bytes, double chunk, int write)
{
    size_t n = (size_t)chunk, total = (size_t)bytes / 4096 * 4096, done = 0;
    int fd = open(path, (write ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY) | O_DIRECT, 0666);
    void *p = fd < 0 ? NULL : probe_memory(chunk);
    double t = now();
    while (p && done < total) {
        size_t m = total - done < n ? total - done : n;
        ssize_t k = write ? pwrite(fd, p, m, (off_t)done) : pread(fd, p, m, (off_t)done);
        if (k <= 0) break;
        done += (size_t)k;
    }
    if (write && fd >= 0 && fsync(fd)) done = 0;
    t = now() - t;
    free(p);
    if (fd >= 0) close(fd);
    return done == total && total > 0 ? t : -1;
}
