// SPDX-License-Identifier: MIT
// cuda/copies.h -- copies and fills, in the order of a stream.
#pragma once
#include "streams.h"

inline cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, cudaMemcpyKind kind, cudaStream_t s)
{
    MS_MAY_FAIL(cudaMemcpyAsync);
    if (kind != cudaMemcpyDeviceToDevice && ms_shim::breaks(s)) return cudaErrorStreamCaptureUnsupported;
    // A source that is not pinned is staged, as in CUDA. A pinned source is staged, too, unless the mode `late` is on.
    if (kind == cudaMemcpyHostToDevice && !(ms_shim::mode.late && ms_shim::is_pinned(src))) {
        char *stage = (char *)malloc(n ? n : 1);
        if (!stage) return cudaErrorMemoryAllocation;
        memcpy(stage, src, n);
        ms_shim::push(s, [=] {
            memcpy(dst, stage, n);
            ms_shim::wrote(dst, n);
            free(stage);
        });
        return cudaSuccess;
    }
    ms_shim::push(s, [=] {
        memmove(dst, src, n);
        ms_shim::wrote(dst, n);
    });
    // As in CUDA, the call returns once the bytes are there: a caller's variable may be gone when a later wait fails.
    if (kind == cudaMemcpyDeviceToHost && !ms_shim::is_pinned(dst)) ms_shim::drain(s);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_line, const void *src, size_t src_line, size_t n,
                                     size_t lines, cudaMemcpyKind, cudaStream_t s)
{
    MS_MAY_FAIL(cudaMemcpy2DAsync);
    ms_shim::push(s, [=] {
        for (size_t k = 0; k < lines; k++) {
            memcpy((char *)dst + k * dst_line, (const char *)src + k * src_line, n);
            ms_shim::wrote((char *)dst + k * dst_line, n);
        }
    });
    return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s)
{
    MS_MAY_FAIL(cudaMemsetAsync);
    ms_shim::push(s, [=] {
        memset(p, v, n);
        ms_shim::wrote(p, n);
    });
    return cudaSuccess;
}
