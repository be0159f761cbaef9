// SPDX-License-Identifier: MIT
// comm/issue/recording.c -- the list of collectives that were issued (ms_dist_record_*), and MOONSHARD_DEBUG.
#include <stdio.h>
#include "comm/issue/recording.h"
#include "comm/movers/bytes.h"

static int debug_level = -1;  // -1: MOONSHARD_DEBUG has not been read yet

void ms_dist_set_debug_level(int level) { debug_level = level; }
int ms_dist_debug_level(void)
{
    if (debug_level < 0) {
        const char *s = getenv("MOONSHARD_DEBUG");
        debug_level = !s ? 0 : strcmp(s, "info") == 0 ? 1 : strcmp(s, "detail") == 0 ? 2 : 0;
    }
    return debug_level;
}

static ms_ledger_entry *ledger;
static int n_ledger, cap_ledger, recording;

ms_status ms__record_collective(const ms_coll *c)
{
    if (MS_LIKELY(!recording && debug_level == 0) || c->op == OP_REFUSED) return MS_OK;
    double larger = c->in.numel > c->out.numel ? c->in.numel : c->out.numel;
    if (ms_dist_debug_level() > 0) {
        char text[400];
        ms__fingerprint_text(&c->fingerprint, text, sizeof text);
        fprintf(stderr, "rank %d: dist: collective %u of group %g: %s\n", ms__world.rank, (unsigned)c->number, c->g->id,
                text);
    }
    if (!recording) return MS_OK;
    MS_TRY(ms__grow(&ledger, &cap_ledger, n_ledger, sizeof *ledger, "dist.record", "entries"));
    ledger[n_ledger++] = (ms_ledger_entry) { .op = c->op,
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
    if (recording++ == 0) n_ledger = 0;
    return n_ledger;
}
int ms_dist_record_count(void) { return n_ledger; }
ms_status ms_dist_record_get(int k, ms_ledger_entry *out)
{
    if (k < 0 || k >= n_ledger)
        return ms__fail(MS_EINVAL, "ms_dist_record_get: entry %d is out of range: there are %d entries", k, n_ledger);
    *out = ledger[k];
    return MS_OK;
}
void ms_dist_record_end(void)
{
    if (recording > 0) recording--;
}
