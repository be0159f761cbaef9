// comm_clean.c -- what killed jobs left behind: Open MPI's segments under /dev/shm, 4 MiB a rank. (Ours have no
// names: memfds die with their processes.) A segment is stale when it is this user's, is a minute old, and no
// process of this machine that we may look at has it mapped.
#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "comm_internal.h"

enum { MAX_STALE = 256, NAME = 128 };

static const char folder[] = "/dev/shm";

// Strikes the names that some process has mapped. A process whose maps we may not read is another user's.
static int strike_mapped(char (*names)[NAME], int n)
{
    DIR *d = opendir("/proc");
    if (!d) return 0;
    for (struct dirent *e; n > 0 && (e = readdir(d));) {
        if (!isdigit((unsigned char)e->d_name[0])) continue;
        char path[300], line[600];
        snprintf(path, sizeof path, "/proc/%.20s/maps", e->d_name);
        FILE *f = fopen(path, "re");
        if (!f) continue;
        while (fgets(line, sizeof line, f)) {
            const char *at = strstr(line, "/dev/shm/vader_segment.");
            for (int k = 0; at && k < n; k++)
                if (strncmp(at + sizeof folder, names[k], strlen(names[k])) == 0) {
                    memcpy(names[k], names[--n], NAME);
                    break;
                }
        }
        fclose(f);
    }
    closedir(d);
    return n;
}

void ms__comm_clean(void)
{
    static char names[MAX_STALE][NAME];
    int n = 0;
    DIR *d = opendir(folder);
    if (!d) return;
    time_t now = time(NULL);
    for (struct dirent *e; n < MAX_STALE && (e = readdir(d));) {
        struct stat st;
        size_t length = strlen(e->d_name);
        if (strncmp(e->d_name, "vader_segment.", 14) != 0 || length >= NAME) continue;
        if (fstatat(dirfd(d), e->d_name, &st, 0) != 0 || !S_ISREG(st.st_mode) || st.st_uid != getuid() || now - st.st_mtime < 60) continue;
        memcpy(names[n++], e->d_name, length + 1);
    }
    if (n > 0) n = strike_mapped(names, n);
    for (int k = 0; k < n; k++) unlinkat(dirfd(d), names[k], 0);
    closedir(d);
}
