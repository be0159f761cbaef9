// SPDX-License-Identifier: MIT
// comm/watch/deadlock.c -- finds ranks of one host that wait for each other in different groups.
//
// The waits are a graph. A node is one stream of a rank, which the engine's thread or a worker executes; it has an edge
// to each stream on the host that must proceed before it can. A deadlock is a cycle whose nodes were all waiting at the
// same instant: the cycle is walked twice, and each node's entry on the board must have the same version both times.
#include <pthread.h>
#include <stdio.h>
#include "comm/memory/board.h"
#include "comm/memory/control.h"
#include "comm/watch/watch.h"

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
    uint64_t number = b->number;
    atomic_thread_fence(memory_order_acquire);  // otherwise the fields may be read after the version
    if (atomic_load(&b->version) != *version) return 0;
    ms_group *g = ms__group_listed(id);
    if (!g || ms__is_broken(g, number >> 32)) return 0;  // the wait in a broken group will end
    int n = 0;
    uint64_t seq = (number & 0xffffffff) - 1;
    // A rank that has not filled its own slot still waits for an earlier collective of its own to leave that slot. The
    // edges of the earlier collective show what it waits for, so this node has none.
    for (int k = 0; k < g->n; k++)
        if (g->ranks[k] == node / MS_STREAMS && atomic_load(&member_slot(g, k, seq)->ready) < number) return 0;
    for (int k = 0; k < g->n; k++) {
        int rank = g->ranks[k], stream;
        if (ms__world.local_of[rank] < 0 || atomic_load(&member_slot(g, k, seq)->ready) >= number) continue;
        uint64_t issued = atomic_load(&g->heads[k].issued);
        if (issued >= number) stream = issued - number < RING ? g->heads[k].executor[seq % RING] : -1;
        else stream = atomic_load(&ms__world.board->rank[rank].engine_waits);
        if (stream >= 0) out[n++] = rank * MS_STREAMS + stream;
    }
    return n;
}

// Follows the edges from a node, depth first. If a node repeats, path[*begin .. n) is the cycle, and walk returns n; 0:
// no cycle.
static int walk_waits(int node, int depth, visit *path, char *seen, int *begin)
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
    for (int i = 0; i < n && !found; i++) found = walk_waits(next[i], depth + 1, path, seen, begin);
    free(next);
    return found;
}

// Breaks the groups of a cycle of n waits. Peers may have found another cycle through the same groups: all give every
// group the text of the group with the lowest id.
static void break_cycle(const visit *cycle, int n)
{
    char text[TEXT] = "deadlock: ", what[WHAT], group[MEMBERS];
    ms_group *first = NULL;
    uint64_t epoch = 0;
    for (int i = 0; i < n; i++) {
        int rank = cycle[i].node / MS_STREAMS, to = cycle[(i + 1) % n].node / MS_STREAMS;
        ms_waiting b = ms__world.board->rank[rank].wait[cycle[i].node % MS_STREAMS];
        ms_group *g = ms__group_listed(b.group);
        if (b.version != cycle[i].version || !g) return;  // the wait has ended: a peer has broken its group
        ms__group_text(g, group, sizeof group);
        ms__fingerprint_text(&b.fingerprint, what, sizeof what);
        ms__append(text, sizeof text, "%srank %d waits for rank %d in %s, #%u of %s", i ? "; " : "", rank, to, what,
                   (unsigned)b.number, group);
        epoch = b.number >> 32;
        if (g != ms__meeting && (!first || g->id < first->id)) first = g;
    }
    ms__break(first, epoch, text);
    ms__broken_reason(first, epoch, text);
    for (int i = 0; i < n; i++) {
        const ms_waiting *b = &ms__world.board->rank[cycle[i].node / MS_STREAMS].wait[cycle[i].node % MS_STREAMS];
        ms_group *g = ms__group_listed(b->group);
        if (g && atomic_load(&b->version) == cycle[i].version) ms__break(g, epoch, text);
    }
}

static void find_cycle(const ms_coll *c)
{
    int nodes = ms__world.size * MS_STREAMS, begin = 0, n = 0;
    visit *path = malloc(((size_t)nodes + 1) * sizeof *path);
    char *seen = calloc((size_t)nodes, 1);
    int *next = malloc((size_t)ms__world.size * sizeof *next);
    if (path && seen && next) n = walk_waits(ms__world.rank * MS_STREAMS + c->stream, 0, path, seen, &begin);
    bool real = n > begin;
    for (int i = begin; i < n && real; i++) {
        uint64_t version;
        int to = path[i + 1 < n ? i + 1 : begin].node, m = successors(path[i].node, &version, next), k = 0;
        while (k < m && next[k] != to) k++;
        real = version == path[i].version && k < m;
    }
    if (real) break_cycle(path + begin, n - begin);
    free(path);
    free(seen);
    free(next);
}

ms_status ms__wait_deadlock(ms_coll *c)
{
    pthread_mutex_lock(&ms__groups_lock);
    find_cycle(c);
    pthread_mutex_unlock(&ms__groups_lock);
    return ms__is_broken(c->g, c->epoch) ? ms__broken_fail(c) : MS_OK;
}
