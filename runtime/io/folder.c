// SPDX-License-Identifier: MIT
// io/folder.c -- small files, and folders that are replaced as a whole.
//
// A complete folder gets its name by one rename, which exchanges it with an existing folder of that name, so that at
// every moment one of them has the name. It is made in a temporary folder beside the target:
//   NAME.tmp-<16 random digits>/owner        its process: boot, process namespace, number and start time
//   NAME.tmp-<16 random digits>/checkpoint/  the new folder; after the exchange, the old one
// Every step uses descriptors of folders that were opened once, without following symbolic links. Only files whose
// names match those written by saves are deleted.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/thread.h"
#include "io/files.h"

// ---- small files --------------------------------------------------------------------------------

ms_status ms_file_put(const char *path, const char *data, double n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) return ms__io_failed("save", "create", path);
    ms_status st = ms__file_write(fd, path, data, (uint64_t)n, 0);
    if (!st && fsync(fd)) st = ms__io_failed("save", "sync", path);
    if (close(fd) && !st) st = ms__io_failed("save", "close", path);
    return st;
}

ms_status ms_file_get(const char *path, const char *who, char **out, double *n)
{
    int fd;
    uint64_t size;
    MS_TRY(ms__file_open(&fd, &size, path, who));
    char *data = NULL;
    ms_status st = MS_OK;
    if (size > 1u << 30)
        st = ms__fail(MS_EIO, "%s: '%s' has %llu bytes; at most 1 GiB is read", who, path, (unsigned long long)size);
    else if (!(data = malloc(size + 1))) st = ms__no_memory(size + 1, who, "'%s'", path);
    else st = ms__file_read(fd, path, data, size, 0, who);
    close(fd);
    if (st) {
        free(data);
        return st;
    }
    *out = data;
    *n = (double)size;
    return MS_OK;
}

void ms_file_free(char *data) { free(data); }

void ms_file_sum(const char *data, double n, char *out)
{
    ms_hash h;
    ms__hash_begin(&h);
    ms__hash_add(&h, data, (size_t)n);
    ms__hash_text(ms__hash_end(&h), out);
    out[16] = 0;
}

ms_status ms_folder_sync(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return ms__io_failed("save", "open folder", path);
    ms_status st = ms__folder_sync(fd, path);
    close(fd);
    return st;
}

ms_status ms_folder_list(const char *path, const char *who, char **out, double *n)
{
    size_t length = 0;
    char *text = NULL;
    DIR *d = opendir(path);
    FILE *f = d ? open_memstream(&text, &length) : NULL;
    ms_status st = !d   ? ms__io_failed(who, "open folder", path)
                   : !f ? ms__no_memory(BUFSIZ, who, "the files in '%s'", path)
                        : MS_OK;
    while (!st) {
        errno = 0;  // to distinguish an error of readdir from the end
        struct dirent *e = readdir(d);
        if (!e && errno) st = ms__io_failed(who, "read folder", path);
        if (!e) break;
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) fprintf(f, "%s/", e->d_name);
    }
    if (f && fclose(f) && !st) st = ms__no_memory(length, who, "the files in '%s'", path);
    if (d) closedir(d);
    if (st) {
        free(text);
        return st;
    }
    *out = text;
    *n = (double)length;
    return MS_OK;
}

// ---- the owner of a temporary folder ------------------------------------------------------------

enum { OWNER = 256, FOLDER = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };

// Reads the beginning of a regular file as a string; "" for other files, or if it cannot be read.
static void beginning(int folder, const char *path, char *out, size_t size)
{
    struct stat info;
    ssize_t n = -1;
    int fd = openat(folder, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) n = read(fd, out, size - 1);
    if (fd >= 0) close(fd);
    out[n > 0 ? n : 0] = 0;
}

// Identifies the boot and the process namespace, within which process numbers are comparable; "" if /proc lacks them.
static void here(char *out, size_t size)
{
    char boot[64], namespace[64];
    ssize_t n = readlink("/proc/self/ns/pid", namespace, sizeof namespace - 1);
    namespace[n > 0 ? n : 0] = 0;
    beginning(AT_FDCWD, "/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    boot[strcspn(boot, "\n")] = 0;
    *out = 0;
    if (*boot && *namespace) snprintf(out, size, "%s %s", boot, namespace);
}

// The start time of a process, in clock ticks since boot; "" if there is no such process or it is a zombie.
static void start_of(long pid, char *out, size_t size)
{
    char path[32], stat[1024], *at;
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    beginning(AT_FDCWD, path, stat, sizeof stat);
    *out = 0;
    at = strrchr(stat, ')');  // the program's name may contain blanks
    if (!at || !at[1] || strchr("ZX", at[2])) return;
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    if (at) snprintf(out, size, "%.*s", (int)strcspn(at + 1, " \n"), at + 1);
}

static void owner_text(char *out)
{
    char host[160], start[32];
    here(host, sizeof host);
    start_of((long)getpid(), start, sizeof start);
    snprintf(out, OWNER, "moonshard %s %ld %s\n", *host ? host : "unknown unknown", (long)getpid(),
             *start ? start : "unknown");
}

// Whether the process that made a temporary folder has certainly ended: it belonged to this boot and namespace and no
// longer exists.
static bool abandoned(int folder)
{
    char text[OWNER], host[160], boot[64], namespace[64], start[32], now[32];
    long pid;
    beginning(folder, "owner", text, sizeof text);
    here(host, sizeof host);
    if (sscanf(text, "moonshard %63s %63s %ld %31s", boot, namespace, &pid, start) != 4) return false;
    snprintf(text, sizeof text, "%s %s", boot, namespace);
    if (strcmp(text, host) || !strcmp(start, "unknown")) return false;
    start_of(pid, now, sizeof now);
    return strcmp(start, now) != 0;
}

// ---- removing -----------------------------------------------------------------------------------

static const char *skip_set(const char *p, int n, const char *set)
{
    return p && strspn(p, set) >= (size_t)n ? p + n : NULL;
}

static const char *skip_word(const char *p, const char *word)
{
    return p && !strncmp(p, word, strlen(word)) ? p + strlen(word) : NULL;
}

// Whether a name is index.json, rank-00000.safetensors, rank-00000-<16 digits>.safetensors, or a temporary name for one
// of them.
static bool is_ours(const char *name)
{
    const char *hex = "0123456789abcdef", *p = skip_word(name, "index.json");
    if (!p) {
        p = skip_set(skip_word(name, "rank-"), 5, "0123456789");
        if (p && *p == '-') p = skip_set(p + 1, 16, hex);
        p = skip_word(p, ".safetensors");
    }
    if (p && *p) p = skip_set(skip_word(p, ".tmp-"), 16, hex);
    return p && !*p;
}

// Removes a temporary folder and the files that a save wrote to it. Keeps other files and the folders that contain
// them. Closes the descriptor.
static void remove_temporary(int parent, int folder, const char *name)
{
    int sub = openat(folder, "checkpoint", FOLDER);
    DIR *d = sub < 0 ? NULL : fdopendir(sub);
    for (struct dirent *e; d && (e = readdir(d));)
        if (is_ours(e->d_name)) unlinkat(sub, e->d_name, 0);
    if (d) closedir(d);
    else if (sub >= 0) close(sub);
    if (unlinkat(folder, "checkpoint", AT_REMOVEDIR) == 0 || errno == ENOENT) unlinkat(folder, "owner", 0);
    close(folder);
    unlinkat(parent, name, AT_REMOVEDIR);
}

// For a folder whose owner file is missing or empty: its process ended before it saved any file. Removes only empty
// folders and the empty owner file, because all other files belong to the user.
static void remove_empty(int parent, int folder, const char *name)
{
    char text[OWNER];
    struct stat st;
    beginning(folder, "owner", text, sizeof text);
    if (*text) return;
    unlinkat(folder, "checkpoint", AT_REMOVEDIR);
    if (fstatat(folder, "owner", &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) && st.st_size == 0)
        unlinkat(folder, "owner", 0);
    unlinkat(parent, name, AT_REMOVEDIR);
}

static void sweep(const ms_place *place)
{
    int fd = openat(place->folder, ".", FOLDER);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d && fd >= 0) close(fd);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (!ms__is_temporary(e->d_name, place->name)) continue;
        int folder = openat(fd, e->d_name, FOLDER);
        if (folder < 0) continue;
        if (abandoned(folder)) {
            remove_temporary(fd, folder, e->d_name);
        } else {
            remove_empty(fd, folder, e->d_name);
            close(folder);
        }
    }
    if (d) closedir(d);
}

// ---- a folder that is replaced ------------------------------------------------------------------

struct ms_folder {
    ms_place place;
    char temporary[MS_TEMPORARY];  // name of the temporary folder
    char *made;                    // path of the new folder in it
    int fd;                        // descriptor of the temporary folder; -1: none
    int old;            // descriptor of the folder with this name, while its files are replaced; -1: not open
    struct stat there;  // the folder that has the name; st_mode 0: none
    bool later;         // remove the temporary folder in a thread
};

static void folder_free(ms_folder *f)
{
    if (f->fd >= 0) remove_temporary(f->place.folder, f->fd, f->temporary);
    if (f->old >= 0) close(f->old);
    ms__place_clear(&f->place);
    free(f->made);
    free(f);
}

ms_status ms_folder_look(ms_folder *f)
{
    if (fstatat(f->place.folder, f->place.name, &f->there, AT_SYMLINK_NOFOLLOW)) {
        f->there.st_mode = 0;
        return errno == ENOENT ? MS_OK : ms__io_failed("save", "look at", f->place.path);
    }
    return S_ISDIR(f->there.st_mode) ? MS_OK : ms__fail(MS_EIO, "save: '%s' is not a folder", f->place.path);
}

ms_folder *ms_folder_new(const char *path)
{
    ms_folder *f = calloc(1, sizeof *f);
    if (!f) {
        ms__no_memory(sizeof *f, "save", "the folder '%s'", path);
        return NULL;
    }
    f->fd = f->old = f->place.folder = -1;
    if (ms__place(&f->place, path, "save") || ms_folder_look(f)) {
        folder_free(f);
        return NULL;
    }
    return f;
}

const char *ms_folder_path(const ms_folder *f) { return f->place.path; }
const char *ms_folder_made(const ms_folder *f) { return f->made; }

ms_status ms_folder_make(ms_folder *f)
{
    sweep(&f->place);
    char text[OWNER];
    size_t before = (size_t)(f->place.name - f->place.path), size = before + MS_TEMPORARY + 16;
    MS_TRY(ms__temporary_name(f->place.name, f->temporary));
    f->made = malloc(size);
    if (!f->made) return ms__no_memory(size, "save", "the folder '%s'", f->place.path);
    snprintf(f->made, size, "%.*s%s/checkpoint", (int)before, f->place.path, f->temporary);
    if (mkdirat(f->place.folder, f->temporary, 0777)) return ms__io_failed("save", "create the folder", f->made);
    f->fd = openat(f->place.folder, f->temporary, FOLDER);
    if (f->fd < 0) {
        ms_status st = ms__io_failed("save", "open folder", f->made);
        unlinkat(f->place.folder, f->temporary, AT_REMOVEDIR);
        return st;
    }
    owner_text(text);
    int fd = openat(f->fd, "owner", O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    ms_status st = fd < 0 ? ms__io_failed("save", "create the owner's file of", f->made)
                          : ms__file_write(fd, f->made, text, strlen(text), 0);
    if (fd >= 0) close(fd);
    if (!st && mkdirat(f->fd, "checkpoint", 0777)) st = ms__io_failed("save", "create the folder", f->made);
    return st;
}

static int rename_to(ms_folder *f, unsigned flags)
{
    return renameat2(f->fd, "checkpoint", f->place.folder, f->place.name, flags);
}

static bool no_flags(void) { return errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP; }

static ms_status rename_failed(const ms_folder *f)
{
    return ms__fail(MS_EIO, "save: cannot rename '%s' to '%s': %s", f->made, f->place.path, strerror(errno));
}

static ms_status replaced(const ms_folder *f)
{
    return ms__fail(MS_EIO, "save: '%s' was replaced by another process while this one saved there", f->place.path);
}

static ms_status exchange(ms_folder *f, int *inside)
{
    struct stat old;
    if (!f->there.st_mode)
        return ms__fail(MS_EIO, "save: '%s' was made by another process while this one saved there", f->place.path);
    if (rename_to(f, RENAME_EXCHANGE)) {
        *inside = no_flags();
        return *inside ? MS_OK
                       : ms__fail(MS_EIO, "save: cannot exchange '%s' and '%s': %s", f->made, f->place.path,
                                  strerror(errno));
    }
    ms_status st = MS_OK;
    if (fstatat(f->fd, "checkpoint", &old, AT_SYMLINK_NOFOLLOW)) st = ms__io_failed("save", "look at", f->made);
    else if (old.st_dev != f->there.st_dev || old.st_ino != f->there.st_ino) st = replaced(f);
    else st = ms__place_sync(&f->place);
    // On failure give the old folder its name back.
    if (st && rename_to(f, RENAME_EXCHANGE)) {
        close(f->fd);  // otherwise ms_folder_free would remove the old folder
        f->fd = -1;
    }
    return st;
}

ms_status ms_folder_commit(ms_folder *f, int later, int *inside)
{
    *inside = 0;
    f->later = later;
    if (rename_to(f, RENAME_NOREPLACE) == 0) return ms__place_sync(&f->place);
    if (errno == EEXIST) return exchange(f, inside);
    if (!no_flags()) return rename_failed(f);
    if (renameat(f->fd, "checkpoint", f->place.folder, f->place.name) == 0) return ms__place_sync(&f->place);
    *inside = errno == ENOTEMPTY || errno == EEXIST;
    return *inside ? MS_OK : rename_failed(f);
}

// ---- replacing files of an existing folder, where two folders cannot be exchanged ---------------

static ms_status open_old(ms_folder *f)
{
    struct stat s;
    if (f->old >= 0) return MS_OK;
    f->old = openat(f->place.folder, f->place.name, FOLDER);
    if (f->old < 0 || fstat(f->old, &s)) return ms__io_failed("save", "open folder", f->place.path);
    if (s.st_dev == f->there.st_dev && s.st_ino == f->there.st_ino) return MS_OK;
    close(f->old);
    f->old = -1;
    return replaced(f);
}

ms_status ms_folder_move_in(ms_folder *f, const char *from, const char *to)
{
    MS_TRY(open_old(f));
    int made = openat(f->fd, "checkpoint", FOLDER);
    int rc = made < 0 ? -1 : renameat(made, from, f->old, to);
    ms_status st = rc == 0 ? MS_OK
                           : ms__fail(MS_EIO, "save: cannot rename '%s/%s' to '%s/%s': %s", f->made, from,
                                      f->place.path, to, strerror(errno));
    if (made >= 0) close(made);
    return st;
}

ms_status ms_folder_remove(ms_folder *f, const char *name)
{
    MS_TRY(open_old(f));
    return unlinkat(f->old, name, 0) == 0 ? MS_OK : ms__io_failed("save", "remove a file of", f->place.path);
}

// Freeing the blocks of a large file can take longer than writing them, so a thread removes folders: one at a time. The
// process waits for it before it ends.
static struct {
    pthread_t thread;
    bool runs;
} removal;

static void *remove_in_thread(void *f)
{
    folder_free(f);
    return NULL;
}

__attribute__((destructor)) static void removal_ends(void)
{
    if (removal.runs) pthread_join(removal.thread, NULL);
    removal.runs = false;
}

void ms_folder_free(ms_folder *f)
{
    if (!f) return;
    removal_ends();
    removal.runs = f->later && ms__thread_start(&removal.thread, remove_in_thread, f) == 0;
    if (!removal.runs) folder_free(f);
}
