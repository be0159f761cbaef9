// SPDX-License-Identifier: MIT
// io/write.c -- writes tensors to a safetensors file. After a crash at any moment, either the old or the new file
// exists.
//
// The steps: remove the temporary files of ended processes, make a temporary file beside the target, write the data and
// the header with checksums, fsync, rename, fsync the folder. The rename makes the file visible. Without both fsyncs, a
// power loss could leave a name without its bytes.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/capture.h"
#include "device/device.h"
#include "io/direct.h"
#include "io/files.h"
#include "ops/op.h"
#include "io/safetensors.h"
#include "tensor/tensor.h"

struct ms_saver {
    ms_st_header h;
    bool *written;  // per entry; allocated once the header is final
    ms_place target;
    char temporary[MS_TEMPORARY];  // name of the temporary file in the target's folder
    char *path;                    // path of the temporary file, for messages
    int fd;                        // descriptor of the temporary file; -1 once it is closed
    char *text, *checksums;        // the header, once it is final, and the place in it for the checksums of blocks
    size_t length;
    uint64_t data_at;   // where the data begins in the file
    ms_direct *direct;  // the writer used for a large file, as long as writes are in order
    uint64_t next;      // byte offset at which that writer continues
};

enum { DIRECT_FROM = 4 << 20, PART = 64 << 10 };

static ms_status create_file(ms_saver *s, const char *path)
{
    MS_TRY(ms__file_path(path, "save"));
    MS_TRY(ms__place(&s->target, path, "save"));
    struct stat info;
    if (fstatat(s->target.folder, s->target.name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
        // The final rename would replace anything that has this name, even a device.
        if (!S_ISREG(info.st_mode)) return ms__fail(MS_EIO, "save: '%s' exists and is not a regular file", path);
    } else if (errno != ENOENT) {
        return ms__io_failed("save", "access", path);
    }
    ms__place_sweep(&s->target);
    size_t before = (size_t)(s->target.name - s->target.path);
    s->path = malloc(before + MS_TEMPORARY);
    if (!s->path) return ms__no_memory(before + MS_TEMPORARY, "save", "writing '%s'", path);
    memcpy(s->path, s->target.path, before);
    MS_TRY(ms__temporary_name(s->target.name, s->temporary));
    strcpy(s->path + before, s->temporary);
    s->fd = openat(s->target.folder, s->temporary, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    return s->fd < 0 ? ms__io_failed("save", "create", s->path) : MS_OK;
}

ms_saver *ms_saver_new(const char *path)
{
    ms_saver *s = calloc(1, sizeof *s);
    if (!s) return ms__null(ms__no_memory(sizeof *s, "save", "writing '%s'", path));
    s->fd = s->target.folder = -1;
    if (create_file(s, path)) {
        ms_saver_abort(s);
        return NULL;
    }
    return s;
}

static void drop_temporary(ms_saver *s)
{
    if (s->fd >= 0) close(s->fd);
    unlinkat(s->target.folder, s->temporary, 0);
    s->fd = -1;
}

void ms_saver_abort(ms_saver *s)
{
    if (!s) return;
    if (s->direct) (void)ms__direct_end(s->direct);
    if (s->fd >= 0) drop_temporary(s);
    ms__place_clear(&s->target);
    ms__st_clear(&s->h);
    free(s->written);
    free(s->text);
    free(s->path);
    free(s);
}

ms_status ms_saver_metadata(ms_saver *s, const char *key, const char *value)
{
    if (s->text) return ms__fail(MS_ESTATE, "save: metadata '%s' was added after the first tensor was written", key);
    if (!strcmp(key, MS_ST_SUMS))
        return ms__fail(MS_EINVAL, "save: metadata '%s': this name is reserved for the file's checksums", key);
    return ms__st_add_meta(&s->h, "save", key, strlen(key), value, strlen(value));
}

ms_status ms_saver_declare(ms_saver *s, const char *name, int dtype, int ndim, const int64_t *shape)
{
    if (s->text) return ms__fail(MS_ESTATE, "save: tensor '%s' was declared after the first tensor was written", name);
    if (dtype < 0 || dtype >= MS_DTYPES)
        return ms__fail(MS_EINVAL, "save: tensor '%s': unknown dtype %d, expected 0 to %d", name, dtype, MS_DTYPES - 1);
    if (ndim < 0 || ndim > MS_MAX_DIMS)
        return ms__fail(MS_EINVAL, "save: tensor '%s' has %d dimensions; at most %d are supported", name, ndim,
                        MS_MAX_DIMS);
    if (!strcmp(name, "__metadata__"))
        return ms__fail(MS_EINVAL, "save: no tensor can be named '__metadata__': the format reserves this name");
    for (int d = 0; d < ndim; d++)
        if (shape[d] < 0)
            return ms__fail(MS_EINVAL, "save: tensor '%s': shape %s has a negative size", name,
                            ms__shape_text(ndim, shape));
    ms_st_entry *e = ms__st_add(&s->h, "save", name, strlen(name));
    if (!e) return ms__failure();
    e->dtype = dtype;
    e->ndim = ndim;
    for (int d = 0; d < ndim; d++) e->shape[d] = shape[d];
    return MS_OK;
}

static ms_status end_direct(ms_saver *s)
{
    ms_direct *d = s->direct;
    s->direct = NULL;
    return ms__direct_end(d);
}

static ms_status put_bytes(ms_saver *s, const void *data, uint64_t bytes, uint64_t at)
{
    if (s->direct && at == s->next) {
        s->next += bytes;
        return ms__direct_write(s->direct, data, bytes);
    }
    if (s->direct && bytes > 0) MS_TRY(end_direct(s));
    return ms__file_write(s->fd, s->path, data, bytes, at);
}

static ms_status put_header(ms_saver *s)
{
    unsigned char prefix[8];
    ms__st_prefix(s->length, prefix);
    MS_TRY(put_bytes(s, prefix, 8, 0));
    return put_bytes(s, s->text, s->length, 8);
}

// Determines the order and offsets of the tensors, and the header. Tensors with larger elements come first, so that
// each is aligned to its element size; tensors with elements of one size are ordered by name.
static ms_status fix_header(ms_saver *s)
{
    const char *twice = ms__st_sort(&s->h);
    if (twice) return ms__fail(MS_EINVAL, "save: tensor '%s' was declared twice", twice);
    uint64_t place = 0, block = 0, bytes;
    for (int size = 8; size; size /= 2) {
        for (int k = 0; k < s->h.n; k++) {
            ms_st_entry *e = &s->h.entries[k];
            if (ms__dtype_size(e->dtype) != size) continue;
            if (!ms__st_bytes(e, &bytes) || place + bytes > INT64_MAX)
                return ms__fail(MS_EINVAL, "save: with tensor '%s' of shape %s the file needs 2^63 bytes or more",
                                e->name, ms__shape_text(e->ndim, e->shape));
            e->begin = place;
            e->end = place += bytes;
            e->block = block;
            block += ms__st_blocks(e);
        }
    }
    free(s->written);
    s->written = calloc((size_t)s->h.n + 1, 1);
    if (!s->written) return ms__no_memory((size_t)s->h.n + 1, "save", "the list of %d tensors", s->h.n);
    MS_TRY(ms__st_format(&s->h, &s->text, &s->length, &s->checksums));
    s->data_at = 8 + s->length;
    if (place < DIRECT_FROM) return MS_OK;
    MS_TRY(ms__direct_writer(&s->direct, s->fd, s->path, "save"));
    return put_header(s);  // writes the header now, because the direct writer writes in order
}

// Writes the data of an entry and the checksums of its blocks, in parts that stay in the CPU's cache between hashing
// and writing.
static ms_status put_data(ms_saver *s, const ms_st_entry *e, const char *data)
{
    uint64_t at = 0, size = e->end - e->begin;
    for (uint64_t block = e->block; at < size; block++) {
        uint64_t end = size - at < MS_ST_BLOCK ? size : at + MS_ST_BLOCK;
        ms_hash h;
        ms__hash_begin(&h);
        while (at < end) {
            uint64_t most = s->direct ? PART : MS_ST_BLOCK, n = end - at < most ? end - at : most;
            ms__hash_add(&h, data + at, n);
            MS_TRY(put_bytes(s, data + at, n, s->data_at + e->begin + at));
            at += n;
        }
        ms__hash_text(ms__hash_end(&h), s->checksums + 16 * block);
    }
    return MS_OK;
}

ms_status ms_saver_write(ms_saver *s, const char *name, ms_id id)
{
    ms_tensor *t = ms__tensor(id), *c;
    if (!t) return ms__failure();
    if (ms__recording) return ms__capture_refuse("it writes a file; save outside of the step");
    if (!s->text) MS_TRY(fix_header(s));
    ms_st_entry *e = ms__st_find(&s->h, name);
    if (!e) return ms__fail(MS_EINVAL, "save: tensor '%s' was not declared", name);
    if (t->sharded)
        return ms__fail(MS_ESTATE,
                        "save: tensor '%s' is sharded over ranks; use full_tensor() or to_local(), and for a model "
                        "fsdp.state_dict(model, { type = 'full' }) or fsdp.save",
                        name);
    if (ms__is_meta(ms__device(t)))
        return ms__fail(MS_EINVAL, "save: tensor '%s' is on device meta and has no values", name);
    if (t->dtype != e->dtype || !ms__has_shape(t, e->ndim, e->shape))
        return ms__fail(MS_EINVAL, "save: tensor '%s' is %s, but was declared as %s %s", name, ms__tensor_text(t),
                        ms__dtype_name(e->dtype), ms__shape_text(e->ndim, e->shape));
    MS_TRY(ms__storage_sync(t->storage, false));
    MS_TRY(ms__on_cpu(&c, t, "save"));
    ms_status st = put_data(s, e, ms__data(c));
    ms__release(c);
    if (!st) s->written[e - s->h.entries] = true;
    return st;
}

ms_status ms_saver_commit(ms_saver *s)
{
    if (!s->text) MS_TRY(fix_header(s));
    for (int k = 0; k < s->h.n; k++)
        if (!s->written[k] && s->h.entries[k].end > s->h.entries[k].begin)
            return ms__fail(MS_ESTATE, "save: tensor '%s' was declared but not written", s->h.entries[k].name);
    if (s->direct) MS_TRY(end_direct(s));
    ms__st_seal(s->text, s->length);
    MS_TRY(put_header(s));
    if (fsync(s->fd)) return ms__io_failed("save", "sync", s->path);
    int fd = s->fd;
    s->fd = -1;
    ms_status st = close(fd) ? ms__io_failed("save", "close", s->path) : MS_OK;
    if (!st && renameat(s->target.folder, s->temporary, s->target.folder, s->target.name))
        st = ms__fail(MS_EIO, "save: cannot rename '%s' to '%s': %s", s->path, s->target.path, strerror(errno));
    if (st) {
        drop_temporary(s);
        return st;
    }
    return ms__place_sync(&s->target);
}

void ms_saver_sum(const ms_saver *s, char *out)
{
    memcpy(out, ms__st_checksum(s->text), 16);
    out[16] = 0;
}
