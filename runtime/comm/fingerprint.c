// SPDX-License-Identifier: MIT
// comm/fingerprint.c -- names, texts and hashes of requests.
#include <stdio.h>
#include "comm/fingerprint.h"

const char *ms__request_name(const ms_fingerprint *p)
{
    if (p->alias) return ms__coll_aliases[p->alias].name;
    return p->op < OPS ? ROW(p->op)->name : "?";
}

static const char *const reductions[] = { "sum", "avg", "max", "min", "prod" };

void ms__fingerprint_text(const ms_fingerprint *p, char *out, size_t n)
{
    snprintf(out, n, "%s", ms__request_name(p));
    if (p->alias == RECOVER) {
        if (p->site[0]) ms__append(out, n, ", at %s", p->site);
        return;
    }
    if (p->op != MS_DIST_BARRIER)
        ms__append(out, n, " of %llu %s", (unsigned long long)p->count, ms__dtype_name(p->dtype));
    if (reduces(p->op)) ms__append(out, n, ", %s", reductions[p->reduction]);
    if (p->op == OP_SEND_RECV) ms__append(out, n, " from rank %d", p->root);
    else if (p->root >= 0) ms__append(out, n, ", root %d", p->root);
    if (p->unit[0]) ms__append(out, n, ", unit '%s'", p->unit);
    if (p->part_of[0]) ms__append(out, n, ", %s", p->part_of);
    if (p->refused) ms__append(out, n, ", after %llu refused calls", (unsigned long long)p->refused);
    if (p->step >= 0) ms__append(out, n, ", step %lld", (long long)p->step);
    if (p->site[0]) ms__append(out, n, ", at %s", p->site);
}

// The script's line is not compared, because `if rank == 0 then dist.broadcast(a) else dist.broadcast(b) end` is
// correct.
uint64_t ms__fingerprint_hash(const ms_fingerprint *p, bool with_step)
{
    uint64_t h = ms__hash_bytes(MS_HASH_START, p, offsetof(ms_fingerprint, step));
    if (with_step) h = ms__hash_bytes(h, &p->step, sizeof p->step);
    if (!with_step) return h;
    h = ms__hash_bytes(h, p->unit, strlen(p->unit));
    return ms__hash_bytes(h, &p->model, sizeof p->model);
}
