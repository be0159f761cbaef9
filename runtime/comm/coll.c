// SPDX-License-Identifier: MIT
// comm/coll.c -- what several floors ask of a collective.
#include "comm/coll.h"
#include "device/device.h"

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

bool ms__storage_on_gpu(const ms_storage *s) { return s && ms__is_cuda(s->device); }

bool ms__coll_on_device(const ms_coll *c)
{
    return ms__storage_on_gpu(c->in.storage) || ms__storage_on_gpu(c->out.storage);
}

ms_status ms__coll_sync(ms_coll *c)
{
    if (c->in.storage) MS_TRY(ms__storage_sync(c->in.storage, false));
    for (int i = 0; i < c->n_parts; i++) MS_TRY(ms__storage_sync(c->parts[i].t->storage, false));
    return c->out.storage ? ms__storage_sync(c->out.storage, true) : MS_OK;
}
