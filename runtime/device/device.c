// SPDX-License-Identifier: MIT
// device/device.c -- finds and loads the CUDA plugin.
//
// MOONSHARD_CUDA selects the plugin. Unset or "real": the plugin for GPUs. "emulated": the emulator on which specs run
// the same kernels (libmoonshard_cuda_emulated.so); never selected by default. "null": the plugin with a CUDA runtime
// that only counts calls (libmoonshard_cuda_null.so), also for specs. "off": no plugin.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "base/plugin.h"
#include "device/device.h"

ms_cuda_client ms__cuda_client;
static struct {
    const ms_cuda_table *table;
    int devices;
    bool tried;
    char why[1024];
} cuda = { .why = "no GPU has been requested yet" };

const ms_cuda_table *ms__cuda(void) { return cuda.table; }

// Stores the reason why there is no GPU. Returns NULL.
static __attribute__((format(printf, 1, 2))) const ms_cuda_table *none(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(cuda.why, sizeof cuda.why, fmt, args);
    va_end(args);
    return NULL;
}

static const ms_cuda_table *plugin(void)
{
    char path[4096];
    const char *mode = getenv("MOONSHARD_CUDA");
    bool emulated = mode && (strcmp(mode, "emulated") == 0 || strcmp(mode, "ptx") == 0);
    bool null = mode && strcmp(mode, "null") == 0;
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

static void load_plugin(void)
{
    if (cuda.tried) return;
    cuda.tried = true;
    const ms_cuda_table *t = plugin();
    if (!t) return;
    cuda.devices = t->start(ms__cuda_client.engine, cuda.why, sizeof cuda.why);
    if (cuda.devices < 1) return;
    if (cuda.devices > MS_CUDA_DEVICES) cuda.devices = MS_CUDA_DEVICES;
    for (const ms_cuda_kernel *const *f = t->families; *f; f++)
        for (const ms_cuda_kernel *k = *f; k->op; k++) ms__cuda_client.add_kernel(k->op, k->run);
    cuda.table = t;
    cuda.why[0] = 0;
}

static __attribute__((noinline)) ms_status require_device(int index, const char *what)
{
    load_plugin();
    if (!what) what = "allocation";
    if (!cuda.table)
        return ms__fail(MS_EUNSUPPORTED, "%s: device 'cuda:%d' is not available: %s", what, index, cuda.why);
    if (index >= cuda.devices)
        return ms__fail(MS_EINVAL, "%s: device 'cuda:%d' is not available: the last CUDA device is cuda:%d", what,
                        index, cuda.devices - 1);
    return MS_OK;
}

ms_status ms__cuda_need(int device, const char *what)
{
    int index = ms__index(device);
    return MS_LIKELY(cuda.table && index < cuda.devices) ? MS_OK : require_device(index, what);
}

// ---- for scripts ----

int ms_cuda_count(void)
{
    load_plugin();
    return cuda.table ? cuda.devices : 0;
}

const char *ms_cuda_why(void)
{
    load_plugin();
    return cuda.why;
}

const char *ms_cuda_name(int index)
{
    static char text[512];
    if (ms__cuda_need(MS_CUDA | index << 8, "cuda") || cuda.table->describe(index, text, sizeof text)) return NULL;
    return text;
}
