// SPDX-License-Identifier: MIT
// cuda/streams.h -- streams and events: queues of items, and positions in them. Events between processes: ipc_events.h.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <dlfcn.h>
#include <signal.h>
#include <vector>
#include <unistd.h>

#include "memory.h"

namespace ms_shim
{

// 1 when the stream has reached an event's record. Waiters keep a reference, so an event may be destroyed or recorded
// again while a stream still waits for it.
typedef std::shared_ptr<std::atomic<int>> flag;
// The state of an event between processes, in memory that both map. recorded: how many records there are; reached: the
// number of the latest record that the stream has reached; wanted: the number of the latest record that another process
// waits for.
struct counters {
    std::atomic<uint64_t> recorded, reached, wanted;
};
struct event_state {
    flag done = std::make_shared<std::atomic<int>>(1);
    counters *between = nullptr;  // of an event between processes
};
struct item {
    std::function<void()> job;    // empty: waits for `after`
    std::function<bool()> after;  // whether the event has been reached
    bool outside = false;         // the event is another process's
};
struct scheduler;
// Work that a stream was given while it recorded a graph (graphs.h). broken: it was given something that no graph may
// contain.
struct recording {
    std::vector<std::function<void()>> jobs;
    bool broken = false;
};
struct stream_state {
    recording *into = nullptr;  // the graph that the stream records; nullptr: none
    scheduler *lazy = nullptr;  // runs the items, late; nullptr: the stream has a thread, which runs them
    std::mutex lock;
    std::condition_variable work, idle;
    std::deque<item> queue;
    bool busy = false, started = false;
};

// Runs a job. One of a library's stand-in writes the emulator knows not what.
inline void run_job(const std::function<void()> &job)
{
    Dl_info own, of;
    job();
    if (mode.check && dladdr((const void *)run_job, &own) && dladdr(&job.target_type(), &of) &&
        own.dli_fbase != of.dli_fbase)
        wrote_foreign();
}

inline void start_thread(void (*body)(stream_state *), stream_state *s)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(body, s).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// ---- eager: each stream's thread runs its items as soon as it can ----

inline void work(stream_state *s)
{
    may_touch(true);
    std::unique_lock<std::mutex> hold(s->lock);
    for (;;) {
        while (s->queue.empty()) s->work.wait(hold);
        item next = std::move(s->queue.front());
        s->queue.pop_front();
        s->busy = true;
        hold.unlock();
        if (next.after)
            for (unsigned us = 20; !next.after(); us += us < 200 ? us / 2 : 0) usleep(us);
        else run_job(next.job);
        next = item {};
        hold.lock();
        s->busy = false;
        if (s->queue.empty()) s->idle.notify_all();  // drain waits for an empty queue, not for each item
    }
}

// ---- lazy: one thread runs the items of all streams, as late as it may (scheduler::wanted) ----
//
// In the modes `seed` and `late` items run late, so results are wrong if the host overwrites memory too early or does
// not wait. With a seed the next item comes from a random one of the streams that are ready; otherwise from the
// oldest.

inline const bool lazy = mode.seed || mode.late;
// Number of queued items at which the thread runs some although the host does not wait: items may hold copies of host
// memory.
enum { MOST = 256 };

struct scheduler {
    std::mutex lock;
    std::condition_variable work, ran;
    std::vector<stream_state *> streams;
    std::vector<const std::function<bool()> *> awaited;  // conditions that the host waits for
    size_t queued = 0;
    uint64_t steps = 0;
    bool (*demanded)() = nullptr;  // whether another process waits for an event of this process
    bool wanted() const
    {
        if (demanded && demanded()) return true;
        for (const auto *done : awaited)
            if (!(*done)()) return true;
        return queued >= MOST;
    }
};
inline scheduler &all = *new scheduler;  // never destroyed: its thread outlives main

inline stream_state *ready_stream()
{
    std::vector<stream_state *> ready;
    for (stream_state *s : all.streams)
        if (!s->queue.empty() && (!s->queue.front().after || s->queue.front().after())) ready.push_back(s);
    return ready.empty() ? nullptr : ready[mode.seed ? draw() % ready.size() : 0];
}

inline bool waits_outside()
{
    for (stream_state *s : all.streams)
        if (!s->queue.empty() && s->queue.front().outside) return true;
    return false;
}

inline void work_for_all(stream_state *)
{
    may_touch(true);
    std::unique_lock<std::mutex> hold(all.lock);
    for (;;) {
        while (!all.queued || !all.wanted())
            if (all.demanded) all.work.wait_for(hold, std::chrono::milliseconds(1));
            else all.work.wait(hold);
        stream_state *s = ready_stream();
        if (!s && waits_outside()) {
            all.work.wait_for(hold, std::chrono::microseconds(50));
            continue;
        }
        if (!s) {
            fputs("emulated GPU: streams wait for events that cannot complete: a GPU would hang\n", stderr);
            abort();
        }
        item next = std::move(s->queue.front());
        s->queue.pop_front();
        s->busy = true;
        hold.unlock();
        if (next.job) run_job(next.job);
        next = item {};
        hold.lock();
        s->busy = false;
        all.queued--;
        all.steps++;
        all.ran.notify_all();
    }
}

inline void run_until(const std::function<bool()> &done)
{
    std::unique_lock<std::mutex> hold(all.lock);
    all.awaited.push_back(&done);
    all.work.notify_one();
    all.ran.wait(hold, done);
    std::erase(all.awaited, &done);
}

// Lets an item run, so that a loop over cudaEventQuery ends. Waits 10 ms at most: an item of a hanging GPU never ends.
inline void step()
{
    std::unique_lock<std::mutex> hold(all.lock);
    uint64_t before = all.steps;
    const std::function<bool()> done = [=] { return all.steps > before || !all.queued; };
    all.awaited.push_back(&done);
    all.work.notify_one();
    all.ran.wait_for(hold, std::chrono::milliseconds(10), done);
    std::erase(all.awaited, &done);
}

// ---- eager and lazy ----

// A stand-in of another CUDA library (cuBLASLt, NCCL) may call this for a stream of the plugin. Each shared library has
// its own copy of the scheduler `all`, so this uses s->lazy, the scheduler of the stream.
inline void push_item(stream_state *s, item &&next)
{
    if (s->into) {
        if (next.after) s->into->broken = true;
        else s->into->jobs.push_back(std::move(next.job));
        return;
    }
    std::unique_lock<std::mutex> hold(s->lazy ? s->lazy->lock : s->lock);
    if (!s->lazy && !s->started) {
        s->started = true;
        start_thread(work, s);
    }
    s->queue.push_back(std::move(next));
    if (s->lazy) s->lazy->queued++;
    hold.unlock();  // otherwise the thread that wakes up would have to wait for the lock
    (s->lazy ? s->lazy->work : s->work).notify_one();
}

inline void open_stream(stream_state *s)
{
    if (!lazy) return;
    std::unique_lock<std::mutex> hold(all.lock);
    if (all.streams.empty()) start_thread(work_for_all, nullptr);
    all.streams.push_back(s);
    s->lazy = &all;
}

// For calls that no graph may contain: if s records a graph, the recording fails. Returns whether s records one.
inline bool breaks(stream_state *s)
{
    if (s->into) s->into->broken = true;
    return s->into;
}

inline void push(stream_state *s, std::function<void()> job) { push_item(s, { std::move(job), nullptr }); }

inline void push_wait(stream_state *s, const flag &done)
{
    push_item(s, { nullptr, [=] { return *done != 0; } });
}

inline std::function<void()> begin_record(counters *c)
{
    uint64_t n = ++c->recorded;
    return [=] { c->reached = n; };
}
// As in CUDA, a wait refers to the latest record at the time of the call.
inline std::function<bool()> latest_record(counters *c)
{
    uint64_t n = c->recorded;
    return [=] {
        if (c->reached >= n) return true;
        if (c->wanted < n) c->wanted = n;
        return false;
    };
}

inline void drain(stream_state *s)
{
    auto done = [s] { return !s->busy && s->queue.empty(); };
    if (lazy) return run_until(done);
    std::unique_lock<std::mutex> hold(s->lock);
    s->idle.wait(hold, done);
}

}  // namespace ms_shim

typedef ms_shim::stream_state *cudaStream_t;
typedef ms_shim::event_state *cudaEvent_t;

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned)
{
    MS_MAY_FAIL(cudaStreamCreateWithFlags);
    *s = new ms_shim::stream_state;
    ms_shim::open_stream(*s);
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    MS_MAY_FAIL(cudaStreamSynchronize);
    if (ms_shim::breaks(s)) return cudaErrorStreamCaptureUnsupported;
    ms_shim::drain(s);
    return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int)
{
    MS_MAY_FAIL(cudaStreamCreateWithPriority);
    return cudaStreamCreateWithFlags(s, flags);
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most)
{
    MS_MAY_FAIL(cudaDeviceGetStreamPriorityRange);
    *least = 0;
    *most = -5;
    return cudaSuccess;
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t s, void (*fn)(void *), void *data)
{
    MS_MAY_FAIL(cudaLaunchHostFunc);
    ms_shim::push(s, [=] { fn(data); });
    return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned)
{
    MS_MAY_FAIL(cudaEventCreateWithFlags);
    *e = new ms_shim::event_state;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    MS_MAY_FAIL(cudaEventRecord);
    if (ms_shim::breaks(s)) return cudaErrorStreamCaptureUnsupported;
    auto flag = std::make_shared<std::atomic<int>>(0);
    e->done = flag;
    std::function<void()> between;
    if (e->between) between = ms_shim::begin_record(e->between);
    ms_shim::push(s, [=] {
        *flag = 1;
        if (between) between();
    });
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t e)
{
    MS_MAY_FAIL(cudaEventQuery);
    if (e->between && *e->done && e->between->reached < e->between->recorded) return cudaErrorNotReady;  // peer's event
    if (!*e->done && ms_shim::lazy) ms_shim::step();
    return *e->done ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    MS_MAY_FAIL(cudaEventSynchronize);
    ms_shim::flag done = e->done;
    if (ms_shim::lazy) ms_shim::run_until([&] { return *done != 0; });
    else
        while (!*done) usleep(20);
    return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    MS_MAY_FAIL(cudaStreamWaitEvent);
    if (ms_shim::breaks(s)) return cudaErrorStreamCaptureUnsupported;
    ms_shim::flag done = e->done;
    if (e->between) ms_shim::push_item(s, { nullptr, ms_shim::latest_record(e->between), true });
    else ms_shim::push_wait(s, done);
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;  // its counters are not reused: streams of other processes may wait for them
    return cudaSuccess;
}
