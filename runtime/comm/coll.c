// SPDX-License-Identifier: MIT
// comm/coll.c -- what several floors ask of a collective.
#include "comm/coll.h"

int ms__coll_root(const ms_group *g, int op, int root)
{
    if (op == OP_SEND_RECV) return 0;
    return is_rooted(op) ? ms__group_member(g, root) : -1;
}

void ms__coll_not_inline(ms_coll *c)
{
    c->inline_ = false;
    if (!c->n_pieces) return;
    c->in.data -= c->pieces[0].in_offset;
    c->out.data -= c->pieces[0].out_offset;
}
