// SPDX-License-Identifier: MIT
// comm/process/process.h -- the processes of a job: launcher, peers, deaths, signals, messages of errors.
#ifndef MS_COMM_PROCESS_PROCESS_H
#define MS_COMM_PROCESS_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include "base/activity.h"
#include "base/base.h"
#include "comm/memory/board.h"

// ---- thread.c: threads that watch the job ----
// Starts a detached thread that receives no signals. False: no thread could start; a failed job then ends later.
bool ms__comm_thread(void *(*fn)(void *));

// ---- clean.c: removes files left by killed jobs ----
#define CONTROL_NAME "moonshard-control-"  // a control memory's file name; the process id and six letters follow
void ms__comm_clean(bool leaving);         // leaving: also removes this process's files

// ---- peer.c: processes of peers on this node, observed from outside ----
typedef struct {
    uint64_t calls, bytes, run;
    int64_t at;
} ms_progress;  // engine calls begun, bytes read and written, ns run on a processor, time of the last progress
typedef enum { PEER_BUSY, PEER_IDLE, PEER_STOPPED } ms_peer_state;
void ms__activity_share(void);
const ms_activity *ms__peer_activity(int pid);  // NULL: that process has not loaded the engine
// What a peer does. PEER_BUSY: it is inside an engine call, runs another program, has begun an engine call, read or
// written since *before, or waits for a processor or a disk. Updates *before if it is busy, unless it only waits.
ms_peer_state ms__peer_watch(int pid, const ms_activity *page, ms_progress *before);
// Reads a file under /proc/PID as a string; "" if it cannot be read. Returns the length.
size_t ms__peer_file(int pid, const char *name, char *text, size_t n);
// The rank of a process, from its launcher's variables; -1: none, or not yet known (between fork and exec).
int ms__peer_rank(int pid);

// ---- launcher.c: the process that started this rank, and how a rank exits under it ----
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

// ---- link.c: connections between nodes, which the kernel closes when a process dies ----
#define MS_OUT_OF_MEMORY "if by SIGKILL, memory may have run out"
// Listens or connects, and tells in *watches whether ms__link_wait must then be called by a thread of this rank.
// ms__link_made ends the exchange: afterwards every connection has been made.
ms_status ms__link_open(bool *watches);
ms_status ms__link_made(void);
// Waits until a rank of another node has reported why the job ends (returns true, *rank -1), or a node is lost: *rank
// is its first rank, and text says why. False: there is nothing more to wait for.
bool ms__link_wait(int *rank, char *text, size_t n);
void ms__link_left(void);   // tells the other nodes that the scripts of this node have ended
void ms__link_ended(void);  // tells them that a rank of this node has reported why the job ends

// ---- death.c: deaths of ranks, and failures that end the job ----
ms_status ms__deaths_watch(void);                    // starts watching the peers whose pids are on the board
void ms__deaths_watch_links(void);                   // starts the thread that waits for other nodes (link.c)
bool ms__rank_dead(int rank);                        // on another node: whether its node is lost
void ms__death_text(int rank, char *out, size_t n);  // writes that a dead rank has died, and of what as far as is known
// Reports the death of a rank. If another rank has begun to report it, gives that rank time to print, because a rank
// that exits makes the launcher kill all others.
void ms__death_report(int rank);
static inline int ms__rank_state(int rank) { return atomic_load(&ms__world.board->rank[rank].state); }
void ms__rank_state_set(int state);  // of this rank: a rank_state
// Records that the failure of `rank` ends the job. Returns false if another failure was recorded first.
bool ms__first_to_fail(int rank);
void ms__mark_reported(void);           // this rank has printed why the job ends, and is exiting
_Noreturn void ms__end_stay(int code);  // called when a peer has failed and reported why
// To be called when a collective cannot complete: returns code, whose error is set, and ends the job soon. culprit: the
// rank that died; -1: this rank is the first to fail and reports.
ms_status ms__fail_job(ms_status code, int culprit);

// ---- join.c: the ranks of this node, from loading this library until they share a board ----
void ms__join_watch(int expected, bool all_here);  // expects so many peers; all_here: mpirun started all ranks here
void ms__join_begin(double limit);                 // called when the script calls dist.init
void ms__join_end(bool through);                   // through: dist.init has succeeded
bool ms__error_reported_by_peer(uint64_t hash);    // whether a peer reports the error with this hash

// ---- report.c: uncaught errors of scripts, with the rank ----
void ms__report_errors(void);  // starts reporting errors
bool ms__error_reported(void);

// ---- signals.c: the signals by which users, mpirun and Slurm end a job ----
void ms__signals_start(void);  // in a rank of a launcher: from now on signals that end it are reported

#endif
