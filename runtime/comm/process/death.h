// SPDX-License-Identifier: MIT
// comm/process/death.h -- deaths of ranks, and failures that end the job.
#ifndef MS_COMM_PROCESS_DEATH_H
#define MS_COMM_PROCESS_DEATH_H

#include "base/base.h"
#include "comm/memory/board.h"

ms_status ms__deaths_watch(void);                    // starts watching the peers whose pids are on the board
void ms__deaths_watch_links(void);                   // starts the thread that waits for other nodes (process/link.h)
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

#endif
