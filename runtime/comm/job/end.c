// SPDX-License-Identifier: MIT
// comm/job/end.c -- the end of a script and of its job.
//
// A rank whose script has ended calls MPI_Finalize as soon as the scripts of all ranks of the node have ended. A peer
// that is stopped, or that runs Lua without an engine call, must end within the timeout of collectives. A job also ends
// if
//
//   a script raises     luajit exits with a code other than 0, which an on_exit handler sees
//   a collective fails  for good (a rank is absent or dead): it raises its error, and half a second later the job ends
//                       even if the script survives the error
//   a rank is killed    its peers report its death, because it prints nothing itself
//
// comm/process/death.c carries out the last two.
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>
#include "base/activity.h"
#include "base/trace.h"
#include "comm/job/job.h"
#include "comm/process/process.h"
#include "comm/world/message.h"

static struct {
    const ms_activity **pages;  // of peers (base/activity.h), indexed by world rank; NULL: not mapped so far
    pid_t started_as;
} at_end;

enum { MS = 1000000 };

static const ms_activity *page_of(int rank)
{
    const ms_activity **page = at_end.pages;
    if (!page && !(page = at_end.pages = calloc((size_t)ms__world.size, sizeof *page))) return NULL;
    if (!page[rank]) page[rank] = ms__peer_activity(ms__world.board->rank[rank].pid);
    return page[rank];
}

// Called at the end of the script. Ends the job if a peer, stopped or looping, has made no progress for the length of
// the timeout. report: print a line about the busy peers. Returns whether a line was printed.
static bool check_late_peers(ms_progress *seen, int64_t since, int64_t now, bool report)
{
    char culprits[TEXT] = "", working[TEXT] = "";
    double waited = (double)(now - since) * 1e-9;
    for (int r = 0; r < ms__world.size; r++) {
        if (r == ms__world.rank || !ms__is_here(r) || ms__rank_state(r) != RANK_RUNNING) continue;
        ms_board_rank *b = &ms__world.board->rank[r];
        ms_peer_state look = ms__peer_watch(b->pid, page_of(r), &seen[r]);
        bool late = (double)(now - (seen[r].at > since ? seen[r].at : since)) * 1e-9 > ms__world.timeout;
        // Until the limit has passed, a peer that looks idle may be between two engine calls: say nothing about it yet.
        if (look != PEER_BUSY && !late) continue;
        char *text = look == PEER_BUSY ? working : culprits;
        ms__append(text, TEXT, "%srank %d (process %d) %s", *text ? "; " : "", r, b->pid,
                   look == PEER_BUSY      ? "computes, reads or writes"
                   : look == PEER_STOPPED ? "is stopped"
                                          : "has not reached the end of its script and makes no engine call");
    }
    if (!culprits[0]) {
        if (!report || !working[0]) return false;
        fprintf(stderr, "rank %d: has waited %.0f s at the end of the script: %s\n", ms__world.rank, waited, working);
        return true;
    }
    ms__rank_state_set(RANK_RAISED);
    if (!ms__first_to_fail(ms__world.rank)) ms__end_stay(1);
    fprintf(stderr, "rank %d: at the end of the script %.1f s have passed and %s\n", ms__world.rank, waited, culprits);
    ms__mark_reported();
    ms__exit_first(1);
}

// Waits until the scripts of all ranks of this node have ended, because MPI_Finalize blocks. Returns false if a rank
// failed.
static bool all_left(void)
{
    ms_progress *seen = calloc((size_t)ms__world.size, sizeof *seen);
    int64_t since = ms__now_ns(), reported_at = since, before = since, looked = since;
    for (;;) {
        int left = 1, here = 1;
        bool lowest = true;
        for (int r = 0; r < ms__world.size; r++) {
            if (r == ms__world.rank || !ms__is_here(r)) continue;
            int state = ms__rank_state(r);
            if (state == RANK_RUNNING && ms__rank_dead(r)) {
                ms__death_report(r);
                ms__first_to_fail(r);
                return false;
            }
            if (state == RANK_RAISED) return false;
            here++;
            left += state == RANK_LEFT;
            lowest = lowest && !(state == RANK_LEFT && r < ms__world.rank);
        }
        if (left == here) break;
        ms__nap(ms__now_ns() - since < 10 * MS ? 20000 : 2 * MS);
        int64_t now = ms__now_ns();
        if (now - before > 500 * MS)
            since += now - before, reported_at += now - before;  // the whole job was probably stopped
        before = now;
        // `left` ranks wait here. Each checks every left * 50 ms, so together they check about every 50 ms.
        if (!seen || now - looked < 50 * MS * left) continue;
        looked = now;
        if (check_late_peers(seen, since, now, lowest && (double)(now - reported_at) * 1e-9 > ms__world.timeout))
            reported_at = now;
    }
    free(seen);
    return true;
}

// Ends the job if a peer is stopped while this rank blocks in MPI_Finalize.
static void *finalize_thread(void *unused)
{
    (void)unused;
    int64_t passed = 0;  // passed: the time until the latest check of the peers; waited: the time since that check
    for (int64_t before = ms__now_ns(), waited = 0;;) {
        ms__nap(100 * MS);
        int64_t now = ms__now_ns();
        if (now - before < 500 * MS) waited += now - before;
        before = now;
        if ((double)waited * 1e-9 <= ms__world.timeout) continue;
        passed += waited;
        waited = 0;
        for (int r = 0; r < ms__world.size; r++) {
            ms_progress unread = { 0 };
            if (r == ms__world.rank || !ms__is_here(r) ||
                ms__peer_watch(ms__world.board->rank[r].pid, NULL, &unread) != PEER_STOPPED)
                continue;
            ms__rank_state_set(RANK_RAISED);
            if (!ms__first_to_fail(ms__world.rank)) ms__end_stay(1);
            fprintf(stderr, "rank %d: MPI_Finalize: %.1f s have passed and rank %d (process %d) is stopped\n",
                    ms__world.rank, (double)passed * 1e-9, r, ms__world.board->rank[r].pid);
            ms__exit_first(1);
        }
    }
    return NULL;
}

void ms__comm_stop(void)
{
    ms_world *w = &ms__world;
    if (!w->up || w->stopped) return;
    w->stopped = true;
    ms__rank_state_set(RANK_LEFT);
    if (w->board && !all_left()) ms__end_stay(1);
    ms__link_left();
    // While mpirun ends the job, it answers no rank, and MPI_Finalize would wait for it.
    if (w->transport->finalize && !ms__launcher_ends_job()) {
        if (w->board) ms__comm_thread(finalize_thread);
        ms__transport_lock();
        w->transport->finalize();
        ms__transport_unlock();
    }
}

static void at_exit(int code, void *arg)
{
    (void)arg;
    if (getpid() != at_end.started_as) return;
    if (ms__world.stopped) {
        if (ms__launcher_ends_job()) ms__fork_waker();  // it would sleep on
        return;
    }
    if (code == 0) {
        ms__streams_drain();  // peers may still read tensors in collectives that the script did not wait for
        ms__comm_stop();
        return;
    }
    // The script called os.exit, or raised an error without a text, such as error(nil).
    if (!ms__error_reported() && ms__world.board && !atomic_load(&ms__world.board->reported))
        fprintf(stderr, "rank %d: the script ended with status %d\n", ms__world.rank, code);
    // Does not call MPI_Finalize, because the launcher ends the peers. Does not take the transport's lock, because a
    // stream worker may hold it inside MPI.
    ms__mark_reported();
    ms__rank_state_set(RANK_RAISED);
    ms__trace_save_now();
    if (!ms__first_to_fail(ms__world.rank)) ms__end_stay(code);
    ms__exit_first(code);
}

void ms__end_catch(void)
{
    at_end.started_as = getpid();
    on_exit(at_exit, NULL);
}
