// SPDX-License-Identifier: MIT
// cuda/segments.h -- how sums over few outputs and many elements are divided, so that they fill the GPU: each part of
// the work into segments, one block per segment; a second launch combines the segments of a part.
#ifndef MS_CUDA_SEGMENTS_H
#define MS_CUDA_SEGMENTS_H

#include "cuda/blocks.h"

// A launch that reads LARGE bytes or more needs at least ENOUGH blocks, one for each multiprocessor of an H100; FILL
// blocks have enough loads in flight for the whole bandwidth. Small work keeps few segments, because combining them
// costs a launch. In the emulator LARGE is a few KiB, so that specs reach these paths.
enum { ENOUGH = 132, FILL = 528 };
#ifdef MS_EMULATED
constexpr int64_t LARGE = 4000;
#else
constexpr int64_t LARGE = 1000000;
#endif

// The number of segments for `parts` parts of `length` elements each, `bytes` bytes in all: at most
// length / least segments of a part, rounded up.
static inline int64_t filling_segments(int64_t bytes, int64_t parts, int64_t length, int64_t least)
{
    if (bytes < LARGE || parts >= ENOUGH || parts < 1) return 1;
    int64_t most = up(length, least), fill = up(FILL, parts);
    return most < fill ? most : fill;
}

// ---- channels ----

// The elements of each channel of a tensor, divided into segments; a block for each segment of each channel.
struct channel_parts : planes {
    int64_t segments, segment;  // segment: elements of each but the last
};
// operands: the number of tensors that are read.
static inline channel_parts channel_parts_of(const planes &z, int size, int operands)
{
    int64_t count = z.n * z.s, least = 4096 / (size * operands);
    channel_parts p = { z, filling_segments(z.c * count * size * operands, z.c, count, least), 0 };
    p.segment = up(up(count, p.segments), WIDE) * WIDE;
    p.segments = p.segment ? up(count, p.segment) : 1;
    return p;
}
// This block's channel, its segment's number, and the segment's elements.
struct channel_part {
    int64_t c, s, from, to;
};
static __device__ inline channel_part channel_part_of(const channel_parts &p)
{
    int64_t c = blockIdx.x / p.segments, s = blockIdx.x - c * p.segments, from = s * p.segment, count = p.n * p.s;
    return { c, s, from, from + p.segment < count ? from + p.segment : count };
}
// The sum of n partial results, added by the lanes of a warp. Every lane gets it.
static __device__ inline double join_parts(const double *parts, int64_t n)
{
    double sum = 0;
    ROLLED
    for (int64_t s = threadIdx.x % 32; s < n; s += 32) sum += parts[s];
    return warp_sum(sum);
}

#endif
