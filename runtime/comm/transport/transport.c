// SPDX-License-Identifier: MIT
// comm/transport/transport.c -- the table of transports: their names, the launchers that each supports, their plugins.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include "base/base.h"
#include "base/plugin.h"
#include "comm/transport/self.h"
#include "comm/transport/transport.h"

// In alphabetical order, in which the error for an unknown name lists them. Either `table` is set or a plugin has
// the table. plugin: the plugin's file. title: its library. needs: the program that must be installed to build it.
static const struct row {
    const char *name, *launchers;
    const ms_transport *table;
    const char *plugin, *title, *needs;
} transports[] = {
    { "mpi", " mpirun srun PMIx mpiexec ", NULL, "libmoonshard_mpi.so", "MPI", "mpicc" },
    { "nccl", " ", NULL, "libmoonshard_nccl.so", "NCCL", "mpicc" },
    { "self", " ", &ms__transport_self, NULL, NULL, NULL },
};

static ms_status load_transport(const ms_transport **out, const struct row *row, const char *launcher)
{
    char path[4096];
    ms__plugin_path(path, sizeof path, row->plugin);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        return ms__fail(
            MS_EUNSUPPORTED,
            "dist.init: the %s plugin cannot be loaded (%s); scripts/setup builds it if %s is installed%s%s",
            row->title, dlerror(), row->needs, *launcher ? "; this process was started by " : "", launcher);
    const ms_transport *t = dlsym(lib, MS_TRANSPORT_SYMBOL);
    if (!t || t->version != MS_TRANSPORT_VERSION)
        return ms__fail(MS_EUNSUPPORTED, "dist.init: %s has no %s of version %d; build engine and plugin together",
                        path, MS_TRANSPORT_SYMBOL, MS_TRANSPORT_VERSION);
    *out = t;
    return MS_OK;
}

static const struct row *find_row(const char *name, const char *launcher)
{
    char word[32];
    snprintf(word, sizeof word, " %s ", launcher);
    for (int k = 0; k < MS_COUNT(transports); k++) {
        const struct row *row = &transports[k];
        if (name ? strcmp(row->name, name) == 0 : *launcher ? strstr(row->launchers, word) != NULL : !!row->table)
            return row;
    }
    return NULL;
}

ms_status ms__transport_choose(const ms_transport **out, const char *name, const ms_launch *launch)
{
    if (name && strcmp(name, "auto") == 0) name = NULL;
    const struct row *row = find_row(name, launch->name);
    if (!row) {
        if (!name)
            return ms__fail(
                MS_EUNSUPPORTED,
                "dist.init: %s started this process as rank %d of %d, but ranks connect over MPI; use mpirun "
                "or srun",
                launch->name, (int)launch->rank, (int)launch->world);
        char names[200] = "'auto'";
        for (int k = 0; k < MS_COUNT(transports); k++) ms__append(names, sizeof names, ", '%s'", transports[k].name);
        return ms__fail(MS_EINVAL, "dist.init: backend '%s' is unknown, expected one of %s", name, names);
    }
    if (row->table) {
        *out = row->table;
        return MS_OK;
    }
    if (*launch->reason) return ms__fail(MS_ECOMM, "dist.init: %s", launch->reason);
    return load_transport(out, row, launch->name);
}
