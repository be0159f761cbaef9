// SPDX-License-Identifier: MIT
// comm/comm.h -- process groups, collectives and works, for the engine's own use (unit.c, optim.c). Scripts
// reach the same functions through moonshard.h's `dist` section.
//
// A collective is started in the order the script issued it, over all groups and streams; it is
// checked by fingerprint before data moves; it is complete on a rank when its output is there and no
// peer will touch its input or output again.
#ifndef MS_COMM_H
#define MS_COMM_H

#include "tensor/tensor.h"

typedef struct ms_group ms_group;
typedef struct ms_work ms_work;

int ms__group_rank(const ms_group *g);  // -1: not a member
int ms__group_size(const ms_group *g);
ms_group *ms__group_world(void);       // a world of one before dist.init
ms_group *ms__group_by_id(double id);  // NULL with the error set
ms_group *ms__group_hold(
    ms_group *g);  // its address stays valid for ever; NULL allowed. Collectives fail once it was freed

typedef enum { MS_SUM, MS_AVG, MS_MAX, MS_MIN, MS_PROD } ms_reduction;

// One run of bytes per rank: rank k's input at in_offset (the same on every rank) lands at
// out_offset + k*out_stride of the output; rank k gives min(bytes, max(0, total - k*bytes)) bytes.
// So a unit's shards, laid side by side, land as whole parameters without a copy-out. A block that is no single run in
// the output (a parameter cut along a later dimension) goes there in lines of `line` bytes, out_line apart; 0: one run.
typedef struct {
    uint64_t in_offset, out_offset, out_stride, bytes, total, line, out_line;
} ms_piece;

// All-gather of n pieces as one collective (one fingerprint, one ledger entry) on `stream`. The storages are
// retained until it is through. unit: name for reports and the ledger, may be NULL. *work is set when stream is not
// compute (then the call returns at once); with the compute stream the call returns when it is complete and *work is
// NULL.
ms_status ms__all_gather_pieces(ms_group *g, ms_storage *out, ms_storage *in, int n, const ms_piece *pieces, int dtype,
                                ms_stream_kind stream, const char *unit, ms_work **work);
// out (1-d, numel) = reduction over ranks of block `rank` of in (1-d, numel * size), in rank order, half types
// accumulated in float32 and rounded once. scale multiplies the result before rounding (1 = none).
ms_status ms__reduce_scatter(ms_group *g, ms_tensor *out, ms_tensor *in, ms_reduction op, double scale,
                             ms_stream_kind stream, const char *unit, ms_work **work);
// The same out of n <= MS_PARTS tensors where they are, on the CPU, of out's dtype: block k is parts' bytes from
// k*stride on, one part after the other, min(bytes, max(0, total - k*bytes)) of each and zeros up to `bytes`. Strides
// may differ between ranks.
enum { MS_PARTS = 21 };
typedef struct {
    ms_tensor *t;
    uint64_t stride, bytes, total;
} ms_part;
ms_status ms__reduce_scatter_parts(ms_group *g, ms_tensor *out, int n, const ms_part *parts, ms_reduction op,
                                   double scale, ms_stream_kind stream, const char *unit, ms_work **work);
ms_status ms__all_reduce(ms_group *g, ms_tensor *t, ms_reduction op, double scale, ms_stream_kind stream,
                         const char *unit, ms_work **work);
ms_status ms__broadcast_from(ms_group *g, ms_tensor *t, int src, const char *unit);  // src: rank of the world
// What the next collectives are said to be called from, until NULL; for engine calls made on behalf of a line of a
// script.
void ms__comm_site(const char *site);
// The unit of the next collective is named in texts and records, but not compared over ranks.
void ms__comm_unit_told(bool on);
void ms__comm_model(uint32_t model);  // of the next collective's unit: tells models of equal names apart
// The part of its unit that the next collective serves: equal on all ranks, like its size. words: for the text.
void ms__comm_mark(uint64_t mark, const char *words);

ms_status ms__work_wait(ms_work *w);  // NULL allowed; reports the collective's failure
bool ms__work_done(ms_work *w);
ms_pending *ms__work_event(ms_work *w);  // borrowed
void ms__work_release(ms_work *w);       // NULL allowed

// Work died on this rank by an error the script survived: peers waiting in its collectives raise with this text.
// since: ms__comm_epoch() when it began. backward: it was one, and the outermost.
void ms__comm_publish_error(const char *text, uint64_t since, bool backward);
// How many such errors this rank has met. When it has grown, ranks may have come to different places in the same work
// before they gave it up: whatever lasts and decides what is communicated next is to be made equal again.
uint64_t ms__comm_epoch(void);
// That of the latest error by which a rank gave up a backward.
uint64_t ms__comm_failed_backward(void);

#endif
