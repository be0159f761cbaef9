// files.c -- tensors in safetensors files: written so that a crash at any moment leaves the old file or the
// new one, read only after the header passed every check.
//
// Writing: a temporary file beside the target -> data -> fsync -> rename -> fsync of the folder. The rename is
// the moment the file exists; without the two fsyncs a power loss could leave a name with no bytes behind it.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device.h"
#include "direct.h"
#include "op.h"
#include "safetensors.h"
#include "tensor.h"

static ms_status io_failed(const char *who, const char *doing, const char *path)
{
    return ms__fail(MS_EIO, "%s: cannot %s '%s': %s", who, doing, path, strerror(errno));
}

// ---- writing ------------------------------------------------------------------------------------

struct ms_saver {
    ms_st_header h;
    bool        *written;       // per entry, once the header is fixed
    char        *path, *temporary;
    int          fd;            // -1 until the header is fixed
    uint64_t     data_at;       // where the data begins in the file
    ms_direct   *direct;        // a large file that was written in order so far
    uint64_t     next;          // where that goes on
    bool         hashed;        // it went in order to the end: hash is the file's
    uint64_t     hash;
};

enum { DIRECT_FROM = 4 << 20 };

ms_saver *ms_saver_new(const char *path)
{
    struct stat info;
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) {    // the new file's name would take its place: that of a device, say
        (void)ms__fail(MS_EIO, "save: '%s' is there and is no regular file", path);
        return NULL;
    }
    ms_saver *s = calloc(1, sizeof *s);
    if (s) {
        s->fd = -1;
        s->path = strdup(path);
        s->temporary = malloc(strlen(path) + 32);
    }
    if (!s || !s->path || !s->temporary) {
        ms__no_memory(sizeof *s + 2 * strlen(path) + 33, "save", "writing '%s'", path);
        ms_saver_abort(s);
        return NULL;
    }
    // Not a dot file, so that a stale one is seen; the process's number keeps two writers apart.
    sprintf(s->temporary, "%s.tmp-%ld", path, (long)getpid());
    return s;
}

void ms_saver_abort(ms_saver *s)
{
    if (!s) return;
    if (s->direct) (void)ms__direct_end(s->direct, NULL);
    if (s->fd >= 0) {
        close(s->fd);
        unlink(s->temporary);
    }
    ms__st_clear(&s->h);
    free(s->written);
    free(s->path);
    free(s->temporary);
    free(s);
}

ms_status ms_saver_metadata(ms_saver *s, const char *key, const char *value)
{
    if (s->fd >= 0) return ms__fail(MS_ESTATE, "save: metadata '%s' after the first tensor was written", key);
    return ms__st_add_meta(&s->h, "save", key, strlen(key), value, strlen(value));
}

ms_status ms_saver_declare(ms_saver *s, const char *name, int dtype, int ndim, const int64_t *shape)
{
    if (s->fd >= 0) return ms__fail(MS_ESTATE, "save: tensor '%s' declared after the first one was written", name);
    if (dtype < 0 || dtype >= MS_DTYPES) return ms__fail(MS_EINVAL, "save: tensor '%s': dtype %d is none of the %d known", name, dtype, MS_DTYPES);
    if (ndim < 0 || ndim > MS_MAX_DIMS) return ms__fail(MS_EINVAL, "save: tensor '%s' has %d dimensions; at most %d are supported", name, ndim, MS_MAX_DIMS);
    if (!strcmp(name, "__metadata__")) return ms__fail(MS_EINVAL, "save: no tensor can be named '__metadata__': the format uses it");
    for (int d = 0; d < ndim; d++)
        if (shape[d] < 0) return ms__fail(MS_EINVAL, "save: tensor '%s': shape %s has a negative size", name, ms__shape_text(ndim, shape));
    return ms__st_add(&s->h, "save", name, strlen(name), dtype, ndim, shape);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ms_st_entry *)a)->name, ((const ms_st_entry *)b)->name);
}

static ms_status end_direct(ms_saver *s, uint64_t *hash)
{
    ms_direct *d = s->direct;
    s->direct = NULL;
    return ms__direct_end(d, hash);
}

static ms_status put(ms_saver *s, const void *data, uint64_t bytes, uint64_t at)
{
    const char *p = data;
    if (s->direct && at == s->next) {
        s->next += bytes;
        return ms__direct_write(s->direct, data, bytes);
    }
    if (s->direct && bytes > 0) MS_TRY(end_direct(s, NULL));
    while (bytes > 0) {
        MS_TRY(ms__check_interrupt());
        ssize_t n = pwrite(s->fd, p, bytes < (64u << 20) ? bytes : 64u << 20, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return io_failed("save", "write", s->temporary);
        p += n;
        at += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return MS_OK;
}

// Fixes the order and the offsets (wide elements first, so that each tensor is aligned to its element; then by
// name), makes the temporary file and writes the header.
static ms_status fix_header(ms_saver *s)
{
    if (s->h.n) qsort(s->h.entries, (size_t)s->h.n, sizeof *s->h.entries, by_name);
    for (int k = 1; k < s->h.n; k++)
        if (!strcmp(s->h.entries[k - 1].name, s->h.entries[k].name)) return ms__fail(MS_EINVAL, "save: tensor '%s' was declared twice", s->h.entries[k].name);
    uint64_t place = 0, bytes;
    for (int size = 8; size; size /= 2) {
        for (int k = 0; k < s->h.n; k++) {
            ms_st_entry *e = &s->h.entries[k];
            if (ms__dtype_size(e->dtype) != size) continue;
            if (!ms__st_bytes(e, &bytes) || place + bytes > INT64_MAX)
                return ms__fail(MS_EINVAL, "save: tensor '%s': its shape %s is too large", e->name, ms__shape_text(e->ndim, e->shape));
            e->begin = place;
            e->end = place += bytes;
        }
    }
    s->written = calloc((size_t)s->h.n + 1, 1);
    if (!s->written) return ms__no_memory((size_t)s->h.n + 1, "save", "the list of %d tensors", s->h.n);
    char *text;
    size_t length;
    MS_TRY(ms__st_format(&s->h, "save", &text, &length));
    s->fd = open(s->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (s->fd < 0) {
        free(text);
        return io_failed("save", "create", s->temporary);
    }
    unsigned char prefix[8];
    for (int k = 0; k < 8; k++) prefix[k] = (unsigned char)((uint64_t)length >> 8 * k);
    ms_status st = place >= DIRECT_FROM ? ms__direct_writer(&s->direct, s->fd, s->temporary, "save") : MS_OK;
    if (!st) st = put(s, prefix, 8, 0);
    if (!st) st = put(s, text, length, 8);
    free(text);
    s->data_at = 8 + length;
    return st;
}

ms_status ms_saver_write(ms_saver *s, const char *name, ms_id id)
{
    ms_tensor *t = ms__tensor(id), *c;
    if (!t) return (ms_status)ms_error_code();
    if (s->fd < 0) MS_TRY(fix_header(s));
    ms_st_entry *e = ms__st_find(&s->h, name);
    if (!e) return ms__fail(MS_EINVAL, "save: tensor '%s' was not declared", name);
    if (t->sharded) return ms__fail(MS_ESTATE, "save: tensor '%s' is sharded over ranks; use full_tensor() or to_local()", name);
    if ((ms__device(t) & 0xff) == MS_META) return ms__fail(MS_EINVAL, "save: tensor '%s' is on device meta and has no values", name);
    bool same = t->dtype == e->dtype && t->ndim == e->ndim;
    for (int d = 0; same && d < e->ndim; d++) same = t->shape[d] == e->shape[d];
    if (!same)
        return ms__fail(MS_EINVAL, "save: tensor '%s' is %s, it was declared as %s %s", name, ms__tensor_text(t), ms__dtype_name(e->dtype), ms__shape_text(e->ndim, e->shape));
    MS_TRY(ms__storage_sync(t->storage, false));
    if (ms__is_cuda(ms__device(t))) {
        MS_TRY(ms__tensor_new(&c, t->dtype, MS_CPU, t->ndim, t->shape, "save"));
        ms_status copied = ms__copy(c, t);
        if (copied != MS_OK) {
            ms__release(c);
            return copied;
        }
    } else {
        MS_TRY(ms__contiguous(&c, t));
    }
    ms_status st = put(s, ms__data(c), e->end - e->begin, s->data_at + e->begin);
    ms__release(c);
    if (!st) s->written[e - s->h.entries] = true;
    return st;
}

// The folder's entry is what a rename changes, so it is the folder that must reach the disk.
static ms_status sync_folder(const char *path)
{
    char *folder = strdup(path), *slash;
    if (!folder) return ms__no_memory(strlen(path) + 1, "save", "the folder of '%s'", path);
    if ((slash = strrchr(folder, '/'))) slash[slash == folder] = 0;
    else strcpy(folder, ".");                   // a file name has at least one character
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ms_status st = fd < 0 ? io_failed("save", "open folder", folder) : MS_OK;
    // Some file systems cannot sync folders (EINVAL): they have nothing to sync.
    if (!st && fsync(fd) && errno != EINVAL) st = io_failed("save", "sync folder", folder);
    if (fd >= 0) close(fd);
    free(folder);
    return st;
}

ms_status ms_saver_commit(ms_saver *s)
{
    if (s->fd < 0) MS_TRY(fix_header(s));
    for (int k = 0; k < s->h.n; k++)
        if (!s->written[k] && s->h.entries[k].end > s->h.entries[k].begin)
            return ms__fail(MS_ESTATE, "save: tensor '%s' was declared but not written", s->h.entries[k].name);
    if (s->direct) {
        s->hashed = true;
        MS_TRY(end_direct(s, &s->hash));
    }
    if (fsync(s->fd)) return io_failed("save", "sync", s->temporary);
    int fd = s->fd;
    s->fd = -1;
    if (close(fd)) {
        ms_status st = io_failed("save", "close", s->temporary);
        unlink(s->temporary);
        return st;
    }
    if (rename(s->temporary, s->path)) {
        ms_status st = ms__fail(MS_EIO, "save: cannot rename '%s' to '%s': %s", s->temporary, s->path, strerror(errno));
        unlink(s->temporary);
        return st;
    }
    return sync_folder(s->path);
}

static void hash_text(uint64_t hash, char *out) { snprintf(out, 17, "%016llx", (unsigned long long)hash); }

// XXH64 of a whole file.
static ms_status hash_file(const char *path, const char *who, uint64_t *hash)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info)) {
        if (fd >= 0) close(fd);
        return io_failed(who, "read", path);
    }
    ms_direct *d;
    const char *data;
    uint64_t n = 1;
    ms_status st = ms__direct_reader(&d, fd, path, (uint64_t)info.st_size, who);
    if (st == MS_OK) {
        while (st == MS_OK && n > 0) st = ms__direct_read(d, &data, &n);
        ms_status end = ms__direct_end(d, hash);
        if (st == MS_OK) st = end;
    }
    close(fd);
    return st;
}

ms_status ms_saver_hash(ms_saver *s, char *out)
{
    if (!s->hashed) MS_TRY(hash_file(s->path, "save", &s->hash));
    hash_text(s->hash, out);
    return MS_OK;
}

// ---- small files, folders -----------------------------------------------------------------------

ms_status ms_file_put(const char *path, const char *data, double n)
{
    ms_saver s = { .fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), .temporary = (char *)path };
    if (s.fd < 0) return io_failed("save", "create", path);
    ms_status st = put(&s, data, (uint64_t)n, 0);
    if (!st && fsync(s.fd)) st = io_failed("save", "sync", path);
    if (close(s.fd) && !st) st = io_failed("save", "close", path);
    return st;
}

ms_status ms_folder_sync(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    ms_status st = fd < 0 ? io_failed("save", "open folder", path) : MS_OK;
    if (!st && fsync(fd) && errno != EINVAL) st = io_failed("save", "sync folder", path);
    if (fd >= 0) close(fd);
    return st;
}

ms_status ms_folder_put(const char *made, const char *path, int *replaced)
{
    *replaced = 0;
    if (renameat2(AT_FDCWD, made, AT_FDCWD, path, RENAME_NOREPLACE)) {
        if (errno == EEXIST) {
            *replaced = 1;
            // Both exist at every moment; the old one is the caller's to remove.
            if (renameat2(AT_FDCWD, made, AT_FDCWD, path, RENAME_EXCHANGE))
                return ms__fail(MS_EIO, "save: cannot exchange '%s' and '%s': %s", made, path, strerror(errno));
            ms_status st = sync_folder(path);
            // Nobody knows which of them a crash would leave: the old one has the name again, and the error is about the new one.
            if (st != MS_OK && renameat2(AT_FDCWD, made, AT_FDCWD, path, RENAME_EXCHANGE) == 0) *replaced = 0;
            return st;
        } else if (errno != EINVAL || rename(made, path)) {     // EINVAL: a file system without the flag
            return ms__fail(MS_EIO, "save: cannot rename '%s' to '%s': %s", made, path, strerror(errno));
        }
    }
    return sync_folder(path);
}

// Freeing the blocks of a large file can take a disk longer than writing them did, so that is done on the side. One folder at a time;
// the process ends after it.
static struct { pthread_t thread; bool runs; } removal;

static void *remove_folder(void *arg)
{
    char *path = arg;
    DIR *d = opendir(path);
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.' || (e->d_name[1] && strcmp(e->d_name, ".."))) unlinkat(dirfd(d), e->d_name, 0);
    if (d) closedir(d);
    rmdir(path);
    free(path);
    return NULL;
}

__attribute__((destructor)) static void removal_ends(void)
{
    if (removal.runs) pthread_join(removal.thread, NULL);
    removal.runs = false;
}

ms_status ms_folder_remove(const char *path, int later)
{
    removal_ends();
    char *copy = strdup(path);
    if (!copy) return ms__no_memory(strlen(path) + 1, "save", "the name '%s'", path);
    sigset_t all, before;                   // signals are the main thread's
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    removal.runs = later && pthread_create(&removal.thread, NULL, remove_folder, copy) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!removal.runs) remove_folder(copy);
    return MS_OK;
}

// ---- reading ------------------------------------------------------------------------------------

typedef struct { uint64_t at, bytes; char *to; ms_tensor *keep; } want;     // at: in the file

struct ms_loader {
    want        *wants;
    int          n_wants, cap_wants;
    uint64_t     size;
    ms_st_header h;
    char        *path;
    int          fd;
    uint64_t     data_at;
};

static ms_status get(const char *path, int fd, void *data, uint64_t bytes, uint64_t at)
{
    char *p = data;
    while (bytes > 0) {
        MS_TRY(ms__check_interrupt());
        ssize_t n = pread(fd, p, bytes < (64u << 20) ? bytes : 64u << 20, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return io_failed("load", "read", path);
        if (n == 0) return ms__fail(MS_EIO, "load: '%s' ended while it was read", path);
        p += n;
        at += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return MS_OK;
}

static ms_status read_header(ms_loader *l, const char *path)
{
    l->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (l->fd < 0) return io_failed("load", "open", path);
    struct stat info;
    if (fstat(l->fd, &info)) return io_failed("load", "read", path);
    if (!S_ISREG(info.st_mode)) return ms__fail(MS_EIO, "load: '%s' is no regular file", path);
    uint64_t size = (uint64_t)info.st_size, length = 0;
    unsigned char prefix[8];
    if (size < 8) return ms__fail(MS_EIO, "load: '%s' is no valid safetensors file: %llu bytes, at least 8 expected", path, (unsigned long long)size);
    MS_TRY(get(path, l->fd, prefix, 8, 0));
    for (int k = 0; k < 8; k++) length |= (uint64_t)prefix[k] << 8 * k;
    if (length > MS_ST_MAX_HEADER || length > size - 8)
        return ms__fail(MS_EIO, "load: '%s' is no valid safetensors file: a header of %llu bytes in a file of %llu (at most %d are allowed)", path,
                        (unsigned long long)length, (unsigned long long)size, MS_ST_MAX_HEADER);
    char *text = malloc(length + 1);
    if (!text) return ms__no_memory(length + 1, "load", "a header of %llu bytes", (unsigned long long)length);
    ms_status st = get(path, l->fd, text, length, 8);
    if (!st) st = ms__st_parse(&l->h, "load", path, text, length, size - 8 - length);
    free(text);
    l->data_at = 8 + length;
    l->size = size;
    return st;
}

static void drop_wants(ms_loader *l)
{
    for (int k = 0; k < l->n_wants; k++) ms__release(l->wants[k].keep);
    l->n_wants = 0;
}

ms_loader *ms_loader_open(const char *path)
{
    ms_loader *l = calloc(1, sizeof *l);
    if (l) l->fd = -1;
    if (!l || !(l->path = strdup(path))) {
        ms__no_memory(sizeof *l + strlen(path) + 1, "load", "reading '%s'", path);
        ms_loader_close(l);
        return NULL;
    }
    if (read_header(l, path)) {
        ms_loader_close(l);
        return NULL;
    }
    return l;
}

void ms_loader_close(ms_loader *l)
{
    if (!l) return;
    drop_wants(l);
    free(l->wants);
    if (l->fd >= 0) close(l->fd);
    ms__st_clear(&l->h);
    free(l->path);
    free(l);
}

// ---- many ranges at once ------------------------------------------------------------------------

ms_status ms_loader_want(ms_loader *l, int k, double first, double count, ms_id dst, double at)
{
    ms_tensor *t = ms__tensor(dst);
    if (!t) return (ms_status)ms_error_code();
    if (k < 0 || k >= l->h.n) return ms__fail(MS_EINVAL, "load: there is no tensor %d among the %d of '%s'", k, l->h.n, l->path);
    const ms_st_entry *e = &l->h.entries[k];
    uint64_t esz = (uint64_t)ms__dtype_size(e->dtype), numel = (e->end - e->begin) / esz;
    if (!(first >= 0 && count >= 0 && first + count <= (double)numel))
        return ms__fail(MS_EINVAL, "load: elements %.0f to %.0f of tensor '%s', which has shape %s", first, first + count, e->name, ms__shape_text(e->ndim, e->shape));
    if (t->dtype != e->dtype || !ms__is_contiguous(t) || (ms__device(t) & 0xff) != MS_CPU || !(at >= 0 && at + count <= (double)t->numel))
        return ms__fail(MS_EINVAL, "load: %.0f elements of tensor '%s', %s, do not fit at %.0f of %s", count, e->name, ms__dtype_name(e->dtype), at, ms__tensor_text(t));
    MS_TRY(ms__storage_sync(t->storage, true));
    if (count == 0) return MS_OK;
    if (l->n_wants == l->cap_wants) {
        int cap = l->cap_wants ? 2 * l->cap_wants : 64;
        want *grown = realloc(l->wants, (size_t)cap * sizeof *grown);
        if (!grown) return ms__no_memory((size_t)cap * sizeof *grown, "load", "%d ranges", cap);
        l->wants = grown;
        l->cap_wants = cap;
    }
    l->wants[l->n_wants++] = (want){ .at = l->data_at + e->begin + (uint64_t)first * esz, .bytes = (uint64_t)count * esz,
                                     .to = (char *)ms__data(t) + (uint64_t)at * esz, .keep = ms__retain(t) };
    return MS_OK;
}

static int by_place(const void *a, const void *b)
{
    uint64_t x = ((const want *)a)->at, y = ((const want *)b)->at;
    return x < y ? -1 : x > y;
}

// The whole file in order; what is wanted is taken out on the way.
static ms_status fetch_whole(ms_loader *l, uint64_t *hash)
{
    ms_direct *d;
    MS_TRY(ms__direct_reader(&d, l->fd, l->path, l->size, "load"));
    ms_status st = MS_OK;
    uint64_t begin = 0, n = 1;
    for (int first = 0; st == MS_OK && n > 0; begin += n) {
        const char *data;
        if ((st = ms__direct_read(d, &data, &n)) != MS_OK) break;
        while (first < l->n_wants && l->wants[first].at + l->wants[first].bytes <= begin) first++;
        for (int k = first; k < l->n_wants && l->wants[k].at < begin + n; k++) {
            want *w = &l->wants[k];
            uint64_t from = w->at > begin ? w->at : begin, to = w->at + w->bytes < begin + n ? w->at + w->bytes : begin + n;
            if (to > from) memcpy(w->to + (from - w->at), data + (from - begin), to - from);
        }
    }
    ms_status end = ms__direct_end(d, hash);
    return st != MS_OK ? st : end;
}

ms_status ms_loader_fetch(ms_loader *l, char *out)
{
    ms_status st = MS_OK;
    if (l->n_wants) qsort(l->wants, (size_t)l->n_wants, sizeof *l->wants, by_place);
    if (out) {
        uint64_t hash;
        st = fetch_whole(l, &hash);
        if (st == MS_OK) hash_text(hash, out);
    } else {
        for (int k = 0; k < l->n_wants && st == MS_OK; k++) st = get(l->path, l->fd, l->wants[k].to, l->wants[k].bytes, l->wants[k].at);
    }
    drop_wants(l);
    return st;
}

int         ms_loader_count(const ms_loader *l) { return l->h.n; }
const char *ms_loader_name(const ms_loader *l, int k) { return k >= 0 && k < l->h.n ? l->h.entries[k].name : NULL; }
int         ms_loader_metadata_count(const ms_loader *l) { return l->h.n_meta; }
const char *ms_loader_metadata_key(const ms_loader *l, int k) { return k >= 0 && k < l->h.n_meta ? l->h.meta[k].key : NULL; }
const char *ms_loader_metadata_value(const ms_loader *l, int k) { return k >= 0 && k < l->h.n_meta ? l->h.meta[k].value : NULL; }

int ms_loader_find(const ms_loader *l, const char *name)
{
    const ms_st_entry *e = ms__st_find(&l->h, name);
    return e ? (int)(e - l->h.entries) : -1;
}

ms_status ms_loader_info(const ms_loader *l, int k, ms_info *out)
{
    if (k < 0 || k >= l->h.n) return ms__fail(MS_EINVAL, "load: there is no tensor %d among the %d of '%s'", k, l->h.n, l->path);
    const ms_st_entry *e = &l->h.entries[k];
    memset(out, 0, sizeof *out);
    out->dtype = e->dtype;
    out->ndim = e->ndim;
    out->is_contiguous = 1;
    out->numel = (int64_t)(e->end - e->begin) / ms__dtype_size(e->dtype);
    int64_t stride = 1;
    for (int d = e->ndim - 1; d >= 0; d--) {
        out->shape[d] = e->shape[d];
        out->stride[d] = stride;
        stride *= e->shape[d];
    }
    return MS_OK;
}

ms_id ms_loader_read(const ms_loader *l, int k, double first, double count)
{
    if (k < 0 || k >= l->h.n) {
        ms__fail(MS_EINVAL, "load: there is no tensor %d among the %d of '%s'", k, l->h.n, l->path);
        return 0;
    }
    const ms_st_entry *e = &l->h.entries[k];
    int64_t shape[MS_MAX_DIMS], rows = e->ndim ? e->shape[0] : 1;
    memcpy(shape, e->shape, sizeof shape);
    if (count < 0) count = (double)rows - first;
    if (!(first >= 0 && count >= 0 && first + count <= (double)rows)) {
        ms__fail(MS_EINVAL, "load: rows %.0f to %.0f of tensor '%s', which has shape %s", first, first + count, e->name, ms__shape_text(e->ndim, e->shape));
        return 0;
    }
    uint64_t row_bytes = rows ? (e->end - e->begin) / (uint64_t)rows : 0;
    if (e->ndim) shape[0] = (int64_t)count;
    ms_tensor *t;
    if (ms__tensor_new(&t, e->dtype, MS_CPU, e->ndim, shape, "load")) return 0;
    if (get(l->path, l->fd, t->storage->data, row_bytes * (uint64_t)count, l->data_at + e->begin + row_bytes * (uint64_t)first)) {
        ms__release(t);
        return 0;
    }
    return ms__name(t);
}
