// SPDX-License-Identifier: MIT
// base/launcher.c -- finds the launcher of this process from its environment variables. The start of a job, the number
// of threads, the prefixes of log lines and the command line all use this one result.
#include <limits.h>
#include <stdio.h>
#include "base/launcher.h"

// The environment variables of each launcher. `rank` is required, and so is `world` if the row has one. The first row
// that applies is used, because several may: mpirun can run inside srun's allocations, and both also set PMIx's
// variables.
static const struct launcher {
    const char *name, *rank, *world, *local_rank, *local_world;
} launchers[] = {
    { "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE" },
    { "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", NULL },
    { "PMIx", "PMIX_RANK", NULL, NULL, NULL },
    { "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS" },
    { "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE" },
};

static const char *text_of(const char *name)
{
    const char *s = name ? getenv(name) : NULL;
    return s && *s ? s : NULL;
}

// Parses a whole number >= 0. Returns -1 if the variable is unset, -2 if its value is invalid.
static int number_of(const char *name)
{
    const char *s = text_of(name);
    if (!s) return -1;
    char *end;
    long n = strtol(s, &end, 10);
    return *end || n < 0 || n > INT_MAX ? -2 : (int)n;
}

// The number of tasks on a node, from a list like "2(x3),1": two tasks on each of the first three nodes, one on the
// last.
static int slurm_tasks(const char *list, int node)
{
    while (list && *list) {
        char *end;
        long tasks = strtol(list, &end, 10), nodes = 1;
        if (end == list) return 0;
        if (end[0] == '(' && end[1] == 'x') {
            nodes = strtol(end + 2, &end, 10);
            if (*end == ')') end++;
        }
        if (node < nodes) return (int)tasks;
        node -= (int)nodes;
        if (*end != ',') return 0;
        list = end + 1;
    }
    return 0;
}

static bool is(const struct launcher *l, const char *name) { return strcmp(l->name, name) == 0; }

// The number of ranks of the job; -1: unset, -2: invalid.
static int world_of(const struct launcher *l)
{
    int n = number_of(l->world);
    return n == -1 && is(l, "srun") ? number_of("SLURM_NTASKS") : n;
}

// Whether l launched this process. A job of one rank counts as a single process under srun, mpiexec and torchrun, and
// as an MPI job under mpirun and PMIx.
static bool applies(const struct launcher *l)
{
    int world = world_of(l);
    if (is(l, "mpirun")) return world != -1;
    if (!text_of(l->rank)) return false;
    if (is(l, "PMIx")) return true;
    // Slurm also sets its variables in batch scripts and allocations, where this is a single process. torchrun's
    // variable names are generic, so RANK, WORLD_SIZE and LOCAL_RANK must all be set.
    if (is(l, "srun") && !text_of("SLURM_STEP_ID")) return false;
    if (is(l, "torchrun") && !text_of(l->local_rank)) return false;
    return world != -1 && world != 1;
}

static bool refuse(ms_launch *out, const char *name, const char *expected)
{
    const char *s = text_of(name);
    if (s) snprintf(out->reason, sizeof out->reason, "%s is '%.40s', expected %s", name, s, expected);
    else snprintf(out->reason, sizeof out->reason, "%s is not set, expected %s", name, expected);
    return false;
}

// Sets *value to the rank in the variable, which must be below `limit` (0: no limit). If the variable is unset, *value
// stays unchanged, or the call fails if `must` is set.
static bool read_rank(ms_launch *out, const char *name, int limit, bool must, int32_t *value)
{
    char expected[64] = "a rank";
    int n = number_of(name);
    if (n == -1 && !must) return true;
    if (limit > 0) snprintf(expected, sizeof expected, "a rank from 0 to %d", limit - 1);
    if (n < 0 || (limit > 0 && n >= limit)) return refuse(out, name, expected);
    *value = n;
    return true;
}

static bool read_all(const struct launcher *l, ms_launch *out)
{
    int world = world_of(l), local = number_of(l->local_world);
    if (l->world && world < 1) return refuse(out, l->world, "a number of ranks above 0");
    if (local == -2 || local == 0 || (l->world && local > world))
        return refuse(out, l->local_world, "the number of ranks on this node, from 1 to the job's number of ranks");
    if (is(l, "srun")) {
        int node = number_of("SLURM_NODEID");
        local = slurm_tasks(getenv("SLURM_STEP_TASKS_PER_NODE"), node > 0 ? node : 0);
    }
    if (local < 0) local = 0;
    int32_t rank = 0, local_rank = 0;
    if (!read_rank(out, l->rank, l->world ? world : 0, true, &rank)) return false;
    if (!read_rank(out, l->local_rank, local, false, &local_rank)) return false;
    out->rank = rank;
    out->world = l->world ? world : 0;
    out->local_rank = local_rank;
    out->local_world = local;
    return true;
}

void ms_launcher(ms_launch *out)
{
    *out = (ms_launch) { .name = "", .world = 1, .local_world = 1 };
    for (int k = 0; k < MS_COUNT(launchers); k++) {
        const struct launcher *l = &launchers[k];
        if (!applies(l)) continue;
        out->name = l->name;
        // Fail here: MPI_Init would end the process with a long message that does not name the cause.
        if (read_all(l, out) && is(l, "srun") && !getenv("PMIX_RANK") && !getenv("PMI_RANK")) {
            const char *way = getenv("SLURM_MPI_TYPE");
            snprintf(
                out->reason, sizeof out->reason,
                "srun started this process without PMIx or PMI, by which ranks find each other (MPI type '%.40s'); "
                "use srun --mpi=pmix",
                way ? way : "none");
        }
        return;
    }
}

int ms__ranks_here(void)
{
    ms_launch l;
    ms_launcher(&l);
    return *l.name ? l.local_world : 0;
}

int ms__pmix_rank(const char *block, size_t n)
{
    static const char name[] = "PMIX_RANK=";
    for (const char *at = block; at < block + n; at += strlen(at) + 1)
        if (strncmp(at, name, sizeof name - 1) == 0) return atoi(at + sizeof name - 1);
    return -1;
}
