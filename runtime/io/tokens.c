// SPDX-License-Identifier: MIT
// io/tokens.c -- token files: ranges of memory-mapped files, concatenated to one sequence, and batches from it. A text
// file is a sequence of 1-byte tokens; llm.c's shards have tokens of 2 or 4 bytes.
//
// The kernel's page cache holds the pages: a corpus may exceed memory, and the ranks of a node share it. If a mapped
// file is truncated, the process ends with SIGBUS, as with any mmap.
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/capture.h"
#include "io/files.h"
#include "tensor/tensor.h"

typedef struct {
    void *map;
    size_t map_bytes;
    const void *data;  // the first token
    int token_bytes;
    int64_t first, count;  // first: position in the whole sequence
} range;

struct ms_tokens {
    range *ranges;
    int n, capacity;
    int64_t count;
};

ms_tokens *ms_tokens_new(void)
{
    ms_tokens *t = calloc(1, sizeof *t);
    if (!t) ms__no_memory(sizeof *t, "tokens", "a token file");
    return t;
}

void ms_tokens_free(ms_tokens *t)
{
    if (!t) return;
    for (int k = 0; k < t->n; k++) munmap(t->ranges[k].map, t->ranges[k].map_bytes);
    free(t->ranges);
    free(t);
}

ms_status ms_tokens_add(ms_tokens *t, const char *path, int token_bytes, double offset, double count)
{
    if (token_bytes != 1 && token_bytes != 2 && token_bytes != 4)
        return ms__fail(MS_EINVAL, "tokens: '%s': tokens of %d bytes; 1, 2 or 4 are supported", path, token_bytes);
    if (!(offset >= 0 && count >= 0 && offset < 0x1p53 && count < 0x1p50))
        return ms__fail(
            MS_EINVAL,
            "tokens: '%s': %.0f tokens from byte %.0f, expected 0 to below 2^50 tokens from byte 0 to below 2^53", path,
            count, offset);
    if (count == 0) return MS_OK;
    int fd;
    uint64_t size;
    MS_TRY(ms__file_open(&fd, &size, path, "tokens"));
    size_t end = (size_t)offset + (size_t)count * (size_t)token_bytes;
    if (size < end) {
        close(fd);
        return ms__fail(MS_EIO,
                        "tokens: '%s' has %llu bytes, but %.0f tokens of %d bytes from byte %.0f on need %zu bytes",
                        path, (unsigned long long)size, count, token_bytes, offset, end);
    }
    ms_status grown = ms__grow(&t->ranges, &t->capacity, t->n, sizeof *t->ranges, "tokens", "files");
    if (grown != MS_OK) {
        close(fd);
        return grown;
    }
    void *map = mmap(NULL, end, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return ms__fail(MS_EIO, "tokens: cannot map %zu bytes of '%s': %s", end, path, strerror(errno));
    t->ranges[t->n++] = (range) { map, end, (const char *)map + (size_t)offset, token_bytes, t->count, (int64_t)count };
    t->count += (int64_t)count;
    return MS_OK;
}

// The index of the range that contains a position, which must be less than t->count.
static int find_file(const ms_tokens *t, int64_t place)
{
    int low = 0, high = t->n - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (t->ranges[middle].first <= place) low = middle;
        else high = middle - 1;
    }
    return low;
}

static int64_t token(const range *r, int64_t k)
{
    switch (r->token_bytes) {
    case 1: return ((const uint8_t *)r->data)[k];
    case 2: {  // a range may begin at an odd byte
        uint16_t v;
        memcpy(&v, (const char *)r->data + 2 * k, 2);
        return v;
    }
    default: {
        uint32_t v;
        memcpy(&v, (const char *)r->data + 4 * k, 4);
        return v;
    }
    }
}

// Copies [first, first + count) to out; positions past the end of the sequence give 0.
static void copy_tokens(const ms_tokens *t, int64_t first, int64_t count, int64_t *out)
{
    int64_t done = 0;
    if (first < t->count) {
        for (int k = find_file(t, first); k < t->n && done < count; k++) {
            const range *r = &t->ranges[k];
            for (int64_t j = first + done - r->first; j < r->count && done < count; j++) out[done++] = token(r, j);
        }
    }
    while (done < count) out[done++] = 0;
}

ms_status ms_tokens_read(const ms_tokens *t, double first, double count, uint8_t *out)
{
    if (!(first >= 0 && count >= 0 && first + count <= (double)t->count))
        return ms__fail(MS_EINVAL,
                        "tokens: %.0f tokens from position %.0f are out of range; the sequence has %lld tokens", count,
                        first, (long long)t->count);
    int64_t done = 0, n = (int64_t)count;
    for (int k = n ? find_file(t, (int64_t)first) : t->n; k < t->n && done < n; k++) {
        const range *r = &t->ranges[k];
        int64_t from = (int64_t)first + done - r->first, some = r->count - from < n - done ? r->count - from : n - done;
        if (r->token_bytes != 1)
            return ms__fail(MS_EINVAL, "tokens: these tokens have %d bytes, expected 1-byte tokens (text)",
                            r->token_bytes);
        memcpy(out + done, (const uint8_t *)r->data + from, (size_t)some);
        done += some;
    }
    return MS_OK;
}

// ---- shuffles -----------------------------------------------------------------------------------

// The finalizer of splitmix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit of x.
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t as_unsigned(double x) { return (uint64_t)(int64_t)x; }
static uint64_t hash(double a, double b, double c)
{
    return mix(mix(mix(as_unsigned(a)) + as_unsigned(b)) + as_unsigned(c));
}

// A Feistel network of 4 rounds over an even number of bits, applied repeatedly until the result is below n (cycle
// walking, Black and Rogaway 2002). It is a bijection by construction.
double ms_shuffle(double a, double b, double c, double j, double n)
{
    uint64_t key = hash(a, b, c), count = n >= 1 ? as_unsigned(n) : 1, at = j >= 0 && j < n ? as_unsigned(j) : 0;
    int half = 1;
    while (half < 26 && (uint64_t)1 << 2 * half < count) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = at >> half, right = at & mask;
        for (uint64_t round = 1; round <= 4; round++) {
            uint64_t next = left ^ (mix(key + right * 4 + round) & mask);
            left = right;
            right = next;
        }
        at = left << half | right;
    } while (at >= count);
    return (double)at;
}

double ms_hash_share(double a, double b, double c) { return (double)hash(a, b, c) * 0x1p-64; }
double ms_hash_below(double a, double b, double c, double n)
{
    return n >= 1 ? (double)(hash(a, b, c) % as_unsigned(n)) : 0;
}

ms_status ms_tokens_batch(const ms_tokens *t, int n, const double *starts, const double *skip, const double *scored,
                          int length, double ignore, ms_id *out)
{
    if (ms__recording) return ms__capture_refuse("it reads a batch of tokens; pass batches as arguments");
    if (n < 0 || length < 1)
        return ms__fail(
            MS_EINVAL, "tokens: a batch of %d sequences of %d tokens, expected 0 or more sequences of 1 or more tokens",
            n, length);
    for (int k = 0; k < n; k++)
        if (!(starts[k] >= 0 && starts[k] < (double)t->count))
            return ms__fail(
                MS_EINVAL,
                "tokens: sequence %d begins at position %.0f, expected 0 to below %lld, the number of tokens", k + 1,
                starts[k], (long long)t->count);
    const int64_t shape[2] = { n, length };
    ms_tensor *x, *y;
    MS_TRY(ms__tensor_new(&x, MS_I64, MS_CPU, 2, shape, "tokens"));
    ms_status st = ms__tensor_new(&y, MS_I64, MS_CPU, 2, shape, "tokens");
    int64_t *row = st ? NULL : malloc(((size_t)length + 1) * sizeof *row);
    if (!row) {
        if (!st) ms__release(y);
        ms__release(x);
        return st ? st : ms__no_memory(((size_t)length + 1) * sizeof *row, "tokens", "%d tokens", length);
    }
    for (int k = 0; k < n; k++) {
        int64_t *xs = (int64_t *)x->storage->data + (int64_t)k * length,
                *ys = (int64_t *)y->storage->data + (int64_t)k * length;
        copy_tokens(t, (int64_t)starts[k], length + 1, row);
        memcpy(xs, row, (size_t)length * sizeof *row);
        for (int64_t j = 0; j < length; j++) {
            bool counts =
                (!skip || j >= (int64_t)skip[k]) && (!scored || j < (int64_t)(skip ? skip[k] : 0) + (int64_t)scored[k]);
            ys[j] = counts ? row[j + 1] : (int64_t)ignore;
        }
    }
    free(row);
    out[0] = ms__name(x);
    out[1] = ms__name(y);
    return out[0] && out[1] ? MS_OK : ms__failure();
}
