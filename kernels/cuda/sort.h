// SPDX-License-Identifier: MIT
// cuda/sort.h -- a stable radix sort of entries, each a position and its key: by digits of 8 bits of the key, the
// lowest first. Time and memory grow with the number of entries. No atomics.
//
// A block orders the entries of a chunk: each of its threads counts the digits of `each` adjacent entries, and then
// places these in order. Where an entry goes follows from the counts of all blocks.
#ifndef MS_CUDA_SORT_H
#define MS_CUDA_SORT_H

#include "cuda/blocks.h"

struct alignas(8) entry {
    int32_t key, at;  // at: the position
};
enum { DIGITS = 256, SORTERS = 64, ALONE = 2048 };  // one block sorts up to ALONE entries in one launch
constexpr int64_t MOST_SORTED = 1 << 25;            // so that counts of a block fit in 16 bits
enum { MOST_CHUNKS = 512 };                         // a lane of sort_scan_kernel adds the counts of at most 16 chunks

struct sort_sizes {
    int64_t n, each, chunks;
    int passes;
};
// Sizes for n entries whose keys are at most `largest`.
static inline sort_sizes sort_sizes_of(int64_t n, int64_t largest)
{
    int64_t most = n <= ALONE ? 1 : MOST_CHUNKS, each = up(n, SORTERS * most);
    sort_sizes s = { n, each > 4 ? each : 4, 0, 1 };
    while (largest >> (8 * s.passes)) s.passes++;
    s.chunks = up(n, SORTERS * s.each);
    return s;
}
static inline int64_t sort_bytes(const sort_sizes &s) { return 16 * s.n + 4 * DIGITS * (s.chunks + 1); }

struct sort_room {
    uint16_t counts[DIGITS]
                   [SORTERS];  // how many entries of each thread have a digit; then, where the thread's next entry goes
    int32_t base[DIGITS], sums[SORTERS];
};
// One pass over the digits at bit `shift`: entries are moved to `to`.
struct sort_pass {
    sort_sizes s;
    int shift;
    entry *to;
    // [chunks + 1][DIGITS]: each chunk's counts of the digits; then, for each chunk, the sums over the chunks before
    // it, and in the last row the sums over all. NULL if there is one chunk.
    int32_t *all;
};
// Calls fn for this thread's entries of a chunk, in order. from(i): entry i before the pass. The loads of several
// entries are in flight together.
template <class F, class G>
static __device__ __forceinline__ void each_entry(const sort_pass &p, int64_t chunk, const F &from, const G &fn)
{
    enum { AHEAD = 4 };
    int64_t first = (chunk * SORTERS + threadIdx.x) * p.s.each, last = first + p.s.each;
    if (last > p.s.n) last = p.s.n;
    for (int64_t i = first; i < last; i += AHEAD) {
        entry e[AHEAD];
        UNROLL
        for (int a = 0; a < AHEAD; a++) e[a] = from(i + a < last ? i + a : i);
        UNROLL
        for (int a = 0; a < AHEAD; a++)
            if (i + a < last) fn(e[a]);
    }
}
template <class F>
static __device__ __forceinline__ void count_digits(const sort_pass &p, int64_t chunk, const F &from, sort_room &r)
{
    int t = threadIdx.x;
    for (int d = 0; d < DIGITS; d++) r.counts[d][t] = 0;
    each_entry(p, chunk, from, [&](const entry &e) { r.counts[e.key >> p.shift & 255][t]++; });
    __syncthreads();
}
// Turns counts into positions in the result.
static __device__ __forceinline__ void find_places(const sort_pass &p, int64_t chunk, sort_room &r)
{
    enum { MINE = DIGITS / SORTERS };  // the number of digits per thread, which are adjacent
    int t = threadIdx.x;
    int32_t all[MINE] = {}, before[MINE] = {}, sum = 0;
    UNROLL
    for (int k = 0; k < MINE; k++) {
        int32_t run = 0;
        for (int other = 0; other < SORTERS; other++) {
            int32_t n = r.counts[MINE * t + k][other];
            r.counts[MINE * t + k][other] = (uint16_t)run;
            run += n;
        }
        all[k] = run;
        if (p.all) {
            before[k] = p.all[chunk * DIGITS + MINE * t + k];
            all[k] = p.all[p.s.chunks * DIGITS + MINE * t + k];
        }
    }
    UNROLL
    for (int k = 0; k < MINE; k++) sum += all[k];
    r.sums[t] = sum;
    __syncthreads();
    sum = 0;
    for (int other = 0; other < t; other++) sum += r.sums[other];
    UNROLL
    for (int k = 0; k < MINE; k++) {
        r.base[MINE * t + k] = sum + before[k];
        sum += all[k];
    }
    __syncthreads();
}
template <class F>
static __device__ __forceinline__ void place_entries(const sort_pass &p, int64_t chunk, const F &from, sort_room &r)
{
    int t = threadIdx.x;
    each_entry(p, chunk, from, [&](const entry &e) {
        int d = e.key >> p.shift & 255;
        p.to[r.base[d] + r.counts[d][t]++] = e;
    });
}

// READ: a function object with entry operator()(int64_t i), the entries before the first pass.
template <class READ> __global__ void sort_alone_kernel(sort_sizes s, READ read, entry *a, entry *b)
{
    __shared__ sort_room room;
    for (int pass = 0; pass < s.passes; pass++) {
        const entry *from = pass % 2 ? a : b;
        sort_pass p = { s, 8 * pass, pass % 2 ? b : a, NULL };
        auto get = [&](int64_t i) { return pass ? from[i] : read(i); };
        count_digits(p, 0, get, room);
        find_places(p, 0, room);
        place_entries(p, 0, get, room);
        __syncthreads();
    }
}
template <class READ> __global__ void sort_count_kernel(sort_pass p, READ read, const entry *from)
{
    __shared__ sort_room room;
    count_digits(
        p, blockIdx.x, [&](int64_t i) { return from ? from[i] : read(i); }, room);
    for (int d = threadIdx.x; d < DIGITS; d += SORTERS) {
        int32_t sum = 0;
        for (int t = 0; t < SORTERS; t++) sum += room.counts[d][t];
        p.all[blockIdx.x * DIGITS + d] = sum;
    }
}
// Replaces each chunk's counts by the sums over the chunks before it: a block of one warp per digit, whose lanes have
// adjacent chunks.
static __global__ void sort_scan_kernel(sort_pass p)
{
    int d = (int)blockIdx.x, lane = threadIdx.x;
    int64_t each = (p.s.chunks + 31) / 32, first = lane * each, last = first + each;
    if (last > p.s.chunks) last = p.s.chunks;
    int32_t mine = 0;
    for (int64_t c = first; c < last; c++) mine += p.all[c * DIGITS + d];
    int32_t run = mine;
    for (int step = 1; step < 32; step *= 2) {
        int32_t left = __shfl_up_sync(0xffffffffu, run, step);
        if (lane >= step) run += left;
    }
    if (lane == 31) p.all[p.s.chunks * DIGITS + d] = run;
    run -= mine;
    for (int64_t c = first; c < last; c++) {
        int32_t n = p.all[c * DIGITS + d];
        p.all[c * DIGITS + d] = run;
        run += n;
    }
}
template <class READ> __global__ void sort_place_kernel(sort_pass p, READ read, const entry *from)
{
    __shared__ sort_room room;
    auto get = [&](int64_t i) { return from ? from[i] : read(i); };
    count_digits(p, blockIdx.x, get, room);
    find_places(p, blockIdx.x, room);
    place_entries(p, blockIdx.x, get, room);
}

// Sorts the entries that `read` returns. *sorted: where the result is in `room`, which has sort_bytes(s) bytes on the
// device.
template <class READ>
static ms_status sort_entries(const char *what, int index, const sort_sizes &s, const READ &read, void *room,
                              const entry **sorted)
{
    entry *a = (entry *)room, *b = a + s.n;
    *sorted = s.passes % 2 ? a : b;
    if (s.n <= ALONE) return launch_blocks(what, index, sort_alone_kernel<READ>, 1, SORTERS, s, read, a, b);
    for (int pass = 0; pass < s.passes; pass++) {
        const entry *from = pass == 0 ? NULL : pass % 2 ? a : b;
        sort_pass p = { s, 8 * pass, pass % 2 ? b : a, (int32_t *)(b + s.n) };
        MS_TRY(launch_blocks(what, index, sort_count_kernel<READ>, s.chunks, SORTERS, p, read, from));
        MS_TRY(launch_blocks(what, index, sort_scan_kernel, (int)DIGITS, 32, p));
        MS_TRY(launch_blocks(what, index, sort_place_kernel<READ>, s.chunks, SORTERS, p, read, from));
    }
    return MS_OK;
}

#endif
