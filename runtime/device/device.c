// SPDX-License-Identifier: MIT
// device/device.c -- finds and loads the CUDA plugin, and moves bytes between devices.
//
// MOONSHARD_CUDA selects the plugin. Unset or "real": the plugin for GPUs. "emulated": the emulator on which specs run
// the same kernels (libmoonshard_cuda_emulated.so); never selected by default. "null": the plugin with a CUDA runtime
// that only counts calls (libmoonshard_cuda_null.so), also for specs. "off": no plugin.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "base/activity.h"
#include "base/plugin.h"
#include "device/capture.h"
#include "device/device.h"
#include "device/stream.h"

ms_cuda_client ms__cuda_client;
static const ms_cuda_table *table;
static int devices;
static bool tried;
uint64_t ms__cuda_waits[MS_CUDA_DEVICES];
static char why[1024] = "no GPU has been requested yet";

const ms_cuda_table *ms__cuda(void) { return table; }

// Stores the reason why there is no GPU. Returns NULL.
static __attribute__((format(printf, 1, 2))) const ms_cuda_table *none(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(why, sizeof why, fmt, args);
    va_end(args);
    return NULL;
}

static const ms_cuda_table *plugin(void)
{
    char path[4096];
    const char *mode = getenv("MOONSHARD_CUDA");
    bool emulated = mode && strcmp(mode, "emulated") == 0, null = mode && strcmp(mode, "null") == 0;
    if (mode && strcmp(mode, "off") == 0) return none("MOONSHARD_CUDA is off");
    const char *name = emulated ? "libmoonshard_cuda_emulated.so"
                       : null   ? "libmoonshard_cuda_null.so"
                                : "libmoonshard_cuda.so";
    ms__plugin_path(path, sizeof path, name);
    if (access(path, R_OK) != 0)
        return none("this build has no CUDA plugin (%s): scripts/setup builds it if %s is installed and --engine is "
                    "not given%s",
                    name, emulated ? "g++" : "nvcc",
                    emulated || null ? "" : "; the Debian package moonshard-cuda has it");
    // Check the driver before the plugin: a missing driver is common and has its own message.
    if (!emulated && !null && !dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL))
        return none("no NVIDIA driver is installed (libcuda.so.1 is not found)");
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) return none("the CUDA plugin cannot be loaded: %s", dlerror());
    const ms_cuda_table *(*wrapped)(void) = null ? (const ms_cuda_table *(*)(void))dlsym(lib, MS_CUDA_NULL) : NULL;
    const ms_cuda_table *t = wrapped ? wrapped() : dlsym(lib, MS_CUDA_SYMBOL);
    if (!t || t->version != MS_CUDA_TABLE_VERSION)
        return none("%s has no %s of version %d; build engine and plugin together", name, MS_CUDA_SYMBOL,
                    MS_CUDA_TABLE_VERSION);
    return t;
}

static void load(void)
{
    if (tried) return;
    tried = true;
    const ms_cuda_table *t = plugin();
    if (!t) return;
    devices = t->start(ms__cuda_client.engine, why, sizeof why);
    if (devices < 1) return;
    if (devices > MS_CUDA_DEVICES) devices = MS_CUDA_DEVICES;
    for (const ms_cuda_kernel *const *f = t->families; *f; f++)
        for (const ms_cuda_kernel *k = *f; k->op; k++) ms__cuda_client.add_kernel(k->op, k->run);
    table = t;
    why[0] = 0;
}

static __attribute__((noinline)) ms_status need(int index, const char *what)
{
    load();
    if (!what) what = "allocation";
    if (!table) return ms__fail(MS_EUNSUPPORTED, "%s: device 'cuda:%d' is not available: %s", what, index, why);
    if (index >= devices)
        return ms__fail(MS_EINVAL, "%s: device 'cuda:%d' is not available: the last CUDA device is cuda:%d", what,
                        index, devices - 1);
    return MS_OK;
}

ms_status ms__cuda_need(int device, const char *what)
{
    int index = ms__index(device);
    return MS_LIKELY(table && index < devices) ? MS_OK : need(index, what);
}

// Polls: the event's stream may wait for a peer's GPU, which may never finish (comm/gpu_wait.c).
ms_status ms__cuda_await(void *event)
{
    enum { US = 1000 };
    int reached;
    ms_status st = MS_OK;
    int64_t since = ms__now_ns();
    while ((reached = table->done(event)) == 0 && st == MS_OK) {
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
    MS_TRY(table->record(index, stream, &end));
    ms_status st = ms__cuda_await(end);
    table->drop(end);
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

static ms_status wait_for(int index, int stream)
{
    MS_TRY(poll_streams(index, stream));
    MS_TRY(table->sync(index, stream));
    if (stream < 0 || stream == MS_STREAM_COMPUTE) ms__cuda_waits[index]++;
    return MS_OK;
}

ms_status ms__cuda_settle(int index) { return table ? wait_for(index, -1) : MS_OK; }

ms_status ms__cuda_sync(int device, int stream)
{
    if (!table) return MS_OK;
    if (stream < 0) ms__streams_join();  // so that ms__collectives_queued counts all collectives
    return wait_for(ms__index(device), stream);
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
        return table->copy_peer(ms__index(to), dst, ms__index(from), src, bytes);
    int index = ms__index(ms__is_cuda(to) ? to : from);
    ms_direction way = !ms__is_cuda(from) ? MS_TO_DEVICE : !ms__is_cuda(to) ? MS_TO_HOST : MS_ON_DEVICE;
    // The driver's waits check no peers, so poll before a copy in which the driver waits: to the host; and of more than
    // STAGED bytes to the device, where it waits until they are read from pinned memory, or staged from other memory.
    enum { STAGED = 64 << 10 };
    if (way == MS_TO_HOST || (way == MS_TO_DEVICE && bytes > STAGED)) MS_TRY(poll_streams(index, MS_STREAM_COMPUTE));
    MS_TRY(table->copy(index, MS_STREAM_COMPUTE, dst, src, bytes, way));
    return way == MS_TO_HOST ? wait_for(index, MS_STREAM_COMPUTE) : MS_OK;
}

ms_status ms__set_bytes(int device, void *p, int byte, size_t bytes)
{
    if (bytes == 0) return MS_OK;
    if (ms__is_cuda(device)) return table->fill(ms__index(device), 0, p, byte, bytes);
    memset(p, byte, bytes);
    return MS_OK;
}

// ---- for scripts ----

int ms_cuda_count(void)
{
    load();
    return table ? devices : 0;
}

const char *ms_cuda_why(void)
{
    load();
    return why;
}

const char *ms_cuda_name(int index)
{
    static char text[512];
    if (ms__cuda_need(MS_CUDA | index << 8, "cuda") || table->describe(index, text, sizeof text)) return NULL;
    return text;
}

ms_status ms_cuda_synchronize(int index)
{
    MS_BUSY;
    MS_TRY(ms__cuda_need(MS_CUDA | index << 8, "cuda.synchronize"));
    return ms__cuda_sync(MS_CUDA | index << 8, -1);
}
