// SPDX-License-Identifier: MIT
// comm/memory/control.c -- the control memory of a node: its layout, and the places of groups and pairs in it.
#include <pthread.h>
#include <stdio.h>
#include "comm/memory/control.h"
#include "comm/memory/board.h"

typedef _Atomic(ms_group *) pair_entry;
typedef struct {
    size_t at, bytes;
} hole;
static struct {
    ms_group *groups;   // all groups, including those without this rank
    pair_entry *pairs;  // groups of send and recv, indexed by from * size + to
    size_t used;        // bytes used in the part of the control memory for groups
    hole *holes;        // free ranges below groups_used, sorted; adjacent ranges are merged
    size_t n_holes, n_groups;
    int cap_holes;
    pthread_mutex_t pair_lock;  // held while a pair is added to `pairs`, by any thread
} control = { .pair_lock = PTHREAD_MUTEX_INITIALIZER };
pthread_mutex_t ms__groups_lock = PTHREAD_MUTEX_INITIALIZER;

// Bytes that a group of n members needs: slots, heads, and whether it is broken.
static size_t group_bytes(int n) { return (size_t)n * (sizeof(ms_head) + RING * sizeof(ms_slot)) + sizeof(ms_broken); }

static void group_at(ms_group *g, char *p)
{
    g->slots = (ms_slot *)p;
    g->heads = (ms_head *)(p + (size_t)g->n * RING * sizeof(ms_slot));
    g->broken = (ms_broken *)(g->heads + g->n);
}

// ---- layout of the control memory: board, windows, pairs, groups ---------------------------------

static size_t page_up(size_t n) { return (n + 4095) & ~(size_t)4095; }
static size_t windows_at(void) { return page_up(sizeof(ms_board) + (size_t)ms__world.size * sizeof(ms_board_rank)); }
static size_t pairs_at(void) { return windows_at() + (size_t)ms__world.local_size * MS_STREAMS * 2 * WINDOW; }
static size_t groups_at(void)
{
    return pairs_at() + page_up((size_t)ms__world.size * (size_t)ms__world.size * group_bytes(2));
}

size_t ms__ctl_size(void) { return groups_at() + (size_t)ms__world.size * RANKS * RING * sizeof(ms_slot); }

uint64_t ms__ctl_offset(const void *p) { return (uint64_t)((const char *)p - ms__world.ctl); }

char *ms__window(int rank, ms_stream_kind stream)
{
    return ms__world.ctl + windows_at() + ((size_t)ms__world.local_of[rank] * MS_STREAMS + (size_t)stream) * 2 * WINDOW;
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
    // Makes room in the list of free places for all groups, because freeing a group must not fail.
    MS_TRY(ms__grow(&control.holes, &control.cap_holes, (int)control.n_groups + 2, sizeof *control.holes,
                    "dist.new_group", "the list of free places of groups"));
    if (ms__world.up && ms__world.size > 1) {
        size_t k = 0;
        while (k < control.n_holes && control.holes[k].bytes < bytes) k++;
        if (k < control.n_holes) {
            g->place = control.holes[k].at;
            control.holes[k].at += bytes;
            if ((control.holes[k].bytes -= bytes) == 0)
                memmove(&control.holes[k], &control.holes[k + 1], (--control.n_holes - k) * sizeof *control.holes);
        } else {
            if (groups_at() + control.used + bytes > ms__world.ctl_bytes)
                return ms__fail(MS_ENOMEM,
                                "dist.new_group: the control memory holds no more groups (%zu bytes used); "
                                "dist.free_group frees the memory of a group",
                                control.used);
            g->place = control.used;
            control.used += bytes;
        }
        g->bytes = bytes;
        group_at(g, ms__world.ctl + groups_at() + g->place);
        group_nodes(g);
    }
    control.n_groups++;
    pthread_mutex_lock(&ms__groups_lock);
    g->next = control.groups;
    control.groups = g;
    pthread_mutex_unlock(&ms__groups_lock);
    return MS_OK;
}

void ms__group_unplace(ms_group *g, bool used)
{
    pthread_mutex_lock(&ms__groups_lock);
    for (ms_group **at = &control.groups; *at; at = &(*at)->next)
        if (*at == g) {
            *at = g->next;
            break;
        }
    pthread_mutex_unlock(&ms__groups_lock);
    control.n_groups--;
    if (g->bytes == 0) return;
    // A new group at this place numbers its collectives from 1. One rank zeroes the slots; it must do so before it
    // makes the next group.
    if (used && ms__world.local_rank == 0) memset(g->slots, 0, g->bytes);
    size_t k = 0;
    while (k < control.n_holes && control.holes[k].at < g->place) k++;
    memmove(&control.holes[k + 1], &control.holes[k], (control.n_holes++ - k) * sizeof *control.holes);
    control.holes[k] = (hole) { g->place, g->bytes };
    if (k + 1 < control.n_holes && control.holes[k].at + control.holes[k].bytes == control.holes[k + 1].at) {
        control.holes[k].bytes += control.holes[k + 1].bytes;
        memmove(&control.holes[k + 1], &control.holes[k + 2], (--control.n_holes - k - 1) * sizeof *control.holes);
    }
    if (k > 0 && control.holes[k - 1].at + control.holes[k - 1].bytes == control.holes[k].at) {
        control.holes[k - 1].bytes += control.holes[k].bytes;
        memmove(&control.holes[k], &control.holes[k + 1], (--control.n_holes - k) * sizeof *control.holes);
    }
    if (control.n_holes &&
        control.holes[control.n_holes - 1].at + control.holes[control.n_holes - 1].bytes == control.used)
        control.used = control.holes[--control.n_holes].at;
    g->bytes = 0;
    g->slots = NULL;
}

ms_group *ms__pair_by_id(double id)
{
    return ms__pair((int)(-id - 1) / ms__world.size, (int)(-id - 1) % ms__world.size);
}

ms_group *ms__group_listed(double id)
{
    if (id < 0) return ms__pair_by_id(id);
    for (ms_group *g = control.groups; g; g = g->next)
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

ms_group *ms__pair(int from, int to)
{
    size_t at = (size_t)from * (size_t)ms__world.size + (size_t)to;
    ms_group *g = atomic_load_explicit(&control.pairs[at], memory_order_acquire);
    if (g) return g;
    pthread_mutex_lock(&control.pair_lock);
    if (!(g = atomic_load(&control.pairs[at])) && (g = pair_new(from, to, at)))
        atomic_store_explicit(&control.pairs[at], g, memory_order_release);
    pthread_mutex_unlock(&control.pair_lock);
    return g;
}

void ms__each_group(void (*fn)(ms_group *))
{
    for (ms_group *g = control.groups; g; g = g->next)
        if (g->me >= 0) fn(g);
    for (int k = 0; control.pairs && k < ms__world.size * ms__world.size; k++) {
        ms_group *g = atomic_load(&control.pairs[k]);
        if (g && g->me >= 0) fn(g);
    }
}

// ---- start --------------------------------------------------------------------------------------

ms_status ms__control_layout(void)
{
    int n = ms__world.size;
    ms__world.local_of = calloc((size_t)n, sizeof *ms__world.local_of);
    control.pairs = calloc((size_t)n * (size_t)n, sizeof *control.pairs);
    if (!ms__world.local_of || !control.pairs)
        return ms__no_memory((size_t)n * (sizeof *ms__world.local_of + (size_t)n * sizeof *control.pairs), "dist.init",
                             "%d ranks", n);
    for (int r = 0, l = 0; r < n; r++) ms__world.local_of[r] = ms__world.node_of[r] == ms__world.node ? l++ : -1;
    return MS_OK;
}
