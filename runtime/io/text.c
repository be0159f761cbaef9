// SPDX-License-Identifier: MIT
// io/text.c -- texts to tokens: normalizing as SentencePiece does it, the unigram model (Kudo 2018), and byte-pair
// encoding (Sennrich et al. 2016).
//
// All memory belongs to the caller, but for the heap of long words and the table in ms_text_pairs.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "moonshard.h"

// ---- pairs and tries ----------------------------------------------------------------------------

static inline uint32_t pair_hash(int32_t a, int32_t b, int bits)
{
    return (uint32_t)(((uint32_t)a * 0x9e3779b1u) ^ ((uint32_t)b * 0x85ebca77u)) * 0xc2b2ae3du >> (32 - bits);
}

// The slot of a key, or the empty one where it belongs.
static inline uint32_t find(const ms_text_slot *slots, int bits, int32_t a, int32_t b)
{
    uint32_t k = pair_hash(a, b, bits), last = (1u << bits) - 1;
    while (slots[k].a >= 0 && (slots[k].a != a || slots[k].b != b)) k = (k + 1) & last;
    return k;
}

void ms_text_add(ms_text_slot *slots, int bits, int a, int b, int x, int y)
{
    ms_text_slot *at = &slots[find(slots, bits, a, b)];
    if (at->a < 0) *at = (ms_text_slot) { a, b, x, y };
}

// The place of a text in a table of ids by text: with the id of the token with these bytes, or -1.
static int32_t *token_at(int32_t *table, int bits, const char *texts, const int *ends, const char *s, int n)
{
    uint32_t h = 0, last = (1u << bits) - 1;
    for (int k = 0; k < n; k++) h = (h ^ (uint8_t)s[k]) * 16777619u;
    uint32_t k = pair_hash((int32_t)h, n, bits);
    for (int32_t id; (id = table[k]) >= 0; k = (k + 1) & last)
        if (ends[id + 1] - ends[id] == n && memcmp(texts + ends[id], s, (size_t)n) == 0) break;
    return &table[k];
}

// The rank of a score: larger scores have smaller ones.
static int32_t rank_by(double score)
{
    float x = (float)-score;
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? INT32_MIN - bits : bits;
}

int ms_text_pairs(const char *texts, const int *ends, const double *scores, int n, ms_text_slot *slots, int bits)
{
    int table_bits = 9, count = 0;
    while (1u << table_bits < 2u * (uint32_t)n) table_bits++;
    int32_t *table = malloc(sizeof *table << table_bits);
    if (!table) return -1;
    memset(table, 255, sizeof *table << table_bits);
    for (int id = 0; id < n; id++) {
        const char *s = texts + ends[id];
        int size = ends[id + 1] - ends[id];
        if (size > 0) *token_at(table, table_bits, texts, ends, s, size) = id;
    }
    for (int id = 0; id < n; id++) {
        const char *s = texts + ends[id], *end = texts + ends[id + 1];
        for (const char *at = s + 1; at < end; at++) {
            int32_t a = *token_at(table, table_bits, texts, ends, s, (int)(at - s));
            if (a < 0) continue;
            int size = (int)(end - at);
            int32_t b = *token_at(table, table_bits, texts, ends, at, size);
            if (b >= 0 && ++count <= 1 << (bits - 1)) ms_text_add(slots, bits, a, b, rank_by(scores[id]), id);
        }
    }
    free(table);
    return count;
}

// Where byte c leads to from a node of a trie; negative for nowhere.
static inline int32_t child_of(const ms_text_slot *trie, int32_t node, uint8_t c)
{
    int32_t to = trie[node].b ^ c;
    return trie[to].a == node ? to : -1;
}

// ---- characters ---------------------------------------------------------------------------------

// The bytes of the character at s: 1 for a byte that begins none.
static inline int char_size(const uint8_t *s, int n)
{
    uint8_t c = *s;
    int size = c < 0xc2 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 1;
    return size == 1 || size > n || ms__utf8_error(s, s + size) ? 1 : size;
}

int ms_text_ascii(const char *text, int n)
{
    uint8_t all = 0;
    for (int k = 0; k < n; k++) all |= (uint8_t)text[k];
    return all < 128;
}

// The node to which a text leads from another one, or -1.
static int32_t follow(const ms_text_model *m, int32_t node, const void *text, int n)
{
    const uint8_t *s = text;
    for (int k = 0; k < n && node >= 0; k++) node = child_of(m->trie, node, s[k]);
    return node;
}

// Writes the tokens of n bytes that have no token: one for each byte if all have one, otherwise the unknown one.
// Returns their number. Of several of a text's characters, with `spread` each token has its byte, without it the first
// one has all.
static int put_unknown(const ms_text_model *m, const uint8_t *s, int n, int32_t *ids, int32_t *sizes)
{
    int all = m->bytes != NULL;
    for (int k = 0; all && k < n; k++) all = m->bytes[s[k]] >= 0;
    if (!all) {
        ids[0] = m->unknown;
        sizes[0] = n;
        return m->unknown >= 0;
    }
    for (int k = 0; k < n; k++) {
        ids[k] = m->bytes[s[k]];
        sizes[k] = m->single ? 1 : k == 0 ? n : 0;
    }
    return n;
}

// ---- normalizing --------------------------------------------------------------------------------

// A map of characters is a trie in a double array as darts-clone writes it (Aoe 1989): bits 31 and 0 to 7 of a unit are
// its label, bit 8 says that a text ends there, the rest is the distance to its children, in units of 256 if bit 9 is
// set.
static inline uint32_t distance(uint32_t unit) { return unit >> 10 << (unit >> 6 & 8); }

// The longest text of the map with which s begins: its size, and its replacement; 0 for none.
static int mapped(const ms_text_map *m, const uint8_t *s, int n, const uint8_t **to, int *to_size)
{
    int found = 0;
    uint32_t at = distance(m->units[0]);
    for (int k = 0; k < n && s[k]; k++) {
        at ^= s[k];
        if (at >= (uint32_t)m->count || (m->units[at] & 0x800000ff) != s[k]) break;
        uint32_t unit = m->units[at];
        at ^= distance(unit);
        if (!(unit >> 8 & 1) || at >= (uint32_t)m->count) continue;
        uint32_t text = m->units[at] & 0x7fffffff;
        *to = (const uint8_t *)m->texts + (text < (uint32_t)m->texts_size ? text : (uint32_t)m->texts_size);
        *to_size = (int)strnlen((const char *)*to, (size_t)((const uint8_t *)m->texts + m->texts_size - *to));
        found = k + 1;
    }
    return found;
}

int ms_text_normalize(const ms_text_map *m, const char *text, int n, char *out, int *origins, int room)
{
    static const char sign[] = "\xe2\x96\x81", bad[] = "\xef\xbf\xbd";
    const uint8_t *s = (const uint8_t *)text;
    const int sign_size = m->escapes ? 3 : 1;
    const char *space = m->escapes ? sign : "   ";  // 3 bytes, of which sign_size count
    int size = 0, is_space = m->squeezes, seen = 0;
    const uint32_t root = distance(m->units[0]);
    for (int at = 0, used; at < n; at += used) {
        // Characters of ASCII with which no text of the map begins.
        if (seen && size + n - at < room) {
            for (; at < n && s[at] > ' ' && s[at] < 127; at++, size++) {
                uint32_t to = root ^ s[at];
                if (to < (uint32_t)m->count && (m->units[to] & 0x800000ff) == s[at]) break;
                out[size] = (char)s[at];
                if (origins) origins[size] = at;
                is_space = 0;
            }
            if (at == n) break;
        }
        const uint8_t *new;
        int new_size, changed = 1;
        used = mapped(m, s + at, n - at, &new, &new_size);
        if (!used) {
            used = new_size = char_size(s + at, n - at);
            new = s + at;
            changed = 0;
            if (used == 1 && s[at] > 127) {
                new = (const uint8_t *)bad;
                new_size = 3;
                changed = 1;
            }
        }
        if (is_space)
            for (; new_size > 0 && *new == ' '; new ++, new_size--) changed = 1;
        if (new_size == 0) continue;
        is_space = m->squeezes && new[new_size - 1] == ' ';
        int prefix = m->prefix && !seen;
        seen = 1;
        if (size + 3 * (new_size + 1) > room) return -1;
        if (prefix) {
            memcpy(out + size, space, 3);
            for (int k = 0; k < sign_size; k++, size++)
                if (origins) origins[size] = at;
        }
        // Bytes that are what they were come from themselves, others from the character's first.
        int whole = changed || prefix || *new == ' ';
        for (int k = 0; k < new_size; k++) {
            if (new[k] == ' ') {
                memcpy(out + size, space, 3);
                for (int j = 0; j < sign_size; j++, size++)
                    if (origins) origins[size] = at;
            } else {
                out[size] = (char)new[k];
                if (origins) origins[size] = whole ? at : at + k;
                size++;
            }
        }
    }
    if (origins) origins[size] = n;
    while (m->squeezes && size >= sign_size && memcmp(out + size - sign_size, space, (size_t)sign_size) == 0)
        size -= sign_size;
    return size;
}

// ---- the unigram model --------------------------------------------------------------------------

static inline void offer(ms_text_end *to, double score, int from, int id, const int single)
{
    if (single) score = (float)score;
    if (score > to->best) *to = (ms_text_end) { score, from, id };
}

// The best way to the end of each token. `single` is a constant in each call.
static inline void find_ways(const ms_text_model *m, const uint8_t *s, int n, ms_text_end *ends, const int single)
{
    const ms_text_slot *trie = m->trie;
    const double *scores = m->scores, unknown_score = m->unknown_score;
    for (int at = 0, reached = 0; at < n;) {
        int size = char_size(s + at, n - at), has_char = 0;
        // SentencePiece adds in single precision. When a sum is below -100000, it is taken off all that are in use.
        if (single && ends[at].best < -100000) {
            double off = ends[at].best;
            for (int k = at; k <= reached || k == at; k++) ends[k].best = (float)(ends[k].best - off);
        }
        double best = ends[at].best;
        int32_t node = 0;
        for (int k = at; k < n; k++) {
            node = child_of(trie, node, s[k]);
            if (node < 0) break;
            int32_t id = trie[node].y;
            if (id < 0) continue;
            offer(&ends[k + 1], best + scores[id], at, id, single);
            if (k + 1 > reached) reached = k + 1;
            has_char |= k + 1 == at + size;
        }
        at += size;
        if (!has_char) {
            offer(&ends[at], best + unknown_score, at - size, -1, single);
            if (at > reached) reached = at;
        }
    }
}

static int best_way(const ms_text_model *m, const uint8_t *s, int n, ms_text_end *ends, int *ids, int *sizes)
{
    ends[0].from = 0;
    for (int k = 1; k <= n; k++) ends[k] = (ms_text_end) { -HUGE_VAL, 0, -1 };
    if (m->single) find_ways(m, s, n, ends, 1);
    else find_ways(m, s, n, ends, 0);
    // Turns the way's links round: from is then where the next token ends.
    int next = 0;
    for (int at = n; at > 0;) {
        int from = ends[at].from;
        ends[at].from = next;
        next = at;
        at = from;
    }
    int count = 0, from = 0, unknown = -1;
    for (int at = next; at > 0; from = at, at = ends[at].from) {
        int id = ends[at].id;
        if (id < 0 || id == m->unknown) {
            if (unknown < 0) unknown = from;
            continue;
        }
        if (unknown >= 0) count += put_unknown(m, s + unknown, from - unknown, ids + count, sizes + count);
        unknown = -1;
        ids[count] = id;
        sizes[count++] = at - from;
    }
    if (unknown >= 0) count += put_unknown(m, s + unknown, n - unknown, ids + count, sizes + count);
    return count;
}

// Where a word ends that begins at `at`: before a sign of a space, or only before one that follows something else.
static int word_end(const ms_text_model *m, const uint8_t *s, int at, int n)
{
    if (!m->cuts) return n;
    for (int is_sign = 1, here, from = at; at + 3 <= n; at += here ? 3 : 1, is_sign = here) {
        here = s[at] == 0xe2 && s[at + 1] == 0x96 && s[at + 2] == 0x81;
        if (here && (m->cuts == 2 ? at > from : !is_sign)) return at;
    }
    return n;
}

int ms_text_unigram(const ms_text_model *m, const char *text, int n, ms_text_end *ends, int *ids, int *sizes)
{
    const uint8_t *s = (const uint8_t *)text;
    if (m->cuts < 2) return best_way(m, s, n, ends, ids, sizes);
    int count = 0;
    for (int at = 0, end; at < n; at = end) {
        end = word_end(m, s, at, n);
        ends[0].best = 0;
        count += best_way(m, s + at, end - at, ends, ids + count, sizes + count);
    }
    return count;
}

// ---- byte-pair encoding -------------------------------------------------------------------------

// The rank of the pair at k and the id that it joins to; INT32_MAX for a pair that does not join.
static inline int32_t rank_of(const ms_text_model *m, int32_t a, int32_t b, int32_t *joined)
{
    const ms_text_slot *at = &m->pairs[find(m->pairs, m->pair_bits, a, b)];
    *joined = at->y;
    return at->a < 0 ? INT32_MAX : at->x;
}

enum { SHORT = 64 };  // longer words find the next pair in a heap

static int join_short(const ms_text_model *m, int32_t *ids, int32_t *sizes, int n)
{
    int32_t rank[SHORT], joined[SHORT];
    for (int k = 0; k < n - 1; k++) rank[k] = rank_of(m, ids[k], ids[k + 1], &joined[k]);
    while (n > 1) {
        int at = 0;
        for (int k = 1; k < n - 1; k++)
            if (rank[k] < rank[at]) at = k;
        if (rank[at] == INT32_MAX) break;
        ids[at] = joined[at];
        sizes[at] += sizes[at + 1];
        n--;
        for (int k = at + 1; k < n; k++) {
            ids[k] = ids[k + 1];
            sizes[k] = sizes[k + 1];
            rank[k] = rank[k + 1];
            joined[k] = joined[k + 1];
        }
        if (at > 0) rank[at - 1] = rank_of(m, ids[at - 1], ids[at], &joined[at - 1]);
        if (at < n - 1) rank[at] = rank_of(m, ids[at], ids[at + 1], &joined[at]);
    }
    return n;
}

typedef struct {
    int32_t rank, at;
} entry;

static inline int before(entry a, entry b) { return a.rank < b.rank || (a.rank == b.rank && a.at < b.at); }

static void push(entry *heap, int *n, entry e)
{
    int k = (*n)++;
    for (; k > 0 && before(e, heap[(k - 1) / 2]); k = (k - 1) / 2) heap[k] = heap[(k - 1) / 2];
    heap[k] = e;
}

static entry pop(entry *heap, int *n)
{
    entry top = heap[0], e = heap[--*n];
    int k = 0;
    for (int down; (down = 2 * k + 1) < *n; k = down) {
        if (down + 1 < *n && before(heap[down + 1], heap[down])) down++;
        if (!before(heap[down], e)) break;
        heap[k] = heap[down];
    }
    heap[k] = e;
    return top;
}

// As join_short; -1 without memory. A symbol that was joined to the one before it has size 0.
static int join_long(const ms_text_model *m, int32_t *ids, int32_t *sizes, int n)
{
    int32_t *next = malloc((size_t)n * (4 * sizeof *next + 3 * sizeof(entry)));
    if (!next) return -1;
    int32_t *previous = next + n, *rank = previous + n, *joined = rank + n;
    entry *heap = (entry *)(joined + n);
    int held = 0;
    for (int k = 0; k < n; k++) {
        next[k] = k + 1;
        previous[k] = k - 1;
        rank[k] = k < n - 1 ? rank_of(m, ids[k], ids[k + 1], &joined[k]) : INT32_MAX;
        if (rank[k] < INT32_MAX) push(heap, &held, (entry) { rank[k], k });
    }
    while (held > 0) {
        entry e = pop(heap, &held);
        int at = e.at;
        if (rank[at] != e.rank) continue;  // the pair was joined, or is another one now
        int gone = next[at];
        ids[at] = joined[at];
        sizes[at] += sizes[gone];
        sizes[gone] = 0;
        rank[gone] = INT32_MAX;
        next[at] = next[gone];
        if (next[at] < n) previous[next[at]] = at;
        for (int k = at;; k = previous[at]) {
            rank[k] = next[k] < n ? rank_of(m, ids[k], ids[next[k]], &joined[k]) : INT32_MAX;
            if (rank[k] < INT32_MAX) push(heap, &held, (entry) { rank[k], k });
            if (k != at || previous[at] < 0) break;
        }
    }
    int count = 0;
    for (int k = 0; k < n; k = next[k]) {
        ids[count] = ids[k];
        sizes[count++] = sizes[k];
    }
    free(next);
    return count;
}

// The first tokens of a word: its characters, or its bytes.
static int start(const ms_text_model *m, const uint8_t *s, int n, int32_t *ids, int32_t *sizes)
{
    int count = 0, fused = 0;
    for (int at = 0, size; at < n; at += size) {
        size = m->by_byte ? 1 : char_size(s + at, n - at);
        int32_t node = follow(m, at > 0 ? follow(m, 0, m->prefix, m->prefix_size) : 0, s + at, size);
        if (at + size == n) node = follow(m, node, m->suffix, m->suffix_size);
        int id = node > 0 ? m->trie[node].y : -1;
        if (id >= 0) {
            ids[count] = id;
            sizes[count++] = size;
            fused = 0;
            continue;
        }
        int more = put_unknown(m, s + at, size, ids + count, sizes + count);
        int is_unknown = more == 1 && ids[count] == m->unknown;
        // Without any token, the character is left out.
        if (is_unknown ? fused && m->fuses : !more && count > 0) sizes[count - 1] += size;
        else count += more;
        fused = is_unknown;
    }
    return count;
}

int ms_text_bpe(const ms_text_model *m, const char *text, int n, int *ids, int *sizes)
{
    const uint8_t *s = (const uint8_t *)text;
    int count = 0;
    for (int at = 0, end; at < n; at = end) {
        end = word_end(m, s, at, n);
        int k = start(m, s + at, end - at, ids + count, sizes + count);
        k = k <= SHORT ? join_short(m, ids + count, sizes + count, k) : join_long(m, ids + count, sizes + count, k);
        if (k < 0) return -1;
        count += k;
    }
    return count;
}
