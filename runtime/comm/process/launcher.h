// SPDX-License-Identifier: MIT
// comm/process/launcher.h -- the process that started this rank, and how a rank exits under it.
#ifndef MS_COMM_PROCESS_LAUNCHER_H
#define MS_COMM_PROCESS_LAUNCHER_H

#include <stdbool.h>
#include <sys/types.h>

typedef struct {
    pid_t mpirun;  // mpirun or its daemon if that is the parent process, otherwise 0
    int rank;      // world rank from the launcher's variables, known before dist.init
} ms_launched;
extern ms_launched ms__launched;

int ms__launched_peers(int parent, int *pids, int room);  // lists at most `room` children of the launcher
bool ms__launcher_ends_job(void);                         // whether mpirun is ending the job
void ms__wake_launcher(void);  // to be called repeatedly while mpirun ends the job: interrupts its sleeps

void ms__launcher_to_loopback(void);
// Starts a child process that wakes mpirun until mpirun has exited, for at most 1.5 s, even if this rank is killed. If
// mpirun has not exited many seconds later, the child kills it.
void ms__fork_waker(void);
// Called by the first rank to fail. A child process keeps waking mpirun, because the peers may be stopped.
_Noreturn void ms__exit_first(int code);

// To be called before a rank exits that has just printed why: srun loses what a task prints in its last 50 ms if
// another task was killed (13 of 30 times).
void ms__end_settle(void);

#endif
