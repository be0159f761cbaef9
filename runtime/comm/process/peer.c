// SPDX-License-Identifier: MIT
// comm/process/peer.c -- observes processes of peers on this node, through /proc and through the page on which each
// engine counts its calls. This works for peers that are stopped, that loop in Lua, or that have not joined the job
// yet.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/activity.h"
#include "base/launcher.h"
#include "comm/process/process.h"

static const char page_name[] = "moonshard-activity";

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
static uint64_t transferred_bytes(int pid)
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
    ms_progress now = { page ? __atomic_load_n(&page->calls, __ATOMIC_RELAXED) : 0, transferred_bytes(pid), run,
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

int ms__peer_rank(int pid)
{
    static char text[1 << 17];
    return ms__pmix_rank(text, ms__peer_file(pid, "environ", text, sizeof text));
}
