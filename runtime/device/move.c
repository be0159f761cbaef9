// SPDX-License-Identifier: MIT
// device/move.c -- waits for GPUs, and moves bytes between devices.
#include <sched.h>

#include "base/activity.h"
#include "device/capturing.h"
#include "device/device.h"
#include "device/move.h"
#include "device/stream.h"

uint64_t ms__cuda_waits[MS_CUDA_DEVICES];

// Polls: the event's stream may wait for a peer's GPU, which may never finish (comm/movers/gpu/flights.c).
ms_status ms__cuda_await(void *event)
{
    enum { US = 1000 };
    int reached;
    ms_status st = MS_OK;
    int64_t since = ms__now_ns();
    while ((reached = ms__cuda()->done(event)) == 0 && st == MS_OK) {
        int64_t waited = ms__now_ns() - since;
        if (waited < 50 * US) sched_yield();
        else ms__nap(waited < 2000 * US ? 10 * US : 100 * US);
        st = ms__check_interrupt();
        if (st == MS_OK) st = ms__stream_observer.check();
    }
    return reached < 0 && st == MS_OK ? ms__failure() : st;
}

// Waits until the GPU has run what is queued in the stream now.
static ms_status poll(int index, int stream)
{
    void *end;
    MS_TRY(ms__cuda()->record(index, stream, &end));
    ms_status st = ms__cuda_await(end);
    ms__cuda()->drop(end);
    return st;
}

// Waits for a stream, or all streams (stream < 0), if collectives are queued on any GPU of this rank.
static ms_status poll_streams(int index, int stream)
{
    if (MS_LIKELY(ms__collectives_queued == 0)) return MS_OK;
    for (int k = 0; k < MS_STREAMS; k++)
        if (stream < 0 || k == stream) MS_TRY(poll(index, k));
    return MS_OK;
}

static ms_status wait_for_stream(int index, int stream)
{
    MS_TRY(poll_streams(index, stream));
    MS_TRY(ms__cuda()->sync(index, stream));
    if (stream < 0 || stream == MS_STREAM_COMPUTE) ms__cuda_waits[index]++;
    return MS_OK;
}

ms_status ms__cuda_settle(int index) { return ms__cuda() ? wait_for_stream(index, -1) : MS_OK; }

ms_status ms__cuda_sync(int device, int stream)
{
    if (!ms__cuda()) return MS_OK;
    if (stream < 0) ms__streams_join();  // so that ms__collectives_queued counts all collectives
    return wait_for_stream(ms__index(device), stream);
}

ms_status ms__move(int to, void *dst, int from, const void *src, size_t bytes)
{
    if (bytes == 0) return MS_OK;
    if (MS_UNLIKELY(ms__capturing != NULL))
        return ms__capture_refuse("it copies %zu bytes outside of any operator, which repetitions would not copy",
                                  bytes);
    if (!ms__is_cuda(to) && !ms__is_cuda(from)) {
        memmove(dst, src, bytes);
        return MS_OK;
    }
    if (ms__is_cuda(to) && ms__is_cuda(from) && to != from)
        return ms__cuda()->copy_peer(ms__index(to), dst, ms__index(from), src, bytes);
    int index = ms__index(ms__is_cuda(to) ? to : from);
    ms_direction way = !ms__is_cuda(from) ? MS_TO_DEVICE : !ms__is_cuda(to) ? MS_TO_HOST : MS_ON_DEVICE;
    // The driver's waits check no peers, so poll before a copy in which the driver waits: to the host; and of more than
    // STAGED bytes to the device, where it waits until they are read from pinned memory, or staged from other memory.
    enum { STAGED = 64 << 10 };
    if (way == MS_TO_HOST || (way == MS_TO_DEVICE && bytes > STAGED)) MS_TRY(poll_streams(index, MS_STREAM_COMPUTE));
    MS_TRY(ms__cuda()->copy(index, MS_STREAM_COMPUTE, dst, src, bytes, way));
    return way == MS_TO_HOST ? wait_for_stream(index, MS_STREAM_COMPUTE) : MS_OK;
}

ms_status ms__set_bytes(int device, void *p, int byte, size_t bytes)
{
    if (bytes == 0) return MS_OK;
    if (ms__is_cuda(device)) return ms__cuda()->fill(ms__index(device), 0, p, byte, bytes);
    memset(p, byte, bytes);
    return MS_OK;
}

ms_status ms_cuda_synchronize(int index)
{
    MS_BUSY;
    MS_TRY(ms__cuda_need(MS_CUDA | index << 8, "cuda.synchronize"));
    return ms__cuda_sync(MS_CUDA | index << 8, -1);
}
