// SPDX-License-Identifier: MIT
// comm/request.h -- one collective, as the engine asks for it.
//
// Collectives start in the order in which the script issued them, over all groups and streams. The ranks compare
// fingerprints before data moves. A collective is complete on a rank when its output is written and no peer will touch
// its input or output again.
#ifndef MS_REQUEST_H
#define MS_REQUEST_H

#include "comm/comm.h"

typedef enum { MS_SUM, MS_AVG, MS_MAX, MS_MIN, MS_PROD } ms_reduction;

// A run of bytes of every rank in an all-gather: rank k's input at in_offset (the same on every rank) lands at
// out_offset + k*out_stride of the output; rank k gives min(bytes, max(0, total - k*bytes)) bytes. A unit's shards land
// as whole parameters this way, without a copy-out. A block that is not contiguous in the output (of a parameter cut
// along a later dimension) lands in lines of `line` bytes, out_line apart; line 0: it is contiguous.
typedef struct {
    uint64_t in_offset, out_offset, out_stride, bytes, total, line, out_line;
} ms_piece;

// The bytes of the member's block.
static inline size_t ms__piece_bytes(const ms_piece *p, int member)
{
    uint64_t before = (uint64_t)member * p->bytes, left = p->total > before ? p->total - before : 0;
    return (size_t)(left < p->bytes ? left : p->bytes);
}

// A part of a reduce-scatter's input, on the CPU, of the output's dtype: block k is the bytes of t from k*stride on,
// min(bytes, max(0, total - k*bytes)) of them and zeros up to `bytes`. Strides may differ between ranks.
enum { MS_PARTS = 21 };
typedef struct {
    ms_tensor *t;
    uint64_t stride, bytes, total;
} ms_part;

// What errors, reports and the ledger call a collective. The ranks compare all of it but site and part_of.
typedef struct {
    const char *unit;     // NULL: none
    const char *site;     // the script's line; NULL: unknown
    uint32_t model;       // distinguishes models whose units have equal names
    bool text_only;       // unit and model are not compared
    uint64_t part;        // hash of the part of the unit that is served; 0: the whole unit
    const char *part_of;  // that part in words
} ms_label;

// Fields that an operation does not use stay zero.
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
    // reduce-scatter of tensors in place: each rank's block is its parts, one after the other; n_parts <= MS_PARTS
    int n_parts;
    const ms_part *parts;
    bool by_script;       // shapes are compared too
    uint64_t agreed;      // a value that must be equal on all ranks
    const char *refusal;  // of a call that its own checks refused: the error's text
    ms_label label;
} ms_request;

// Starts a collective. Tensors and storages are retained until it is complete. On the compute stream it is complete on
// return and *work is NULL; on another stream the call returns at once. work may be NULL.
// Reductions add in rank order; half types are accumulated in float32 and rounded once.
ms_status ms__collective(const ms_request *r, ms_work **work);

#endif
