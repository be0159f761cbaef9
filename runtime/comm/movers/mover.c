// SPDX-License-Identifier: MIT
// comm/movers/mover.c -- the list of movers.
#include "comm/movers/mover.h"

// In the order in which they are asked.
#define MOVERS(X) X(nccl) X(gpu) X(host) X(inline) X(nodes) X(direct) X(staged)

#define DECLARE(NAME) extern const ms_mover ms__mover_##NAME;
#define ADDRESS(NAME) &ms__mover_##NAME,
MOVERS(DECLARE)
static const ms_mover *const movers[] = { MOVERS(ADDRESS) };

ms_status ms__mover_prepare(ms_coll *c)
{
    for (int k = 0; k < MS_COUNT(movers) && !c->mover; k++)
        if (movers[k]->prepare) MS_TRY(movers[k]->prepare(c));
    return MS_OK;
}

ms_status ms__mover_choose(ms_waiter *w, const ms_mover **out)
{
    const ms_coll *c = w->c;
    w->flags = ~0u;
    for (int k = 0; k < c->g->n; k++) w->flags &= member_slot(c->g, k, c->seq)->flags;
    bool yes = false;
    for (int k = 0; k < MS_COUNT(movers) && !yes; k++) {
        *out = movers[k];
        // One that prepares tensors moves only those that it has prepared.
        if ((*out)->serves && (*out == c->mover || !(*out)->prepare)) MS_TRY((*out)->serves(w, &yes));
    }
    return MS_OK;
}

ms_status ms__movers_open(const ms_transport *t, const ms_launch *launch)
{
    for (int k = 0; k < MS_COUNT(movers); k++)
        if (movers[k]->open) MS_TRY(movers[k]->open(t, launch));
    return MS_OK;
}

ms_status ms__movers_join(ms_group *g)
{
    for (int k = 0; k < MS_COUNT(movers); k++)
        if (movers[k]->join) MS_TRY(movers[k]->join(g));
    return MS_OK;
}

ms_status ms__movers_part(ms_group *g)
{
    for (int k = 0; k < MS_COUNT(movers); k++)
        if (movers[k]->part) MS_TRY(movers[k]->part(g));
    return MS_OK;
}

ms_status ms__movers_check(void)
{
    for (int k = 0; k < MS_COUNT(movers); k++)
        if (movers[k]->check) MS_TRY(movers[k]->check());
    return MS_OK;
}

void ms__movers_stop(void)
{
    for (int k = 0; k < MS_COUNT(movers); k++)
        if (movers[k]->stop) movers[k]->stop();
}
