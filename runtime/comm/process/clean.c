// SPDX-License-Identifier: MIT
// comm/process/clean.c -- removes files left by killed jobs: Open MPI's segments (4 MiB per rank) and control memories.
// (A running job unlinks its control memory as soon as all ranks have opened it.) A file is stale if it belongs to this
// user, was made on this host, and no process has it open or mapped. A file in use is never stale: its maker keeps it
// open until it is mapped, and mapped until the process exits.
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "comm/process/process.h"

enum { MAX_STALE = 256, NAME = 200 };

static struct {
    char names[MAX_STALE][NAME];  // whole paths
    int n;
} stale;

static void list_files(const char *folder)
{
    char mine[NAME], host[128] = "";
    gethostname(host, sizeof host - 1);
    host[strcspn(host, ".")] = 0;
    int n = snprintf(mine, sizeof mine, "vader_segment.%s.%u.", host, (unsigned)getuid());
    DIR *d = opendir(folder);
    for (struct dirent *e; d && stale.n < MAX_STALE && (e = readdir(d));) {
        struct stat st;
        bool segment = strncmp(e->d_name, mine, (size_t)n) == 0;
        int pid, control = 0;
        if (!segment && (sscanf(e->d_name, CONTROL_NAME "%d-%*6[A-Za-z0-9]%n", &pid, &control) != 1 || control == 0 ||
                         e->d_name[control]))
            continue;
        if (fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode) ||
            st.st_uid != getuid())
            continue;
        if (snprintf(stale.names[stale.n], NAME, "%s/%s", folder, e->d_name) < NAME) stale.n++;
    }
    if (d) closedir(d);
}

// Unlists the files of this name: a process in another root (a container) has the same file under another path.
static void unlist_file(const char *path)
{
    const char *name = strrchr(path, '/');
    for (int k = 0; name && k < stale.n; k++)
        if (strcmp(name, strrchr(stale.names[k], '/')) == 0) memmove(stale.names[k--], stale.names[--stale.n], NAME);
}

// Whether an error hides what a process uses. One that has ended, or whose /proc this user cannot read, uses no file of
// this user's jobs.
static bool hidden(const void *opened)
{
    return !opened && errno != ENOENT && errno != ESRCH && errno != EACCES && errno != EPERM;
}

// Removes from the list the files that a process uses; all, if that is hidden. Checks the process's descriptors before
// its mappings, because a file is mapped before it is closed.
static void unlist_used_by(const char *pid)
{
    char path[300], to[NAME + 100], line[600];
    snprintf(path, sizeof path, "/proc/%.20s/fd", pid);
    DIR *d = opendir(path);
    if (hidden(d)) stale.n = 0;
    for (struct dirent *e; d && (e = readdir(d));) {
        ssize_t n = readlinkat(dirfd(d), e->d_name, to, sizeof to - 1);
        if (n <= 0) continue;
        to[n] = 0;
        unlist_file(to);
    }
    if (d) closedir(d);
    snprintf(path, sizeof path, "/proc/%.20s/maps", pid);
    FILE *f = fopen(path, "re");
    if (hidden(f)) stale.n = 0;
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        const char *at = strchr(line, '/');
        if (at) unlist_file(at);
    }
    if (f) fclose(f);
}

void ms__comm_clean(bool leaving)
{
    const char *temporary = getenv("TMPDIR");
    stale.n = 0;
    list_files("/dev/shm");
    list_files("/tmp");
    if (temporary && *temporary && strcmp(temporary, "/tmp") != 0) list_files(temporary);
    if (stale.n == 0) return;
    DIR *d = opendir("/proc");
    if (!d) return;
    for (struct dirent *e; stale.n > 0 && (e = readdir(d));)
        if (isdigit((unsigned char)e->d_name[0]) && !(leaving && atoi(e->d_name) == (int)getpid()))
            unlist_used_by(e->d_name);
    closedir(d);
    for (int k = 0; k < stale.n; k++) unlink(stale.names[k]);
}
