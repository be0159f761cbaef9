// SPDX-License-Identifier: MIT
// cpu/order/sort.c -- sort and topk on the CPU: stable, by keys (formulas/order.h) and positions.
//
// A line becomes entries, each a key and a position, which are sorted: short lines by merge sort, long ones by radix
// sort from the lowest digit on. Keys of up to 32 bits are stored with their position in one 64-bit number; integers
// whose range is small have few bits, and digits that are equal in all entries are skipped. Threads share the lines
// among them; if there are fewer lines than threads, long ones are divided into chunks. For a small k, topk keeps the
// best entries that it has found so far, and skips blocks that have no better one. The result does not depend on the
// division, because no two entries are equal.
#include "cpu/cpu.h"
#include "cpu/order/order.h"
#include "formulas/order.h"

enum { DIGIT = 8, DIGITS = 1 << DIGIT, RUN = 16, SMALL = 512, LONG = 65536, MOST_CHUNKS = 64, STEP = 64 };

// How the elements of a line become keys, which increase in the order of the result.
typedef struct {
    int cls, bits, shift;  // bits: of a key; shift: low bits dropped from half types' keys, as the sign decides them
    bool wide, descending;
    int64_t low;    // if the keys of integers are not wide: the integer whose key is 0, the first in the order
    uint64_t flip;  // all ones to reverse the order
} keys;

// ---- keys ----

static MS_KERNEL void keys_f32(int64_t n, uint32_t *restrict to, const float *restrict x, int shift, uint32_t flip)
{
    for (int64_t k = 0; k < n; k++) to[k] = (ms_key_f32(x[k]) ^ flip) >> shift;
}
static MS_KERNEL void keys_f64(int64_t n, uint64_t *restrict to, const double *restrict x, uint64_t flip)
{
    for (int64_t k = 0; k < n; k++) to[k] = ms_key_f64(x[k]) ^ flip;
}
static MS_KERNEL void keys_i64(int64_t n, uint64_t *restrict to, const int64_t *restrict x, uint64_t flip)
{
    for (int64_t k = 0; k < n; k++) to[k] = ms_key_i64(x[k]) ^ flip;
}
static MS_KERNEL void keys_near(int64_t n, uint32_t *restrict to, const int64_t *restrict x, int64_t low, bool down)
{
    for (int64_t k = 0; k < n; k++) {
        uint64_t away = (uint64_t)x[k] - (uint64_t)low;
        to[k] = (uint32_t)(down ? 0 - away : away);
    }
}
static MS_KERNEL void limits_i64(int64_t n, const int64_t *x, int64_t *low, int64_t *high)
{
    int64_t a = *low, b = *high;
    for (int64_t k = 0; k < n; k++) {
        a = x[k] < a ? x[k] : a;
        b = x[k] > b ? x[k] : b;
    }
    *low = a, *high = b;
}

typedef union {
    float f[MS_CHUNK];
    double d[MS_CHUNK];
    int64_t i[MS_CHUNK];
} chunk;
// Elements [first, first + n), n at most MS_CHUNK, in the computing type: in place if they are adjacent and have this
// type, otherwise converted into *buffer.
static const void *line_elements(const ms_line *x, int cls, int64_t first, int64_t n, chunk *buffer)
{
    const char *from = x->data + first * x->step;
    if (x->dtype == ms__class_dtype(cls) && x->step == ms__class_size(cls)) return from;
    ms__load(cls, x->dtype, n, buffer, from, x->step);
    return buffer;
}

static keys keys_for(const ms_line *x, bool descending)
{
    keys q = { .descending = descending, .flip = descending ? ~(uint64_t)0 : 0 };
    if (ms__is_float(x->dtype)) {
        q.cls = x->dtype == MS_F64 ? MS_C_F64 : MS_C_F32;
        q.wide = x->dtype == MS_F64;
        q.shift = x->dtype == MS_F16 ? 13 : x->dtype == MS_BF16 ? 16 : 0;
        q.bits = q.wide ? 64 : 32 - q.shift;
        return q;
    }
    q.cls = MS_C_I64;
    int64_t low = INT64_MAX, high = INT64_MIN;
    chunk buffer;
    for (int64_t k = 0; k < x->n; k += MS_CHUNK) {
        int64_t n = x->n - k < MS_CHUNK ? x->n - k : MS_CHUNK;
        limits_i64(n, line_elements(x, q.cls, k, n, &buffer), &low, &high);
    }
    uint64_t range = x->n ? (uint64_t)high - (uint64_t)low : 0;
    q.wide = range > UINT32_MAX;
    q.low = descending ? high : low;
    q.bits = q.wide ? 64 : range ? 64 - __builtin_clzll(range) : 0;
    return q;
}

static void narrow_keys_of(const keys *q, const ms_line *x, int64_t first, int64_t n, uint32_t *to)
{
    chunk buffer;
    const void *from = line_elements(x, q->cls, first, n, &buffer);
    if (q->cls == MS_C_F32) keys_f32(n, to, from, q->shift, (uint32_t)q->flip);
    else keys_near(n, to, from, q->low, q->descending);
}
static void wide_keys_of(const keys *q, const ms_line *x, int64_t first, int64_t n, uint64_t *to)
{
    chunk buffer;
    const void *from = line_elements(x, q->cls, first, n, &buffer);
    if (q->cls == MS_C_F64) keys_f64(n, to, from, q->flip);
    else keys_i64(n, to, from, q->flip);
}

static MS_KERNEL bool narrow_any_below(int64_t n, const uint32_t *key, uint32_t limit)
{
    uint32_t any = 0;
    for (int64_t k = 0; k < n; k++) any |= key[k] < limit;
    return any;
}
static MS_KERNEL bool wide_any_below(int64_t n, const uint64_t *key, uint64_t limit)
{
    uint64_t any = 0;
    for (int64_t k = 0; k < n; k++) any |= key[k] < limit;
    return any;
}

// ---- entries ----

typedef struct {
    uint64_t key;
    int64_t at;
} wide_entry;

// A part of a line from which the first k entries are selected (sort_body.h).
typedef struct {
    const keys *q;
    const ms_line *x;
    int64_t first, last, k, room;
    uint32_t (*count)[DIGITS];
} part;

#define N(name) narrow_##name
#define ENTRY uint64_t
#define KEY uint32_t
#define MAKE(key, at) ((uint64_t)(key) << 32 | (uint64_t)(at))
#define KEY_OF(e) ((uint32_t)((e) >> 32))
#define AT_OF(e) ((int64_t)((e)&UINT32_MAX))
#define BEFORE(a, b) ((a) < (b))
#include "cpu/order/sort_body.h"
#undef N
#undef ENTRY
#undef KEY
#undef MAKE
#undef KEY_OF
#undef AT_OF
#undef BEFORE
#define N(name) wide_##name
#define ENTRY wide_entry
#define KEY uint64_t
#define MAKE(key, at) ((wide_entry) { key, at })
#define KEY_OF(e) ((e).key)
#define AT_OF(e) ((e).at)
#define BEFORE(a, b) ((a).key < (b).key)
#include "cpu/order/sort_body.h"

// ---- a call ----

typedef struct {
    const ms_tensor *x;
    ms_tensor *values, *positions;
    int d;
    int64_t k, room;  // elements of a line that are wanted; entries of a buffer
    bool descending;
    char *scratch;  // the buffers: two for each thread, or for a divided line the number that sort_lines() computes
    uint32_t (*count)[DIGITS];
    int64_t group;
    // The line that is being sorted:
    keys q;
    ms_line line;
    void *e;
    int64_t chunks, number, found[MOST_CHUNKS];
} sort_job;

static char *buffer_of(const sort_job *j, int64_t number)
{
    return j->scratch + number * j->room * (int64_t)sizeof(wide_entry);
}

static inline void move_value(int size, char *to, const char *from)
{
    switch (size) {
    case 1: *to = *from; break;
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    default: memcpy(to, from, 8); break;
    }
}
// Writes results [first, last) of a line: the elements and positions of the sorted entries.
static void write_results(const sort_job *j, const keys *q, int64_t first, int64_t last)
{
    ms_line v = ms__line_of(j->values, j->d, j->number), p = ms__line_of(j->positions, j->d, j->number);
    int size = ms__dtype_size(v.dtype);
    const uint64_t *narrow = j->e;
    const wide_entry *wide = j->e;
    for (int64_t k = first; k < last; k++) {
        int64_t at = q->wide ? wide[k].at : (int64_t)(narrow[k] & UINT32_MAX);
        move_value(size, v.data + k * v.step, j->line.data + at * j->line.step);
        *(int64_t *)(p.data + k * p.step) = at;
    }
}

static void read_chunk(void *arg, int64_t begin, int64_t end, int64_t c)
{
    (void)begin;
    (void)end;
    const sort_job *j = arg;
    int64_t first = j->line.n * c / j->chunks, last = j->line.n * (c + 1) / j->chunks;
    if (j->q.wide) wide_read_line(&j->q, &j->line, first, last, (wide_entry *)j->e + first);
    else narrow_read_line(&j->q, &j->line, first, last, (uint64_t *)j->e + first);
}
static void write_chunk(void *arg, int64_t begin, int64_t end, int64_t c)
{
    (void)begin;
    (void)end;
    const sort_job *j = arg;
    write_results(j, &j->q, j->k * c / j->chunks, j->k * (c + 1) / j->chunks);
}
// Sorts all elements of a line, in j->chunks chunks, with the buffers a and b.
static void sort_line(sort_job *j, char *a, char *b, uint32_t (*count)[DIGITS])
{
    j->e = a;
    ms__parallel_tasks(j->chunks, read_chunk, j);
    if (j->q.wide) j->e = wide_sort_entries((wide_entry *)a, (wide_entry *)b, j->line.n, j->q.bits, j->chunks, count);
    else j->e = narrow_sort_entries((uint64_t *)a, (uint64_t *)b, j->line.n, j->q.bits, j->chunks, count);
    ms__parallel_tasks(j->chunks, write_chunk, j);
}

// Whether topk selects instead of sorting; sorting costs less if k is 1/8 of the line or more.
static bool selects(const sort_job *j, int64_t n) { return n > 2 * STEP && j->k < n / 8; }
static int64_t room_for_selection(int64_t k) { return 4 * k > STEP ? 4 * k : STEP; }

static part sort_part_of(const sort_job *j, int64_t first, int64_t last, uint32_t (*count)[DIGITS])
{
    return (part) { &j->q, &j->line, first, last, j->k, room_for_selection(j->k), count };
}
static int64_t select_part(const part *p, char *a, char *b, void **out)
{
    if (p->q->wide) return wide_select_part(p, (wide_entry *)a, (wide_entry *)b, (wide_entry **)out);
    return narrow_select_part(p, (uint64_t *)a, (uint64_t *)b, (uint64_t **)out);
}
// Selects the best entries of chunk c, and leaves them in the chunk's first buffer.
static void select_chunk(void *arg, int64_t begin, int64_t end, int64_t c)
{
    (void)begin;
    (void)end;
    sort_job *j = arg;
    char *a = buffer_of(j, 2 * c), *b = buffer_of(j, 2 * c + 1);
    void *out;
    part p = sort_part_of(j, j->line.n * c / j->chunks, j->line.n * (c + 1) / j->chunks, j->count + c);
    j->found[c] = select_part(&p, a, b, &out);
    if (out != a) memcpy(a, out, (size_t)j->found[c] * sizeof(wide_entry));
}
// Selects from each chunk of a long line, then sorts what was found.
static void select_line(sort_job *j)
{
    ms__parallel_tasks(j->chunks, select_chunk, j);
    int64_t have = 0, size = j->q.wide ? (int64_t)sizeof(wide_entry) : (int64_t)sizeof(uint64_t);
    char *a = buffer_of(j, 2 * j->chunks), *b = a + j->chunks * j->k * (int64_t)sizeof(wide_entry);
    for (int64_t c = 0; c < j->chunks; c++) {
        memcpy(a + have * size, buffer_of(j, 2 * c), (size_t)(j->found[c] * size));
        have += j->found[c];
    }
    if (j->q.wide) j->e = wide_sort_entries((wide_entry *)a, (wide_entry *)b, have, j->q.bits, 1, j->count);
    else j->e = narrow_sort_entries((uint64_t *)a, (uint64_t *)b, have, j->q.bits, 1, j->count);
    write_results(j, &j->q, 0, j->k);
}

// Sorts or selects a group of lines on one thread.
static void sort_lines_range(void *arg, int64_t begin, int64_t end, int64_t task)
{
    (void)begin;
    (void)end;
    sort_job j = *(const sort_job *)arg;
    int thread = ms__thread_num();
    char *a = buffer_of(&j, 2 * thread), *b = buffer_of(&j, 2 * thread + 1);
    int64_t lines = ms__lines_of(j.x, j.d), last = (task + 1) * j.group < lines ? (task + 1) * j.group : lines;
    j.chunks = 1;
    for (j.number = task * j.group; j.number < last; j.number++) {
        j.line = ms__line_of(j.x, j.d, j.number);
        j.q = keys_for(&j.line, j.descending);
        if (selects(&j, j.line.n)) {
            part p = sort_part_of(&j, 0, j.line.n, j.count + thread);
            select_part(&p, a, b, &j.e);
            write_results(&j, &j.q, 0, j.k);
        } else sort_line(&j, a, b, j.count + thread);
    }
}

static ms_status sort_lines(ms_call *c, int d, int64_t k, bool descending)
{
    sort_job j = {
        .x = c->in[0], .values = c->out[0], .positions = c->out[1], .d = d, .k = k, .descending = descending, .group = 1
    };
    int64_t n = j.x->ndim ? j.x->shape[d] : 1, lines = ms__lines_of(j.x, d), threads = ms_num_threads();
    if (j.values->numel == 0) return MS_OK;
    if (n > UINT32_MAX)
        return ms__fail(MS_EUNSUPPORTED, "%s: dimension %d of %s has more than 2^32 - 1 elements", c->op->name, d + 1,
                        ms__tensor_text(j.x));
    bool divided = n >= LONG && lines < threads, select = selects(&j, n);
    j.chunks = !divided                    ? threads
               : select                    ? (threads < MOST_CHUNKS ? threads : MOST_CHUNKS)
               : 2 * threads < MOST_CHUNKS ? 2 * threads
                                           : MOST_CHUNKS;
    j.room = select ? room_for_selection(k) + STEP : n;
    int64_t buffers = divided && !select ? 2 : 2 * j.chunks, more = divided && select ? 2 * j.chunks * k : 0;
    size_t bytes = (size_t)(buffers * j.room + more) * sizeof(wide_entry), counts = (size_t)j.chunks * sizeof *j.count;
    j.scratch = malloc(bytes + counts);
    if (!j.scratch) return ms__no_memory(bytes + counts, c->op->name, "%lld entries", (long long)(buffers * j.room));
    j.count = (uint32_t(*)[DIGITS])(j.scratch + bytes);
    if (divided) {
        for (j.number = 0; j.number < lines; j.number++) {
            j.line = ms__line_of(j.x, d, j.number);
            j.q = keys_for(&j.line, descending);
            if (select) select_line(&j);
            else sort_line(&j, buffer_of(&j, 0), buffer_of(&j, 1), j.count);
        }
    } else {
        if (n < 8192) j.group = (8192 + n - 1) / n;
        int64_t weight = j.group * n;
        ms__parallel((lines + j.group - 1) / j.group * weight, weight, sort_lines_range, &j);
    }
    free(j.scratch);
    return MS_OK;
}

static int dim_of(const ms_call *c)
{
    return c->in[0]->ndim ? (int)(c->i[0] < 0 ? c->i[0] + c->in[0]->ndim : c->i[0]) : 0;
}

// Integers: dimension, whether the largest come first.
ms_status ms__cpu_sort(ms_call *c)
{
    const ms_tensor *x = c->in[0];
    int d = dim_of(c);
    return sort_lines(c, d, x->ndim ? x->shape[d] : 1, c->n_i > 1 && c->i[1]);
}
// Integers: dimension, k, whether the largest are wanted.
ms_status ms__cpu_topk(ms_call *c) { return sort_lines(c, dim_of(c), c->i[1], c->n_i < 3 || c->i[2]); }
