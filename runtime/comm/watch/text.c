// SPDX-License-Identifier: MIT
// comm/watch/text.c -- what messages say about groups, ranks and collectives.
#include <pthread.h>
#include <stdio.h>
#include "comm/memory/board.h"
#include "comm/memory/control.h"
#include "comm/watch/watch.h"

// Describes what a rank is doing; for reports.
static void describe_rank(int rank, char *out, size_t n)
{
    if (ms__world.local_of[rank] < 0) {
        snprintf(out, n, "on another node");
        return;
    }
    ms_board_rank *r = &ms__world.board->rank[rank];
    char what[WHAT];
    for (int k = 0; k < MS_STREAMS; k++) {
        if (!(atomic_load(&r->wait[k].version) & 1)) continue;
        ms_waiting b = r->wait[k];
        ms_group *g = ms__group_listed(b.group);
        ms__fingerprint_text(&b.fingerprint, what, sizeof what);
        snprintf(out, n, "waiting for %.1f s in %s (#%u %s)", (double)(ms__now_ns() - b.since) * 1e-9, what,
                 (unsigned)b.number,
                 !g || b.group < 0                  ? "between these two ranks"
                 : g == ms__meeting || b.group == 0 ? "of the world"
                                                    : "of a group other than the world");
        return;
    }
    if (r->last.number == 0) snprintf(out, n, "in no collective so far");
    else {
        ms__fingerprint_text(&r->last.fingerprint, what, sizeof what);
        snprintf(out, n, "in no collective; its last one was %s (#%u %s)", what, (unsigned)r->last.number,
                 r->last.group < 0    ? "between these two ranks"
                 : r->last.group == 0 ? "of the world"
                                      : "of a group other than the world");
    }
}

void ms__rank_text(int rank, char *out, size_t n)
{
    pthread_mutex_lock(&ms__groups_lock);
    describe_rank(rank, out, n);
    pthread_mutex_unlock(&ms__groups_lock);
}

void ms__group_text(const ms_group *g, char *out, size_t n)
{
    if (g->id == 0 || g == ms__meeting) {
        snprintf(out, n, "the world");
        return;
    }
    snprintf(out, n, "ranks ");
    for (int k = 0; k < g->n; k++) ms__append(out, n, k ? ", %d" : "%d", g->ranks[k]);
}

ms_status ms__request_fail(const ms_group *g, uint64_t number, const ms_fingerprint *p, const char *what)
{
    char mine[WHAT], group[MEMBERS];
    ms__fingerprint_text(p, mine, sizeof mine);
    ms__group_text(g, group, sizeof group);
    return ms__fail(MS_ECOMM, "%s: collective #%u of %s (%s): %s", ROW(p->op)->name, (unsigned)number, group, mine,
                    what);
}

ms_status ms__coll_fail(const ms_coll *c, const char *what)
{
    return ms__request_fail(c->g, c->number, &c->fingerprint, what);
}
