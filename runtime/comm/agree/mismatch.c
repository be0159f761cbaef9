// SPDX-License-Identifier: MIT
// comm/agree/mismatch.c -- the error of requests that differ.
#include <sched.h>
#include <stdio.h>
#include "comm/agree/mismatch.h"
#include "comm/movers/far.h"

static bool equal_shapes(const ms_fingerprint *a, const ms_fingerprint *b)
{
    return a->shaped == b->shaped &&
           (!a->shaped || memcmp(a->shape, b->shape, (size_t)(a->shaped - 1) * sizeof *a->shape) == 0);
}

static void append_shape(const ms_fingerprint *p, char *text, size_t n)
{
    ms__append(text, n, ", shape [");
    for (int d = 0; d < p->shaped - 1; d++) ms__append(text, n, d ? ", %u" : "%u", (unsigned)p->shape[d]);
    ms__append(text, n, "]");
}

static bool same_request(const ms_slot *a, const ms_slot *b)
{
    return a->hash == b->hash && strncmp(a->fingerprint.site, b->fingerprint.site, SITE) == 0;
}

bool ms__is_refused(const ms_coll *c)
{
    for (int k = 0; k < c->g->n; k++) {
        const ms_slot *s = member_slot(c->g, k, c->seq);
        uint64_t ready = atomic_load_explicit(&s->ready, memory_order_acquire);
        if (ready >= c->number && s->fingerprint.op == OP_REFUSED) return true;
    }
    return false;
}

// The slot of a call that a member has refused but another has made: c, an earlier one, or a later one of a member that
// has left c. NULL: there is none.
static const ms_slot *find_refusal(const ms_coll *c)
{
    const ms_group *g = c->g;
    for (int k = 0; k < g->n; k++)
        for (uint64_t i = 0; i < RING; i++) {
            const ms_slot *s = member_slot(g, k, i);
            uint64_t number = atomic_load(&s->ready);
            if (s->fingerprint.op != OP_REFUSED || number >> 32 != c->number >> 32) continue;
            if (number == c->number || atomic_load(&member_slot(g, k, c->seq)->ready) > c->number) return s;
            for (int j = 0; j < g->n; j++) {
                const ms_slot *o = member_slot(g, j, i);
                if (atomic_load(&o->ready) == number && o->fingerprint.op != OP_REFUSED) return s;
            }
        }
    return NULL;
}

// Lists the requests of the members that have arrived, equal ones from the same line once. If a call was refused, gives
// only its error; its fingerprint's root is the rank that failed, -1 if the error says which.
static void describe_requests(const ms_coll *c, char *text, size_t size)
{
    ms_group *g = c->g;
    char what[WHAT];
    const ms_slot *s = find_refusal(c);
    if (s) {
        text[0] = 0;
        if (s->fingerprint.root >= 0) snprintf(text, size, "rank %d failed: ", s->fingerprint.root);
        ms__append(text, size, "%.*s", PAYLOAD, s->payload);
        return;
    }
    ms__group_text(g, what, sizeof what);
    snprintf(text, size, "collective #%u of %s: the ranks ask for different things", (unsigned)c->number, what);
    bool listed[RANKS] = { false }, models = false, parts = false, shapes = false, natives = false;
    const ms_fingerprint *mine = &own_slot(c)->fingerprint;
    // Find out whether requests that look equal differ in model, part or shape, or in whether NCCL moves the tensors.
    for (int k = 0; k < g->n && k < RANKS; k++) {
        s = member_slot(g, k, c->seq);
        if (atomic_load(&s->ready) != c->number || strncmp(s->fingerprint.unit, mine->unit, UNIT_NAME) != 0) continue;
        natives |= s->fingerprint.op == mine->op && s->fingerprint.native != mine->native;
        shapes |= s->fingerprint.op == mine->op && !equal_shapes(&s->fingerprint, mine);
        models |= s->fingerprint.model != mine->model;
        parts |= mine->unit[0] && s->fingerprint.op == mine->op && s->fingerprint.part != mine->part;
    }
    for (int k = 0; k < g->n && k < RANKS; k++) {
        s = member_slot(g, k, c->seq);
        uint64_t ready = atomic_load(&s->ready);
        if (listed[k] || ready < c->number) continue;
        if (ready > c->number) {
            ms__append(text, size, "; rank %d is already at #%u", g->ranks[k], (unsigned)ready);
            continue;
        }
        int same = 0;
        for (int j = k + 1; j < g->n && !same; j++) {
            ms_slot *o = member_slot(g, j, c->seq);
            same = atomic_load(&o->ready) == c->number && same_request(o, s);
        }
        ms__append(text, size, same ? "; ranks" : "; rank");
        same = 0;
        for (int j = k; j < g->n && j < RANKS; j++) {
            ms_slot *o = member_slot(g, j, c->seq);
            if (atomic_load(&o->ready) != c->number || !same_request(o, s)) continue;
            listed[j] = true;
            ms__append(text, size, same++ ? ", %d" : " %d", g->ranks[j]);
        }
        ms_fingerprint p = s->fingerprint;
        ms__fingerprint_text(&p, what, sizeof what);
        ms__append(text, size, ": %s", what);
        if (shapes && p.shaped) append_shape(&p, text, size);
        if (natives) ms__append(text, size, p.native ? ", between GPUs" : ", in CPU memory or on another GPU");
        if (models) ms__append(text, size, ", of model #%u of its class", (unsigned)(p.model & 0xffff));
    }
    if (models) ms__append(text, size, "; all ranks of a group must wrap the same models, in the same order");
    if (parts)
        ms__append(
            text, size,
            "; all ranks must train the same parameters of a unit, and, if fully_shard made it, use the same ones in "
            "one backward");
}

ms_status ms__mismatch(ms_waiter *w)
{
    ms_coll *c = w->c;
    ms_group *g = c->g;
    // Unless a call was refused, the message also lists members that arrive within 20 ms.
    int64_t until = ms__now_ns() + (find_refusal(c) ? 0 : 20 * 1000 * 1000);
    for (int k = 0; k < g->n && ms__now_ns() < until;) {
        if (atomic_load(&member_slot(g, k, c->seq)->ready) >= c->number) k++;
        else {
            if (g->far && k != g->me && g->me == g->leader && ms__far_ready(c) != MS_OK) break;
            sched_yield();
        }
    }
    // Sends the requests of this node's members to other nodes, which list them in their messages.
    if (g->far && g->me == g->leader) ms__far_ready(c);
    char text[TEXT];
    if (!ms__is_broken(g, c->epoch)) {
        describe_requests(c, text, sizeof text);
        ms__break(g, c->epoch, text);
    }
    return ms__broken_fail(c);
}
