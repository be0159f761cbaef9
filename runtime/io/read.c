// SPDX-License-Identifier: MIT
// io/read.c -- reads tensors from safetensors files. The header is checked completely first. With `verify`,
// and if the file has checksums, only verified bytes are returned.
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "device/capture.h"
#include "device/device.h"
#include "io/direct.h"
#include "io/files.h"
#include "ops/op.h"
#include "io/safetensors.h"
#include "tensor/tensor.h"

typedef struct {
    int entry;
    uint64_t from, bytes, at;  // from: position in the entry's data; at: position in the file
    char *to;
    ms_tensor *keep;
} want;

struct ms_loader {
    want *wants;
    int n_wants, cap_wants;
    uint64_t size;
    ms_st_header h;
    char *path;
    char checksum[17];  // the header's checksum; "" if it was not verified
    int fd;
    uint64_t data_at;
    bool verify;
    char *block;            // the block read last; used by reads of partial blocks
    uint64_t block_number;  // the number of that block; UINT64_MAX: none
};

static bool verifies(const ms_loader *l) { return l->verify && l->h.checksums; }

// Entry k; NULL with the error set if there is none, or tensors lack its dtype.
static const ms_st_entry *entry_at(const ms_loader *l, int k)
{
    const ms_st_entry *e = k >= 0 && k < l->h.n ? &l->h.entries[k] : NULL;
    if (e && e->dtype >= 0) return e;
    if (e)
        ms__fail(MS_EINVAL, "load: '%s': tensor '%s' has dtype %s, which Moonshard's tensors do not have", l->path,
                 e->name, e->type);
    else
        ms__fail(MS_EINVAL, "load: tensor %d is out of range; '%s' has %d tensor%s", k, l->path, l->h.n,
                 l->h.n == 1 ? "" : "s");
    return NULL;
}

static ms_status read_header(ms_loader *l, const char *path)
{
    uint64_t length = 0, size;
    MS_TRY(ms__file_open(&l->fd, &size, path, "load"));
    unsigned char prefix[8];
    if (size < 8)
        return ms__fail(MS_EIO, "load: '%s' is not a valid safetensors file: it has %llu bytes, at least 8 expected",
                        path, (unsigned long long)size);
    MS_TRY(ms__file_read(l->fd, path, prefix, 8, 0, "load"));
    for (int k = 0; k < 8; k++) length |= (uint64_t)prefix[k] << 8 * k;
    if (length > MS_ST_MAX_HEADER || length > size - 8)
        return ms__fail(
            MS_EIO,
            "load: '%s' is not a valid safetensors file: the header has %llu bytes, the file %llu (a header "
            "may have at most %d)",
            path, (unsigned long long)length, (unsigned long long)size, MS_ST_MAX_HEADER);
    char *text = malloc(length + 1);
    if (!text) return ms__no_memory(length + 1, "load", "a header of %llu bytes", (unsigned long long)length);
    ms_status st = ms__file_read(l->fd, path, text, length, 8, "load");
    if (!st) st = ms__st_parse(&l->h, path, text, length, size - 8 - length, l->verify);
    if (!st && verifies(l)) memcpy(l->checksum, ms__st_checksum(text), 16);
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

ms_loader *ms_loader_open(const char *path, int verify)
{
    ms_loader *l = calloc(1, sizeof *l);
    if (l) {
        l->fd = -1;
        l->verify = verify;
        l->block_number = UINT64_MAX;
    }
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
    free(l->block);
    free(l->path);
    free(l);
}

// ---- checksums ----------------------------------------------------------------------------------

static ms_status check_block(const ms_loader *l, const ms_st_entry *e, uint64_t block, const ms_hash *h)
{
    char digits[16];
    ms__hash_text(ms__hash_end(h), digits);
    if (!memcmp(digits, l->h.checksums + 16 * (e->block + block), 16)) return MS_OK;
    return ms__fail(
        MS_EIO, "load: '%s' is damaged: tensor '%s' is not what was written (the checksum of its block %llu differs)",
        l->path, e->name, (unsigned long long)block + 1);
}

static ms_status read_block(ms_loader *l, const ms_st_entry *e, uint64_t block, uint64_t bytes, char *to)
{
    ms_hash h;
    MS_TRY(ms__file_read(l->fd, l->path, to, bytes, l->data_at + e->begin + block * MS_ST_BLOCK, "load"));
    ms__hash_begin(&h);
    ms__hash_add(&h, to, bytes);
    return check_block(l, e, block, &h);
}

// Reads bytes of an entry. If the file is verified, whole blocks are verified in place; to read a part of a block,
// reads and verifies the whole block in l->block, unless it is there already.
static ms_status get(ms_loader *l, const ms_st_entry *e, uint64_t from, uint64_t bytes, char *to)
{
    if (!verifies(l)) return ms__file_read(l->fd, l->path, to, bytes, l->data_at + e->begin + from, "load");
    for (uint64_t n; bytes > 0; from += n, to += n, bytes -= n) {
        uint64_t block = from / MS_ST_BLOCK, begin = block * MS_ST_BLOCK, rest = e->end - e->begin - begin;
        uint64_t size = rest < MS_ST_BLOCK ? rest : MS_ST_BLOCK;
        n = begin + size - from < bytes ? begin + size - from : bytes;
        if (n == size) {
            MS_TRY(read_block(l, e, block, size, to));
            continue;
        }
        if (!l->block && !(l->block = malloc(MS_ST_BLOCK)))
            return ms__no_memory(MS_ST_BLOCK, "load", "a block of tensor '%s'", e->name);
        if (l->block_number != e->block + block) {
            l->block_number = UINT64_MAX;
            MS_TRY(read_block(l, e, block, size, l->block));
            l->block_number = e->block + block;
        }
        memcpy(to, l->block + (from - begin), n);
    }
    return MS_OK;
}

// Other programs, or damage, may have stored other bytes than 0 and 1, which kernels would add up.
static void fix_bools(const ms_st_entry *e, char *data, uint64_t bytes)
{
    for (uint64_t k = 0; e->dtype == MS_BOOL && k < bytes; k++) data[k] = data[k] != 0;
}

// ---- many ranges at once ------------------------------------------------------------------------

ms_status ms_loader_want(ms_loader *l, int k, double first, double count, ms_id dst, double at)
{
    if (ms__recording) return ms__capture_refuse("it reads a file; pass what it reads as arguments");
    ms_tensor *t = ms__tensor(dst);
    const ms_st_entry *e = t ? entry_at(l, k) : NULL;
    if (!e) return ms__failure();
    uint64_t esz = (uint64_t)ms__dtype_size(e->dtype), numel = (e->end - e->begin) / esz;
    if (!(first >= 0 && count >= 0 && first + count <= (double)numel))
        return ms__fail(MS_EINVAL, "load: elements %.0f to %.0f are out of range for tensor '%s' of shape %s", first,
                        first + count, e->name, ms__shape_text(e->ndim, e->shape));
    if (t->dtype != e->dtype || !ms__is_contiguous(t) || ms__device_type(ms__device(t)) != MS_CPU ||
        !(at >= 0 && at + count <= (double)t->numel))
        return ms__fail(
            MS_EINVAL,
            "load: %.0f elements of tensor '%s' (%s) cannot be stored from element %.0f of %s on, expected a "
            "contiguous CPU tensor of that dtype with room for them",
            count, e->name, ms__dtype_name(e->dtype), at, ms__tensor_text(t));
    MS_TRY(ms__storage_sync(t->storage, true));
    if (count == 0) return MS_OK;
    MS_TRY(ms__grow(&l->wants, &l->cap_wants, l->n_wants, sizeof *l->wants, "load", "ranges"));
    uint64_t from = (uint64_t)first * esz;
    l->wants[l->n_wants++] = (want) { .entry = k,
                                      .from = from,
                                      .bytes = (uint64_t)count * esz,
                                      .at = l->data_at + e->begin + from,
                                      .to = (char *)ms__data(t) + (uint64_t)at * esz,
                                      .keep = ms__retain(t) };
    return MS_OK;
}

static int by_file_place(const void *a, const void *b)
{
    uint64_t x = ((const want *)a)->at, y = ((const want *)b)->at;
    return x < y ? -1 : x > y;
}

// Verification of the data in order, block by block.
typedef struct {
    const ms_st_entry **order;  // the remaining entries, the current one first
    uint64_t at;                // position in the current entry's data
    ms_hash hash;               // hash of the current block up to `at`
} verifier;

static int by_begin(const void *a, const void *b)
{
    const ms_st_entry *x = *(const ms_st_entry *const *)a, *y = *(const ms_st_entry *const *)b;
    return x->block != y->block ? (x->block < y->block ? -1 : 1) : 0;
}

static ms_status verify(const ms_loader *l, verifier *f, const char *data, uint64_t n)
{
    while (n > 0) {
        const ms_st_entry *e = *f->order;
        uint64_t size = e->end - e->begin, room = MS_ST_BLOCK - f->at % MS_ST_BLOCK;
        if (room > size - f->at) room = size - f->at;
        if (room > n) room = n;
        ms__hash_add(&f->hash, data, room);
        f->at += room;
        data += room;
        n -= room;
        if (f->at < size && f->at % MS_ST_BLOCK) continue;
        MS_TRY(check_block(l, e, (f->at - 1) / MS_ST_BLOCK, &f->hash));
        ms__hash_begin(&f->hash);
        if (f->at < size) continue;
        f->order++;
        f->at = 0;
    }
    return MS_OK;
}

// Reads the file in order, verifies the data or hashes the whole file, and copies the requested ranges.
static ms_status stream(ms_loader *l, verifier *f)
{
    ms_direct *d;
    MS_TRY(ms__direct_reader(&d, l->fd, l->path, l->size, "load"));
    ms_status st = MS_OK;
    uint64_t begin = 0, n = 1;
    for (int first = 0; st == MS_OK && n > 0; begin += n) {
        const char *data;
        if ((st = ms__direct_read(d, &data, &n)) != MS_OK) break;
        if (!f->order) {
            ms__hash_add(&f->hash, data, n);
        } else {
            uint64_t header = begin >= l->data_at ? 0 : l->data_at - begin < n ? l->data_at - begin : n;
            if ((st = verify(l, f, data + header, n - header)) != MS_OK) break;
        }
        while (first < l->n_wants && l->wants[first].at + l->wants[first].bytes <= begin) first++;
        for (int k = first; k < l->n_wants && l->wants[k].at < begin + n; k++) {
            want *w = &l->wants[k];
            uint64_t from = w->at > begin ? w->at : begin,
                     to = w->at + w->bytes < begin + n ? w->at + w->bytes : begin + n;
            if (to > from) memcpy(w->to + (from - w->at), data + (from - begin), to - from);
        }
    }
    ms_status end = ms__direct_end(d);
    return st != MS_OK ? st : end;
}

// Reads the whole file in order and copies the requested ranges. hash: receives the XXH64 of a file without checksums;
// "" if the file has them.
static ms_status fetch_whole(ms_loader *l, char *hash)
{
    const ms_st_entry **order = NULL;
    verifier f = { .at = 0 };
    ms__hash_begin(&f.hash);
    if (verifies(l)) {
        int n = 0;
        order = malloc((size_t)(l->h.n + 1) * sizeof *order);
        if (!order)
            return ms__no_memory((size_t)(l->h.n + 1) * sizeof *order, "load", "the list of %d tensors", l->h.n);
        for (int k = 0; k < l->h.n; k++)
            if (l->h.entries[k].end > l->h.entries[k].begin) order[n++] = &l->h.entries[k];
        qsort(order, (size_t)n, sizeof *order, by_begin);
        f.order = order;
    }
    ms_status st = stream(l, &f);
    free(order);
    hash[0] = hash[16] = 0;
    if (!st && !l->h.checksums) ms__hash_text(ms__hash_end(&f.hash), hash);
    return st;
}

ms_status ms_loader_fetch(ms_loader *l, char *whole)
{
    ms_status st = MS_OK;
    if (l->n_wants) qsort(l->wants, (size_t)l->n_wants, sizeof *l->wants, by_file_place);
    if (whole) st = fetch_whole(l, whole);
    for (int k = 0; !whole && k < l->n_wants && !st; k++) {
        const want *w = &l->wants[k];
        st = get(l, &l->h.entries[w->entry], w->from, w->bytes, w->to);
    }
    for (int k = 0; k < l->n_wants && !st; k++)
        fix_bools(&l->h.entries[l->wants[k].entry], l->wants[k].to, l->wants[k].bytes);
    drop_wants(l);
    return st;
}

const char *ms_loader_sum(const ms_loader *l) { return l->checksum; }

const char *ms_loader_name(const ms_loader *l, int k, const char **other)
{
    if (k < 0 || k >= l->h.n) return NULL;
    const ms_st_entry *e = &l->h.entries[k];
    *other = e->dtype < 0 ? e->type : NULL;
    return e->name;
}

const char *ms_loader_metadata(const ms_loader *l, int k, const char **value)
{
    if (k < 0 || k >= l->h.n_meta) return NULL;
    *value = l->h.meta[k].value;
    return l->h.meta[k].key;
}

int ms_loader_find(const ms_loader *l, const char *name)
{
    const ms_st_entry *e = ms__st_find(&l->h, name);
    return e ? (int)(e - l->h.entries) : -1;
}

ms_status ms_loader_info(const ms_loader *l, int k, ms_info *out)
{
    const ms_st_entry *e = entry_at(l, k);
    if (!e) return ms__failure();
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

ms_id ms_loader_read(ms_loader *l, int k, double first, double count)
{
    if (ms__recording) return ms__no_id(ms__capture_refuse("it reads a file; pass what it reads as arguments"));
    const ms_st_entry *e = entry_at(l, k);
    if (!e) return 0;
    int64_t shape[MS_MAX_DIMS], rows = e->ndim ? e->shape[0] : 1;
    memcpy(shape, e->shape, sizeof shape);
    if (count < 0) count = (double)rows - first;
    if (!(first >= 0 && count >= 0 && first + count <= (double)rows))
        return ms__no_id(
            ms__fail(MS_EINVAL,
                     "load: rows %.0f to %.0f are not a range of rows of tensor '%s' of shape %s; rows count from 1",
                     first + 1, first + count, e->name, ms__shape_text(e->ndim, e->shape)));
    uint64_t row_bytes = rows ? (e->end - e->begin) / (uint64_t)rows : 0;
    if (e->ndim) shape[0] = (int64_t)count;
    ms_tensor *t;
    if (ms__tensor_new(&t, e->dtype, MS_CPU, e->ndim, shape, "load")) return 0;
    uint64_t bytes = row_bytes * (uint64_t)count;
    if (get(l, e, row_bytes * (uint64_t)first, bytes, t->storage->data)) {
        ms__release(t);
        return 0;
    }
    fix_bools(e, t->storage->data, bytes);
    return ms__name(t);
}
