// SPDX-License-Identifier: MIT
// comm/job/peer.c -- observes processes of peers on this node, through /proc and through the page on which each engine
// counts its calls. This works for peers that are stopped, that loop in Lua, or that have not joined the job yet.
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "comm/internal.h"

static const char page_name[] = "moonshard-activity";

pid_t ms__launcher_pid;

void ms__activity_share(void)
{
    int fd = memfd_create(page_name, MFD_CLOEXEC);
    if (fd < 0) return;
    void *p = ftruncate(fd, 4096) == 0 ? mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (p == MAP_FAILED) close(fd);
    else ms__activity = p;  // keep fd open: peers find the page among this process's descriptors
}

const ms_activity *ms__peer_activity(int pid)
{
    char path[300], to[64], want[64];
    snprintf(want, sizeof want, "/memfd:%s (deleted)", page_name);
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *d = opendir(path);
    const ms_activity *page = NULL;
    for (struct dirent *e; d && !page && (e = readdir(d));) {
        snprintf(path, sizeof path, "/proc/%d/fd/%.20s", pid, e->d_name);
        ssize_t n = readlink(path, to, sizeof to - 1);
        if (n <= 0 || (to[n] = 0, strcmp(to, want) != 0)) continue;
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        // The owner creates the page and sets its size in two steps; reading beyond the size would kill this process.
        struct stat st;
        bool sized = fd >= 0 && fstat(fd, &st) == 0 && st.st_size >= 4096;
        void *p = sized ? mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
        if (fd >= 0) close(fd);
        if (p == MAP_FAILED) break;
        page = p;
    }
    if (d) closedir(d);
    return page;
}

size_t ms__peer_file(int pid, const char *name, char *text, size_t n)
{
    char path[100];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t at = 0;
    for (ssize_t got; fd >= 0 && at < n - 1 && (got = read(fd, text + at, n - 1 - at)) > 0;) at += (size_t)got;
    if (fd >= 0) close(fd);
    text[at] = 0;
    return at;
}

// Bytes that the process has read and written; 0: the kernel does not count them.
static uint64_t transferred(int pid)
{
    char text[512];
    uint64_t sum = 0;
    ms__peer_file(pid, "io", text, sizeof text);
    for (const char *name[] = { "rchar: ", "wchar: ", "\nread_bytes: " }, **p = name; p < name + 3; p++) {
        const char *at = strstr(text, *p);
        if (at) sum += strtoull(at + strlen(*p), NULL, 10);
    }
    return sum;
}

ms_peer_state ms__peer_watch(int pid, const ms_activity *page, ms_progress *before)
{
    char text[512];
    ms__peer_file(pid, "stat", text, sizeof text);
    const char *state = strrchr(text, ')');  // the command before it may contain blanks and parentheses
    char how = state && state[1] ? state[2] : 0;
    if (how == 'T' || how == 't') return PEER_STOPPED;
    ms__peer_file(pid, "schedstat", text, sizeof text);
    uint64_t run = strtoull(text, NULL, 10);
    ms_progress now = { page ? __atomic_load_n(&page->calls, __ATOMIC_RELAXED) : 0, transferred(pid), run,
                        ms__now_ns() };
    char children[32];
    snprintf(children, sizeof children, "task/%d/children", pid);
    bool busy = now.calls != before->calls || now.bytes != before->bytes ||
                (page && __atomic_load_n(&page->inside, __ATOMIC_RELAXED) > 0) ||
                ms__peer_file(pid, children, text, sizeof text) > 0;  // it runs another program
    if (busy) *before = now;
    // The process may wait for a processor or for a disk.
    bool held_up = how == 'D' || (how == 'R' && run - before->run < 20 * 1000000);
    return busy || held_up ? PEER_BUSY : PEER_IDLE;
}

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
    if (ms__launcher_pid <= 1 || getppid() != ms__launcher_pid) return;
    signal(SIGTERM, SIG_IGN);
    syscall(SYS_tgkill, ms__launcher_pid, ms__launcher_pid, SIGCHLD);
}

// Whether mpirun is ending the job: only then does it call nanosleep.
bool ms__launcher_ends_job(void)
{
    char text[64];
    ms__peer_file(ms__launcher_pid, "wchan", text, sizeof text);
    return strstr(text, "nanosleep") != NULL;
}

// Whether mpirun hangs. If a rank dies while it connects, mpirun may wait forever for a lock held by a PMIx thread that
// has ended (PMIx 4.2: pmix_rte_finalize). In that case all its child processes are dead and it does not reap them.
static bool launcher_hangs(void)
{
    char text[512];
    int pids[256], n = ms__launched_peers(ms__launcher_pid, pids, 256);
    ms__peer_file(ms__launcher_pid, "wchan", text, sizeof text);
    bool hangs = n > 0 && strstr(text, "futex");
    for (int k = 0; k < n && hangs; k++) {
        ms__peer_file(pids[k], "stat", text, sizeof text);
        const char *state = strrchr(text, ')');
        hangs = state && state[1] && state[2] == 'Z';
    }
    return hangs;
}

static bool has_ended(int launcher) { return poll(&(struct pollfd) { .fd = launcher, .events = POLLIN }, 1, 0) != 0; }

void ms__fork_waker(void)
{
    static atomic_bool left;
    if (ms__launcher_pid > 1 && getppid() == ms__launcher_pid && !atomic_exchange(&left, true) && fork() == 0) {
        signal(SIGTERM, SIG_IGN);
        setpgid(0, 0);                             // mpirun sends KILL to the rank's process group
        for (int fd = 0; fd < 3; fd++) close(fd);  // mpirun waits until all writers of the rank's output have closed it
        syscall(SYS_close_range, 3, ~0u, 0);       // connections must end with the rank
        int launcher = (int)syscall(SYS_pidfd_open, ms__launcher_pid, 0);
        for (int k = 0, hung = 0; k < 300 && !has_ended(launcher); k++) {
            hung = launcher_hangs() ? hung + 1 : 0;
            if (hung == 60) kill(ms__launcher_pid, SIGKILL);
            else if (!hung) syscall(SYS_tgkill, ms__launcher_pid, ms__launcher_pid, SIGCHLD);
            ms__nap(5000000);
        }
        // mpirun waits until its daemons on other hosts have killed their ranks; for ever, if the link to one is lost.
        const char *pause = getenv("OMPI_MCA_odls_base_sigkill_timeout");
        int64_t until = ms__now_ns() + (10 + 2ll * (pause ? atoi(pause) : 1)) * 1000000000;
        while (!has_ended(launcher) && ms__now_ns() < until) ms__nap(50000000);
        if (!has_ended(launcher)) syscall(SYS_pidfd_send_signal, launcher, SIGKILL, NULL, 0);
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
    int launcher = (int)syscall(SYS_pidfd_open, ms__launcher_pid, 0);
    snprintf(path, sizeof path, "/proc/%d/fd", (int)ms__launcher_pid);
    DIR *d = launcher >= 0 ? opendir(path) : NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "/proc/%d/fd/%.20s", (int)ms__launcher_pid, e->d_name);
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
