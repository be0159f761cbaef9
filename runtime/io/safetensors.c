// SPDX-License-Identifier: MIT
// io/safetensors.c -- a strict parser for safetensors headers, and a writer.
//
// The text comes from a file, so everything is checked: the JSON must have exactly the format's structure, valid UTF-8,
// no duplicate keys at any level and only whole numbers; products must not overflow; the tensors must cover the data
// without gap, overlap or unused end. The length of the text limits what the parser allocates.
#include <stdarg.h>
#include <stdio.h>

#include "tensor/dtype.h"
#include "io/files.h"
#include "io/safetensors.h"
#include "base/utf8.h"

static const struct {
    const char *name;
    int dtype;
} names[] = {
    { "F32", MS_F32 }, { "F64", MS_F64 }, { "F16", MS_F16 },   { "BF16", MS_BF16 }, { "I64", MS_I64 },
    { "I32", MS_I32 }, { "U8", MS_U8 },   { "BOOL", MS_BOOL }, { "I8", MS_I8 },     { "I16", MS_I16 },
};

static const char *st_name(int dtype)
{
    for (int k = 0; k < MS_COUNT(names); k++)
        if (names[k].dtype == dtype) return names[k].name;
    return "?";
}

bool ms__st_bytes(const ms_st_entry *e, uint64_t *bytes)
{
    // A size of 0 must not hide the overflow of the other sizes, because strides are products of them.
    uint64_t n = (uint64_t)ms__dtype_size(e->dtype);
    bool fits = true, empty = false;
    for (int d = 0; d < e->ndim; d++) {
        if (e->shape[d] == 0) empty = true;
        else if (__builtin_mul_overflow(n, (uint64_t)e->shape[d], &n) || n > INT64_MAX) fits = false;
    }
    *bytes = empty ? 0 : n;
    return fits;
}

uint64_t ms__st_blocks(const ms_st_entry *e) { return (e->end - e->begin + MS_ST_BLOCK - 1) / MS_ST_BLOCK; }

// ---- the list of entries ------------------------------------------------------------------------

static char *copy_text(const char *s, size_t n)
{
    char *c = malloc(n + 1);
    if (c) {
        memcpy(c, s, n);
        c[n] = 0;
    }
    return c;
}

ms_st_entry *ms__st_add(ms_st_header *h, const char *who, const char *name, size_t length)
{
    char *copy = NULL;
    if (h->n >= MS_ST_MAX_ENTRIES) {
        ms__fail(MS_EIO, "%s: more than %d tensors in one file, at most %d are allowed", who, MS_ST_MAX_ENTRIES,
                 MS_ST_MAX_ENTRIES);
    } else if (length > MS_ST_MAX_NAME) {
        ms__fail(MS_EIO, "%s: a tensor's name has %zu bytes, at most %d are allowed", who, length, MS_ST_MAX_NAME);
    } else if (!(copy = copy_text(name, length)) ||
               ms__grow(&h->entries, &h->capacity, h->n, sizeof *h->entries, who, "tensors")) {
        free(copy);
        ms__no_memory(length + 1 + sizeof *h->entries, who, "tensor %d of a file", h->n + 1);
    } else {
        ms_st_entry *e = &h->entries[h->n++];
        *e = (ms_st_entry) { .name = copy };
        return e;
    }
    return NULL;
}

ms_status ms__st_add_meta(ms_st_header *h, const char *who, const char *key, size_t key_length, const char *value,
                          size_t value_length)
{
    if (h->n_meta >= MS_ST_MAX_ENTRIES)
        return ms__fail(MS_EIO, "%s: more than %d metadata entries in one file, at most %d are allowed", who,
                        MS_ST_MAX_ENTRIES, MS_ST_MAX_ENTRIES);
    char *k = copy_text(key, key_length), *v = copy_text(value, value_length);
    if (!k || !v || ms__grow(&h->meta, &h->meta_capacity, h->n_meta, sizeof *h->meta, who, "metadata")) {
        free(k);
        free(v);
        return ms__no_memory(key_length + value_length + 2 + sizeof *h->meta, who, "metadata '%s'", key);
    }
    h->meta[h->n_meta++] = (ms_st_meta) { k, v };
    return MS_OK;
}

void ms__st_clear(ms_st_header *h)
{
    for (int k = 0; k < h->n; k++) free(h->entries[k].name);
    for (int k = 0; k < h->n_meta; k++) {
        free(h->meta[k].key);
        free(h->meta[k].value);
    }
    free(h->entries);
    free(h->meta);
    free(h->checksums);
    memset(h, 0, sizeof *h);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const ms_st_entry *)a)->name, ((const ms_st_entry *)b)->name);
}

const char *ms__st_sort(ms_st_header *h)
{
    if (h->n) qsort(h->entries, (size_t)h->n, sizeof *h->entries, by_name);
    for (int k = 1; k < h->n; k++)
        if (!strcmp(h->entries[k - 1].name, h->entries[k].name)) return h->entries[k].name;
    return NULL;
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const ms_st_meta *)a)->key, ((const ms_st_meta *)b)->key);
}

static int by_data_place(const void *a, const void *b)
{
    const ms_st_entry *x = *(const ms_st_entry *const *)a, *y = *(const ms_st_entry *const *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

ms_st_entry *ms__st_find(const ms_st_header *h, const char *name)
{
    ms_st_entry key = { .name = (char *)name };
    return h->n ? bsearch(&key, h->entries, (size_t)h->n, sizeof key, by_name) : NULL;
}

// ---- parsing ------------------------------------------------------------------------------------

typedef struct {
    const char *path, *text, *at, *end;
    char *buffer;  // the latest string; as long as the text, so that every string fits
    size_t buffered;
} parser;

static __attribute__((format(printf, 2, 3))) ms_status invalid(const parser *p, const char *fmt, ...)
{
    va_list args;
    char text[2048];
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return ms__fail(MS_EIO, "load: '%s' is not a valid safetensors file: %s", p->path, text);
}

static ms_status bad(const parser *p, const char *what)
{
    return invalid(p, "header, byte %zu: %s", (size_t)(p->at - p->text), what);
}

// Fails as the function bad does, and names the byte that was found.
static ms_status bad_byte(const parser *p, const char *what)
{
    char text[96];
    if (p->at >= p->end) snprintf(text, sizeof text, "%s, found the header's end", what);
    else if (*p->at > 0x20 && *p->at < 0x7f) snprintf(text, sizeof text, "%s, found '%c'", what, *p->at);
    else snprintf(text, sizeof text, "%s, found byte 0x%02x", what, (unsigned char)*p->at);
    return bad(p, text);
}

static void skip_blanks(parser *p)
{
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r')) p->at++;
}

static bool accept(parser *p, char c)
{
    skip_blanks(p);
    if (p->at >= p->end || *p->at != c) return false;
    p->at++;
    return true;
}

static ms_status hex4(parser *p, uint32_t *out)
{
    uint32_t v = 0;
    for (int k = 0; k < 4; k++, p->at++) {
        if (p->at >= p->end) return bad(p, "a string ends inside an escape");
        char c = *p->at;
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return bad(p, "\\u needs four hexadecimal digits");
        v = v << 4 | (uint32_t)digit;
    }
    *out = v;
    return MS_OK;
}

static void put_utf8(parser *p, uint32_t c)
{
    char *b = p->buffer + p->buffered;
    if (c < 0x80) {
        b[0] = (char)c;
        p->buffered += 1;
    } else if (c < 0x800) {
        b[0] = (char)(0xc0 | c >> 6);
        b[1] = (char)(0x80 | (c & 63));
        p->buffered += 2;
    } else if (c < 0x10000) {
        b[0] = (char)(0xe0 | c >> 12);
        b[1] = (char)(0x80 | (c >> 6 & 63));
        b[2] = (char)(0x80 | (c & 63));
        p->buffered += 3;
    } else {
        b[0] = (char)(0xf0 | c >> 18);
        b[1] = (char)(0x80 | (c >> 12 & 63));
        b[2] = (char)(0x80 | (c >> 6 & 63));
        b[3] = (char)(0x80 | (c & 63));
        p->buffered += 4;
    }
}

// Parses a string. Decoding never makes it longer (an escape of 6 bytes gives at most 3), so it fits the buffer.
static ms_status string(parser *p)
{
    if (!accept(p, '"')) return bad(p, "expected a string");
    p->buffered = 0;
    for (;;) {
        if (p->at >= p->end) return bad(p, "a string does not end");
        unsigned char c = (unsigned char)*p->at;
        if (c == '"') break;
        if (c < 0x20) return bad(p, "a control character in a string");
        p->at++;
        if (c != '\\') {
            p->buffer[p->buffered++] = (char)c;
            continue;
        }
        if (p->at >= p->end) return bad(p, "a string ends inside an escape");
        static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
        char e = *p->at++;
        const char *found = e ? strchr(from, e) : NULL;
        if (found) {
            p->buffer[p->buffered++] = to[found - from];
            continue;
        }
        if (e != 'u') return bad(p, "an unknown escape in a string");
        uint32_t u, low;
        MS_TRY(hex4(p, &u));
        if (u >= 0xdc00 && u <= 0xdfff) return bad(p, "a lone surrogate in a string");
        if (u >= 0xd800 && u <= 0xdbff) {
            if (p->end - p->at < 2 || p->at[0] != '\\' || p->at[1] != 'u')
                return bad(p, "a lone surrogate in a string");
            p->at += 2;
            MS_TRY(hex4(p, &low));
            if (low < 0xdc00 || low > 0xdfff) return bad(p, "a lone surrogate in a string");
            u = 0x10000 + ((u - 0xd800) << 10) + (low - 0xdc00);
        }
        if (u == 0) return bad(p, "a zero byte in a string");
        put_utf8(p, u);
    }
    p->at++;
    p->buffer[p->buffered] = 0;
    return MS_OK;
}

static ms_status whole_number(parser *p, uint64_t *out)
{
    skip_blanks(p);
    const char *first = p->at;
    uint64_t v = 0;
    while (p->at < p->end && *p->at >= '0' && *p->at <= '9') {
        if (__builtin_mul_overflow(v, 10u, &v) || __builtin_add_overflow(v, (uint64_t)(*p->at - '0'), &v) ||
            v > INT64_MAX)
            return bad(p, "a number is too large, expected at most 2^63 - 1");
        p->at++;
    }
    if (p->at == first) return bad_byte(p, "expected a whole number that is not negative");
    if (*first == '0' && p->at - first > 1) return bad(p, "a number has a leading 0, expected none");
    if (p->at < p->end && *p->at == '.') return bad(p, "expected a whole number, this one has a fraction");
    if (p->at < p->end && (*p->at == 'e' || *p->at == 'E'))
        return bad(p, "expected a whole number, this one has an exponent");
    *out = v;
    return MS_OK;
}

static ms_status metadata(parser *p, ms_st_header *h)
{
    if (!accept(p, '{')) return bad(p, "__metadata__ is not an object");
    if (accept(p, '}')) return MS_OK;
    do {
        MS_TRY(string(p));
        size_t key_length = p->buffered;
        char *key = copy_text(p->buffer, key_length);
        if (!key) return ms__no_memory(key_length + 1, "load", "a name in metadata");
        ms_status st = MS_OK;
        if (!accept(p, ':')) st = bad(p, "expected ':'");
        if (!st) st = string(p);
        if (!st) st = ms__st_add_meta(h, "load", key, key_length, p->buffer, p->buffered);
        free(key);
        MS_TRY(st);
    } while (accept(p, ','));
    return accept(p, '}') ? MS_OK : bad(p, "expected ',' or '}'");
}

static ms_status shape_of(parser *p, ms_st_entry *e)
{
    if (!accept(p, '[')) return bad(p, "shape is not an array");
    if (accept(p, ']')) return MS_OK;
    do {
        uint64_t size;
        MS_TRY(whole_number(p, &size));
        if (e->ndim >= MS_MAX_DIMS) return bad(p, "a shape has more than 8 dimensions");
        e->shape[e->ndim++] = (int64_t)size;
    } while (accept(p, ','));
    return accept(p, ']') ? MS_OK : bad(p, "expected ',' or ']'");
}

static ms_status entry(parser *p, ms_st_entry *e)
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    int seen = 0;
    if (!accept(p, '{')) return bad(p, "a tensor's entry is not an object");
    do {
        MS_TRY(string(p));
        int field = !strcmp(p->buffer, "dtype")          ? DTYPE
                    : !strcmp(p->buffer, "shape")        ? SHAPE
                    : !strcmp(p->buffer, "data_offsets") ? OFFSETS
                                                         : 0;
        if (!field) return bad(p, "a tensor's entry has an unknown field, expected dtype, shape, data_offsets");
        if (seen & field) return bad(p, "a field occurs twice in a tensor's entry");
        seen |= field;
        if (!accept(p, ':')) return bad(p, "expected ':'");
        if (field == DTYPE) {
            MS_TRY(string(p));
            e->dtype = -1;
            for (int k = 0; k < MS_COUNT(names); k++)
                if (!strcmp(names[k].name, p->buffer)) e->dtype = names[k].dtype;
            if (e->dtype < 0) {
                // Other programs store more types (F8_E4M3, U16, C64, ...); they must not block the other tensors.
                if (!p->buffered) return bad(p, "a dtype has no name");
                snprintf(e->type, sizeof e->type, "%s", p->buffer);
            }
        } else if (field == SHAPE) {
            MS_TRY(shape_of(p, e));
        } else {
            if (!accept(p, '[')) return bad(p, "data_offsets is not an array");
            MS_TRY(whole_number(p, &e->begin));
            if (!accept(p, ',')) return bad(p, "data_offsets needs two numbers");
            MS_TRY(whole_number(p, &e->end));
            if (!accept(p, ']')) return bad(p, "data_offsets needs two numbers");
        }
    } while (accept(p, ','));
    if (!accept(p, '}')) return bad(p, "expected ',' or '}'");
    return seen == (DTYPE | SHAPE | OFFSETS) ? MS_OK : bad(p, "a tensor's entry lacks dtype, shape or data_offsets");
}

static ms_status object(parser *p, ms_st_header *h)
{
    bool has_metadata = false;
    if (p->at >= p->end || *p->at != '{') return bad_byte(p, "expected '{' first");
    p->at++;
    if (!accept(p, '}')) {
        do {
            MS_TRY(string(p));
            if (!strcmp(p->buffer, "__metadata__")) {
                if (has_metadata) return bad(p, "__metadata__ occurs twice");
                has_metadata = true;
                if (!accept(p, ':')) return bad(p, "expected ':'");
                MS_TRY(metadata(p, h));
                continue;
            }
            if (p->buffered > MS_ST_MAX_NAME)
                return invalid(p, "header, byte %zu: a tensor's name has %zu bytes, at most %d are allowed",
                               (size_t)(p->at - p->text), p->buffered, MS_ST_MAX_NAME);
            ms_st_entry *e = ms__st_add(h, "load", p->buffer, p->buffered);
            if (!e) return ms__failure();
            if (!accept(p, ':')) return bad(p, "expected ':'");
            MS_TRY(entry(p, e));
        } while (accept(p, ','));
        if (!accept(p, '}')) return bad(p, "expected ',' or '}'");
    }
    skip_blanks(p);
    return p->at == p->end ? MS_OK : bad(p, "unexpected text after the closing '}'");
}

static ms_status check_entries(const parser *p, ms_st_header *h, uint64_t data_bytes)
{
    const char *twice = ms__st_sort(h);
    if (twice) return invalid(p, "tensor '%s' occurs twice", twice);
    qsort(h->meta, (size_t)h->n_meta, sizeof *h->meta, by_key);
    for (int k = 1; k < h->n_meta; k++)
        if (!strcmp(h->meta[k - 1].key, h->meta[k].key))
            return invalid(p, "metadata '%s' occurs twice", h->meta[k].key);
    ms_st_entry **order = malloc((size_t)(h->n ? h->n : 1) * sizeof *order);
    if (!order) return ms__no_memory((size_t)(h->n ? h->n : 1) * sizeof *order, "load", "the list of %d tensors", h->n);
    for (int k = 0; k < h->n; k++) order[k] = &h->entries[k];
    qsort(order, (size_t)h->n, sizeof *order, by_data_place);
    uint64_t place = 0, block = 0, bytes = 0;
    ms_status st = MS_OK;
    for (int k = 0; k < h->n && !st; k++) {
        ms_st_entry *e = order[k];
        bool known = e->dtype >= 0;
        if (known && !ms__st_bytes(e, &bytes))
            st = invalid(p, "tensor '%s': its shape %s is too large: it needs 2^63 bytes or more", e->name,
                         ms__shape_text(e->ndim, e->shape));
        else if (e->begin > e->end || e->end > data_bytes)
            st = invalid(p, "tensor '%s': bytes %llu to %llu are outside of the %llu bytes of data", e->name,
                         (unsigned long long)e->begin, (unsigned long long)e->end, (unsigned long long)data_bytes);
        else if (known && e->end - e->begin != bytes)
            st = invalid(p, "tensor '%s': has %llu bytes, but %s %s needs %llu", e->name,
                         (unsigned long long)(e->end - e->begin), ms__dtype_name(e->dtype),
                         ms__shape_text(e->ndim, e->shape), (unsigned long long)bytes);
        else if (e->begin != place)
            st = invalid(p,
                         "tensor '%s' begins at byte %llu, but the tensor before it ends at %llu; expected no gap and "
                         "no overlap",
                         e->name, (unsigned long long)e->begin, (unsigned long long)place);
        place = e->end;
        e->block = block;
        block += ms__st_blocks(e);
    }
    free(order);
    if (!st && place != data_bytes)
        st = invalid(p, "the tensors end at byte %llu, but the data ends at %llu", (unsigned long long)place,
                     (unsigned long long)data_bytes);
    return st;
}

// ---- checksums ----------------------------------------------------------------------------------

static const char PREFIX[] = "{\"__metadata__\":{\"" MS_ST_SUMS "\":\"xxh64 1048576 ";  // the number is MS_ST_BLOCK
static const char MARK[] = "\t\r\t\r\t\r\t\r";  // whitespace that no other program writes in this order
enum { DIGITS = 16, IN_PREFIX = sizeof PREFIX - 1, IN_MARK = sizeof MARK - 1 };

void ms__st_prefix(size_t length, unsigned char *out)
{
    for (int k = 0; k < 8; k++) out[k] = (unsigned char)((uint64_t)length >> 8 * k);
}

static void header_checksum(const char *text, size_t length, char *digits)
{
    ms_hash h;
    unsigned char prefix[8];
    ms__st_prefix(length, prefix);
    ms__hash_begin(&h);
    ms__hash_add(&h, prefix, 8);
    ms__hash_add(&h, text, IN_PREFIX);
    ms__hash_add(&h, "0000000000000000", DIGITS);
    ms__hash_add(&h, text + IN_PREFIX + DIGITS, length - IN_PREFIX - DIGITS);
    ms__hash_text(ms__hash_end(&h), digits);
}

void ms__st_seal(char *text, size_t length) { header_checksum(text, length, text + IN_PREFIX); }

const char *ms__st_checksum(const char *text) { return text + IN_PREFIX; }

// Whether the header has checksums. Accepts a damaged mark if most of it is intact.
static bool has_checksums(const char *text, size_t length)
{
    while (length && strchr(" \t\r\n", text[length - 1]) && text[length - 1]) length--;
    if (length < IN_MARK + 1 || text[length - 1] != '}') return false;
    int same = 0;
    for (int k = 0; k < IN_MARK; k++) same += text[length - 1 - IN_MARK + (size_t)k] == MARK[k];
    return same > IN_MARK / 2;
}

static ms_status verify_header(const parser *p, size_t length)
{
    char digits[DIGITS];
    bool there = length >= IN_PREFIX + DIGITS && !memcmp(p->text, PREFIX, IN_PREFIX);
    if (there) header_checksum(p->text, length, digits);
    if (there && !memcmp(p->text + IN_PREFIX, digits, DIGITS)) return MS_OK;
    return ms__fail(MS_EIO, "load: '%s' is damaged: its header is not the one that was written (its checksum differs)",
                    p->path);
}

// Removes the checksums from the metadata and stores them in the header.
static ms_status take_checksums(const parser *p, ms_st_header *h, bool marked, bool verify)
{
    for (int k = 0; k < h->n_meta; k++) {
        if (strcmp(h->meta[k].key, MS_ST_SUMS)) continue;
        char *value = h->meta[k].value;
        uint64_t blocks = 0;
        for (int i = 0; i < h->n; i++) blocks += ms__st_blocks(&h->entries[i]);
        const char *digits = strrchr(value, ' ');
        bool fits = digits && strlen(digits + 1) == DIGITS * blocks;
        if (marked && fits) {
            memmove(value, digits + 1, DIGITS * blocks + 1);
            h->checksums = value;
        } else {
            free(value);
        }
        free(h->meta[k].key);
        h->n_meta--;
        memmove(&h->meta[k], &h->meta[k + 1], (size_t)(h->n_meta - k) * sizeof *h->meta);
        if (marked && !fits && verify)
            return ms__fail(MS_EIO,
                            "load: '%s' is damaged: it does not have one checksum for each block of its tensors",
                            p->path);
        break;
    }
    return MS_OK;
}

ms_status ms__st_parse(ms_st_header *out, const char *path, const char *text, size_t length, uint64_t data_bytes,
                       bool verify)
{
    parser p = { .path = path, .text = text, .at = text, .end = text + length };
    bool marked = has_checksums(text, length);
    if (marked && verify) MS_TRY(verify_header(&p, length));
    const unsigned char *wrong = ms__utf8_error((const unsigned char *)text, (const unsigned char *)text + length);
    if (wrong) {
        p.at = (const char *)wrong;
        return bad_byte(&p, "invalid UTF-8");
    }
    p.buffer = malloc(length + 1);
    if (!p.buffer) return ms__no_memory(length + 1, "load", "a header of %zu bytes", length);
    ms_st_header h = { 0 };
    ms_status st = object(&p, &h);
    if (!st) st = check_entries(&p, &h, data_bytes);
    if (!st) st = take_checksums(&p, &h, marked, verify);
    free(p.buffer);
    if (st) ms__st_clear(&h);
    else *out = h;
    return st;
}

// ---- writing ------------------------------------------------------------------------------------

static void put_header_string(FILE *f, const char *s)
{
    putc('"', f);
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') {
            putc('\\', f);
            putc(c, f);
        } else if (c < 0x20) {
            fprintf(f, "\\u%04x", c);
        } else {
            putc(c, f);
        }
    }
    putc('"', f);
}

ms_status ms__st_format(const ms_st_header *h, char **text, size_t *length, char **checksums)
{
    uint64_t blocks = 0;
    for (int k = 0; k < h->n; k++) blocks += ms__st_blocks(&h->entries[k]);
    if (blocks > MS_ST_MAX_HEADER / DIGITS)
        return ms__fail(MS_EINVAL, "save: the header is larger than 100 MB, the most that is allowed");
    *text = NULL;
    FILE *f = open_memstream(text, length);
    if (!f) return ms__no_memory(BUFSIZ, "save", "the header of %d tensors", h->n);
    fputs(PREFIX, f);
    fprintf(f, "%0*d ", DIGITS, 0);
    for (uint64_t k = 0; k < blocks; k++) fprintf(f, "%0*d", DIGITS, 0);
    putc('"', f);
    for (int k = 0; k < h->n_meta; k++) {
        putc(',', f);
        put_header_string(f, h->meta[k].key);
        putc(':', f);
        put_header_string(f, h->meta[k].value);
    }
    fputs(h->n ? "}," : "}", f);
    for (int k = 0; k < h->n; k++) {
        const ms_st_entry *e = &h->entries[k];
        if (k) putc(',', f);
        put_header_string(f, e->name);
        fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", st_name(e->dtype));
        for (int d = 0; d < e->ndim; d++) fprintf(f, "%s%lld", d ? "," : "", (long long)e->shape[d]);
        fprintf(f, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)e->begin, (unsigned long long)e->end);
    }
    fprintf(f, "%s}", MARK);
    while (ftell(f) % 8) putc(' ', f);
    if (fclose(f) || !*text) {
        free(*text);
        *text = NULL;
        return ms__no_memory(*length + 1, "save", "the header of %d tensors", h->n);
    }
    if (*length > MS_ST_MAX_HEADER ||
        ms__utf8_error((const unsigned char *)*text, (const unsigned char *)*text + *length)) {
        ms_status st =
            ms__fail(MS_EINVAL, *length > MS_ST_MAX_HEADER
                                    ? "save: the header is larger than 100 MB, the most that is allowed"
                                    : "save: a tensor's name, or a key or value of the metadata, is not valid UTF-8");
        free(*text);
        *text = NULL;
        return st;
    }
    *checksums = *text + IN_PREFIX + DIGITS + 1;
    return MS_OK;
}
