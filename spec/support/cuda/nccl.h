// SPDX-License-Identifier: MIT
// nccl.h -- of the stand-in for NCCL (nccl.cpp): its faults, and the memory and the waits of a communicator.
#ifndef MS_NCCL_STANDIN_H
#define MS_NCCL_STANDIN_H

#include <algorithm>
#include <atomic>
#include <csignal>
#include <map>
#include <sched.h>
#include "cuda/cuda.h"
extern "C" {
#include "comm/transport/nccl/library.h"
}

inline namespace standin
{

// ---- faults ----

enum what { NONE, FAIL, ASYNC, HANG, DIE };
struct fault {
    what kind;
    std::string call;
    long number;
    int rank, result;
};
struct settings {
    std::vector<fault> faults;
    int version = 22809;
    bool duplicates = false;
};

inline int number_of(const char *variable)
{
    const char *s = getenv(variable);
    return s ? atoi(s) : 0;
}
inline int world_rank() { return number_of("OMPI_COMM_WORLD_RANK"); }

inline settings read_settings()
{
    settings s;
    const char *text = getenv("MOONSHARD_NCCL_STANDIN");
    std::string all = text ? text : "";
    for (size_t at = 0; !all.empty() && at <= all.size();) {
        size_t end = std::min(all.find(',', at), all.size());
        std::string word = all.substr(at, end - at);
        at = end + 1;
        char kind[16] = "", call[64] = "";
        fault f = {};
        int n = sscanf(word.c_str(), "%15[a-z]:%63[A-Za-z]:%ld:%d:%d", kind, call, &f.number, &f.rank, &f.result);
        f.kind = !strcmp(kind, "fail") ? FAIL : !strcmp(kind, "async") ? ASYNC : !strcmp(kind, "hang") ? HANG : DIE;
        f.call = call;
        if (word == "duplicates") s.duplicates = true;
        else if (sscanf(word.c_str(), "version:%d", &s.version) == 1) continue;
        else if (n >= 4 && (f.kind != DIE || !strcmp(kind, "die")) && n == (f.kind <= ASYNC ? 5 : 4))
            s.faults.push_back(f);
        else {
            fprintf(stderr,
                    "libnccl_standin: MOONSHARD_NCCL_STANDIN has '%s', expected fail or async:CALL:N:RANK:RESULT, hang "
                    "or die:CALL:N:RANK, version:CODE, or duplicates\n",
                    word.c_str());
            _exit(2);
        }
    }
    return s;
}
inline const settings set = read_settings();

inline std::mutex counts_lock;
inline std::map<std::string, long> counts;

// Counts the call, and returns its fault, if it has one.
inline fault next_call(const char *call)
{
    std::lock_guard<std::mutex> hold(counts_lock);
    long n = ++counts[call];
    for (const fault &f : set.faults)
        if (f.call == call && f.number == n && f.rank == world_rank()) return f;
    return {};
}

inline thread_local std::string last_error;
inline nccl_result refuse(nccl_result r, const char *why)
{
    last_error = why;
    return r;
}

// ---- the memory of a communicator ----

enum { RANKS = 64 };
constexpr size_t ROOM = 1 << 20;  // bytes that a rank can have in flight

struct member {
    std::atomic<int> joined, aborted;
    std::atomic<uint64_t> step;  // number of barriers that the rank has reached
    int device;
    uint64_t operation;                       // fingerprint of the operation in progress
    std::atomic<uint64_t> split, split_read;  // number of splits that the rank has entered, and has finished
    int color, key;
    std::atomic<uint64_t> offered;  // number of the split for which the rank made the memory of a communicator
    int pid, fd;
};
struct memory {
    member of[RANKS];
    char pad[4096];
};
struct unique_id {
    char magic[8];
    int pid, fd;
};
inline const char MAGIC[8] = "standin";

inline size_t memory_bytes() { return sizeof(memory) + RANKS * ROOM; }

inline int make_memory()
{
    int fd = memfd_create("moonshard_nccl_standin", MFD_CLOEXEC);
    return fd >= 0 && ftruncate(fd, (off_t)memory_bytes()) == 0 ? fd : -1;
}
inline memory *map_memory(int pid, int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    int own = open(path, O_RDWR | O_CLOEXEC);
    if (own < 0) return nullptr;
    void *p = mmap(nullptr, memory_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, own, 0);
    close(own);
    return p == MAP_FAILED ? nullptr : (memory *)p;
}

}  // namespace standin

enum : uint32_t { LIVE = 0x6e63636c, GONE };
struct ncclComm {
    std::atomic<uint32_t> is = LIVE;
    int rank = 0, size = 0, fd = -1;  // fd: of the memory, if this rank has made it for a split
    memory *mem = nullptr;
    std::atomic<int> state = NCCL_InProgress;
    std::atomic<bool> stop = false, finalized = false;
    std::string error;   // written before `state`
    uint64_t steps = 0;  // barriers so far; without a lock, because operations run one after the other
    uint64_t splits = 0;
    long operations = 0;
    ms_shim::flag last = std::make_shared<std::atomic<int>>(1);  // 1 when the latest operation has ended

    member &me() { return mem->of[rank]; }
    char *room(int k) { return (char *)(mem + 1) + (size_t)k * ROOM; }
    void end(int result, const char *why = "")
    {
        error = why;
        state = result;
    }
};

inline namespace standin
{

inline void doze(int &turns)
{
    if (turns++ < 200) sched_yield();
    else usleep(50);
}

// Waits until the condition holds. False if this rank or a peer has aborted the communicator.
template <class F> bool wait_until(ncclComm *c, const F &holds)
{
    for (int turns = 0; !holds(); doze(turns)) {
        if (c->stop) return false;
        for (int k = 0; k < c->size; k++)
            if (c->mem->of[k].aborted) {
                c->end(NCCL_RemoteError, "a peer has aborted the communicator");
                return false;
            }
    }
    return true;
}
inline void wait_for_abort(ncclComm *c)
{
    while (!c->stop) usleep(100);
}

// A barrier of all ranks of the communicator. Returns the result of wait_until.
inline bool meet(ncclComm *c)
{
    uint64_t to = ++c->steps;
    c->me().step = to;
    return wait_until(c, [=] {
        for (int k = 0; k < c->size; k++)
            if (c->mem->of[k].step < to) return false;
        return true;
    });
}

template <class F> void in_thread(const F &body)
{
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    std::thread(body).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Carries out the fault f of an operation in progress. Returns whether the operation ends with it.
inline bool meet_fault(ncclComm *c, const fault &f)
{
    if (f.kind == DIE) raise(SIGKILL);
    if (f.kind == ASYNC) c->end(f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    if (f.kind == ASYNC || f.kind == HANG) wait_for_abort(c);
    return f.kind != NONE;
}

}  // namespace standin

#endif
