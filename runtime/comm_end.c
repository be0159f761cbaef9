// comm_end.c -- how a job ends: politely, or because a rank cannot go on.
//
// A script that reaches its end leaves politely (MPI_Finalize), once every rank here is at its end. An uncaught Lua
// error makes luajit exit with a code other than 0, which an on_exit handler sees; a collective that cannot end
// (an absence, a death) raises its error, and ends the job half a second later even if the script survived it; a
// killed rank says nothing. Each rank has a thread asleep on its peers' process descriptors, so every one of these
// is seen at once, by busy ranks too.
//
// The first one that fails exits; the launcher then ends the others and reports the first one's code. mpirun does that
// with CONT, TERM and KILL and sleeps a second after each of the first two; SIGCHLD ends such a sleep, so the others
// stay and send it that signal until the TERM is there. Others that exited by themselves, meanwhile, would leave
// nobody to do so: 2 s instead of some hundredths. srun may end nobody: under it everybody exits.
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "comm_internal.h"
#include "trace.h"

static int        *pidfd;               // by world rank; -1: not here
static bool        stopped;
static pid_t       started_as;
static bool        by_mpirun;
static atomic_bool doomed;              // a report by this rank is due
static atomic_bool said;                // this rank is on its way out, its text printed
static char        doom_text[2 * TEXT];

enum { MS = 1000000 };
static const int64_t STAY = 1500ll * MS;        // for the launcher's TERM; a launcher that does nothing is none

static void nap(long ns)
{
    struct timespec t = { 0, ns };
    nanosleep(&t, NULL);
}

static bool is_here(int rank) { return ms__world.node_of[rank] == ms__world.node; }
static int state_of(int rank) { return atomic_load(&ms__world.board->rank[rank].state); }

void ms__board_state(int state)
{
    if (ms__world.board) atomic_store(&ms__world.board->rank[ms__world.rank].state, state);
}

bool ms__rank_dead(int rank)
{
    if (pidfd[rank] < 0) return false;
    struct pollfd p = { .fd = pidfd[rank], .events = POLLIN };
    return poll(&p, 1, 0) > 0;
}

// Rank `rank` is the one whose failure ends the job. False: another one was first.
static bool first_to_fail(int rank)
{
    int nobody = 0;
    return !ms__world.board || atomic_compare_exchange_strong(&ms__world.board->ending, &nobody, rank + 1);
}

// What is to be told has been told.
static void say_ended(void)
{
    fflush(NULL);
    said = true;
    if (ms__world.board) atomic_store(&ms__world.board->said, true);
}

// A peer failed and the job ends: stay until the launcher ends this process.
_Noreturn void ms__end_stay(int code)
{
    say_ended();
    for (int64_t since = ms__now_ns(); by_mpirun && ms__now_ns() - since < STAY;) nap(2 * MS);
    _exit(code);
}

// ---- peers are watched ----------------------------------------------------------------------------

// Somebody here waits in a collective, or has found out that it cannot end, and will say so.
static bool report_due(void)
{
    if (atomic_load(&ms__world.board->doomed)) return true;
    for (int r = 0; r < ms__world.size; r++)
        for (int k = 0; k < MS_STREAMS && is_here(r) && state_of(r) == RANK_RUNNING && !ms__rank_dead(r); k++)
            if (atomic_load(&ms__world.board->rank[r].wait[k].version) & 1) return true;
    return false;
}

// The first peer here that ended without having left; -1 when all of them left.
static int first_death(void)
{
    int n = 0;
    struct pollfd *p = malloc((size_t)ms__world.size * sizeof *p);
    int *rank = malloc((size_t)ms__world.size * sizeof *rank);
    for (int r = 0; p && rank && r < ms__world.size; r++)
        if (pidfd[r] >= 0) {
            p[n] = (struct pollfd){ .fd = pidfd[r], .events = POLLIN };
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

static void *watch_thread(void *arg)
{
    (void)arg;
    int dead = first_death();
    if (dead < 0) return NULL;
    first_to_fail(dead);
    int64_t since = ms__now_ns();
    // Whoever raised has told why. Of one that died without a word those tell who wait for it in a collective, or will in
    // a moment: a machine with more work than cores gives them their turn late.
    if (state_of(dead) == RANK_RUNNING)
        while (!atomic_load(&ms__world.board->said) && ms__now_ns() - since < 800 * MS && (ms__now_ns() - since < 250 * MS || report_due())) nap(2 * MS);
    while (by_mpirun && ms__now_ns() - since < STAY) {
        pid_t up = getppid();
        // To its main thread, which is the one that sleeps.
        if (up > 1) syscall(SYS_tgkill, up, up, SIGCHLD);
        nap(5 * MS);
    }
    _exit(1);
}

static void start_watch(void)
{
    sigset_t all, before;
    pthread_t t;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);        // signals belong to the engine thread
    pthread_create(&t, &small, watch_thread, NULL);     // without it a job ends all the same, later
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
}

ms_status ms__end_start(void)
{
    int n = ms__world.size, here = 0;
    if (!(pidfd = malloc((size_t)n * sizeof *pidfd))) return ms__no_memory((size_t)n * sizeof *pidfd, "dist.init", "processes of %d ranks", n);
    for (int r = 0; r < n; r++) {
        pidfd[r] = -1;
        if (r == ms__world.rank || !is_here(r)) continue;
        pidfd[r] = (int)syscall(SYS_pidfd_open, ms__world.board->rank[r].pid, 0);
        here += pidfd[r] >= 0;
    }
    by_mpirun = getenv("OMPI_COMM_WORLD_SIZE") != NULL;
    if (here > 0) start_watch();
    return MS_OK;
}

// ---- a collective that cannot end -----------------------------------------------------------------

static void *doom_thread(void *arg)
{
    (void)arg;
    nap(500 * MS);                      // time for the error to be raised and its traceback to be printed
    if (atomic_load(&said)) return NULL;        // the script is on its way out
    fprintf(stderr, "rank %d: %s\nrank %d: ending the job\n", ms__world.rank, doom_text, ms__world.rank);
    ms__board_state(RANK_RAISED);
    if (!first_to_fail(ms__world.rank)) ms__end_stay(1);
    say_ended();
    _exit(1);
}

// The error is raised like any other; but if the script survives it, or is busy elsewhere, the job still ends.
ms_status ms__doom(ms_status code)
{
    bool no = false;
    if (!atomic_compare_exchange_strong(&doomed, &no, true)) return code;
    atomic_store(&ms__world.board->doomed, true);
    snprintf(doom_text, sizeof doom_text, "%s", ms_error());
    pthread_t t;
    if (pthread_create(&t, NULL, doom_thread, NULL) == 0) pthread_detach(t);
    return code;
}

// ---- a script's end -------------------------------------------------------------------------------

// Before MPI_Finalize, which blocks: until every rank here is at its end as well. False: one ended with an error.
static bool all_left(void)
{
    for (int64_t since = ms__now_ns();;) {
        bool all = true;
        for (int r = 0; r < ms__world.size; r++) {
            if (r == ms__world.rank || !is_here(r)) continue;
            int state = state_of(r);
            if (state == RANK_RAISED || (state == RANK_RUNNING && ms__rank_dead(r))) return false;
            all = all && state == RANK_LEFT;
        }
        if (all) return true;
        nap(ms__now_ns() - since < 10 * MS ? 20000 : 2 * MS);
    }
}

void ms__comm_stop(void)
{
    ms_world *w = &ms__world;
    if (!w->up || stopped) return;
    stopped = true;
    ms__board_state(RANK_LEFT);
    if (w->board && !all_left()) ms__end_stay(1);
    if (w->mpi) {
        ms__mpi_lock();
        w->mpi->finalize();
        ms__mpi_unlock();
    }
}

bool ms__comm_stopped(void) { return stopped; }

static void at_exit(int code, void *arg)
{
    (void)arg;
    if (stopped || getpid() != started_as) return;
    if (code == 0) {
        ms__streams_drain();            // peers may be reading what nobody here waited for
        ms__comm_stop();
        return;
    }
    // Without MPI_Finalize: the launcher ends the others. A stream worker may be inside MPI: no lock.
    say_ended();
    ms__board_state(RANK_RAISED);
    ms__trace_save_now();
    if (!first_to_fail(ms__world.rank)) ms__end_stay(code);
    _exit(code);
}

void ms__end_catch(void)
{
    started_as = getpid();
    on_exit(at_exit, NULL);
}
