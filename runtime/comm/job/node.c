// SPDX-License-Identifier: MIT
// comm/job/node.c -- the control memory of a node: its layout, peers' arenas, the board, and waiting.
//
// A wait polls flags. It yields first, and sleeps after 50 us. Every few milliseconds it checks whether the wait can
// still succeed: a peer may have published an error, left or died; ranks may wait for each other in a cycle; the
// timeout may have passed. A rank may leave a collective only before it is committed (comm/exchange.c); afterwards
// peers may be reading and writing its tensors.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "comm/internal.h"

static ms_group *groups;            // all groups, including those without this rank
static _Atomic(ms_group *) *pairs;  // groups of send and recv, indexed by from * size + to
static size_t groups_used;          // bytes used in the part of the control memory for groups
typedef struct {
    size_t at, bytes;
} hole;
static hole *holes;  // free ranges below groups_used, sorted; adjacent ranges are merged
static size_t n_holes, n_groups;
static int cap_holes;
static pthread_mutex_t groups_lock = PTHREAD_MUTEX_INITIALIZER;  // other threads read the list for reports
static int *local_of;                                            // indexed by world rank

// Bytes that a group of n members needs: slots, heads, and the text of a mismatch.
static size_t group_bytes(int n)
{
    return (size_t)n * (sizeof(ms_head) + RING * sizeof(ms_slot)) + sizeof(ms_mismatch_text);
}

static void group_at(ms_group *g, char *p)
{
    g->slots = (ms_slot *)p;
    g->heads = (ms_head *)(p + (size_t)g->n * RING * sizeof(ms_slot));
    g->mismatch = (ms_mismatch_text *)(g->heads + g->n);
}

// ---- layout of the control memory: board, windows, pairs, groups ---------------------------------

static size_t page_up(size_t n) { return (n + 4095) & ~(size_t)4095; }
static size_t windows_at(void) { return page_up(sizeof(ms_board) + (size_t)ms__world.size * sizeof(ms_board_rank)); }
static size_t pairs_at(void) { return windows_at() + (size_t)ms__world.local_size * MS_STREAMS * 2 * WINDOW; }
static size_t groups_at(void)
{
    return pairs_at() + page_up((size_t)ms__world.size * (size_t)ms__world.size * group_bytes(2));
}

size_t ms__ctl_size(void) { return groups_at() + (size_t)ms__world.size * 1024 * RING * sizeof(ms_slot); }

uint64_t ms__ctl_offset(const void *p) { return (uint64_t)((const char *)p - ms__world.ctl); }

char *ms__window(int rank, ms_stream_kind stream)
{
    return ms__world.ctl + windows_at() + ((size_t)local_of[rank] * MS_STREAMS + (size_t)stream) * 2 * WINDOW;
}

static void group_nodes(ms_group *g)
{
    g->far = false;
    g->single = true;
    g->leader = -1;
    for (int k = 0; k < g->n; k++) {
        int node = ms__world.node_of[g->ranks[k]];
        if (node != ms__world.node) g->far = true;
        else if (g->leader < 0) g->leader = k;
        for (int j = 0; j < k && g->single; j++) g->single = ms__world.node_of[g->ranks[j]] != node;
    }
    if (g->leader < 0) g->far = true;
}

// All ranks make and free groups in the same order, so a group has the same place on every rank.
ms_status ms__group_place(ms_group *g)
{
    size_t bytes = page_up(group_bytes(g->n));
    // Room for freeing every group: freeing must not fail.
    MS_TRY(ms__grow(&holes, &cap_holes, (int)n_groups + 2, sizeof *holes, "dist.new_group", "places of groups"));
    if (ms__world.up && ms__world.size > 1) {
        size_t k = 0;
        while (k < n_holes && holes[k].bytes < bytes) k++;
        if (k < n_holes) {
            g->place = holes[k].at;
            holes[k].at += bytes;
            if ((holes[k].bytes -= bytes) == 0) memmove(&holes[k], &holes[k + 1], (--n_holes - k) * sizeof *holes);
        } else {
            if (groups_at() + groups_used + bytes > ms__world.ctl_bytes)
                return ms__fail(MS_ENOMEM,
                                "dist.new_group: the control memory holds no more groups (%zu bytes used); "
                                "dist.free_group frees the memory of a group",
                                groups_used);
            g->place = groups_used;
            groups_used += bytes;
        }
        g->bytes = bytes;
        group_at(g, ms__world.ctl + groups_at() + g->place);
        group_nodes(g);
    }
    n_groups++;
    pthread_mutex_lock(&groups_lock);
    g->next = groups;
    groups = g;
    pthread_mutex_unlock(&groups_lock);
    return MS_OK;
}

void ms__group_unplace(ms_group *g, bool used)
{
    pthread_mutex_lock(&groups_lock);
    for (ms_group **at = &groups; *at; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    pthread_mutex_unlock(&groups_lock);
    n_groups--;
    if (g->bytes == 0) return;
    // A new group at this place numbers its collectives from 1. One rank zeroes the slots; it must do so before it
    // makes the next group.
    if (used && ms__world.local_rank == 0) memset(g->slots, 0, g->bytes);
    size_t k = 0;
    while (k < n_holes && holes[k].at < g->place) k++;
    memmove(&holes[k + 1], &holes[k], (n_holes++ - k) * sizeof *holes);
    holes[k] = (hole) { g->place, g->bytes };
    if (k + 1 < n_holes && holes[k].at + holes[k].bytes == holes[k + 1].at) {
        holes[k].bytes += holes[k + 1].bytes;
        memmove(&holes[k + 1], &holes[k + 2], (--n_holes - k - 1) * sizeof *holes);
    }
    if (k > 0 && holes[k - 1].at + holes[k - 1].bytes == holes[k].at) {
        holes[k - 1].bytes += holes[k].bytes;
        memmove(&holes[k], &holes[k + 1], (--n_holes - k) * sizeof *holes);
    }
    if (n_holes && holes[n_holes - 1].at + holes[n_holes - 1].bytes == groups_used) groups_used = holes[--n_holes].at;
    g->bytes = 0;
    g->slots = NULL;
}

ms_group *ms__pair_by_id(double id)
{
    return ms__pair((int)(-id - 1) / ms__world.size, (int)(-id - 1) % ms__world.size);
}

static ms_group *group_with(double id)
{
    if (id < 0) return ms__pair_by_id(id);
    for (ms_group *g = groups; g; g = g->next)
        if (g->id == id) return g;
    return NULL;
}

static ms_group *pair_new(int from, int to, size_t at)
{
    ms_group *g = calloc(1, sizeof *g);
    int *ranks = malloc(2 * sizeof *ranks);
    if (!g || !ranks) {
        free(g);
        free(ranks);
        ms__no_memory(sizeof *g + 2 * sizeof *ranks, "dist.send", "a pair of ranks");
        return NULL;
    }
    ranks[0] = from;
    ranks[1] = to;
    *g = (ms_group) { .id = -1.0 - (double)at,
                      .n = 2,
                      .ranks = ranks,
                      .me = ms__world.rank == from ? 0
                            : ms__world.rank == to ? 1
                                                   : -1 };
    group_at(g, ms__world.ctl + pairs_at() + at * group_bytes(2));
    group_nodes(g);
    return g;
}

static pthread_mutex_t pair_lock = PTHREAD_MUTEX_INITIALIZER;  // workers read pairs in reports

ms_group *ms__pair(int from, int to)
{
    size_t at = (size_t)from * (size_t)ms__world.size + (size_t)to;
    ms_group *g = atomic_load_explicit(&pairs[at], memory_order_acquire);
    if (g) return g;
    pthread_mutex_lock(&pair_lock);
    if (!(g = atomic_load(&pairs[at])) && (g = pair_new(from, to, at)))
        atomic_store_explicit(&pairs[at], g, memory_order_release);
    pthread_mutex_unlock(&pair_lock);
    return g;
}

// ---- peers' arenas --------------------------------------------------------------------------------

static pthread_mutex_t map_lock = PTHREAD_MUTEX_INITIALIZER;
typedef struct {
    _Atomic(char *) base[ARENAS];
} peer_maps;
static peer_maps *maps;  // indexed by world rank

// Finds the arena of the storage's memory: its number on the board (from 1). Enters the arena there at its first use.
// False: the memory has no arena and must be staged.
bool ms__comm_locate(ms_storage *s, const void *p, uint32_t *arena, uint64_t *at)
{
    int fd;
    uint64_t offset, id, bytes;
    if (!ms__world.mapped || !s || !s->block || !ms__segment_of(s->block, &fd, &offset, &id, &bytes)) return false;
    ms_board_rank *me = &ms__world.board->rank[ms__world.rank];
    int n = atomic_load_explicit(&me->n_arenas, memory_order_acquire), k = 0;
    while (k < n && me->arena[k].id != id) k++;
    if (k == n) {
        pthread_mutex_lock(&map_lock);
        n = atomic_load(&me->n_arenas);
        for (k = 0; k < n && me->arena[k].id != id; k++) {}
        struct stat st;
        if (k == n && n < ARENAS && fstat(fd, &st) == 0) {
            me->arena[k].id = id;
            me->arena[k].bytes = bytes;
            me->arena[k].inode = (uint64_t)st.st_ino;
            me->arena[k].fd = fd;
            atomic_store_explicit(&me->n_arenas, ++n, memory_order_release);
        }
        pthread_mutex_unlock(&map_lock);
        if (k == n) return false;
    }
    *arena = (uint32_t)k + 1;
    *at = offset + (uint64_t)((const char *)p - (const char *)s->block->data);
    return true;
}

static char *map_arena(int rank, int k)
{
    ms_board_rank *r = &ms__world.board->rank[rank];
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", r->pid, r->arena[k].fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return ms__null(ms__fail(MS_ECOMM, "dist: cannot open the memory of rank %d: %s", rank, strerror(errno)));
    // The inode differs: the descriptor has been reused, or belongs to another process namespace.
    void *p = NULL;
    if (fstat(fd, &st) == 0 && (uint64_t)st.st_ino == r->arena[k].inode) p = ms__map_aligned(fd, r->arena[k].bytes);
    close(fd);
    if (!p)
        return ms__null(ms__fail(MS_ECOMM, "dist: cannot map %llu bytes of rank %d: %s",
                                 (unsigned long long)r->arena[k].bytes, rank, strerror(errno)));
    return p;
}

char *ms__comm_resolve(int rank, uint32_t arena, uint64_t at)
{
    if (arena == 0) return ms__world.ctl + at;
    _Atomic(char *) *slot = &maps[rank].base[arena - 1];
    char *base = atomic_load_explicit(slot, memory_order_acquire);
    if (MS_UNLIKELY(!base)) {
        pthread_mutex_lock(&map_lock);
        if (!(base = atomic_load(slot)) && (base = map_arena(rank, (int)arena - 1)))
            atomic_store_explicit(slot, base, memory_order_release);
        pthread_mutex_unlock(&map_lock);
        if (!base) return NULL;
    }
    return base + at;
}

// Requires that the first arena of every peer on this node is on the board.
bool ms__comm_can_map(int rank)
{
    return ms__world.board->rank[rank].n_arenas > 0 && ms__comm_resolve(rank, 1, 0) != NULL;
}

// ---- start and state ------------------------------------------------------------------------------

ms_status ms__node_layout(void)
{
    int n = ms__world.size;
    local_of = calloc((size_t)n, sizeof *local_of);
    maps = calloc((size_t)n, sizeof *maps);
    pairs = calloc((size_t)n * (size_t)n, sizeof *pairs);
    if (!local_of || !maps || !pairs)
        return ms__no_memory((size_t)n * (sizeof *local_of + sizeof *maps + (size_t)n * sizeof *pairs), "dist.init",
                             "%d ranks", n);
    for (int r = 0, l = 0; r < n; r++) local_of[r] = ms__world.node_of[r] == ms__world.node ? l++ : -1;
    return MS_OK;
}

ms_status ms__node_start(void)
{
    ms__engine_waits = &ms__world.board->rank[ms__world.rank].engine_waits;
    return ms__end_start();
}

// ---- waiting --------------------------------------------------------------------------------------

void ms__wait_begin(ms_waiter *w, ms_coll *c) { *w = (ms_waiter) { .c = c }; }

// Publishes this wait on the board; called only after a millisecond.
static void post_on_board(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_waiting *b = &ms__world.board->rank[ms__world.rank].wait[c->stream];
    b->group = c->g->id;
    b->word = c->word;
    b->since = w->begun;
    b->fingerprint = c->fingerprint;
    if (c->place.here) b->fingerprint.resumed = c->place;
    atomic_store(&b->version, (atomic_load(&b->version) | 1) + (atomic_load(&b->version) & 1 ? 2 : 0));
    if (c->stream == MS_STREAM_COMPUTE)
        atomic_store(&ms__world.board->rank[ms__world.rank].engine_waits, MS_STREAM_COMPUTE);
}

void ms__wait_end(ms_waiter *w)
{
    if (!w->checked) return;  // the wait was not published
    ms_board_rank *me = &ms__world.board->rank[ms__world.rank];
    ms_waiting *b = &me->wait[w->c->stream];
    if (w->c->stream == MS_STREAM_COMPUTE) atomic_store(&me->engine_waits, -1);
    if (atomic_load(&b->version) & 1) atomic_fetch_add(&b->version, 1);
    w->checked = 0;
}

static bool is_missing(const ms_waiter *w, int member)
{
    ms_coll *c = w->c;
    ms_slot *s = slot_of(c->g, member, c->seq);
    return atomic_load(w->committed ? &s->done : &s->ready) < c->word;
}

// Describes what a rank is doing; for reports.
static void describe_rank(int rank, char *out, size_t n)
{
    if (local_of[rank] < 0) {
        snprintf(out, n, "on another node");
        return;
    }
    ms_board_rank *r = &ms__world.board->rank[rank];
    char what[400];
    for (int k = 0; k < MS_STREAMS; k++) {
        if (!(atomic_load(&r->wait[k].version) & 1)) continue;
        ms_waiting b = r->wait[k];
        ms_group *g = group_with(b.group);
        ms__fingerprint_text(&b.fingerprint, what, sizeof what);
        snprintf(out, n, "waiting for %.1f s in %s (#%u of %s)", (double)(ms__now_ns() - b.since) * 1e-9, what,
                 (unsigned)b.word,
                 !g || b.group < 0 ? "its pair"
                 : b.group == 0    ? "the world"
                                   : "another group");
        return;
    }
    if (r->last.word == 0) snprintf(out, n, "in no collective so far");
    else {
        ms__fingerprint_text(&r->last.fingerprint, what, sizeof what);
        snprintf(out, n, "in no collective; its last one was %s (#%u of %s)", what, (unsigned)r->last.word,
                 r->last.group < 0    ? "a pair"
                 : r->last.group == 0 ? "the world"
                                      : "another group");
    }
}

void ms__wait_text(char *out, size_t n)
{
    pthread_mutex_lock(&groups_lock);
    describe_rank(ms__world.rank, out, n);
    pthread_mutex_unlock(&groups_lock);
}

void ms__group_text(const ms_group *g, char *out, size_t n)
{
    if (g->id == 0) {
        snprintf(out, n, "the world");
        return;
    }
    snprintf(out, n, "ranks ");
    for (int k = 0; k < g->n; k++) ms__append(out, n, k ? ", %d" : "%d", g->ranks[k]);
}

ms_status ms__coll_fail(const ms_coll *c, const char *what)
{
    char mine[400], group[200];
    ms__fingerprint_text(&c->fingerprint, mine, sizeof mine);
    ms__group_text(c->g, group, sizeof group);
    return ms__fail(MS_ECOMM, "%s: collective #%u of %s (%s): %s", ROW(c->op)->name, (unsigned)c->word, group, mine,
                    what);
}

typedef struct {
    int rank;
    char where[600];
} asked_rank;

// Asks the first missing members on other nodes what they wait for, and lists those that answer within 100 ms.
static int ask_others(const ms_waiter *w, asked_rank *list, int room)
{
    int asked = 0, n = 0, from;
    const ms_group *g = w->c->g;
    for (int k = 0; k < g->n && asked < room; k++)
        if (local_of[g->ranks[k]] < 0 && is_missing(w, k)) {
            ms__far_ask(g->ranks[k]);
            asked++;
        }
    for (int64_t until = ms__now_ns() + 100 * 1000 * 1000; n < asked && ms__now_ns() < until;) {
        if ((from = ms__far_answered(list[n].where, sizeof list[n].where)) >= 0) list[n++].rank = from;
        else ms__nap(100 * 1000);
    }
    return n;
}

static ms_status report_absence(ms_waiter *w)
{
    enum { ASKED = 8 };
    char text[TEXT], where[600];
    asked_rank others[ASKED];
    snprintf(text, sizeof text, "%.1f s have passed and ", (double)(w->now - w->begun) * 1e-9);
    int named = 0, n_others = ms__world.nodes > 1 ? ask_others(w, others, ASKED) : 0;
    pthread_mutex_lock(&groups_lock);
    for (int k = 0; k < w->c->g->n; k++) {
        if (!is_missing(w, k)) continue;
        int rank = w->c->g->ranks[k];
        describe_rank(rank, where, sizeof where);
        for (int j = 0; j < n_others; j++)
            if (others[j].rank == rank) ms__append(where, sizeof where, ", %s", others[j].where);
        ms__append(text, sizeof text, "%srank %d %s (it is %s)", named++ ? "; " : "", rank,
                   w->committed ? "has not finished its part" : "has not arrived", where);
    }
    pthread_mutex_unlock(&groups_lock);
    ms__coll_fail(w->c, text);
    return ms__fail_job(MS_ECOMM, -1);
}

// Waits as a graph. A node is an executor of a rank; it has an edge to each executor that must proceed before it can. A
// deadlock is a cycle whose nodes were all waiting at the same instant: the cycle is walked twice, and the versions
// must agree.
typedef struct {
    int node;
    uint64_t version;
} visit;

// Lists the successors of node and returns their number. *version: the version of the node's entry on the board.
static int successors(int node, uint64_t *version, int *out)
{
    ms_waiting *b = &ms__world.board->rank[node / MS_STREAMS].wait[node % MS_STREAMS];
    *version = atomic_load(&b->version);
    if (!(*version & 1)) return 0;
    double id = b->group;
    uint64_t word = b->word;
    if (atomic_load(&b->version) != *version) return 0;
    if (ms__comm_error_since(word >> 32)) return 0;  // a published error will end this wait
    ms_group *g = group_with(id);
    if (!g) return 0;
    int n = 0;
    uint64_t seq = (word & 0xffffffff) - 1;
    // A rank that has not filled its own slot still waits for a free ring entry. The entry is held by earlier
    // collectives of that rank, whose own edges show what they wait for, so this node has none.
    for (int k = 0; k < g->n; k++)
        if (g->ranks[k] == node / MS_STREAMS && atomic_load(&slot_of(g, k, seq)->ready) < word) return 0;
    for (int k = 0; k < g->n; k++) {
        int rank = g->ranks[k], stream;
        if (local_of[rank] < 0 || atomic_load(&slot_of(g, k, seq)->ready) >= word) continue;
        uint64_t issued = atomic_load(&g->heads[k].issued);
        if (issued >= word) stream = issued - word < RING ? g->heads[k].executor[seq % RING] : -1;
        else stream = atomic_load(&ms__world.board->rank[rank].engine_waits);
        if (stream >= 0) out[n++] = rank * MS_STREAMS + stream;
    }
    return n;
}

static int walk(int node, int depth, visit *path, char *seen, int *begin)
{
    for (int i = 0; i < depth; i++)
        if (path[i].node == node) {
            *begin = i;
            return depth;
        }
    if (seen[node] || depth >= ms__world.size * MS_STREAMS) return 0;
    seen[node] = 1;
    int *next = malloc((size_t)ms__world.size * sizeof *next);
    int found = 0;
    if (!next) return 0;
    path[depth].node = node;
    int n = successors(node, &path[depth].version, next);
    for (int i = 0; i < n && !found; i++) found = walk(next[i], depth + 1, path, seen, begin);
    free(next);
    return found;
}

// The latest place in the script among the ranks of a cycle; only ranks at earlier places have to fail. NULL if all are
// at the same place, or if a place is unknown.
static const ms_resumption *furthest_of(const visit *path, int begin, int n)
{
    const ms_resumption *furthest = NULL;
    bool some_behind = false;
    for (int i = begin; i < n; i++) {
        int rank = path[i].node / MS_STREAMS;
        const ms_resumption *r = &ms__world.board->rank[rank].wait[path[i].node % MS_STREAMS].fingerprint.resumed;
        if (!r->here) return NULL;
        int order = furthest ? ms__compare_places(furthest, r, true) : 0;
        some_behind |= order != 0;
        if (!furthest || order < 0) furthest = r;
    }
    return some_behind ? furthest : NULL;
}

static ms_status find_cycle(ms_waiter *w)
{
    int nodes = ms__world.size * MS_STREAMS, begin = 0, n = 0;
    visit *path = malloc(((size_t)nodes + 1) * sizeof *path);
    char *seen = calloc((size_t)nodes, 1);
    int *next = malloc((size_t)ms__world.size * sizeof *next);
    if (path && seen && next) n = walk(ms__world.rank * MS_STREAMS + w->c->stream, 0, path, seen, &begin);
    bool real = n > begin;
    for (int i = begin; i < n && real; i++) {
        uint64_t version;
        int to = path[i + 1 < n ? i + 1 : begin].node, m = successors(path[i].node, &version, next), k = 0;
        while (k < m && next[k] != to) k++;
        real = version == path[i].version && k < m;
    }
    ms_status status = MS_OK;
    if (real) {
        char text[TEXT] = "deadlock: ", what[400];
        for (int i = begin; i < n; i++) {
            int rank = path[i].node / MS_STREAMS, to = path[i + 1 < n ? i + 1 : begin].node / MS_STREAMS;
            ms_waiting *b = &ms__world.board->rank[rank].wait[path[i].node % MS_STREAMS];
            char group[200];
            ms_group *g = group_with(b->group);
            ms__group_text(g, group, sizeof group);
            ms__fingerprint_text(&b->fingerprint, what, sizeof what);
            ms__append(text, sizeof text, "%srank %d waits for rank %d in %s, #%u of %s", i > begin ? "; " : "", rank,
                       to, what, (unsigned)b->word, group);
        }
        // A peer that has reported the deadlock and continued may wait for something else now; that wait is not part of
        // it.
        uint64_t number = w->c->epoch + 1;
        if (!ms__comm_error_since(w->c->epoch) && ms__comm_publish_as(number, text, furthest_of(path, begin, n)) &&
            ms__world.nodes > 1)
            ms__far_error(number, text, false);
        status = ms__comm_raise(w->c);
    }
    free(path);
    free(seen);
    free(next);
    return status;
}

static ms_status check_deadlock(ms_waiter *w)
{
    pthread_mutex_lock(&groups_lock);
    ms_status status = find_cycle(w);
    pthread_mutex_unlock(&groups_lock);
    return status;
}

// Called every few milliseconds during a long wait.
static ms_status check_peers(ms_waiter *w)
{
    ms_coll *c = w->c;
    char text[200];
    if (ms__world.nodes > 1) ms__far_poll();
    for (int k = 0; k < c->g->n; k++) {
        int rank = c->g->ranks[k];
        if (k == c->g->me || local_of[rank] < 0) continue;
        int state = atomic_load(&ms__world.board->rank[rank].state);
        // The peer has printed its traceback and the job is ending. A second error would hide the first.
        if (state == RANK_RAISED) ms__end_stay(1);
        if (state == RANK_LEFT && is_missing(w, k)) {
            snprintf(text, sizeof text, "rank %d has left: its script has ended", rank);
            ms__coll_fail(c, text);
            return ms__fail_job(MS_ECOMM, -1);
        }
        if (state == RANK_RUNNING && ms__rank_dead(rank)) {
            snprintf(text, sizeof text, "rank %d (process %d) died", rank, ms__world.board->rank[rank].pid);
            ms__coll_fail(c, text);
            return ms__fail_job(MS_ECOMM, rank);
        }
    }
    if ((double)(w->now - w->begun) * 1e-9 > ms__world.timeout) return report_absence(w);
    return w->committed ? MS_OK : check_deadlock(w);
}

// Without this reset, later slices of a long collective would be polled as rarely as a collective that hangs.
void ms__wait_moved(ms_waiter *w)
{
    w->begun = 0;
    w->polls = 0;
}

ms_status ms__wait_poll(ms_waiter *w)
{
    ms_coll *c = w->c;
    w->now = ms__now_ns();
    if (!w->begun) w->begun = w->last = w->now;
    // After a gap of half a second, assume that this process was stopped (Ctrl-Z, a debugger), usually together with
    // its peers. That time does not count towards the timeout.
    if (w->now - w->last > 500000000) w->begun += w->now - w->last;
    w->last = w->now;
    int64_t for_ns = w->now - w->begun;
    // Messages between nodes make progress only while both sides poll, and a sleep takes longer than sending 4 MiB.
    if (for_ns < (w->committed && c->g->far ? 20000 : 50) * 1000 || w->polls++ < 4) {
        sched_yield();
        return MS_OK;
    }
    ms__nap(for_ns < 2000000 ? 10000 : for_ns < 100000000 ? 100000 : 500000);
    // Between nodes peers access only windows, so even a committed collective may be abandoned.
    if (!w->committed || c->g->far) {
        if (MS_UNLIKELY(ms__comm_error_since(c->epoch))) return ms__comm_raise(c);
        if (c->stream == MS_STREAM_COMPUTE && !w->committed) {
            ms_status status = ms__check_interrupt();
            if (status != MS_OK) return status;
        }
        if (ms__stream_cancelled()) return ms__fail(MS_ECOMM, "the process is exiting");
    }
    if (w->now - w->checked < 5 * 1000 * 1000 || for_ns < 1000000) return MS_OK;
    if (!w->checked) post_on_board(w);
    w->checked = w->now;
    return check_peers(w);
}
