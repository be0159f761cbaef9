// SPDX-License-Identifier: MIT
// io/folder.c -- small files, and folders that are replaced as a whole.
//
// A finished folder gets its name by one rename, which exchanges it with an existing folder of that name: both names
// exist at every moment. The new folder is filled beside the target under the temporary name NAME.tmp-... (files.h),
// which becomes NAME.old-... before the exchange. A folder named NAME.tmp-... was therefore made by a save; one named
// NAME.old-... may be the user's until its content has been checked.
//
// Every step uses descriptors of folders that were opened once and without following links. Only files with the names
// that saves give are deleted.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
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
    if (fd < 0) return ms__io_failed("save", "open the folder", path);
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
    ms_status st = !d   ? ms__io_failed(who, "open the folder", path)
                   : !f ? ms__no_memory(BUFSIZ, who, "the list of names in '%s'", path)
                        : MS_OK;
    while (!st) {
        errno = 0;  // to distinguish an error of readdir from the end
        struct dirent *e = readdir(d);
        if (!e && errno) st = ms__io_failed(who, "read the folder", path);
        if (!e) break;
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) fprintf(f, "%s/", e->d_name);
    }
    if (f && fclose(f) && !st) st = ms__no_memory(length, who, "the list of names in '%s'", path);
    if (d) closedir(d);
    if (st) {
        free(text);
        return st;
    }
    *out = text;
    *n = (double)length;
    return MS_OK;
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

// Whether a save gives this name: index.json, index.json.inside, rank-00000.safetensors, rank-00000-<16
// digits>.safetensors, or a temporary name of the latter two.
static bool is_ours(const char *name)
{
    const char *p = skip_word(name, "index.json");
    if (p) return !*p || !strcmp(p, ".inside");
    p = skip_set(skip_word(name, "rank-"), 5, "0123456789");
    if (p && *p == '-') p = skip_set(p + 1, 16, "0123456789abcdef");
    p = skip_word(p, ".safetensors");
    return p && (!*p || ms__is_temporary_suffix(p));
}

enum { FOLDER = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };

// Removes a temporary folder and the files of a save in it; the index last, because it identifies the folder as a
// checkpoint. Other files, and the folders that contain them, stay.
static void remove_temporary(int parent, const char *name)
{
    bool all = true;
    int fd = openat(parent, name, FOLDER);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    while (d) {
        errno = 0;  // to distinguish an error of readdir from the end
        struct dirent *e = readdir(d);
        if (!e && errno) all = false;
        if (!e) break;
        if (is_ours(e->d_name) && strcmp(e->d_name, "index.json") && unlinkat(fd, e->d_name, 0)) all = false;
    }
    if (d && all) unlinkat(fd, "index.json", 0);
    if (d) closedir(d);
    else if (fd >= 0) close(fd);
    unlinkat(parent, name, AT_REMOVEDIR);
}

// ---- a folder that is replaced ------------------------------------------------------------------

struct ms_folder {
    ms_place place;
    char temporary[MS_TEMPORARY];  // name of the temporary folder
    char *made;                    // path of the temporary folder
    int fd;                        // descriptor of the temporary folder; -1: none
    int there;                     // descriptor of the folder that ms_folder_look found under the name; -1: none
    bool ours;                     // the temporary folder and its files may be removed
    bool later;                    // a thread removes the temporary folder
};

static void folder_free(ms_folder *f)
{
    if (f->ours) remove_temporary(f->place.folder, f->temporary);
    if (f->fd >= 0) close(f->fd);
    if (f->there >= 0) close(f->there);
    ms__place_clear(&f->place);
    free(f->made);
    free(f);
}

static bool is_same_file(int a, int b)
{
    struct stat x, y;
    if (a < 0 || b < 0) return a < 0 && b < 0;
    return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// The descriptor stays open, so that no other folder can get the inode number by which two looks are compared.
ms_status ms_folder_look(ms_folder *f, int *same)
{
    int fd = openat(f->place.folder, f->place.name, FOLDER);
    if (fd < 0 && (errno == ENOTDIR || errno == ELOOP))
        return ms__fail(MS_EIO, "save: '%s' is not a folder", f->place.path);
    if (fd < 0 && errno != ENOENT) return ms__io_failed("save", "open the folder", f->place.path);
    if (same) *same = is_same_file(fd, f->there);
    if (f->there >= 0) close(f->there);
    f->there = fd;
    return MS_OK;
}

ms_folder *ms_folder_new(const char *path)
{
    ms_folder *f = calloc(1, sizeof *f);
    if (!f) return ms__null(ms__no_memory(sizeof *f, "save", "the folder '%s'", path));
    f->fd = f->there = f->place.folder = -1;
    if (ms__place(&f->place, path, "save") || ms_folder_look(f, NULL)) {
        folder_free(f);
        return NULL;
    }
    return f;
}

const char *ms_folder_path(const ms_folder *f, int temporary) { return temporary ? f->made : f->place.path; }

void ms_folder_discard(const ms_folder *f, const char *name)
{
    if (ms_folder_left(name, f->place.name) > MS_LEFT_RUNS) remove_temporary(f->place.folder, name);
}

static void set_kind(ms_folder *f, const char *kind)
{
    ms__set_temporary_kind(f->temporary, kind);
    strcpy(f->made + (f->place.name - f->place.path), f->temporary);
}

ms_status ms_folder_make(ms_folder *f)
{
    size_t before = (size_t)(f->place.name - f->place.path), size = before + MS_TEMPORARY;
    MS_TRY(ms__temporary_name(f->place.name, f->temporary));
    f->made = malloc(size);
    if (!f->made) return ms__no_memory(size, "save", "the folder '%s'", f->place.path);
    snprintf(f->made, size, "%.*s%s", (int)before, f->place.path, f->temporary);
    if (mkdirat(f->place.folder, f->temporary, 0777)) return ms__io_failed("save", "create the folder", f->made);
    f->ours = true;
    f->fd = openat(f->place.folder, f->temporary, FOLDER);
    return f->fd < 0 ? ms__io_failed("save", "open the folder", f->made) : MS_OK;
}

static int rename_to(ms_folder *f, unsigned flags)
{
    return renameat2(f->place.folder, f->temporary, f->place.folder, f->place.name, flags);
}

// Whether a failed renameat2 means that the file system does not support its flags.
static bool no_flags(int error) { return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP; }

static ms_status rename_failed(const ms_folder *f, int error)
{
    return ms__fail(MS_EIO, "save: cannot rename '%s' to '%s': %s", f->made, f->place.path, strerror(error));
}

// Renames the temporary folder to NAME.old-... (files.h), or back.
static int rename_kind(ms_folder *f, const char *kind)
{
    char from[MS_TEMPORARY];
    strcpy(from, f->temporary);
    set_kind(f, kind);
    if (renameat(f->place.folder, from, f->place.folder, f->temporary) == 0) return 0;
    int error = errno;
    memcpy(f->temporary, from, sizeof from);
    strcpy(f->made + (f->place.name - f->place.path), f->temporary);
    errno = error;
    return -1;
}

ms_status ms_folder_settle(ms_folder *f, int ok, int later)
{
    f->ours = f->later = false;
    if (ok) {
        f->ours = true;
        f->later = later;
        return MS_OK;
    }
    if (rename_to(f, RENAME_EXCHANGE)) return rename_failed(f, errno);
    // If another save has replaced the new folder since the commit, this exchange moved that save's folder to the
    // temporary name, and it must not be removed.
    int fd = openat(f->place.folder, f->temporary, FOLDER);
    f->ours = fd >= 0 && is_same_file(fd, f->fd);
    if (fd >= 0) close(fd);
    return ms__place_sync(&f->place);
}

static ms_status exchange(ms_folder *f, int *how)
{
    if (rename_kind(f, "old")) return rename_failed(f, errno);
    if (rename_to(f, RENAME_EXCHANGE)) {
        int error = errno;
        if (rename_kind(f, "tmp")) return rename_failed(f, errno);
        if (error == ENOENT) return MS_OK;  // another process has removed the folder that had the name
        *how = MS_COMMIT_INSIDE;
        return no_flags(error) ? MS_OK
                               : ms__fail(MS_EIO, "save: cannot exchange '%s' and '%s': %s", f->made, f->place.path,
                                          strerror(error));
    }
    f->ours = false;
    *how = MS_COMMIT_EXCHANGED;
    ms_status st = ms__place_sync(&f->place);
    if (st) (void)ms_folder_settle(f, 0, 0);
    return st;
}

// Saves that replace files inside a folder exclude each other, by a lock that ms_folder_free releases. A save continues
// without the lock where the file system has none, and after 10 s, because the process that holds it may be stopped.
static ms_status take_turn(ms_folder *f)
{
    struct timespec pause = { .tv_nsec = 10 * 1000 * 1000 };
    for (int k = 0; k < 1000 && flock(f->place.folder, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK; k++) {
        MS_TRY(ms__check_interrupt());
        nanosleep(&pause, NULL);
    }
    return MS_OK;
}

ms_status ms_folder_commit(ms_folder *f, int *how)
{
    for (int tries = 0; tries < 100; tries++) {
        *how = MS_COMMIT_NEW;
        int rc = rename_to(f, RENAME_NOREPLACE), error = errno;
        if (rc && error == EEXIST) {
            MS_TRY(exchange(f, how));
            if (*how == MS_COMMIT_NEW) continue;
            return *how == MS_COMMIT_INSIDE ? take_turn(f) : MS_OK;
        }
        if (rc && no_flags(error)) {
            rc = renameat(f->place.folder, f->temporary, f->place.folder, f->place.name);
            error = errno;
            if (rc && (error == ENOTEMPTY || error == EEXIST)) {
                *how = MS_COMMIT_INSIDE;
                return take_turn(f);
            }
        }
        if (rc) return rename_failed(f, error);
        f->ours = false;
        return ms__place_sync(&f->place);
    }
    return ms__fail(MS_EIO, "save: other processes keep creating and removing '%s'", f->place.path);
}

// ---- replacing files of an existing folder, where two folders cannot be exchanged ---------------

ms_status ms_folder_move_in(ms_folder *f, const char *from, const char *to)
{
    if (f->there >= 0 && renameat(f->fd, from, f->there, to) == 0) return MS_OK;
    return ms__fail(MS_EIO, "save: cannot rename '%s/%s' to '%s/%s': %s", f->made, from, f->place.path, to,
                    strerror(f->there < 0 ? ENOENT : errno));
}

ms_status ms_folder_remove(ms_folder *f, const char *name)
{
    if (f->there < 0 || unlinkat(f->there, name, 0) == 0 || errno == ENOENT) return MS_OK;
    return ms__fail(MS_EIO, "save: cannot remove '%s/%s': %s", f->place.path, name, strerror(errno));
}

// Freeing the blocks of a large file can take longer than writing them, so a thread removes folders, one at a time. The
// process waits for the thread before it ends.
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
