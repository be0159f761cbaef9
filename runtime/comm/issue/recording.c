// SPDX-License-Identifier: MIT
// comm/issue/recording.c -- the list of collectives that were issued (ms_dist_record_*), and MOONSHARD_DEBUG.
#include <stdio.h>
#include "comm/issue/recording.h"
#include "comm/movers/bytes.h"

static struct {
    ms_ledger_entry *list;
    int n, cap, depth;
} log;

ms_status ms__record_collective(const ms_coll *c)
{
    if (MS_LIKELY(!log.depth && ms__state.debug_level == 0) || c->op == OP_REFUSED) return MS_OK;
    double larger = c->in.numel > c->out.numel ? c->in.numel : c->out.numel;
    if (ms__state.debug_level > 0) {
        char text[WHAT];
        ms__fingerprint_text(&c->fingerprint, text, sizeof text);
        fprintf(stderr, "rank %d: dist: collective %u of group %g: %s\n", ms__world.rank, (unsigned)c->number, c->g->id,
                text);
    }
    if (!log.depth) return MS_OK;
    MS_TRY(ms__grow(&log.list, &log.cap, log.n, sizeof *log.list, "dist.record", "entries"));
    log.list[log.n++] = (ms_ledger_entry) { .op = c->op,
                                            .dtype = c->reducer.dtype,
                                            .input_numel = c->in.numel,
                                            .output_numel = c->out.numel,
                                            .bytes = larger * ms__dtype_size(c->reducer.dtype),
                                            .group = c->g->id,
                                            .unit = c->unit };
    return MS_OK;
}

int ms_dist_record_begin(void)
{
    if (log.depth++ == 0) log.n = 0;
    return log.n;
}
const ms_ledger_entry *ms_dist_record(int *n)
{
    *n = log.n;
    return log.list;
}
void ms_dist_record_end(void)
{
    if (log.depth > 0) log.depth--;
}
