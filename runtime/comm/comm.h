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

// A part of a reduce-scatter's input, on the CPU, of the output's dtype: block k is the bytes of t from k*stride on,
// min(bytes, max(0, total - k*bytes)) of them and zeros up to `bytes`. Strides may differ between ranks.
enum { MS_PARTS = 21 };
typedef struct {
    ms_tensor *t;
    uint64_t stride, bytes, total;
} ms_part;

// What errors, reports and the ledger call a collective. All but site and part_of is compared over ranks.
typedef struct {
    const char *unit;     // NULL: none
    const char *site;     // the script's line; NULL: unknown
    uint32_t model;       // tells models apart whose units have equal names
    bool text_only;       // unit and model are not compared
    uint64_t part;        // hash of the part of its unit that it serves; 0: the whole unit
    const char *part_of;  // the same in words
} ms_label;

// One collective. What an operation does not use stays zero.
typedef struct {
    ms_group *group;
    int op;  // MS_DIST_*
    ms_reduction reduction;
    double scale;  // multiplies the result of a reduction before it is rounded; 0: no scale
    ms_stream_kind stream;
    int root;             // rank of the world
    ms_tensor *in, *out;  // contiguous, of one dtype; all-reduce, broadcast and reduce work on out
    // all-gather: pieces of one storage into another, as one collective
    ms_storage *from, *to;
    int dtype, n_pieces;
    const ms_piece *pieces;
    // reduce-scatter: the input where it is, one part after the other in each block; n_parts <= MS_PARTS
    int n_parts;
    const ms_part *parts;
    bool by_script;       // shapes are compared too
    uint64_t agreed;      // compared too
    const char *refusal;  // of a call that was refused: why
    ms_label label;
} ms_request;

// Starts a collective. Tensors and storages are retained until it is through. With the compute stream it is complete on
// return and *work is NULL; with another stream the call returns at once. work may be NULL.
// A reduction adds in rank order; half types are accumulated in float32 and rounded once.
ms_status ms__collective(const ms_request *r, ms_work **work);

ms_status ms__work_wait(ms_work *w);  // NULL allowed; reports the collective's failure
bool ms__work_done(ms_work *w);
void ms__work_release(ms_work *w);  // NULL allowed

// Work died on this rank by an error the script survived: peers waiting in its collectives raise with this text.
// since: ms__comm_epoch() when it began. backward: it was one, and the outermost.
void ms__comm_publish_error(const char *text, uint64_t since, bool backward);
// How many such errors this rank has met. When it has grown, ranks may have come to different places in the same work
// before they gave it up: whatever lasts and decides what is communicated next is to be made equal again.
uint64_t ms__comm_epoch(void);
// That of the latest error by which a rank gave up a backward.
uint64_t ms__comm_failed_backward(void);

#endif
