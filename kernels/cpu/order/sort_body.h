// SPDX-License-Identifier: MIT
// cpu/order/sort_body.h -- sorting and selecting entries, a key and a position each. Included by sort.c with ENTRY, the
// type of an entry; KEY, that of its key; N(name); MAKE(key, at), KEY_OF(e), AT_OF(e); and BEFORE(a, b), whether a,
// which comes after b, must move before it: false if their keys are equal.

static void N(insert)(ENTRY *e, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        ENTRY one = e[i];
        int64_t k = i;
        for (; k > 0 && BEFORE(one, e[k - 1]); k--) e[k] = e[k - 1];
        e[k] = one;
    }
}

// Merges [from, middle) and [middle, end) of a into b.
static void N(merge)(const ENTRY *a, ENTRY *b, int64_t from, int64_t middle, int64_t end)
{
    int64_t i = from, j = middle, k = from;
    while (i < middle && j < end) {
        bool right = BEFORE(a[j], a[i]);
        b[k++] = right ? a[j] : a[i];
        j += right;
        i += !right;
    }
    memcpy(b + k, a + i, (size_t)(middle - i) * sizeof *a);
    memcpy(b + k + (middle - i), a + j, (size_t)(end - j) * sizeof *a);
}

static ENTRY *N(merge_sort)(ENTRY *a, ENTRY *b, int64_t n)
{
    for (int64_t k = 0; k < n; k += RUN) N(insert)(a + k, n - k < RUN ? n - k : RUN);
    for (int64_t width = RUN; width < n; width *= 2) {
        for (int64_t k = 0; k < n; k += 2 * width) {
            int64_t middle = k + width < n ? k + width : n, end = k + 2 * width < n ? k + 2 * width : n;
            N(merge)(a, b, k, middle, end);
        }
        ENTRY *other = a;
        a = b, b = other;
    }
    return a;
}

// ---- by digits, the lowest first ----

typedef struct {
    const ENTRY *from;
    ENTRY *to;
    int64_t n, chunks;
    int shift;
    uint32_t (*count)[DIGITS];  // each chunk's counts of the digits, later the places of its next entries
} N(radix);

static void N(count_chunk)(void *arg, int64_t first, int64_t last, int64_t c)
{
    (void)first;
    (void)last;
    const N(radix) *r = arg;
    uint32_t *count = r->count[c];
    memset(count, 0, sizeof *r->count);
    for (int64_t k = r->n * c / r->chunks, end = r->n * (c + 1) / r->chunks; k < end; k++)
        count[KEY_OF(r->from[k]) >> r->shift & (DIGITS - 1)]++;
}
static void N(place_chunk)(void *arg, int64_t first, int64_t last, int64_t c)
{
    (void)first;
    (void)last;
    const N(radix) *r = arg;
    uint32_t *next = r->count[c];
    for (int64_t k = r->n * c / r->chunks, end = r->n * (c + 1) / r->chunks; k < end; k++) {
        ENTRY e = r->from[k];
        r->to[next[KEY_OF(e) >> r->shift & (DIGITS - 1)]++] = e;
    }
}

// Sorts n entries, whose keys have `bits` bits; a and b have room for them. count has a row for each of `chunks`
// chunks, which are divided among the threads. Returns a or b, which then contains the sorted entries.
static ENTRY *N(sort_entries)(ENTRY *a, ENTRY *b, int64_t n, int bits, int64_t chunks, uint32_t (*count)[DIGITS])
{
    if (n < SMALL) return N(merge_sort)(a, b, n);
    for (int shift = 0; shift < bits; shift += DIGIT) {
        N(radix) r = { a, b, n, chunks, shift, count };
        ms__parallel_tasks(chunks, N(count_chunk), &r);
        uint32_t at = 0;
        bool one = false;  // all entries have the same digit
        for (int d = 0; d < DIGITS; d++) {
            uint32_t before = at;
            for (int64_t c = 0; c < chunks; c++) {
                uint32_t here = count[c][d];
                count[c][d] = at;
                at += here;
            }
            one |= at - before == (uint32_t)n;
        }
        if (one) continue;
        ms__parallel_tasks(chunks, N(place_chunk), &r);
        ENTRY *other = a;
        a = b, b = other;
    }
    return a;
}

// ---- lines ----

// Writes the entries of elements [first, last) of a line to e.
static void N(read_line)(const keys *q, const ms_line *x, int64_t first, int64_t last, ENTRY *e)
{
    KEY key[MS_CHUNK];
    for (int64_t k = first; k < last; k += MS_CHUNK) {
        int64_t n = last - k < MS_CHUNK ? last - k : MS_CHUNK;
        N(keys_of)(q, x, k, n, key);
        for (int64_t j = 0; j < n; j++) e[k - first + j] = MAKE(key[j], k + j);
    }
}

// Selects the first k entries of a part of a line, in order: entries below the k-th best so far are collected until
// there are `room` of them, which are then sorted to find a better k-th. e and spare have room + STEP entries. The
// result is in *out; returns its number of entries: k, or all if the part has fewer.
static int64_t N(select_part)(const part *p, ENTRY *e, ENTRY *spare, ENTRY **out)
{
    KEY key[MS_CHUNK], limit = 0;
    int64_t have = 0, k = p->k;
    bool limited = false;
    for (int64_t at = p->first; at < p->last; at += MS_CHUNK) {
        int64_t n = p->last - at < MS_CHUNK ? p->last - at : MS_CHUNK;
        N(keys_of)(p->q, p->x, at, n, key);
        if (limited && !N(any_below)(n, key, limit)) continue;
        for (int64_t from = 0; from < n; from += STEP) {
            int64_t to = from + STEP < n ? from + STEP : n;
            if (!limited) {
                for (int64_t j = from; j < to; j++) e[have++] = MAKE(key[j], at + j);
            } else {
                for (int64_t j = from; j < to; j++) {
                    e[have] = MAKE(key[j], at + j);
                    have += key[j] < limit;
                }
            }
            if (have < p->room) continue;
            ENTRY *sorted = N(sort_entries)(e, spare, have, p->q->bits, 1, p->count);
            spare = sorted == e ? spare : e;
            e = sorted;
            have = k;
            limited = true;
            limit = KEY_OF(e[k - 1]);
        }
    }
    *out = N(sort_entries)(e, spare, have, p->q->bits, 1, p->count);
    return have < k ? have : k;
}
