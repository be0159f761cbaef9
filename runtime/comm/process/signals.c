// SPDX-License-Identifier: MIT
// comm/process/signals.c -- the signals by which users, mpirun and Slurm ask for a checkpoint or end a job.
//
// A script may catch them as requests for checkpoints. If it does not, they end the rank, which says so in one line.
// mpirun ends its ranks with SIGCONT, SIGTERM and SIGKILL and sleeps between them (odls_base_sigkill_timeout, 1 s); a
// rank that catches signals takes the SIGCONT as the request, because that leaves twice the time for the checkpoint.
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>
#include "comm/process/process.h"

static const int signals[] = { SIGUSR1, SIGUSR2, SIGTERM };
static const char *const names[] = { "SIGUSR1", "SIGUSR2", "SIGTERM" };

static struct {
    atomic_int requests;           // bit 0: SIGUSR1; bit 1: SIGUSR2, SIGTERM or the end of the job by mpirun
    _Atomic int64_t at;            // when the latest of them arrived
    _Atomic int64_t continued_at;  // when a SIGCONT arrived that may come from mpirun; 0: none
    bool speaks;                   // a rank of a launcher, which says what ended it
} asked;

// ---- a script that does not catch signals -----------------------------------------------------------

// Prints the signal and lets it end the process. A signal from the launcher reaches all ranks, of which rank 0 prints;
// the others wait for it, because mpirun kills all ranks as soon as one has died of SIGTERM.
static void on_fatal_signal(int sig, siginfo_t *info, void *context)
{
    (void)context;
    ms_board *board = ms__world.board;
    bool everywhere = info->si_pid == getppid(), mine = !everywhere || ms__launched.rank == 0;
    for (int k = 0; !mine && k < 100 && !(board && atomic_load(&board->reported)); k++) ms__nap(5000000);
    if (!mine) ms__nap(50000000);
    else if (!(board && atomic_exchange(&board->reported, true))) {
        char text[120];
        int k = 0;
        while (signals[k] != sig) k++;
        const char *from = !everywhere || ms__launched.mpirun <= 0 ? ""
                           : sig == SIGTERM ? " (sent by mpirun, which was terminated or interrupted)"
                           : sig == SIGUSR2 ? " (sent by mpirun, which received it or SIGTERM)"
                                            : "";
        int n = snprintf(text, sizeof text, "rank %d: %s ended this job%s\n", ms__launched.rank, names[k], from);
        if (write(STDERR_FILENO, text, (size_t)n) > 0) ms__end_settle();
    }
    signal(sig, SIG_DFL);
    raise(sig);
}

static void set_handler(int sig, void (*fn)(int, siginfo_t *, void *))
{
    struct sigaction sa = { .sa_flags = SA_RESTART | SA_SIGINFO };
    sigemptyset(&sa.sa_mask);
    if (fn) sa.sa_sigaction = fn;
    else sa.sa_handler = SIG_DFL;
    sigaction(sig, &sa, NULL);
}

void ms__signals_start(void)
{
    asked.speaks = true;
    ms_catch_checkpoint_signals(0);
}

// ---- a script that catches them ---------------------------------------------------------------------

static void on_request(int sig, siginfo_t *info, void *context)
{
    (void)info, (void)context;
    if (sig == SIGCONT) {
        atomic_store(&asked.continued_at, ms__now_ns());
        return;
    }
    atomic_store(&asked.at, ms__now_ns());
    atomic_fetch_or(&asked.requests, sig == SIGUSR1 ? 1 : 2);
}

void ms_catch_checkpoint_signals(int on)
{
    for (int k = 0; k < MS_COUNT(signals); k++)
        set_handler(signals[k], on ? on_request : asked.speaks ? on_fatal_signal : NULL);
    if (ms__launched.mpirun > 0) set_handler(SIGCONT, on ? on_request : NULL);
}

int ms_checkpoint_signal(double *at)
{
    int64_t continued = atomic_load(&asked.continued_at);
    if (MS_UNLIKELY(continued != 0)) {
        // mpirun sleeps once it has sent SIGCONT to all ranks. It sends SIGCONT also after Ctrl-Z.
        bool ends = ms__launcher_ends_job();
        if (ends) {
            atomic_store(&asked.at, continued);
            atomic_fetch_or(&asked.requests, 2);
        }
        if (ends || ms__now_ns() - continued > 1000000000) atomic_store(&asked.continued_at, 0);
    }
    int s = atomic_exchange(&asked.requests, 0);
    *at = (double)atomic_load(&asked.at) * 1e-9;
    return s & 2 ? 2 : s;
}
