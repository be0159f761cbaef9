// comm_exec.c -- one collective on one rank, from its ready flag to its completion.
//
//  1 publish   fingerprint, places of input and output, small input as payload; then `ready`
//  2 agree     wait for every member's `ready`; compare fingerprints: a difference fails on every rank
//  3 commit    one compare-and-swap decides for all members here: go on, or dropped because one of them walked away
//  4 move      small: everything is in the payloads. Direct: peers' tensors are read and written where they are.
//              Otherwise in rounds through the windows, which also serve other nodes (comm_far.c)
//  5 complete  `done`; and wait for the peers' `done` where they touch our tensors
//
// A rank may leave without having been answered (an error elsewhere, Ctrl-C) until the commit, never after it.
#include <sched.h>
#include <stdio.h>
#include <time.h>
#include "comm_internal.h"

const char *const ms__coll_names[OPS] = { "barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather",
                                          "scatter", "all_to_all", "send/recv" };
static const char *const reductions[] = { "sum", "avg", "max", "min", "prod" };

// ---- fingerprints ---------------------------------------------------------------------------------

bool ms__coll_reduces(int op) { return op == OP_ALL_REDUCE || op == OP_REDUCE_SCATTER || op == OP_REDUCE; }

void ms__print_text(const ms_print *p, char *out, size_t n)
{
    int at = snprintf(out, n, "%s", p->op < OPS ? ms__coll_names[p->op] : "?");
    #define ADD(...) do { if (at >= 0 && (size_t)at < n) at += snprintf(out + at, n - (size_t)at, __VA_ARGS__); } while (0)
    if (p->op != OP_BARRIER) ADD(" of %llu %s", (unsigned long long)p->count, ms__dtype_name(p->dtype));
    if (ms__coll_reduces(p->op)) ADD(", %s", reductions[p->red]);
    if (p->op == OP_SEND_RECV) ADD(" from rank %d", p->root);
    else if (p->root >= 0) ADD(", root %d", p->root);
    if (p->unit[0]) ADD(", unit '%s'", p->unit);
    if (p->step >= 0) ADD(", step %lld", (long long)p->step);
    if (p->site[0]) ADD(", at %s", p->site);
    #undef ADD
}

static uint64_t mix(uint64_t h, const void *p, size_t n)
{
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * 1099511628211ull;
    return h;
}

// The line is told, never compared: `if rank == 0 then dist.broadcast(a) else dist.broadcast(b) end` is an ordinary script.
uint64_t ms__print_hash(const ms_print *p, bool with_step)
{
    uint64_t h = 14695981039346656037ull;
    h = mix(h, p, offsetof(ms_print, step));
    if (!with_step) return h;
    h = mix(h, &p->step, sizeof p->step);
    return p->told ? h : mix(mix(h, p->unit, strlen(p->unit)), &p->model, sizeof p->model);
}

static bool same_request(const ms_slot *a, const ms_slot *b)
{
    return a->hash == b->hash && strncmp(a->print.site, b->print.site, SITE) == 0;
}

// Who asks for what, equal requests from one line told once.
static void tell_requests(const ms_coll *c, char *text, size_t size)
{
    ms_group *g = c->g;
    char what[400];
    int at = snprintf(text, size, "collective #%u of ", (unsigned)c->word);
    ms__group_text(g, text + at, size - (size_t)at);
    at = (int)strlen(text);
    at += snprintf(text + at, size - (size_t)at, ": the ranks ask for different things");
    bool told[1024] = { false }, models = false;
    const ms_print *mine = &slot_of(g, g->me, c->seq)->print;
    for (int k = 0; k < g->n && k < 1024; k++) {        // units of one name, of several models
        const ms_slot *s = slot_of(g, k, c->seq);
        models |= atomic_load(&s->ready) == c->word && s->print.model != mine->model && !strncmp(s->print.unit, mine->unit, UNIT_NAME);
    }
    for (int k = 0; k < g->n && k < 1024 && (size_t)at < size - 1; k++) {
        ms_slot *s = slot_of(g, k, c->seq);
        uint64_t ready = atomic_load(&s->ready);
        if (told[k] || ready < c->word) continue;
        if (ready > c->word) {
            at += snprintf(text + at, size - (size_t)at, "; rank %d is at #%u already", g->ranks[k], (unsigned)ready);
            continue;
        }
        int same = 0;
        for (int j = k + 1; j < g->n && !same; j++) {
            ms_slot *o = slot_of(g, j, c->seq);
            same = atomic_load(&o->ready) == c->word && same_request(o, s);
        }
        at += snprintf(text + at, size - (size_t)at, same ? "; ranks" : "; rank");
        same = 0;
        for (int j = k; j < g->n && j < 1024 && (size_t)at < size - 1; j++) {
            ms_slot *o = slot_of(g, j, c->seq);
            if (atomic_load(&o->ready) != c->word || !same_request(o, s)) continue;
            told[j] = true;
            at += snprintf(text + at, size - (size_t)at, same++ ? ", %d" : " %d", g->ranks[j]);
        }
        ms_print p = s->print;
        ms__print_text(&p, what, sizeof what);
        if ((size_t)at < size - 1) at += snprintf(text + at, size - (size_t)at, ": %s", what);
        if (models && (size_t)at < size - 1) at += snprintf(text + at, size - (size_t)at, ", of the model made as number %u of its class", (unsigned)p.model);
    }
}

// The first rank that is through with waiting writes the text, the others take it: a rank too late for the text is missing
// from everybody's.
static ms_status mismatch(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    // A moment for those still on their way, so that the text names everybody. It is an error already.
    int64_t until = ms__now_ns() + 20 * 1000 * 1000;
    for (int k = 0; k < g->n && ms__now_ns() < until;) {
        if (atomic_load(&slot_of(g, k, c->seq)->ready) >= c->word) k++;
        else {
            if (g->far && k != g->me && g->me == g->leader && ms__far_ready(c, w, false) != MS_OK) break;
            sched_yield();
        }
    }
    // The other nodes are to see what the ranks here ask for, too.
    if (g->far && g->me == g->leader) ms__far_ready(c, w, false);
    ms_blame *b = g->blame;
    char text[TEXT];
    uint64_t was = atomic_load(&b->claimed);
    while (was < c->word)
        if (atomic_compare_exchange_weak(&b->claimed, &was, c->word)) {
            tell_requests(c, b->text, sizeof b->text);
            memcpy(text, b->text, sizeof text);
            atomic_store(&b->told, c->word);
            return ms__fail(MS_ECOMM, "%s", text);
        }
    until = ms__now_ns() + (int64_t)1e9;
    while (atomic_load(&b->told) < c->word && ms__now_ns() < until) sched_yield();
    bool taken = atomic_load(&b->told) == c->word;
    memcpy(text, b->text, sizeof text);
    atomic_thread_fence(memory_order_acquire);
    // The others are further already, or he who claimed it was killed.
    if (!taken || atomic_load(&b->claimed) != c->word) tell_requests(c, text, sizeof text);
    return ms__fail(MS_ECOMM, "%s", text);
}

// Empty tensors have no address.
static inline void put(void *to, const void *from, size_t n)
{
    if (n) memmove(to, from, n);
}

// ---- steps ----------------------------------------------------------------------------------------

static ms_status publish(ms_coll *c)
{
    ms_group *g = c->g;
    ms_slot *s = slot_of(g, g->me, c->seq);
    s->print = c->print;
    s->hash = c->hash;
    s->flags = 0;
    s->bytes = 0;
    atomic_store_explicit(&s->round, 0, memory_order_relaxed);
    if (c->inline_) {
        s->flags = SLOT_INLINE;
        s->bytes = (uint32_t)c->in_bytes;
        put(s->payload, c->in, c->in_bytes);
    } else {
        uint32_t ia = 0, oa = 0;
        uint64_t ip = 0, op = 0;
        bool pushes = c->op == OP_ALL_REDUCE || (c->op == OP_REDUCE && c->root == g->me);
        bool direct = !g->far && (c->in_bytes == 0 || ms__comm_locate(c->in_storage, c->in, &ia, &ip))
                      && (!pushes || ms__comm_locate(c->out_storage, c->out, &oa, &op));
        s->in_arena = ia;
        s->in_at = ip;
        s->out_arena = oa;
        s->out_at = op;
        if (direct) s->flags = SLOT_DIRECT;
    }
    atomic_store(&s->ready, c->word);
    return MS_OK;
}

// A peer will not take part: by the error that it published, when there is one.
static ms_status gave_up(ms_coll *c, int rank)
{
    atomic_store(&c->raised, true);
    if (ms__comm_error_since(c->epoch)) return ms__fail(MS_ECOMM, "%s", ms__comm_error_after(c->epoch));
    if (rank >= 0) return ms__fail(MS_ECOMM, "%s: rank %d gave this collective up after an error", ms__coll_names[c->op], rank);
    return ms__fail(MS_ECOMM, "%s: a peer gave this collective up after an error", ms__coll_names[c->op]);
}

static ms_status agree(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    bool leads = g->far && g->me == g->leader, first = true;
    for (int k = 0; k < g->n; k++) {
        ms_slot *s = slot_of(g, k, c->seq);
        uint64_t ready;
        while ((ready = atomic_load_explicit(&s->ready, memory_order_acquire)) < c->word) {
            if (leads) {
                MS_TRY(ms__far_ready(c, w, first));
                first = false;
            }
            if (atomic_load_explicit(&s->ready, memory_order_acquire) >= c->word) continue;
            MS_TRY(ms__wait_poll(w));
        }
        if (MS_UNLIKELY(ready != c->word)) {
            // It is further already: by a published error into a new count, or past an error here.
            if (ready >> 32 != c->word >> 32) {
                return gave_up(c, g->ranks[k]);
            }
            return mismatch(w);
        }
        if (MS_UNLIKELY(s->hash != c->hash)) return mismatch(w);
    }
    if (leads) MS_TRY(ms__far_ready(c, w, first));      // ours may still have to go out
    return MS_OK;
}

// The members on this node decide once, together. False: somebody walked away first.
static bool decide(ms_coll *c, bool go)
{
    _Atomic uint64_t *commit = &slot_of(c->g, c->g->leader, c->seq)->commit;
    uint64_t was = atomic_load_explicit(commit, memory_order_acquire), want = c->word * 2 + go;
    while (was >> 1 != c->word)
        if (atomic_compare_exchange_weak(commit, &was, want)) return go;
    return was & 1;
}

static void pause_for(double seconds)
{
    int64_t until = ms__now_ns() + (int64_t)(seconds * 1e9);
    struct timespec t = { 0, 100 * 1000 };
    while (ms__now_ns() < until) nanosleep(&t, NULL);
}

static ms_status wait_done(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    for (int k = 0; k < g->n; k++) {
        if (g->far && ms__world.node_of[g->ranks[k]] != ms__world.node) continue;
        ms_slot *s = slot_of(g, k, c->seq);
        while (atomic_load_explicit(&s->done, memory_order_acquire) < c->word) MS_TRY(ms__wait_poll(w));
    }
    return MS_OK;
}

// Every member here has reached `round`.
static ms_status wait_round(ms_waiter *w, uint64_t round)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    atomic_store_explicit(&slot_of(g, g->me, c->seq)->round, round, memory_order_release);
    for (int k = 0; k < g->n; k++) {
        if (g->far && ms__world.node_of[g->ranks[k]] != ms__world.node) continue;
        ms_slot *s = slot_of(g, k, c->seq);
        while (atomic_load_explicit(&s->round, memory_order_acquire) < round) MS_TRY(ms__wait_poll(w));
    }
    return MS_OK;
}

static size_t piece_bytes(const ms_piece *p, int member)
{
    uint64_t first = (uint64_t)member * p->bytes;
    if (first >= p->total) return 0;
    return p->total - first < p->bytes ? (size_t)(p->total - first) : (size_t)p->bytes;
}

// ---- small: every input is in a payload ------------------------------------------------------------

static ms_status move_inline(ms_coll *c)
{
    ms_group *g = c->g;
    const char *src[1024];
    size_t esize = (size_t)ms__dtype_size(c->dtype), block = c->count * esize;
    for (int k = 0; k < g->n; k++) src[k] = slot_of(g, k, c->seq)->payload;
    switch (c->op) {
    case OP_ALL_REDUCE:
        ms__reduce(c->dtype, c->red, c->scale, g->n, g->n, src, 1, &c->out, c->count);
        break;
    case OP_REDUCE:
        if (c->root == g->me) ms__reduce(c->dtype, c->red, c->scale, g->n, g->n, src, 1, &c->out, c->count);
        break;
    case OP_REDUCE_SCATTER:
        for (int k = 0; k < g->n; k++) src[k] += (size_t)g->me * block;
        ms__reduce(c->dtype, c->red, c->scale, g->n, g->n, src, 1, &c->out, c->count);
        break;
    case OP_BROADCAST:
        if (c->root != g->me) put(c->out, src[c->root], block);
        break;
    case OP_ALL_GATHER:
        for (int k = 0; k < g->n; k++) put(c->out + (size_t)k * block, src[k], block);
        break;
    case OP_GATHER:
        for (int k = 0; k < g->n && c->root == g->me; k++) put(c->out + (size_t)k * block, src[k], block);
        break;
    case OP_ALL_TO_ALL:
        for (int k = 0; k < g->n; k++) put(c->out + (size_t)k * block, src[k] + (size_t)g->me * block, block);
        break;
    default: break;
    }
    return MS_OK;
}

// ---- direct: tensors where they are ----------------------------------------------------------------

// Bytes [at, at + n) of member k's block, to their places in the output.
static void put_piece(char *out, const ms_piece *p, int k, size_t at, const char *from, size_t n)
{
    char *to = out + p->out_offset + (size_t)k * p->out_stride;
    if (!p->line) {
        if (n && to + at != from) ms__comm_copy(to + at, from, n);
        return;
    }
    while (n > 0) {
        size_t in_line = at % p->line, m = p->line - in_line < n ? p->line - in_line : n;
        memcpy(to + at / p->line * p->out_line + in_line, from, m);
        at += m;
        from += m;
        n -= m;
    }
}

static void gather_pieces(ms_coll *c, int k, const char *from)
{
    for (int i = 0; i < c->n_pieces; i++) {
        const ms_piece *p = &c->pieces[i];
        put_piece(c->out, p, k, 0, from + p->in_offset, piece_bytes(p, k));
    }
}

static ms_status move_direct(ms_coll *c)
{
    ms_group *g = c->g;
    int n = g->n, me = g->me;
    const char *in[1024];
    char *out[1024];
    size_t esize = (size_t)ms__dtype_size(c->dtype), block = c->count * esize;
    for (int k = 0; k < n; k++) {
        in[k] = c->in;
        out[k] = c->out;
        if (k == me) continue;
        ms_slot *s = slot_of(g, k, c->seq);
        if (s->in_arena && !(in[k] = ms__comm_resolve(g->ranks[k], s->in_arena, s->in_at))) return MS_ECOMM;
        if (s->out_arena && !(out[k] = ms__comm_resolve(g->ranks[k], s->out_arena, s->out_at))) return MS_ECOMM;
    }
    // Cut for the members at cache lines; the cut does not change a bit of the result.
    size_t per = (c->count + (size_t)n - 1) / (size_t)n;
    per = (per + 63) & ~(size_t)63;
    size_t first = per * (size_t)me < c->count ? per * (size_t)me : c->count;
    size_t mine = c->count - first < per ? c->count - first : per;
    switch (c->op) {
    case OP_ALL_REDUCE:
    case OP_REDUCE:
        for (int k = 0; k < n; k++) {
            in[k] += first * esize;
            out[k] += first * esize;
        }
        if (c->op == OP_REDUCE) out[0] = out[c->root];
        ms__reduce(c->dtype, c->red, c->scale, n, n, in, c->op == OP_REDUCE ? 1 : n, out, mine);
        break;
    case OP_REDUCE_SCATTER:
        for (int k = 0; k < n; k++) in[k] += (size_t)me * block;
        ms__reduce(c->dtype, c->red, c->scale, n, n, in, 1, &c->out, c->count);
        break;
    case OP_BROADCAST:
        if (c->root != me) ms__comm_copy(c->out, in[c->root], block);
        break;
    case OP_ALL_GATHER:
        for (int j = 0; j < n; j++) gather_pieces(c, (me + j) % n, in[(me + j) % n]);
        break;
    case OP_GATHER:
        for (int k = 0; k < n && c->root == me; k++) ms__comm_copy(c->out + (size_t)k * block, in[k], block);
        break;
    case OP_SCATTER:
        ms__comm_copy(c->out, in[c->root] + (size_t)me * block, block);
        break;
    case OP_ALL_TO_ALL:
        for (int j = 0; j < n; j++) {
            int k = (me + j) % n;
            ms__comm_copy(c->out + (size_t)k * block, in[k] + (size_t)me * block, block);
        }
        break;
    case OP_SEND_RECV:
        if (me == 1) ms__comm_copy(c->out, in[0], block);
        break;
    default: break;
    }
    return MS_OK;
}

ms_status ms__coll_alone(ms_coll *c)
{
    if (c->op == OP_BARRIER || (c->in == c->out && c->scale == 1 && c->op != OP_ALL_GATHER)) return MS_OK;
    if (c->n_pieces && c->inline_) c->out -= c->pieces[0].out_offset, c->in -= c->pieces[0].in_offset;
    return move_direct(c);
}

// ---- staged: in rounds through the windows ----------------------------------------------------------

// Blocks of the input that travel: one, or one per member.
static int input_blocks(const ms_coll *c) { return c->op == OP_REDUCE_SCATTER || c->op == OP_ALL_TO_ALL || c->op == OP_SCATTER ? c->g->n : 1; }

bool ms__coll_gives(const ms_coll *c, int member)
{
    return (c->op != OP_BROADCAST && c->op != OP_SCATTER && c->op != OP_SEND_RECV) || member == (c->op == OP_SEND_RECV ? 0 : c->root);
}

// One slice [at, at + n) bytes of every block, n <= WINDOW / blocks. piece: of an all-gather.
static ms_status stage_slice(ms_waiter *w, uint64_t *round, size_t block, size_t at, size_t n, const ms_piece *piece)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    int members = g->n, me = g->me, blocks = input_blocks(c);
    size_t esize = (size_t)ms__dtype_size(c->dtype), stride = (n + 63) & ~(size_t)63;
    char *windows[1024], *mine;
    // Executors differ between ranks: a member's window is where its slot says.
    for (int k = 0; k < members; k++) {
        bool here = ms__world.node_of[g->ranks[k]] == ms__world.node;
        windows[k] = here ? ms__world.ctl + slot_of(g, k, c->seq)->out_at : NULL;
    }
    mine = windows[me];
    char *result = windows[g->leader] + WINDOW;         // of the node's leader, or each member's own part

    if (ms__coll_gives(c, me)) {
        if (piece) {
            size_t have = piece_bytes(piece, me), m = at >= have ? 0 : have - at < n ? have - at : n;
            if (m) put(mine, c->in + piece->in_offset + at, m);
        } else {
            for (int b = 0; b < blocks; b++) put(mine + (size_t)b * stride, c->in + (size_t)b * block + at, n);
        }
    }
    MS_TRY(wait_round(w, ++*round));

    if (ms__coll_reduces(c->op)) {
        size_t total = stride * (size_t)blocks, count = total / esize;
        if (g->far) {
            if (me == g->leader) MS_TRY(ms__far_reduce(c, w, windows, result, count));
        } else {
            // Each member adds up its part of the slice and leaves it in its own window.
            size_t per = (((count + (size_t)members - 1) / (size_t)members) + 63) & ~(size_t)63;
            size_t first = per * (size_t)me < count ? per * (size_t)me : count, m = count - first < per ? count - first : per;
            const char *src[1024];
            for (int k = 0; k < members; k++) src[k] = windows[k] + first * esize;
            char *dst = mine + WINDOW + first * esize;
            ms__reduce(c->dtype, c->red, c->scale, members, members, src, 1, &dst, m);
        }
        MS_TRY(wait_round(w, ++*round));
        if (c->op != OP_REDUCE || c->root == me) {
            size_t skip = c->op == OP_REDUCE_SCATTER ? (size_t)me * stride : 0;
            size_t per = (((count + (size_t)members - 1) / (size_t)members) + 63) & ~(size_t)63;
            for (size_t done = 0; done < n;) {          // over the members' parts
                size_t place = skip + done, m = n - done;
                char *from = result + place;
                if (!g->far) {
                    size_t k = place / (per * esize), end = (k + 1) * per * esize;
                    if (end - place < m) m = end - place;
                    from = windows[k] + WINDOW + place;
                }
                put(c->out + at + done, from, m);
                done += m;
            }
        }
    } else {
        // A peer's slice: in its window, or mirrored by the leader from another node.
        size_t bytes = stride * (size_t)blocks;
        if (g->far) {
            if (me == g->leader) MS_TRY(ms__far_gather(c, w, windows, result, bytes, bytes));
            MS_TRY(wait_round(w, ++*round));
        }
        for (int k = 0; k < members; k++) {
            if (!ms__coll_gives(c, k)) continue;
            const char *from = windows[k] ? windows[k] : result + (size_t)k * bytes;
            switch (c->op) {
            case OP_ALL_GATHER: {
                size_t have = piece_bytes(piece, k), m = at >= have ? 0 : have - at < n ? have - at : n;
                put_piece(c->out, piece, k, at, from, m);
                break;
            }
            case OP_BROADCAST: if (k != me) put(c->out + at, from, n); break;
            case OP_GATHER:    if (c->root == me) put(c->out + (size_t)k * block + at, from, n); break;
            case OP_SCATTER:   put(c->out + at, from + (size_t)me * stride, n); break;
            case OP_ALL_TO_ALL: put(c->out + (size_t)k * block + at, from + (size_t)me * stride, n); break;
            case OP_SEND_RECV: if (me == 1) put(c->out + at, from, n); break;
            default: break;
            }
        }
    }
    // Nobody fills its window again before everybody has read it.
    return wait_round(w, ++*round);
}

static ms_status move_staged(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    int blocks = input_blocks(c);
    uint64_t round = 0;
    // Say where this rank's window is; the first round tells that everybody has.
    slot_of(g, g->me, c->seq)->out_at = ms__ctl_offset(ms__window(g->ranks[g->me], c->stream));
    MS_TRY(wait_round(w, ++round));
    size_t room = WINDOW / (size_t)blocks;
    if (g->far && !ms__coll_reduces(c->op)) room /= (size_t)g->n;        // mirrors of all members share one result window
    room = (room & ~(size_t)63) >= 64 ? room & ~(size_t)63 : 64;
    for (int i = 0; i < (c->op == OP_ALL_GATHER ? c->n_pieces : 1); i++) {
        const ms_piece *p = c->op == OP_ALL_GATHER ? &c->pieces[i] : NULL;
        size_t block = p ? (size_t)p->bytes : c->count * (size_t)ms__dtype_size(c->dtype);
        for (size_t at = 0; at < block; at += room)
            MS_TRY(stage_slice(w, &round, block, at, block - at < room ? block - at : room, p));
    }
    return MS_OK;
}

// ---- the whole ------------------------------------------------------------------------------------

static ms_status run(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    int k = (int)(c->seq % RING);
    if (MS_UNLIKELY(ms__comm_error_since(c->epoch))) {
        atomic_store(&c->raised, true);
        return ms__fail(MS_ECOMM, "%s", ms__comm_error_after(c->epoch));
    }
    // The ring entry: our own earlier use is over, and nobody reads its payload any more.
    while (atomic_load_explicit(&g->finished[k], memory_order_acquire) < c->before) MS_TRY(ms__wait_poll(w));
    if (g->committed[k])
        for (int m = 0; m < g->n; m++) {
            if (g->far && ms__world.node_of[g->ranks[m]] != ms__world.node) continue;
            while (atomic_load_explicit(&slot_of(g, m, c->seq)->done, memory_order_acquire) < g->committed[k]) MS_TRY(ms__wait_poll(w));
        }

    MS_TRY(publish(c));
    ms_status status = agree(w);
    if (status != MS_OK) {
        // Unless everybody was there already and a peer went on: then it counts on us. An error that a peer published came
        // after this collective, which ends well here too; it is met at the next one.
        if (!decide(c, false)) return status;
        if (atomic_exchange(&c->raised, false)) status = MS_OK;
        else if (status != MS_EINTR) return status;
    } else if (!decide(c, true)) {
        return gave_up(c, -1);
    }
    w->committed = true;
    g->committed[k] = c->word;
    if (MS_UNLIKELY(c->delay > 0)) pause_for(c->delay);

    bool direct = true;
    for (int m = 0; m < g->n && !c->inline_; m++) direct = direct && (slot_of(g, m, c->seq)->flags & SLOT_DIRECT);
    ms_status moved = c->inline_ ? move_inline(c) : direct ? move_direct(c) : move_staged(w);
    atomic_store_explicit(&slot_of(g, g->me, c->seq)->done, c->word, memory_order_release);
    if (moved == MS_OK && !c->inline_) moved = wait_done(w);
    return status != MS_OK ? status : moved;
}

ms_status ms__coll_run(ms_coll *c)
{
    ms_waiter w;
    int k = (int)(c->seq % RING);
    ms__wait_begin(&w, c);
    ms_status status = run(&w);
    ms__wait_end(&w);
    uint64_t was = atomic_load(&c->g->finished[k]);
    while (was < c->word && !atomic_compare_exchange_weak(&c->g->finished[k], &was, c->word)) {}
    ms__far_end(c);
    return status;
}
