// SPDX-License-Identifier: MIT
// ops/engine.c -- process-wide settings: environment variables, threads, modes, the random generator's state.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

#include "base/launcher.h"
#include "base/env.h"
#include "base/trace.h"
#include "device/capture.h"
#include "device/history.h"
#include "ops/op.h"

static struct {
    int threads;
    bool ready;
    uint64_t rng_seed, rng_offset;
} settings = { .threads = 1, .rng_seed = 20231 };

// The number of threads: MOONSHARD_THREADS or OMP_NUM_THREADS, if set. Otherwise the number of CPUs in the process's
// affinity mask; if the mask has all CPUs, an equal share of them per rank of the node (mpirun binds ranks to cores
// only on request or if there are few ranks).
static int default_threads(void)
{
    double given = 0;
    if (ms__env_number("MOONSHARD_THREADS", "a whole number from 1 to 1e9", &given) == MS_OK && given > 0)
        return given < 1024 ? (int)given : 1024;
    const char *omp = getenv("OMP_NUM_THREADS");
    if (omp && atoi(omp) > 0) return atoi(omp);
    cpu_set_t set;
    int cpus = 1, online = (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
    int local = ms__ranks_here();
    if (local > 1 && cpus >= online) cpus /= local;
    return cpus > 0 ? cpus : 1;
}

// Fails if a variable has an invalid value, with an error that names the variable.
static ms_status check_environment(void)
{
    static const struct {
        const char *name, *choices[5];
    } chosen[] = {
        { "MOONSHARD_DEBUG", { "off", "info", "detail" } },
        { "MOONSHARD_LOG", { "fsdp" } },
        { "MOONSHARD_ISA", { "v1", "v2", "v3", "v4" } },
        { "MOONSHARD_PROGRESS", { "bar", "lines" } },
        { "MOONSHARD_COMM_MAP", { "refuse", "refuse-all" } },
        { "MOONSHARD_CUBLAS", { "on", "off" } },
        { "MOONSHARD_CUDA", { "real", "emulated", "ptx", "null", "off" } },
        { "MOONSHARD_CUDA_GRAPHS", { "on", "off" } },
        { "MOONSHARD_CUDA_GUARD", { "0", "1" } },
        { "MOONSHARD_CUDA_SYNC", { "0", "1" } },
        { "MOONSHARD_CUDA_PRETEND", { "sm_75", "one_sm_75", "old_driver" } },
    };
    for (int k = 0; k < MS_COUNT(chosen); k++) {
        const char *value = getenv(chosen[k].name);
        char expected[64] = "";
        bool known = !value || !*value;
        for (int c = 0; c < 5 && chosen[k].choices[c]; c++) {
            known |= value && strcmp(value, chosen[k].choices[c]) == 0;
            ms__append(expected, sizeof expected, "%s%s", c ? ", " : "", chosen[k].choices[c]);
        }
        if (!known)
            return ms__fail(MS_EINVAL, "%s is '%s', expected %s%s", chosen[k].name, value,
                            strchr(expected, ',') ? "one of " : "", expected);
    }
    static const struct {
        const char *name, *expected;
        double most;
        bool whole;
    } numbers[] = {
        { "MOONSHARD_THREADS", "a whole number from 1 to 1e9", 1e9, true },
        { "MOONSHARD_TIMEOUT", "a number of seconds above 0", INFINITY, false },
        { "MOONSHARD_CUDA_DEVICES", "a whole number from 1 to 8", 8, true },
        { "MOONSHARD_CUDA_MEMORY", "a whole number of bytes from 1 to 1e18", 1e18, true },
    };
    for (int k = 0; k < MS_COUNT(numbers); k++) {
        double value = 1;
        MS_TRY(ms__env_number(numbers[k].name, numbers[k].expected, &value));
        if (value > numbers[k].most || (numbers[k].whole && value != floor(value)))
            return ms__fail(MS_EINVAL, "%s is '%s', expected %s", numbers[k].name, getenv(numbers[k].name),
                            numbers[k].expected);
    }
    const char *nodes = getenv("MOONSHARD_COMM_NODES");
    if (nodes && nodes[strspn(nodes, "0123456789,")])
        return ms__fail(MS_EINVAL,
                        "MOONSHARD_COMM_NODES is '%s', expected a number of nodes, or the node number of every rank, "
                        "separated by commas",
                        nodes);
    return MS_OK;
}

ms_status ms_init(void)
{
    if (settings.ready) return MS_OK;
    MS_TRY(check_environment());
    settings.ready = true;
    ms_set_num_threads(default_threads());
    const char *debug = getenv("MOONSHARD_DEBUG");
    ms__state.debug_level = !debug ? 0 : strcmp(debug, "info") == 0 ? 1 : strcmp(debug, "detail") == 0 ? 2 : 0;
    return MS_OK;
}

const char *ms_name_of(ms_named what, int k)
{
    switch (what) {
    case MS_NAME_DTYPE: return k >= 0 && k < MS_DTYPES ? ms__dtype_name(k) : NULL;
    case MS_NAME_MEMORY: return ms__memory_kind_name(k);
    case MS_NAME_RANGE: return ms__range_kind_name(k);
    case MS_NAME_LANE: return ms__range_lane_name(k);
    }
    return NULL;
}

int ms_num_threads(void) { return settings.threads; }

// The limit is 1024, because libgomp crashes with a team of 100,000 threads.
void ms_set_num_threads(int n)
{
    settings.threads = n < 1 ? 1 : n > 1024 ? 1024 : n;
    // oneDNN uses OpenMP's threads and loads the OpenMP library.
    void (*set_openmp)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    if (set_openmp) set_openmp(settings.threads);
}

static int swap(int32_t *setting, int value)
{
    int before = *setting;
    *setting = value;
    return before;
}

int ms_set_grad_mode(int on) { return swap(&ms__state.grad_mode, on != 0); }
int ms_set_autocast(int dtype_plus_1) { return swap(&ms__state.autocast, dtype_plus_1); }
int ms_set_default_dtype(int dtype)
{
    bool real = dtype >= 0 && ms__is_float(dtype);
    return swap(&ms__state.default_dtype, real ? dtype : ms__state.default_dtype);
}

// ---- random numbers ---------------------------------------------------------------------------

// A fixed default, so that runs are reproducible without ms.manual_seed.

void ms_manual_seed(double seed)
{
    if (ms__recording) (void)ms__capture_refuse("it sets the random generator; call manual_seed outside of the step");
    settings.rng_seed = (uint64_t)(int64_t)seed;
    settings.rng_offset = 0;
}

void ms_rng_get(double *seed, double *offset)
{
    *seed = (double)(int64_t)settings.rng_seed;
    *offset = (double)settings.rng_offset;
}

void ms_rng_set(double seed, double offset)
{
    settings.rng_seed = (uint64_t)(int64_t)seed;
    settings.rng_offset = (uint64_t)offset;
}

void ms__rng_next(uint64_t *seed, uint64_t *offset)
{
    *seed = settings.rng_seed;
    *offset = settings.rng_offset++;
}

uint64_t ms__rng_offset(void) { return settings.rng_offset; }
uint64_t ms__rng_seed(void) { return settings.rng_seed; }
void ms__rng_rewind(uint64_t offset) { settings.rng_offset = offset; }
