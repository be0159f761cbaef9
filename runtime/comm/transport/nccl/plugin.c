// SPDX-License-Identifier: MIT
// comm/transport/nccl/plugin.c -- the transport over NCCL: ranks meet, agree and send messages over MPI, by the
// functions of its plugin; NCCL moves the tensors on GPUs.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include "comm/transport/nccl/communicator.h"
#include "comm/transport/nccl/library.h"
#include "comm/transport/transport.h"

static const ms_transport *mpi;

static int init(const ms_launch *launch, char *text, size_t n);
static int finalize(void);

// Before `init` only these fields are set; `init` adds MPI's functions.
__attribute__((visibility("default"))) ms_transport ms_transport_table = {
    .version = MS_TRANSPORT_VERSION, .name = "nccl", .init = init, .gpu = &nccl_communicators
};

static const ms_transport *load_mpi(char *text, size_t n)
{
    Dl_info here;
    char path[4096] = "libmoonshard_mpi.so";
    if (dladdr((void *)load_mpi, &here) && here.dli_fname) {
        const char *slash = strrchr(here.dli_fname, '/');
        if (slash)
            snprintf(path, sizeof path, "%.*s/libmoonshard_mpi.so", (int)(slash - here.dli_fname), here.dli_fname);
    }
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const ms_transport *t = lib ? dlsym(lib, MS_TRANSPORT_SYMBOL) : NULL;
    if (!lib) snprintf(text, n, "backend 'nccl' connects ranks over MPI, whose plugin cannot be loaded: %s", dlerror());
    else if (!t || t->version != MS_TRANSPORT_VERSION)
        snprintf(text, n, "%s and the plugin of backend 'nccl' are of different builds", path);
    else return t;
    return NULL;
}

static int init(const ms_launch *launch, char *text, size_t n)
{
    // NCCL is loaded first: a process that has joined MPI and then fails ends its peers.
    if (nccl_load(text, n) != 0 || !(mpi = load_mpi(text, n)) || mpi->init(launch, text, n) != 0) return -1;
    ms_transport all = *mpi;
    all.name = ms_transport_table.name;
    all.gpu = ms_transport_table.gpu;
    all.init = init;
    all.finalize = finalize;
    ms_transport_table = all;
    return 0;
}

static int finalize(void)
{
    nccl_leave_all();
    return mpi->finalize();
}
