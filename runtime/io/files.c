// SPDX-License-Identifier: MIT
// io/files.c -- resolved paths, complete reads and writes, XXH64 (files.h).
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/files.h"

ms_status ms__io_failed(const char *who, const char *doing, const char *path)
{
    return ms__fail(MS_EIO, "%s: cannot %s '%s': %s", who, doing, path, strerror(errno));
}

// ---- paths --------------------------------------------------------------------------------------

// *out: the absolute path without symbolic links; the caller frees it. The last part of the path need not exist.
static ms_status resolve(char **out, char *path, const char *who)
{
    struct stat info;
    bool there = lstat(path, &info) == 0;
    if (!there && errno != ENOENT && errno != ENOTDIR) return ms__io_failed(who, "access", path);
    if (there && S_ISLNK(info.st_mode)) {
        *out = realpath(path, NULL);
        if (*out) return MS_OK;
        return ms__fail(
            MS_EIO, "%s: '%s' is a symbolic link whose target cannot be reached: %s; remove it, or name another path",
            who, path, strerror(errno));
    }
    char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    if (!*name || !strcmp(name, ".") || !strcmp(name, "..")) {
        *out = realpath(path, NULL);
        return *out ? MS_OK : ms__io_failed(who, "access", path);
    }
    if (slash) *slash = 0;
    char *folder = realpath(!slash ? "." : slash == path ? "/" : path, NULL);
    int error = errno;
    if (slash) *slash = '/';
    errno = error;
    if (!folder) return ms__io_failed(who, "create", path);
    size_t size = strlen(folder) + strlen(name) + 2;
    *out = malloc(size);
    if (*out) snprintf(*out, size, "%s/%s", strcmp(folder, "/") ? folder : "", name);
    free(folder);
    return *out ? MS_OK : ms__no_memory(size, who, "the path '%s'", path);
}

ms_status ms__place(ms_place *out, const char *path, const char *who)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    char *copy = strndup(path, n), *whole = NULL;
    if (!copy) return ms__no_memory(n + 1, who, "the path '%s'", path);
    ms_status st = resolve(&whole, copy, who);
    free(copy);
    if (st) return st;
    char *slash = strrchr(whole, '/');  // whole is absolute, so it has a slash
    if (!slash[1]) {
        free(whole);
        return ms__fail(MS_EIO, "%s: '%s' is the root folder, expected a path below it", who, path);
    }
    char kept = slash[slash == whole];
    slash[slash == whole] = 0;
    int folder = open(whole, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) st = ms__io_failed(who, "open the folder", whole);
    slash[slash == whole] = kept;
    if (st) free(whole);
    else *out = (ms_place) { folder, whole, slash + 1 };
    return st;
}

void ms__place_clear(ms_place *p)
{
    if (p->folder >= 0) close(p->folder);
    free(p->path);
    *p = (ms_place) { .folder = -1 };
}

// Syncs a folder. File systems that cannot sync folders return EINVAL; they need no sync.
ms_status ms__folder_sync(int fd, const char *path)
{
    return fsync(fd) && errno != EINVAL ? ms__io_failed("save", "sync the folder", path) : MS_OK;
}

ms_status ms__place_sync(const ms_place *p) { return ms__folder_sync(p->folder, p->path); }

// ---- temporary names ----------------------------------------------------------------------------

typedef struct {
    char kind[4], random[17], host[17];  // host: zeros if /proc does not show the boot or the PID namespace
    long pid;
    unsigned long long start;  // in clock ticks since the boot; 0: unknown
} origin;

enum { NAME = 160, SUFFIX = 95 };  // longer names are cut off: file systems allow 255 bytes
enum { LATER = 500 };              // 5 seconds

static void origin_text(const origin *o, char *out)
{
    snprintf(out, SUFFIX, ".%s-%s-%s-%ld-%llu", o->kind, o->random, o->host, o->pid, o->start);
}

static bool origin_of(const char *text, origin *o)
{
    char again[SUFFIX];
    if (sscanf(text, ".%3[a-z]-%16[0-9a-f]-%16[0-9a-f]-%ld-%llu", o->kind, o->random, o->host, &o->pid, &o->start) != 5)
        return false;
    origin_text(o, again);
    return !strcmp(text, again) && strlen(o->random) == 16 && strlen(o->host) == 16 && o->pid > 0 &&
           (!strcmp(o->kind, "tmp") || !strcmp(o->kind, "old"));
}

// Stores the beginning of a file of /proc in out, as a string; "" if it cannot be read.
static void beginning(const char *path, char *out, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, out, size - 1);
    if (fd >= 0) close(fd);
    out[n > 0 ? n : 0] = 0;
}

// Writes a hash of the boot and the PID namespace, 16 digits: PIDs are comparable only between processes with equal
// hashes.
static void host_of_this_process(char *out)
{
    char boot[64], namespace[64];
    ssize_t n = readlink("/proc/self/ns/pid", namespace, sizeof namespace - 1);
    namespace[n > 0 ? n : 0] = 0;
    beginning("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    ms_hash h;
    ms__hash_begin(&h);
    ms__hash_add(&h, boot, strlen(boot));
    ms__hash_add(&h, namespace, strlen(namespace));
    memset(out, '0', 16);
    out[16] = 0;
    if (*boot && *namespace) ms__hash_text(ms__hash_end(&h), out);
}

// Sets *out to the start time of a process, 0 for a zombie. Returns false if /proc does not show it.
static bool start_of(long pid, unsigned long long *out)
{
    char path[32], stat[1024], *at;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    beginning(path, stat, sizeof stat);
    at = strrchr(stat, ')');  // the program's name may contain blanks
    if (!at || !at[1]) return false;
    *out = 0;
    if (strchr("ZX", at[2])) return true;
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at && sscanf(at, " %llu", out) == 1;
}

// Whether the process of an origin has certainly ended. kill also finds processes of other users, which /proc may hide.
// An emulator (qemu) shows a process a start time of its own, that of the emulation; it is a little later.
static bool has_ended(const origin *o)
{
    char host[17];
    unsigned long long start;
    host_of_this_process(host);
    if (strcmp(o->host, host) || !strcmp(host, "0000000000000000")) return false;
    if (kill((pid_t)o->pid, 0) && errno == ESRCH) return true;
    return o->start && start_of(o->pid, &start) && (!start || start > o->start || o->start - start > LATER);
}

ms_status ms__temporary_name(const char *name, char *out)
{
    uint64_t random;
    char suffix[SUFFIX];
    origin o = { .kind = "tmp", .pid = (long)getpid() };
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return ms__io_failed("save", "make a temporary name for", name);
    ms__hash_text(random, o.random);
    host_of_this_process(o.host);
    (void)start_of(o.pid, &o.start);
    origin_text(&o, suffix);
    snprintf(out, MS_TEMPORARY, "%.*s%s", NAME, name, suffix);
    return MS_OK;
}

void ms__set_temporary_kind(char *temporary, const char *kind)
{
    char *last = temporary;
    for (char *p = temporary; (p = strchr(p, '.')); p++) last = p;
    memcpy(last + 1, kind, 3);
}

bool ms__is_temporary_suffix(const char *text)
{
    origin o;
    return origin_of(text, &o);
}

int ms_folder_left(const char *entry, const char *name)
{
    origin o;
    size_t n = strlen(name) < NAME ? strlen(name) : NAME;
    if (strncmp(entry, name, n) || !origin_of(entry + n, &o)) return MS_LEFT_NOT;
    if (!has_ended(&o)) return MS_LEFT_RUNS;
    return strcmp(o.kind, "old") ? MS_LEFT_UNFINISHED : MS_LEFT_REPLACED;
}

void ms__place_sweep(const ms_place *p)
{
    struct stat info;
    int fd = openat(p->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d && fd >= 0) close(fd);
    for (struct dirent *e; d && (e = readdir(d));)
        if (ms_folder_left(e->d_name, p->name) == MS_LEFT_UNFINISHED &&
            fstatat(fd, e->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(info.st_mode))
            unlinkat(fd, e->d_name, 0);
    if (d) closedir(d);
}

// ---- reading and writing ------------------------------------------------------------------------

ms_status ms__file_write(int fd, const char *path, const void *data, uint64_t bytes, uint64_t at)
{
    const char *p = data;
    while (bytes > 0) {
        MS_TRY(ms__check_interrupt());
        ssize_t n = pwrite(fd, p, bytes < (64u << 20) ? bytes : 64u << 20, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return ms__io_failed("save", "write", path);
        p += n;
        at += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return MS_OK;
}

ms_status ms__file_read(int fd, const char *path, void *data, uint64_t bytes, uint64_t at, const char *who)
{
    char *p = data;
    while (bytes > 0) {
        MS_TRY(ms__check_interrupt());
        ssize_t n = pread(fd, p, bytes < (64u << 20) ? bytes : 64u << 20, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return ms__io_failed(who, "read", path);
        if (n == 0) return ms__fail(MS_EIO, "%s: unexpected end of file in '%s'", who, path);
        p += n;
        at += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return MS_OK;
}

ms_status ms__file_path(const char *path, const char *who)
{
    size_t n = strlen(path);
    if (n == 0) return ms__fail(MS_EINVAL, "%s: the path is empty", who);
    if (path[n - 1] != '/') return MS_OK;
    return ms__fail(MS_EINVAL, "%s: '%s' ends in '/', like a folder; expected the name of a file", who, path);
}

ms_status ms__file_open(int *out, uint64_t *size, const char *path, const char *who)
{
    struct stat info;
    MS_TRY(ms__file_path(path, who));
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);  // O_NONBLOCK: a pipe must not block
    if (fd < 0) return ms__io_failed(who, "open", path);
    ms_status st = MS_OK;
    if (fstat(fd, &info)) st = ms__io_failed(who, "read", path);
    else if (!S_ISREG(info.st_mode)) st = ms__fail(MS_EIO, "%s: '%s' is not a regular file", who, path);
    if (st) {
        close(fd);
        return st;
    }
    *out = fd;
    *size = (uint64_t)info.st_size;
    return MS_OK;
}

// ---- XXH64 --------------------------------------------------------------------------------------

static const uint64_t P1 = 0x9E3779B185EBCA87ull, P2 = 0xC2B2AE3D27D4EB4Full, P3 = 0x165667B19E3779F9ull,
                      P4 = 0x85EBCA77C2B2AE63ull, P5 = 0x27D4EB2F165667C5ull;

static uint64_t rotate(uint64_t x, int r) { return x << r | x >> (64 - r); }
static uint64_t load64(const unsigned char *p)
{
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}
static uint64_t round64(uint64_t lane, uint64_t x) { return rotate(lane + x * P2, 31) * P1; }

void ms__hash_begin(ms_hash *h) { *h = (ms_hash) { .lane = { P1 + P2, P2, 0, 0 - P1 } }; }

static void stripes(ms_hash *h, const unsigned char *p, size_t n)
{
    uint64_t a = h->lane[0], b = h->lane[1], c = h->lane[2], d = h->lane[3];
    for (; n >= 32; n -= 32, p += 32) {
        a = round64(a, load64(p));
        b = round64(b, load64(p + 8));
        c = round64(c, load64(p + 16));
        d = round64(d, load64(p + 24));
    }
    h->lane[0] = a;
    h->lane[1] = b;
    h->lane[2] = c;
    h->lane[3] = d;
}

void ms__hash_add(ms_hash *h, const void *data, size_t n)
{
    const unsigned char *p = data;
    h->total += n;
    if (h->n_rest) {
        size_t m = 32 - (size_t)h->n_rest < n ? 32 - (size_t)h->n_rest : n;
        memcpy(h->rest + h->n_rest, p, m);
        h->n_rest += (int)m;
        p += m;
        n -= m;
        if (h->n_rest < 32) return;
        stripes(h, h->rest, 32);
    }
    size_t whole = n & ~(size_t)31;
    stripes(h, p, whole);
    h->n_rest = (int)(n - whole);
    if (h->n_rest) memcpy(h->rest, p + whole, n - whole);
}

uint64_t ms__hash_end(const ms_hash *h)
{
    uint64_t x = P5;
    if (h->total >= 32) {
        x = rotate(h->lane[0], 1) + rotate(h->lane[1], 7) + rotate(h->lane[2], 12) + rotate(h->lane[3], 18);
        for (int k = 0; k < 4; k++) x = (x ^ round64(0, h->lane[k])) * P1 + P4;
    }
    x += h->total;
    const unsigned char *p = h->rest;
    int n = h->n_rest;
    for (; n >= 8; n -= 8, p += 8) x = rotate(x ^ round64(0, load64(p)), 27) * P1 + P4;
    if (n >= 4) {
        uint32_t w;
        memcpy(&w, p, 4);
        x = rotate(x ^ w * P1, 23) * P2 + P3;
        n -= 4;
        p += 4;
    }
    for (; n > 0; n--, p++) x = rotate(x ^ *p * P5, 11) * P1;
    x = (x ^ x >> 33) * P2;
    x = (x ^ x >> 29) * P3;
    return x ^ x >> 32;
}

void ms__hash_text(uint64_t hash, char *out)
{
    char text[17];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    memcpy(out, text, 16);
}
