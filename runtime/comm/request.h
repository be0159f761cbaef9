// SPDX-License-Identifier: MIT
// comm/request.h -- one collective as the engine requests it.
//
// The collectives of a stream start in the order in which the script issued them, across all groups. Streams do not
// wait for each other, except where NCCL moves the tensors (comm/movers/nccl/nccl.c). The ranks compare fingerprints
// before data moves. A collective is complete on a rank when its output is written and no peer will access its tensors
// again.
#ifndef MS_REQUEST_H
#define MS_REQUEST_H

#include "comm/comm.h"

typedef enum { MS_SUM, MS_AVG, MS_MAX, MS_MIN, MS_PROD } ms_reduction;

// A piece of every rank's input in an all-gather; all fields are in bytes. Rank k's input at in_offset (the same on
// every rank) is copied to out_offset + k*out_stride of the output; rank k provides min(bytes, max(0, total - k*bytes))
// bytes. This puts a unit's shards directly into whole parameters, without another copy. A block that is not contiguous
// in the output (of a parameter cut along a later dimension) is copied in lines of `line` bytes, out_line apart; line
// 0: the block is contiguous.
typedef struct {
    uint64_t in_offset, out_offset, out_stride, bytes, total, line, out_line;
} ms_piece;

// The number of bytes of the member's block.
static inline size_t ms__piece_bytes(const ms_piece *p, int member)
{
    uint64_t before = (uint64_t)member * p->bytes, left = p->total > before ? p->total - before : 0;
    return (size_t)(left < p->bytes ? left : p->bytes);
}

// A part of the input of a reduce-scatter: a tensor t of the output's dtype. Block k consists of min(bytes, max(0,
// total - k*bytes)) bytes of t from k*stride on, followed by zeros up to `bytes`. Strides may differ between ranks.
enum { MS_PARTS = 21 };
typedef struct {
    ms_tensor *t;
    uint64_t stride, bytes, total;  // in bytes
} ms_part;

// How errors, reports and recordings describe a collective. The ranks compare unit, model and part.
typedef struct {
    const char *unit;     // name of the unit whose collective this is; NULL: none
    const char *site;     // the script's line; NULL: unknown
    uint32_t model;       // distinguishes models whose units have equal names
    uint64_t part;        // hash of the part of the unit that is communicated; 0: the whole unit
    const char *part_of;  // description of that part
    int alias;            // index in ms__coll_aliases
} ms_label;

// Fields that an operation does not use are 0.
typedef struct {
    ms_group *group;
    int op;  // MS_DIST_*
    ms_reduction reduction;
    double scale;  // multiplies the result of a reduction before it is rounded; 0: no scale
    ms_stream_kind stream;
    int root;             // world rank; of a refused call: the rank that failed, -1: `refusal` says which
    ms_tensor *in, *out;  // contiguous, of one dtype; all-reduce, broadcast and reduce use only out
    // All-gather: copies pieces of one storage into another, as one collective.
    ms_storage *from, *to;
    int dtype, n_pieces;
    const ms_piece *pieces;
    // Reduce-scatter of several tensors in place: each rank's block consists of its parts in order; n_parts <=
    // MS_PARTS.
    int n_parts;
    const ms_part *parts;
    bool narrow;          // reduction: a library may add half types in their own dtype, which the script has chosen
    bool by_script;       // set for calls of scripts: the ranks also compare shapes
    uint64_t agreed;      // a value that must be equal on all ranks
    const char *refusal;  // set for a refused call: the text of the error
    ms_label label;
} ms_request;

// Starts a collective. Tensors and storages are retained until it is complete. On the compute stream it is complete on
// return and *work is NULL; on other streams the call returns at once. work may be NULL.
// Reductions add in rank order, except where NCCL moves the tensors; half types are accumulated in float32 and rounded
// once, except with `narrow`.
ms_status ms__collective(const ms_request *r, ms_work **work);

#endif
