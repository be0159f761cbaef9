// SPDX-License-Identifier: MIT
// cuda/streams.h -- streams are threads with a queue; events are positions in it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <signal.h>
#include <unistd.h>

#include "memory.h"

namespace ms_shim
{

// The latest record. Waiters keep a reference, so an event may be destroyed while a stream still waits for it.
struct event_state {
    std::shared_ptr<std::atomic<int>> done = std::make_shared<std::atomic<int>>(1);
};
struct stream_state {
    std::mutex lock;
    std::condition_variable work, idle;
    std::deque<std::function<void()>> queue;
    bool busy = false, started = false;
};

inline void work(stream_state *s)
{
    may_touch(true);
    std::unique_lock<std::mutex> hold(s->lock);
    for (;;) {
        while (s->queue.empty()) s->work.wait(hold);
        std::function<void()> job = std::move(s->queue.front());
        s->queue.pop_front();
        s->busy = true;
        hold.unlock();
        job();
        job = nullptr;
        hold.lock();
        s->busy = false;
        s->idle.notify_all();
    }
}

inline void push(stream_state *s, std::function<void()> job)
{
    std::unique_lock<std::mutex> hold(s->lock);
    if (!s->started) {
        s->started = true;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        std::thread(work, s).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    s->queue.push_back(std::move(job));
    s->work.notify_one();
}

inline void drain(stream_state *s)
{
    std::unique_lock<std::mutex> hold(s->lock);
    while (s->busy || !s->queue.empty()) s->idle.wait(hold);
}

}  // namespace ms_shim

typedef ms_shim::stream_state *cudaStream_t;
typedef ms_shim::event_state *cudaEvent_t;

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    *s = new ms_shim::stream_state;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    ms_shim::drain(s);
    return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    *e = new ms_shim::event_state;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    auto flag = std::make_shared<std::atomic<int>>(0);
    e->done = flag;
    ms_shim::push(s, [=] { *flag = 1; });
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t e) { return *e->done ? cudaSuccess : cudaErrorNotReady; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    while (!*e->done) usleep(20);
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    auto flag = e->done;
    ms_shim::push(s, [=] {
        while (!*flag) usleep(20);
    });
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;
    return cudaSuccess;
}
