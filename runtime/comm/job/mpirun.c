// SPDX-License-Identifier: MIT
// comm/job/mpirun.c -- a library that scripts/train and the prompt preload into mpirun. Ranks do not load it.
//
// Loopback: mpirun listens on every address of the host for daemons on other hosts, and no setting changes that. If all
// ranks are on one host, this library binds these sockets to the loopback address.
//
// SIGTERM: mpirun answers it by killing the ranks, and ends with status 1. This library turns it into SIGUSR2, which
// mpirun forwards: the ranks save a checkpoint, and mpirun ends with their status. It sends SIGUSR2 again every second,
// because mpirun drops signals while it starts the ranks. A second SIGTERM makes mpirun kill the ranks.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int one_host;

// Whether a resource manager or a host file may name several hosts.
static int may_be_several_hosts(void)
{
    static const char *const names[] = { "SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE",
                                         "OMPI_MCA_orte_default_hostfile" };
    for (size_t k = 0; k < sizeof names / sizeof *names; k++)
        if (getenv(names[k])) return 1;
    return 0;
}

__attribute__((visibility("default"))) int bind(int fd, const struct sockaddr *address, socklen_t n)
{
    static int (*next)(int, const struct sockaddr *, socklen_t);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "bind");
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    if (!one_host) return next(fd, address, n);
    if (address->sa_family == AF_INET && n >= sizeof v4) {
        memcpy(&v4, address, sizeof v4);
        if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
            v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            return next(fd, (struct sockaddr *)&v4, sizeof v4);
        }
    } else if (address->sa_family == AF_INET6 && n >= sizeof v6) {
        memcpy(&v6, address, sizeof v6);
        if (memcmp(&v6.sin6_addr, &in6addr_any, sizeof v6.sin6_addr) == 0) {
            v6.sin6_addr = in6addr_loopback;
            return next(fd, (struct sockaddr *)&v6, sizeof v6);
        }
    }
    return next(fd, address, n);
}

static void *term_thread(void *unused)
{
    (void)unused;
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    while (sigwaitinfo(&term, NULL) != SIGTERM) {}
    do kill(getpid(), SIGUSR2);
    while (sigtimedwait(&term, NULL, &(struct timespec) { .tv_sec = 1 }) != SIGTERM);
    kill(getpid(), SIGINT);
    return NULL;
}

__attribute__((constructor)) static void loaded(void)
{
    const char *name = program_invocation_short_name;
    if (strcmp(name, "mpirun") != 0 && strcmp(name, "mpiexec") != 0 && strcmp(name, "orterun") != 0) return;
    one_host = !may_be_several_hosts();
    // Restores for the ranks the LD_PRELOAD that scripts/train was started with.
    const char *before = getenv("LD_PRELOAD_OF_RANKS");
    if (before && *before) setenv("LD_PRELOAD", before, 1);
    else unsetenv("LD_PRELOAD");
    unsetenv("LD_PRELOAD_OF_RANKS");
    // mpirun's threads inherit the mask; mpirun unblocks all signals in the ranks.
    sigset_t term;
    pthread_t t;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &term, NULL);
    if (pthread_create(&t, NULL, term_thread, NULL) == 0) pthread_detach(t);
    else pthread_sigmask(SIG_UNBLOCK, &term, NULL);
}
