// SPDX-License-Identifier: MIT
// nccl.cpp -- a stand-in for NCCL, for the emulated GPU: libnccl_standin.so.2. Its ranks are processes of one machine;
// each copies what it sends to memory that all of them map, in the order of its stream, and reads what its peers sent.
//
// It refuses what the library refuses, with the same result, and knows only non-blocking communicators. It is stricter
// in these points: tensors must be memory of the emulated GPU; the process ends if ranks queue operations that do not
// match, where the library would hang. Operations of one communicator run one after the other, and so do all of a
// process if NCCL_LAUNCH_ORDER_IMPLICIT is 1.
//
// Faults (MOONSHARD_NCCL_STANDIN, separated by commas; RANK is the rank that has the fault):
//   fail:CALL:N:RANK:RESULT    call number N of the function CALL returns RESULT, and does nothing
//   async:CALL:N:RANK:RESULT   what the call starts does not happen; ncclCommGetAsyncError returns RESULT
//   hang:CALL:N:RANK           what the call starts does not end
//   die:CALL:N:RANK            the process is killed while what the call starts is in progress
//   version:CODE               the version that ncclGetVersion returns
//   duplicates                 ranks may not share a GPU
#include "nccl.h"

namespace
{

// ---- joining ----

void join(ncclComm *c, const fault &f)
{
    member &me = c->me();
    me.device = number_of("OMPI_COMM_WORLD_LOCAL_RANK") % ms_shim::device_count();
    if (f.kind != NONE) {
        usleep(20000);
        if (meet_fault(c, f)) return;
    }
    if (me.joined.exchange(1)) return c->end(NCCL_InvalidUsage, "two processes joined as the same rank");
    bool there = wait_until(c, [=] {
        for (int k = 0; k < c->size; k++)
            if (!c->mem->of[k].joined) return false;
        return true;
    });
    if (!there) return;
    for (int k = 0; k < c->size && set.duplicates; k++)
        if (k != c->rank && c->mem->of[k].device == me.device)
            return c->end(NCCL_InvalidUsage, "Duplicate GPU detected: two ranks on one CUDA device");
    c->end(NCCL_Success);
}

ncclComm *comm_new(memory *mem, int rank, int size)
{
    // Communicators are never freed, so that a use after the end is detected; the list keeps them reachable for leak
    // checkers.
    static std::mutex lock;
    static std::vector<ncclComm *> &all = *new std::vector<ncclComm *>;
    ncclComm *c = new ncclComm;
    {
        std::lock_guard<std::mutex> hold(lock);
        all.push_back(c);
    }
    c->mem = mem;
    c->rank = rank;
    c->size = size;
    return c;
}

// Returns NCCL_Success if the communicator may be used, otherwise the result of a call that uses it.
nccl_result usable(ncclComm *c)
{
    if (!c || c->is != LIVE || c->finalized)
        return refuse(NCCL_InvalidArgument, "the communicator is NULL, finalized or freed");
    int state = c->state;
    if (state == NCCL_Success) return NCCL_Success;
    return refuse(state == NCCL_InProgress ? NCCL_InvalidArgument : (nccl_result)state,
                  "Attempt to use communicator before the previous operation returned ncclSuccess");
}

// ---- operations ----

struct operation {
    int kind, root;  // kind: an index of `kinds`
    nccl_type type;
    nccl_reduction how;
    size_t count;
    const char *in;
    char *out;
};
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL };
struct {
    const char *call;
    bool adds, rooted, cut;  // cut: the input has a block for each rank
} const kinds[] = {
    { "ncclAllReduce", true, false, false },    { "ncclAllGather", false, false, false },
    { "ncclReduceScatter", true, false, true }, { "ncclBroadcast", false, true, false },
    { "ncclReduce", true, true, false },        { "ncclAlltoAll", false, false, true },
};
bool sends(const operation &o, int rank) { return o.kind != BROADCAST || rank == o.root; }
bool receives(const operation &o, int rank) { return o.kind != REDUCE || rank == o.root; }

int dtype_of(nccl_type t)
{
    switch (t) {
    case NCCL_Float64: return MS_F64;
    case NCCL_Float16: return MS_F16;
    case NCCL_Bfloat16: return MS_BF16;
    case NCCL_Int64: return MS_I64;
    case NCCL_Int32: return MS_I32;
    case NCCL_Int8: return MS_I8;
    case NCCL_Uint8: return MS_U8;
    default: return MS_F32;
    }
}

// Reduces in the order of a ring that begins at rank `begin`, and rounds after every step, as the library does.
template <class T> void combine(const operation &o, ncclComm *c, size_t skip, size_t n, int begin, char *out)
{
    int dtype = dtype_of(o.type);
    double part = o.how == NCCL_Avg ? 1.0 / c->size : 1;
    for (size_t i = 0; i < n; i++)
        for (int j = 0; j < c->size; j++) {
            int k = (begin + j) % c->size;
            T x = (T)(load<T>(dtype, c->room(k) + skip, (int64_t)i) * (T)part);
            if (j > 0) {
                T sum = load<T>(dtype, out, (int64_t)i);
                x = o.how == NCCL_Prod  ? sum * x
                    : o.how == NCCL_Max ? std::max(sum, x)
                    : o.how == NCCL_Min ? std::min(sum, x)
                                        : sum + x;
            }
            store<T>(dtype, out, (int64_t)i, x);
        }
}

// Writes this rank's result for elements [at, at + n) of every block: slice number `number` of the operation.
void receive(const operation &o, ncclComm *c, size_t at, size_t n, size_t number)
{
    size_t size = (size_t)ms__dtype_size(dtype_of(o.type)), skip = kinds[o.kind].cut ? (size_t)c->rank * n * size : 0;
    if (kinds[o.kind].adds) {
        int begin = o.kind == REDUCE_SCATTER ? c->rank + 1 : (int)(number + 1);
        char *out = o.out + at * size;
        if (o.type == NCCL_Float64) combine<double>(o, c, skip, n, begin, out);
        else if (o.type == NCCL_Int64 || o.type == NCCL_Int32 || o.type == NCCL_Int8 || o.type == NCCL_Uint8)
            combine<int64_t>(o, c, skip, n, begin, out);
        else combine<float>(o, c, skip, n, begin, out);
        return;
    }
    bool one = o.kind == BROADCAST;
    for (int k = 0; k < c->size; k++)
        if (!one || k == o.root)
            memcpy(o.out + ((one ? 0 : (size_t)k * o.count) + at) * size, c->room(k) + skip, n * size);
}

bool run(ncclComm *c, const operation &o, const fault &f)
{
    size_t size = (size_t)ms__dtype_size(dtype_of(o.type)), blocks = kinds[o.kind].cut ? (size_t)c->size : 1;
    uint64_t fingerprint = 1469598103934665603ull;
    for (uint64_t v : { (uint64_t)o.kind, (uint64_t)o.type, (uint64_t)(kinds[o.kind].adds ? o.how : 0),
                        (uint64_t)(kinds[o.kind].rooted ? o.root : 0), (uint64_t)o.count })
        fingerprint = (fingerprint ^ v) * 1099511628211ull;
    c->me().operation = fingerprint;
    if ((f.kind == ASYNC || f.kind == HANG) && meet_fault(c, f)) return false;
    if (!meet(c)) return false;
    for (int k = 0; k < c->size; k++)
        if (c->mem->of[k].operation != fingerprint) {
            fprintf(stderr, "libnccl_standin: ranks %d and %d queued operations that do not match (%s here)\n", c->rank,
                    k, kinds[o.kind].call);
            abort();
        }
    size_t room = ROOM / blocks / size, number = 0;
    for (size_t at = 0; at < o.count; at += room, number++) {
        size_t n = std::min(room, o.count - at);
        for (size_t b = 0; b < blocks && sends(o, c->rank); b++)
            memcpy(c->room(c->rank) + b * n * size, o.in + (b * o.count + at) * size, n * size);
        if (f.kind == DIE) raise(SIGKILL);
        if (!meet(c)) return false;
        if (receives(o, c->rank)) receive(o, c, at, n, number);
        if (!meet(c)) return false;
    }
    return true;
}

// ---- queues ----

struct queued {
    ncclComm *comm;
    cudaStream_t stream;
    operation what;
    fault with;
};
thread_local int groups;  // calls of ncclGroupStart that no ncclGroupEnd has ended
thread_local std::vector<queued> waiting;
ms_shim::flag process_last = std::make_shared<std::atomic<int>>(1);
std::mutex order_lock;

void push(const queued &q)
{
    const char *implicit = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    std::lock_guard<std::mutex> hold(order_lock);
    auto done = std::make_shared<std::atomic<int>>(0);
    ms_shim::push_wait(q.stream, q.comm->last);
    if (implicit && !strcmp(implicit, "1")) {
        ms_shim::push_wait(q.stream, process_last);
        process_last = done;
    }
    q.comm->last = done;
    ms_shim::push(q.stream, [=] {
        ncclComm *c = q.comm;
        if (c->is == LIVE && !c->stop) run(c, q.what, q.with);
        *done = 1;
    });
}

// Queues the operations of a group. A communicator's first group, and every seventh after it, is queued by another
// thread, as in the library when it has to connect ranks.
nccl_result launch(const std::vector<queued> &list)
{
    nccl_result result = NCCL_Success;
    for (size_t from = 0, to; from < list.size(); from = to) {
        ncclComm *c = list[from].comm;
        for (to = from; to < list.size() && list[to].comm == c; to++) {}
        std::vector<queued> part(list.begin() + (long)from, list.begin() + (long)to);
        if (c->operations++ % 7 != 0) {
            for (const queued &q : part) push(q);
            continue;
        }
        result = NCCL_InProgress;
        c->state = NCCL_InProgress;
        in_thread([=] {
            usleep(1000);
            for (const queued &q : part) push(q);
            int was = NCCL_InProgress;
            c->state.compare_exchange_strong(was, NCCL_Success);
        });
    }
    return result;
}

// Whether p is memory of the emulated GPU.
bool is_device(const void *p)
{
    static std::mutex lock;
    static std::vector<std::pair<uintptr_t, uintptr_t>> known;
    std::lock_guard<std::mutex> hold(lock);
    for (int turn = 0; turn < 2; turn++) {
        for (auto &r : known)
            if ((uintptr_t)p >= r.first && (uintptr_t)p < r.second) return true;
        known.clear();
        FILE *f = fopen("/proc/self/maps", "re");
        char line[512];
        unsigned long a, b;
        while (f && fgets(line, sizeof line, f))
            if (strstr(line, "moonshard_emulated_gpu") && sscanf(line, "%lx-%lx", &a, &b) == 2)
                known.push_back({ a, b });
        if (f) fclose(f);
    }
    return false;
}

nccl_result call(ncclComm *c, void *stream, const operation &o)
{
    fault f = next_call(kinds[o.kind].call);
    if (f.kind == FAIL) return refuse((nccl_result)f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    nccl_result r = usable(c);
    // Checked inside a group, too: a group's calls are only collected, and leave the communicator's state as it is.
    if (r != NCCL_Success) return r;
    bool known = false;
#define KNOWN(name, value) known = known || o.type == NCCL_##name;
    NCCL_TYPES(KNOWN)
    if (!known) return refuse(NCCL_InvalidArgument, "the type is unknown");
    if (kinds[o.kind].adds && (o.how < NCCL_Sum || o.how > NCCL_Avg))
        return refuse(NCCL_InvalidArgument, "the reduction is unknown");
    if (kinds[o.kind].rooted && (o.root < 0 || o.root >= c->size))
        return refuse(NCCL_InvalidArgument, "the root is not a rank of the communicator");
    if (o.count > ((size_t)1 << 48)) return refuse(NCCL_InvalidArgument, "the count is too large");
    if (!stream) return refuse(NCCL_InvalidArgument, "the stream is the default stream");
    if (o.count == 0) return NCCL_Success;
    if ((sends(o, c->rank) && !is_device(o.in)) || (receives(o, c->rank) && !is_device(o.out)))
        return refuse(NCCL_InvalidArgument, "a buffer is not memory of the GPU");
    queued q = { c, (cudaStream_t)stream, o, f };
    if (groups > 0) {
        waiting.push_back(q);
        return NCCL_Success;
    }
    return launch({ q });
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// ---- the library ----

API nccl_result ncclGetVersion(int *version)
{
    *version = set.version;
    return NCCL_Success;
}
API const char *ncclGetErrorString(nccl_result r)
{
    switch (r) {
    case NCCL_Success: return "no error";
    case NCCL_UnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case NCCL_SystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case NCCL_InternalError: return "internal error - please report this issue to the NCCL developers";
    case NCCL_InvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case NCCL_InvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case NCCL_RemoteError: return "remote process exited or there was a network error";
    case NCCL_InProgress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}
API const char *ncclGetLastError(nccl_comm c)
{
    return c && c->is == LIVE && !c->error.empty() ? c->error.c_str() : last_error.c_str();
}

API nccl_result ncclGetUniqueId(nccl_id *out)
{
    fault f = next_call("ncclGetUniqueId");
    if (f.kind == FAIL) return refuse((nccl_result)f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    unique_id id = { "", getpid(), make_memory() };
    if (!out) return refuse(NCCL_InvalidArgument, "uniqueId is NULL");
    if (id.fd < 0) return refuse(NCCL_SystemError, "cannot make the shared memory of a communicator");
    memcpy(id.magic, MAGIC, sizeof MAGIC);
    memset(out, 0, sizeof *out);
    memcpy(out, &id, sizeof id);
    return NCCL_Success;
}

API nccl_result ncclCommInitRankConfig(nccl_comm *out, int size, nccl_id given, int rank, nccl_config *config)
{
    fault f = next_call("ncclCommInitRankConfig");
    if (f.kind == FAIL) return refuse((nccl_result)f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    if (!out || size < 1 || size > RANKS || rank < 0 || rank >= size)
        return refuse(NCCL_InvalidArgument, "Invalid rank requested");
    nccl_config mine = NCCL_CONFIG;
    if (!config || config->size < offsetof(nccl_config, blocking) + sizeof(int))
        return refuse(NCCL_InvalidArgument, "config is NULL or too small");
    memcpy(&mine, config, std::min(config->size, sizeof mine));
    if (mine.magic != 0xcafebeef)
        return refuse(NCCL_InvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    if (mine.version < 20000) return refuse(NCCL_InvalidArgument, "config.version is below 20000");
    if (mine.blocking != 0)
        return refuse(NCCL_InvalidArgument, ("the stand-in has only non-blocking communicators: config.blocking is " +
                                             std::to_string(mine.blocking) + ", expected 0")
                                                .c_str());
    unique_id id;
    memcpy(&id, &given, sizeof id);
    if (memcmp(id.magic, MAGIC, sizeof MAGIC))
        return refuse(NCCL_InvalidArgument, "the id is not one of ncclGetUniqueId");
    memory *mem = map_memory(id.pid, id.fd);
    if (!mem) return refuse(NCCL_SystemError, "the rank that made the id cannot be reached");
    ncclComm *c = *out = comm_new(mem, rank, size);
    in_thread([=] { join(c, f); });
    return NCCL_InProgress;
}

API nccl_result ncclCommSplit(nccl_comm parent, int color, int key, nccl_comm *out, nccl_config *config)
{
    fault f = next_call("ncclCommSplit");
    if (f.kind == FAIL) return refuse((nccl_result)f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    nccl_result r = usable(parent);
    if (r != NCCL_Success) return r;
    if (!out || (color < 0 && color != NCCL_NOCOLOR) || config)
        return refuse(NCCL_InvalidArgument, "color is invalid, newcomm is NULL, or config is not NULL");
    parent->state = NCCL_InProgress;
    uint64_t number = ++parent->splits;
    *out = nullptr;
    in_thread([=] {
        ncclComm *c = parent;
        member &me = c->me();
        if (f.kind != NONE) {
            usleep(20000);
            if (meet_fault(c, f)) return;
        }
        me.color = color;
        me.key = key;
        me.split = number;
        auto all = [=](std::atomic<uint64_t> member::*field) {
            return wait_until(c, [=] {
                for (int k = 0; k < c->size; k++)
                    if (c->mem->of[k].*field < number) return false;
                return true;
            });
        };
        if (!all(&member::split)) return;
        std::vector<std::pair<int, int>> members;  // key, rank
        for (int k = 0; k < c->size; k++)
            if (c->mem->of[k].color == color) members.push_back({ c->mem->of[k].key, k });
        std::sort(members.begin(), members.end());
        ncclComm *child = nullptr;
        if (color != NCCL_NOCOLOR) {
            int place = 0;
            while (members[(size_t)place].second != c->rank) place++;
            member &leader = c->mem->of[members[0].second];
            if (place == 0) {
                me.pid = getpid();
                me.fd = make_memory();
                me.offered = number;
            }
            if (!wait_until(c, [&] { return leader.offered >= number; })) return;
            memory *mem = map_memory(leader.pid, leader.fd);
            if (!mem) return c->end(NCCL_SystemError, "cannot map the memory of a communicator");
            child = comm_new(mem, place, (int)members.size());
            if (place == 0) child->fd = me.fd;
        }
        me.split_read = number;
        if (!all(&member::split_read)) return;
        *out = child;
        c->end(NCCL_Success);
        if (child) join(child, {});
    });
    return NCCL_InProgress;
}

API nccl_result ncclCommFinalize(nccl_comm c)
{
    fault f = next_call("ncclCommFinalize");
    if (f.kind == FAIL) return refuse((nccl_result)f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    nccl_result r = usable(c);
    if (r != NCCL_Success) return r;
    c->finalized = true;
    c->state = NCCL_InProgress;
    in_thread([=] {
        if (meet_fault(c, f)) return;
        while (!*c->last) usleep(100);
        c->end(NCCL_Success);
    });
    return NCCL_InProgress;
}
API nccl_result ncclCommDestroy(nccl_comm c)
{
    if (!c || c->is != LIVE) return refuse(NCCL_InvalidArgument, "the communicator is NULL, destroyed or aborted");
    if (!c->finalized || c->state != NCCL_Success)
        return refuse(NCCL_InvalidUsage, "the communicator's finalization was not begun, or has not succeeded");
    c->is = GONE;
    munmap(c->mem, memory_bytes());
    if (c->fd >= 0) close(c->fd);
    return NCCL_Success;
}
API nccl_result ncclCommAbort(nccl_comm c)
{
    if (!c || c->is != LIVE) return refuse(NCCL_InvalidArgument, "the communicator is NULL, destroyed or aborted");
    c->stop = true;
    c->me().aborted = 1;
    c->is = GONE;
    return NCCL_Success;
}
API nccl_result ncclCommGetAsyncError(nccl_comm c, nccl_result *state)
{
    fault f = next_call("ncclCommGetAsyncError");
    if (f.kind == FAIL) return refuse((nccl_result)f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    if (!c || c->is != LIVE || !state)
        return refuse(NCCL_InvalidArgument, "the communicator is NULL, destroyed or aborted");
    *state = (nccl_result)c->state.load();
    return NCCL_Success;
}

API nccl_result ncclGroupStart()
{
    fault f = next_call("ncclGroupStart");
    if (f.kind == FAIL) return refuse((nccl_result)f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    groups++;
    return NCCL_Success;
}
API nccl_result ncclGroupEnd()
{
    fault f = next_call("ncclGroupEnd");
    if (groups == 0) return refuse(NCCL_InvalidUsage, "ncclGroupEnd: not in a group call");
    if (--groups > 0) return NCCL_Success;
    std::vector<queued> list = std::move(waiting);
    waiting.clear();
    if (f.kind == FAIL) return refuse((nccl_result)f.result, "a fault injected by MOONSHARD_NCCL_STANDIN");
    return launch(list);
}

API nccl_result ncclAllReduce(const void *in, void *out, size_t n, nccl_type t, nccl_reduction how, nccl_comm c,
                              void *s)
{
    return call(c, s, { ALL_REDUCE, 0, t, how, n, (const char *)in, (char *)out });
}
API nccl_result ncclAllGather(const void *in, void *out, size_t n, nccl_type t, nccl_comm c, void *s)
{
    return call(c, s, { ALL_GATHER, 0, t, NCCL_Sum, n, (const char *)in, (char *)out });
}
API nccl_result ncclReduceScatter(const void *in, void *out, size_t n, nccl_type t, nccl_reduction how, nccl_comm c,
                                  void *s)
{
    return call(c, s, { REDUCE_SCATTER, 0, t, how, n, (const char *)in, (char *)out });
}
API nccl_result ncclBroadcast(const void *in, void *out, size_t n, nccl_type t, int root, nccl_comm c, void *s)
{
    return call(c, s, { BROADCAST, root, t, NCCL_Sum, n, (const char *)in, (char *)out });
}
API nccl_result ncclReduce(const void *in, void *out, size_t n, nccl_type t, nccl_reduction how, int root, nccl_comm c,
                           void *s)
{
    return call(c, s, { REDUCE, root, t, how, n, (const char *)in, (char *)out });
}
API nccl_result ncclAlltoAll(const void *in, void *out, size_t n, nccl_type t, nccl_comm c, void *s)
{
    return call(c, s, { ALL_TO_ALL, 0, t, NCCL_Sum, n, (const char *)in, (char *)out });
}
