// SPDX-License-Identifier: MIT
// comm/job/end.c -- the end of a job: orderly, or because a rank cannot continue.
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
// A thread of each rank sleeps on the process descriptors of its peers, so busy ranks notice an end at once, too.
//
// The first rank to fail exits. The launcher then ends its peers and reports its exit code. mpirun sleeps while it does
// so (ms__wake_launcher), so the peers stay alive and wake it until it kills them: the job ends in hundredths of a
// second instead of 2 s. srun may not end the ranks, so under srun every rank exits.
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "comm/internal.h"
#include "base/trace.h"

static int *pidfd;  // indexed by world rank; -1: this rank, or on another node
// Peers' activity pages (base/activity.h), indexed by world rank; NULL: not mapped so far
static const ms_activity **page;
static bool stopped;
static pid_t started_as;
static atomic_bool failing;  // this rank must report the failure
static atomic_bool leaving;  // this rank is exiting and has printed its error
static char failure_text[2 * TEXT];

enum { MS = 1000000 };
static const int64_t STAY = 1500ll * MS;  // how long to wait for the launcher's SIGKILL

static bool is_here(int rank) { return ms__world.node_of[rank] == ms__world.node; }
static int state_of(int rank) { return atomic_load(&ms__world.board->rank[rank].state); }

static void set_state(int state)
{
    if (ms__world.board) atomic_store(&ms__world.board->rank[ms__world.rank].state, state);
}

bool ms__rank_dead(int rank)
{
    if (!is_here(rank)) {
        int lost = atomic_load(&ms__world.board->lost);
        return lost && ms__world.node_of[lost - 1] == ms__world.node_of[rank];
    }
    if (pidfd[rank] < 0) return false;
    struct pollfd p = { .fd = pidfd[rank], .events = POLLIN };
    return poll(&p, 1, 0) > 0;
}

// The number of processes that the kernel has killed for lack of memory, of a container or of the machine; 0: unknown.
static long oom_kills(void)
{
    char line[128];
    long n = 0;
    FILE *f = fopen("/proc/vmstat", "re");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "oom_kill %ld", &n) == 1) break;
    if (f) fclose(f);
    return n;
}
static long oom_kills_before;

void ms__death_text(int rank, char *out, size_t n)
{
    if (!is_here(rank)) snprintf(out, n, "%s", ms__world.board->lost_text);
    else
        snprintf(out, n, "rank %d (process %d) died; %s", rank, ms__world.board->rank[rank].pid,
                 oom_kills() > oom_kills_before ? "the kernel has killed a process for lack of memory"
                                                : MS_OUT_OF_MEMORY);
}

// Records that the failure of `rank` ends the job. Returns false if another failure was recorded first.
static bool first_to_fail(int rank)
{
    int none = 0;
    return !ms__world.board || atomic_compare_exchange_strong(&ms__world.board->ending, &none, rank + 1);
}

static void mark_reported(void)
{
    fflush(NULL);
    leaving = true;
    if (ms__world.board) atomic_store(&ms__world.board->reported, true);
    ms__link_ended();
}

void ms__end_settle(void)
{
    if (ms__launcher_pid == 0) ms__nap(100 * MS);
}

// Under mpirun, keeps this process alive until mpirun ends it, for at most STAY. Then exits with `code`.
_Noreturn void ms__end_stay(int code)
{
    mark_reported();
    for (int64_t since = ms__now_ns(); ms__launcher_pid > 0 && ms__now_ns() - since < STAY; ms__nap(5 * MS))
        ms__wake_launcher();
    ms__end_settle();
    _exit(code);
}

// Reports the death of a rank. If another rank has begun to report it, gives that rank time to print, because a rank
// that exits makes the launcher kill all others.
static void report_death(int rank)
{
    char text[300];
    if (atomic_exchange(&ms__world.board->reported, true)) {
        ms__nap(20 * MS);
        return;
    }
    ms__death_text(rank, text, sizeof text);
    fprintf(stderr, "rank %d: %s\n", ms__world.rank, text);
}

// ---- watching peers -------------------------------------------------------------------------------

// Whether a rank of this node will report: it waits in a collective, or has found that one cannot complete.
static bool report_due(void)
{
    if (atomic_load(&ms__world.board->failing)) return true;
    for (int r = 0; r < ms__world.size; r++)
        for (int k = 0; k < MS_STREAMS && is_here(r) && state_of(r) == RANK_RUNNING && !ms__rank_dead(r); k++)
            if (atomic_load(&ms__world.board->rank[r].wait[k].version) & 1) return true;
    return false;
}

// Waits until a peer on this node dies before the end of its script, and returns its rank; -1: the scripts of all peers
// have ended, or there is no memory to watch them.
static int first_death(void)
{
    int n = 0;
    struct pollfd *p = malloc((size_t)ms__world.size * sizeof *p);
    int *rank = malloc((size_t)ms__world.size * sizeof *rank);
    for (int r = 0; p && rank && r < ms__world.size; r++)
        if (pidfd[r] >= 0) {
            p[n] = (struct pollfd) { .fd = pidfd[r], .events = POLLIN };
            rank[n++] = r;
        }
    int dead = -1;
    for (int left = n; left > 0 && dead < 0;) {
        if (poll(p, (nfds_t)n, -1) <= 0) continue;
        for (int k = 0; k < n && dead < 0; k++) {
            if (!p[k].revents) continue;
            if (state_of(rank[k]) != RANK_LEFT) dead = rank[k];
            p[k].fd = -1;
            left--;
        }
    }
    free(p);
    free(rank);
    return dead;
}

static _Noreturn void end_after_death(int dead)
{
    first_to_fail(dead);
    int64_t since = ms__now_ns();
    // A rank that raised an error has printed it. A killed rank leaves no message; peers that wait for it in a
    // collective can say more, so this rank waits for their report first: 0.1 s, or up to 0.8 s while one is due.
    if (state_of(dead) == RANK_RUNNING) {
        while (!atomic_load(&ms__world.board->reported) && ms__now_ns() - since < 800 * MS &&
               (ms__now_ns() - since < 100 * MS || report_due()))
            ms__nap(2 * MS);
        report_death(dead);
    }
    ms__end_stay(1);
}

static void *watch_thread(void *arg)
{
    (void)arg;
    int dead = first_death();
    if (dead >= 0) end_after_death(dead);
    return NULL;
}

void ms__end_node(int rank, const char *text)
{
    snprintf(ms__world.board->lost_text, LOST, "%s", text);
    atomic_store(&ms__world.board->lost, rank + 1);
    end_after_death(rank);
}

ms_status ms__end_start(void)
{
    int n = ms__world.size, here = 0;
    pidfd = malloc((size_t)n * sizeof *pidfd);
    page = calloc((size_t)n, sizeof *page);
    if (!pidfd || !page)
        return ms__no_memory((size_t)n * (sizeof *pidfd + sizeof *page), "dist.init", "processes of %d ranks", n);
    for (int r = 0; r < n; r++) {
        pidfd[r] = -1;
        if (r == ms__world.rank || !is_here(r)) continue;
        pidfd[r] = (int)syscall(SYS_pidfd_open, ms__world.board->rank[r].pid, 0);
        here += pidfd[r] >= 0;
    }
    if (here > 0) ms__comm_thread(watch_thread);
    oom_kills_before = oom_kills();
    return MS_OK;
}

// ---- a collective that cannot complete ------------------------------------------------------------

static void *fail_thread(void *arg)
{
    (void)arg;
    ms__nap(500 * MS);                       // so that the error can be raised and its traceback printed
    if (atomic_load(&leaving)) return NULL;  // the script is exiting
    fprintf(stderr, "rank %d: %s\nrank %d: ending the job\n", ms__world.rank, failure_text, ms__world.rank);
    set_state(RANK_RAISED);
    if (!first_to_fail(ms__world.rank)) ms__end_stay(1);
    mark_reported();
    ms__exit_first(1);
}

// The error is raised like any other, but the job ends even if the script survives it or is busy elsewhere.
ms_status ms__fail_job(ms_status code, int culprit)
{
    if (culprit >= 0) first_to_fail(culprit);
    bool no = false;
    if (!atomic_compare_exchange_strong(&failing, &no, true)) return code;
    atomic_store(&ms__world.board->failing, true);
    snprintf(failure_text, sizeof failure_text, "%s", ms_error());
    pthread_t t;
    if (pthread_create(&t, NULL, fail_thread, NULL) == 0) pthread_detach(t);
    return code;
}

// ---- a script's end -------------------------------------------------------------------------------

static const ms_activity *page_of(int rank)
{
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
        if (r == ms__world.rank || !is_here(r) || state_of(r) != RANK_RUNNING) continue;
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
    set_state(RANK_RAISED);
    if (!first_to_fail(ms__world.rank)) ms__end_stay(1);
    fprintf(stderr, "rank %d: at the end of the script %.1f s have passed and %s\n", ms__world.rank, waited, culprits);
    mark_reported();
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
            if (r == ms__world.rank || !is_here(r)) continue;
            int state = state_of(r);
            if (state == RANK_RUNNING && ms__rank_dead(r)) {
                report_death(r);
                first_to_fail(r);
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
            if (r == ms__world.rank || !is_here(r) ||
                ms__peer_watch(ms__world.board->rank[r].pid, NULL, &unread) != PEER_STOPPED)
                continue;
            set_state(RANK_RAISED);
            if (!first_to_fail(ms__world.rank)) ms__end_stay(1);
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
    if (!w->up || stopped) return;
    stopped = true;
    set_state(RANK_LEFT);
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

bool ms__comm_stopped(void) { return stopped; }

static void at_exit(int code, void *arg)
{
    (void)arg;
    if (getpid() != started_as) return;
    if (stopped) {
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
    mark_reported();
    set_state(RANK_RAISED);
    ms__trace_save_now();
    if (!first_to_fail(ms__world.rank)) ms__end_stay(code);
    ms__exit_first(code);
}

void ms__end_catch(void)
{
    started_as = getpid();
    on_exit(at_exit, NULL);
}
