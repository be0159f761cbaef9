// SPDX-License-Identifier: MIT
// cuda/graphs.h -- graphs: the work recorded from a stream, which runs again, in the same order, at each launch.
// Waits, events, launches of graphs and copies from or to host memory break a recording.
#pragma once
#include "streams.h"

typedef ms_shim::recording *cudaGraph_t;
typedef std::shared_ptr<ms_shim::recording> *cudaGraphExec_t;

inline cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode)
{
    MS_MAY_FAIL(cudaStreamBeginCapture);
    if (s->into) return cudaErrorInvalidValue;
    s->into = new ms_shim::recording;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out)
{
    ms_shim::recording *r = s->into;
    s->into = nullptr;
    *out = nullptr;
    cudaError_t e = ms_shim::injected("cudaStreamEndCapture");
    if (!r) return cudaErrorInvalidValue;
    if (e == cudaSuccess && r->broken) e = cudaErrorStreamCaptureInvalidated;
    if (e == cudaSuccess) *out = r;
    else delete r;
    return e;
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t g, unsigned long long)
{
    MS_MAY_FAIL(cudaGraphInstantiateWithFlags);
    *out = new std::shared_ptr<ms_shim::recording>(new ms_shim::recording(*g));
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    delete g;
    return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s)
{
    MS_MAY_FAIL(cudaGraphLaunch);
    if (ms_shim::breaks(s)) return cudaErrorStreamCaptureUnsupported;
    std::shared_ptr<ms_shim::recording> r = *e;
    ms_shim::push(s, [r] {
        for (const auto &job : r->jobs) ms_shim::run_job(job);
    });
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e)
{
    delete e;  // also if the mode `fail` makes this call fail: the emulator itself must not leak
    MS_MAY_FAIL(cudaGraphExecDestroy);
    return cudaSuccess;
}
