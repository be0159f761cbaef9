// SPDX-License-Identifier: MIT
// comm/prompt.c -- a prompt over ranks: lines that end on some ranks only, and a new start after a line that failed.
//
// In a script, calls are matched again after an error by the script's position (comm/error.c). Lines of a prompt have
// no such order: a user may repeat a line, or enter one for a single rank. But between two lines no rank makes a
// collective, so all ranks can begin anew: settling publishes one more error, which every rank counts as met, and
// collectives are numbered anew in each epoch.
#include <stdio.h>
#include "comm/internal.h"

enum { MS = 1000000 };

void ms_dist_set_lines(double ended)
{
    if (ms__world.board) atomic_store(&ms__world.board->rank[ms__world.rank].lines, (int64_t)ended);
}

static int in_flight;
static void count(ms_group *g) { in_flight += g->in_flight; }

static void begin_anew(ms_group *g)
{
    g->epoch = ms__comm_epoch();
    g->seq = 0;
    g->failed = false;
    g->settled = ms__state.dist_failures;
    g->turns = g->ahead = 0;
}

ms_status ms_dist_settle(double number)
{
    if (!ms__world.board) return MS_OK;
    if (!(number >= 1) || number < (double)ms__comm_epoch())
        return ms__fail(MS_EINVAL, "ms_dist_settle: number is %g, expected 1 + ms_dist_published()", number);
    ms__comm_publish_as((uint64_t)number, "a line of the prompt failed", NULL);
    // The error ends collectives in the background, whose tensors the next line may use.
    for (int64_t since = ms__now_ns();; ms__nap(MS / 10)) {
        ms__stream_reap();
        in_flight = 0;
        ms__each_group(count);
        if (in_flight == 0) break;
        if (ms__now_ns() - since > 5000ll * MS)
            return ms__fail(MS_ECOMM, "ms_dist_settle: %d collective%s in the background did not end within 5 s",
                            in_flight, in_flight == 1 ? "" : "s");
    }
    ms__comm_settled((uint64_t)number);
    ms_dist_set_step(-1);  // ranks may have ended the line in different steps of ms.steps
    ms__each_group(begin_anew);
    return MS_OK;
}
