// SPDX-License-Identifier: MIT
// comm/transport/mpi/plugin.c -- the transport over MPI. It connects ranks and sends messages; the engine itself
// implements the collectives.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include "comm/transport/transport.h"

// Handles of requests, recycled; all calls are made under one lock. A handle is allocated before its message starts, so
// that every message in flight has one.
typedef union handle {
    MPI_Request request;
    union handle *next;
} handle;
static struct {
    MPI_Comm world;
    int rank, size;
    handle first_handles[256], *spare;
    int n_given;
} mpi = { .world = MPI_COMM_NULL };

// Whether the folder has room for Open MPI's segments, which take 4 MiB per rank of this node: at least 5 MB per rank.
static int has_room(const char *folder, int ranks)
{
    struct statvfs fs;
    if (statvfs(folder, &fs) != 0) return 0;
    return (double)fs.f_bavail * (double)fs.f_frsize >= 5e6 * (ranks > 0 ? ranks : 1);
}

// Chooses another folder for Open MPI's segments if /dev/shm, its default, has no room: /dev/shm is small in many
// containers. Little data passes through the segments, so any folder will do.
static int place_segments(int ranks, char *text, size_t n)
{
    const char *set = getenv("OMPI_MCA_btl_vader_backing_directory"), *temporary = getenv("TMPDIR");
    if (set || has_room("/dev/shm", ranks)) return 0;
    const char *folder = temporary && *temporary ? temporary : "/tmp";
    if (!has_room(folder, ranks)) {
        snprintf(text, n, "neither /dev/shm nor %s has room for MPI's shared memory, 5 MB for each rank of this node",
                 folder);
        return -1;
    }
    setenv("OMPI_MCA_btl_vader_backing_directory", folder, 1);
    return 0;
}

// Changes Open MPI's defaults, which are for clusters of many nodes. Values already set in the environment win.
static void set_defaults(int one_node)
{
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    // Most containers forbid cross-memory attach (CMA), and Open MPI would print warnings.
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
    if (!one_node) return;
    setenv("OMPI_MCA_pml", "ob1", 0);
    setenv("OMPI_MCA_btl", "self,vader", 0);
    setenv("OMPI_MCA_osc", "^ucx", 0);
    setenv("OMPI_MCA_mtl", "^ofi", 0);
    // hwloc would load plugins for X11, OpenCL and PCI to find devices, a quarter of the time of MPI_Init, and read the
    // kernel's files about PCI and block devices (linuxio), a fifth of its CPU time.
    setenv("HWLOC_PLUGINS_PATH", "/nonexistent", 0);
    setenv("HWLOC_COMPONENTS", "-linuxio", 0);
}

// Whether this MPI can connect the ranks of `srun --mpi=pmi2`. Most builds of Open MPI lack the component for PMI-1 and
// PMI-2, mca_pmix_s1 or _s2; MPI_Init then prints a page about building Slurm and ends the process.
static int knows_pmi(void)
{
#ifdef OPEN_MPI
    Dl_info at;
    char library[PATH_MAX], pattern[PATH_MAX + 64];
    glob_t found;
    if (!dladdr((const void *)(uintptr_t)MPI_Init_thread, &at) || !realpath(at.dli_fname, library)) return 1;
    *strrchr(library, '/') = 0;
    snprintf(pattern, sizeof pattern, "%s/openmpi*/mca_pmix_s[12].so", library);
    int rc = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (rc == 0) globfree(&found);
    return rc != GLOB_NOMATCH;
#else
    return 1;
#endif
}

static int init(const ms_launch *launch, char *text, size_t n)
{
    int provided, done = 0;
    MPI_Initialized(&done);
    if (!done) {
        if (launch->name && strcmp(launch->name, "srun") == 0 && !getenv("PMIX_RANK") && !knows_pmi()) {
            const char *way = getenv("SLURM_MPI_TYPE");
            snprintf(text, n, "this Open MPI cannot connect ranks over PMI (srun --mpi=%.40s); use srun --mpi=pmix",
                     way ? way : "pmi2");
            return -1;
        }
        set_defaults(launch->world > 0 && launch->world == launch->local_world);
        if (place_segments(launch->local_world, text, n) != 0) return -1;
        if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS ||
            provided < MPI_THREAD_SERIALIZED) {
            snprintf(text, n, "MPI_Init_thread failed or does not provide MPI_THREAD_SERIALIZED");
            return -1;
        }
    }
    if (MPI_Comm_dup(MPI_COMM_WORLD, &mpi.world) != MPI_SUCCESS) {
        snprintf(text, n, "MPI_Comm_dup failed");
        return -1;
    }
    MPI_Comm_set_errhandler(mpi.world, MPI_ERRORS_RETURN);
    MPI_Comm_rank(mpi.world, &mpi.rank);
    MPI_Comm_size(mpi.world, &mpi.size);
    return 0;
}

static int rank(void) { return mpi.rank; }
static int size(void) { return mpi.size; }

static int all_gather(const void *in, void *out, int bytes)
{
    return MPI_Allgather(in, bytes, MPI_BYTE, out, bytes, MPI_BYTE, mpi.world) == MPI_SUCCESS ? 0 : -1;
}

static handle *take_handle(void)
{
    handle *h = mpi.spare;
    if (h) mpi.spare = h->next;
    else if (mpi.n_given < (int)(sizeof mpi.first_handles / sizeof *mpi.first_handles))
        h = &mpi.first_handles[mpi.n_given++];
    else h = malloc(sizeof *h);
    return h;
}

static void give_handle(handle *h)
{
    h->next = mpi.spare;
    mpi.spare = h;
}

static void *isend(const void *p, size_t bytes, int to, int tag)
{
    handle *h = take_handle();
    if (!h || MPI_Isend(p, (int)bytes, MPI_BYTE, to, tag, mpi.world, &h->request) == MPI_SUCCESS) return h;
    give_handle(h);
    return NULL;
}

static void *irecv(void *p, size_t bytes, int from, int tag)
{
    handle *h = take_handle();
    if (!h || MPI_Irecv(p, (int)bytes, MPI_BYTE, from, tag, mpi.world, &h->request) == MPI_SUCCESS) return h;
    give_handle(h);
    return NULL;
}

static int test(void **req)
{
    int done = 0;
    handle *h = *req;
    if (!h) return 1;
    if (MPI_Test(&h->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return -1;
    if (!done) return 0;
    give_handle(h);
    *req = NULL;
    return 1;
}

static void cancel(void *req) { MPI_Cancel(&((handle *)req)->request); }

static int probe(int tag, int *from, size_t *bytes)
{
    int there = 0, n = 0;
    MPI_Status s;
    if (MPI_Iprobe(MPI_ANY_SOURCE, tag, mpi.world, &there, &s) != MPI_SUCCESS || !there) return 0;
    MPI_Get_count(&s, MPI_BYTE, &n);
    *from = s.MPI_SOURCE;
    *bytes = (size_t)n;
    return 1;
}

static int finalize(void)
{
    int done = 0;
    MPI_Finalized(&done);
    if (done) return 0;
    MPI_Comm_free(&mpi.world);
    return MPI_Finalize() == MPI_SUCCESS ? 0 : -1;
}

static int own(int op, void *out, const void *in, size_t count)
{
    int n = (int)count, block = n / mpi.size;
    switch (op) {
    case 0: return MPI_Allgather(in, block, MPI_FLOAT, out, block, MPI_FLOAT, mpi.world);
    case 1: return MPI_Reduce_scatter_block(in, out, block, MPI_FLOAT, MPI_SUM, mpi.world);
    case 2: return MPI_Allreduce(in, out, n, MPI_FLOAT, MPI_SUM, mpi.world);
    default: return MPI_Barrier(mpi.world);
    }
}

__attribute__((visibility("default"))) const ms_transport ms_transport_table = {
    .version = MS_TRANSPORT_VERSION,
    .name = "mpi",
    .init = init,
    .rank = rank,
    .size = size,
    .all_gather = all_gather,
    .isend = isend,
    .irecv = irecv,
    .test = test,
    .cancel = cancel,
    .probe = probe,
    .finalize = finalize,
    .own = own,
};
