// SPDX-License-Identifier: MIT
// comm/process/launcher.c -- the process that started this rank, and how a rank exits under it.
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "comm/process/process.h"

ms_launched ms__launched;

int ms__launched_peers(int parent, int *pids, int room)
{
    int n = 0;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", parent);
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!isdigit((unsigned char)e->d_name[0])) continue;
        char name[64], list[1 << 14];
        snprintf(name, sizeof name, "task/%.20s/children", e->d_name);
        ms__peer_file(parent, name, list, sizeof list);
        for (char *at = list, *end; n < room; at = end) {
            long pid = strtol(at, &end, 10);
            if (end == at) break;
            pids[n++] = (int)pid;
        }
    }
    if (d) closedir(d);
    return n;
}

// Interrupts a sleep of mpirun. mpirun ends ranks with CONT, TERM and KILL and sleeps a second after each of the first
// two. SIGCHLD sent to its main thread, which is the one that sleeps, interrupts such a sleep; its handler looks for
// ended children and finds none. This process ignores TERM in order to interrupt the second sleep too: the SIGCHLD of
// its own death might be delivered to another thread.
void ms__wake_launcher(void)
{
    if (ms__launched.mpirun <= 1 || getppid() != ms__launched.mpirun) return;
    signal(SIGTERM, SIG_IGN);
    syscall(SYS_tgkill, ms__launched.mpirun, ms__launched.mpirun, SIGCHLD);
}

// Whether mpirun is ending the job: only then does it call nanosleep.
bool ms__launcher_ends_job(void)
{
    char text[64];
    ms__peer_file(ms__launched.mpirun, "wchan", text, sizeof text);
    return strstr(text, "nanosleep") != NULL;
}

void ms__end_settle(void)
{
    if (ms__launched.mpirun == 0) ms__nap(100 * 1000000);
}

// Whether mpirun hangs. If a rank dies while it connects, mpirun may wait forever for a lock held by a PMIx thread that
// has ended (PMIx 4.2: pmix_rte_finalize). In that case all its child processes are dead and it does not reap them.
static bool launcher_hangs(void)
{
    char text[512];
    int pids[256], n = ms__launched_peers(ms__launched.mpirun, pids, 256);
    ms__peer_file(ms__launched.mpirun, "wchan", text, sizeof text);
    bool hangs = n > 0 && strstr(text, "futex");
    for (int k = 0; k < n && hangs; k++) {
        ms__peer_file(pids[k], "stat", text, sizeof text);
        const char *state = strrchr(text, ')');
        hangs = state && state[1] && state[2] == 'Z';
    }
    return hangs;
}

static bool launcher_ended(int launcher)
{
    return poll(&(struct pollfd) { .fd = launcher, .events = POLLIN }, 1, 0) != 0;
}

void ms__fork_waker(void)
{
    static atomic_bool left;
    if (ms__launched.mpirun > 1 && getppid() == ms__launched.mpirun && !atomic_exchange(&left, true) && fork() == 0) {
        signal(SIGTERM, SIG_IGN);
        setpgid(0, 0);                             // mpirun sends KILL to the rank's process group
        for (int fd = 0; fd < 3; fd++) close(fd);  // mpirun waits until all writers of the rank's output have closed it
        syscall(SYS_close_range, 3, ~0u, 0);       // connections must end with the rank
        int launcher = (int)syscall(SYS_pidfd_open, ms__launched.mpirun, 0);
        for (int k = 0, hung = 0; k < 300 && !launcher_ended(launcher); k++) {
            hung = launcher_hangs() ? hung + 1 : 0;
            if (hung == 60) kill(ms__launched.mpirun, SIGKILL);
            else if (!hung) syscall(SYS_tgkill, ms__launched.mpirun, ms__launched.mpirun, SIGCHLD);
            ms__nap(5000000);
        }
        // mpirun waits until its daemons on other hosts have killed their ranks; for ever, if the link to one is lost.
        const char *pause = getenv("OMPI_MCA_odls_base_sigkill_timeout");
        int64_t until = ms__now_ns() + (10 + 2ll * (pause ? atoi(pause) : 1)) * 1000000000;
        while (!launcher_ended(launcher) && ms__now_ns() < until) ms__nap(50000000);
        if (!launcher_ended(launcher)) syscall(SYS_pidfd_send_signal, launcher, SIGKILL, NULL, 0);
        ms__comm_clean(true);
        _exit(0);
    }
}

_Noreturn void ms__exit_first(int code)
{
    ms__fork_waker();
    ms__end_settle();
    _exit(code);
}

// Binds mpirun's listening sockets to the loopback device. mpirun listens on every address of the host, for daemons on
// other hosts; to be called if all ranks are on this host, so that there are no daemons. Requires the right to ptrace
// mpirun; without it nothing changes.
void ms__launcher_to_loopback(void)
{
    char path[300], to[64];
    int launcher = (int)syscall(SYS_pidfd_open, ms__launched.mpirun, 0);
    snprintf(path, sizeof path, "/proc/%d/fd", (int)ms__launched.mpirun);
    DIR *d = launcher >= 0 ? opendir(path) : NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "/proc/%d/fd/%.20s", (int)ms__launched.mpirun, e->d_name);
        ssize_t n = readlink(path, to, sizeof to);
        if (n < 8 || memcmp(to, "socket:[", 8) != 0) continue;
        int fd = (int)syscall(SYS_pidfd_getfd, launcher, atoi(e->d_name), 0), listens = 0, family = 0;
        if (fd < 0) continue;
        socklen_t size = sizeof listens;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens &&
            getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &family, &size) == 0 && (family == AF_INET || family == AF_INET6))
            (void)setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 2);
        close(fd);
    }
    if (d) closedir(d);
    if (launcher >= 0) close(launcher);
}
