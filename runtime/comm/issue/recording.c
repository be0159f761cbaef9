// SPDX-License-Identifier: MIT
// comm/issue/recording.c -- the list of collectives that were issued (ms_dist_record_*), and MOONSHARD_DEBUG.
#include <stdio.h>
#include "comm/issue/recording.h"
#include "comm/movers/bytes.h"

static struct {
    int debug_level;  // -1: MOONSHARD_DEBUG has not been read yet
    ms_ledger_entry *list;
    int n, cap, depth;
} log = { .debug_level = -1 };

void ms_dist_set_debug_level(int level) { log.debug_level = level; }
int ms_dist_debug_level(void)
{
    if (log.debug_level < 0) {
        const char *s = getenv("MOONSHARD_DEBUG");
        log.debug_level = !s ? 0 : strcmp(s, "info") == 0 ? 1 : strcmp(s, "detail") == 0 ? 2 : 0;
    }
    return log.debug_level;
}

ms_status ms__record_collective(const ms_coll *c)
{
    if (MS_LIKELY(!log.depth && log.debug_level == 0) || c->op == OP_REFUSED) return MS_OK;
    double larger = c->in.numel > c->out.numel ? c->in.numel : c->out.numel;
    if (ms_dist_debug_level() > 0) {
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
int ms_dist_record_count(void) { return log.n; }
ms_status ms_dist_record_get(int k, ms_ledger_entry *out)
{
    if (k < 0 || k >= log.n)
        return ms__fail(MS_EINVAL, "ms_dist_record_get: entry %d is out of range: there are %d entries", k, log.n);
    *out = log.list[k];
    return MS_OK;
}
void ms_dist_record_end(void)
{
    if (log.depth > 0) log.depth--;
}
