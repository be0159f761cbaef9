// SPDX-License-Identifier: MIT
// comm/movers/bytes.c -- the bytes of a collective's tensors, in CPU memory or on a GPU.
#include "comm/movers/bytes.h"

void ms__put_piece(ms_coll *c, const ms_piece *p, const ms_block_part *part, const char *from)
{
    size_t at = part->at, n = part->n;
    char *to = c->out.data + p->out_offset + (size_t)part->k * p->out_stride;
    if (!p->line) {
        if (n && to + at != from) {
            if (part->windows) put_out(c, to + at, from, n);
            else copy_block(c, to + at, from, n);
        }
        return;
    }
    if (c->device && !part->windows) {
        c->device->lines(c, to, p->out_line, from, p->line, n);
        return;
    }
    while (n > 0) {
        size_t in_line = at % p->line, m = p->line - in_line < n ? p->line - in_line : n;
        put_out(c, to + at / p->line * p->out_line + in_line, from, m);
        at += m;
        from += m;
        n -= m;
    }
}

void ms__take_parts(ms_coll *c, int member, size_t at, char *to, size_t n)
{
    for (int i = 0; i < c->n_parts && n > 0; i++) {
        const ms_part *p = &c->parts[i];
        if (at >= p->bytes) {
            at -= p->bytes;
            continue;
        }
        size_t m = bytes_left(p->bytes, at, n), full = bytes_left(part_bytes(p, member), at, m);
        put_in(c, to, (const char *)ms__data(p->t) + (uint64_t)member * p->stride + at, full);
        memset(to + full, 0, m - full);
        to += m;
        n -= m;
        at = 0;
    }
}

ms_status ms__finish_shared(ms_waiter *w, ms_status moved)
{
    ms_coll *c = w->c;
    set_done(c);
    return moved == MS_OK ? ms__wait_done(w, c->number) : moved;
}
