// SPDX-License-Identifier: MIT
// cuda/copies.h -- copies and fills, in the order of a stream.
#pragma once
#include "streams.h"

inline cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, cudaMemcpyKind kind, cudaStream_t s)
{
    if (kind == cudaMemcpyHostToDevice) {  // from memory that is not pinned: staged, as CUDA does
        char *stage = (char *)malloc(n ? n : 1);
        if (!stage) return cudaErrorMemoryAllocation;
        memcpy(stage, src, n);
        ms_shim::push(s, [=] {
            memcpy(dst, stage, n);
            free(stage);
        });
        return cudaSuccess;
    }
    ms_shim::push(s, [=] { memmove(dst, src, n); });
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s)
{
    ms_shim::push(s, [=] { memset(p, v, n); });
    return cudaSuccess;
}
