// SPDX-License-Identifier: MIT
// comm/process/death.c -- deaths of ranks, and failures that end the job.
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
#include "comm/process/process.h"

static struct {
    int *pidfd;           // indexed by world rank; -1: this rank, or on another node
    atomic_bool failing;  // this rank must report the failure
    atomic_bool leaving;  // this rank is exiting and has printed its error
    char text[2 * TEXT];  // the error of the failure
    long oom_kills_before;
} deaths;

enum { MS = 1000000 };
static const int64_t STAY = 1500ll * MS;  // how long to wait for the launcher's SIGKILL

void ms__rank_state_set(int state)
{
    if (ms__world.board) atomic_store(&ms__world.board->rank[ms__world.rank].state, state);
}

bool ms__rank_dead(int rank)
{
    if (!ms__is_here(rank)) {
        int lost = atomic_load(&ms__world.board->lost);
        return lost && ms__world.node_of[lost - 1] == ms__world.node_of[rank];
    }
    if (deaths.pidfd[rank] < 0) return false;
    struct pollfd p = { .fd = deaths.pidfd[rank], .events = POLLIN };
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

void ms__death_text(int rank, char *out, size_t n)
{
    if (!ms__is_here(rank)) snprintf(out, n, "%s", ms__world.board->lost_text);
    else
        snprintf(out, n, "rank %d (process %d) died; %s", rank, ms__world.board->rank[rank].pid,
                 oom_kills() > deaths.oom_kills_before ? "the kernel has killed a process for lack of memory"
                                                       : MS_OUT_OF_MEMORY);
}

bool ms__first_to_fail(int rank)
{
    int none = 0;
    return !ms__world.board || atomic_compare_exchange_strong(&ms__world.board->ending, &none, rank + 1);
}

void ms__mark_reported(void)
{
    fflush(NULL);
    deaths.leaving = true;
    if (ms__world.board) atomic_store(&ms__world.board->reported, true);
    ms__link_ended();
}

// Under mpirun, keeps this process alive until mpirun ends it, for at most STAY. Then exits with `code`.
_Noreturn void ms__end_stay(int code)
{
    ms__mark_reported();
    for (int64_t since = ms__now_ns(); ms__launched.mpirun > 0 && ms__now_ns() - since < STAY; ms__nap(5 * MS))
        ms__wake_launcher();
    ms__end_settle();
    _exit(code);
}

void ms__death_report(int rank)
{
    char text[CAUSE];
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
        for (int k = 0; k < MS_STREAMS && ms__is_here(r) && ms__rank_state(r) == RANK_RUNNING && !ms__rank_dead(r); k++)
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
        if (deaths.pidfd[r] >= 0) {
            p[n] = (struct pollfd) { .fd = deaths.pidfd[r], .events = POLLIN };
            rank[n++] = r;
        }
    int dead = -1;
    for (int left = n; left > 0 && dead < 0;) {
        if (poll(p, (nfds_t)n, -1) <= 0) continue;
        for (int k = 0; k < n && dead < 0; k++) {
            if (!p[k].revents) continue;
            if (ms__rank_state(rank[k]) != RANK_LEFT) dead = rank[k];
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
    ms__first_to_fail(dead);
    int64_t since = ms__now_ns();
    // A rank that raised an error has printed it. A killed rank leaves no message; peers that wait for it in a
    // collective can say more, so this rank waits for their report first: 0.1 s, or up to 0.8 s while one is due.
    if (ms__rank_state(dead) == RANK_RUNNING) {
        while (!atomic_load(&ms__world.board->reported) && ms__now_ns() - since < 800 * MS &&
               (ms__now_ns() - since < 100 * MS || report_due()))
            ms__nap(2 * MS);
        ms__death_report(dead);
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

static _Noreturn void end_after_lost_node(int rank, const char *text)
{
    snprintf(ms__world.board->lost_text, LOST, "%s", text);
    atomic_store(&ms__world.board->lost, rank + 1);
    end_after_death(rank);
}

static void *link_thread(void *unused)
{
    (void)unused;
    int rank;
    char text[LOST];
    if (!ms__link_wait(&rank, text, sizeof text)) return NULL;
    if (rank < 0) ms__end_stay(1);
    end_after_lost_node(rank, text);
}

void ms__deaths_watch_links(void) { ms__comm_thread(link_thread); }

ms_status ms__deaths_watch(void)
{
    int n = ms__world.size, here = 0;
    deaths.pidfd = malloc((size_t)n * sizeof *deaths.pidfd);
    if (!deaths.pidfd) return ms__no_memory((size_t)n * sizeof *deaths.pidfd, "dist.init", "processes of %d ranks", n);
    for (int r = 0; r < n; r++) {
        deaths.pidfd[r] = -1;
        if (r == ms__world.rank || !ms__is_here(r)) continue;
        deaths.pidfd[r] = (int)syscall(SYS_pidfd_open, ms__world.board->rank[r].pid, 0);
        here += deaths.pidfd[r] >= 0;
    }
    if (here > 0) ms__comm_thread(watch_thread);
    deaths.oom_kills_before = oom_kills();
    return MS_OK;
}

// ---- a collective that cannot complete ------------------------------------------------------------

static void *fail_thread(void *arg)
{
    (void)arg;
    ms__nap(500 * MS);                              // so that the error can be raised and its traceback printed
    if (atomic_load(&deaths.leaving)) return NULL;  // the script is exiting
    fprintf(stderr, "rank %d: %s\nrank %d: ending the job\n", ms__world.rank, deaths.text, ms__world.rank);
    ms__rank_state_set(RANK_RAISED);
    if (!ms__first_to_fail(ms__world.rank)) ms__end_stay(1);
    ms__mark_reported();
    ms__exit_first(1);
}

// The error is raised like any other, but the job ends even if the script survives it or is busy elsewhere.
ms_status ms__fail_job(ms_status code, int culprit)
{
    if (culprit >= 0) ms__first_to_fail(culprit);
    bool no = false;
    if (!atomic_compare_exchange_strong(&deaths.failing, &no, true)) return code;
    atomic_store(&ms__world.board->failing, true);
    snprintf(deaths.text, sizeof deaths.text, "%s", ms_error());
    pthread_t t;
    if (pthread_create(&t, NULL, fail_thread, NULL) == 0) pthread_detach(t);
    return code;
}
