// SPDX-License-Identifier: MIT
// comm/job/launch.c -- what a rank does as soon as its launcher has started it and this library is loaded.
#include <unistd.h>
#include "base/launcher.h"
#include "comm/process/process.h"

__attribute__((constructor)) static void launched(void)
{
    ms_launch launch;
    ms_launcher(&launch);
    int expected = *launch.name ? launch.local_world - 1 : -1;
    // Peers are found by the PMIx variable in their environment.
    if (expected < 0 || expected >= RANKS || ms__peer_rank(getpid()) < 0) return;
    ms__launched.rank = launch.rank;
    pid_t parent = getppid();
    if (ms__peer_rank(parent) >= 0)
        return;  // the parent is not the launcher, for example a shell: the other ranks cannot be found
    bool mpirun = strcmp(launch.name, "mpirun") == 0, all_here = mpirun && launch.world == expected + 1;
    if (mpirun) ms__launched.mpirun = parent;
    ms__signals_start();
    if (launch.world != 1) ms__report_errors();
    if (launch.rank == 0 && all_here) ms__launcher_to_loopback();
    ms__join_watch(expected, all_here);
}
