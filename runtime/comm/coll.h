// SPDX-License-Identifier: MIT
// comm/coll.h -- a collective of this rank, from its request to its completion.
#ifndef MS_COMM_COLL_H
#define MS_COMM_COLL_H

#include "comm/fingerprint.h"
#include "comm/memory/group.h"
#include "comm/request.h"

// How a reduction combines the ranks' values.
typedef struct {
    int dtype;
    ms_reduction reduction;
    int n_ranks;
    double scale;  // multiplies the result before it is rounded
    bool narrow;   // ms_request.narrow
} ms_reducer;

typedef struct {
    ms_storage *storage;  // NULL: this rank does not access the tensor; retained by the issuer
    char *data;
    size_t bytes;
    double numel;  // number of elements, for ms_dist_record_get
} ms_operand;

typedef struct ms_coll {
    ms_group *g;
    uint8_t op;
    ms_reducer reducer;  // reducer.dtype: the collective's dtype, also if it reduces nothing
    ms_stream_kind stream;
    int root;  // member number, or -1
    uint64_t seq, number, epoch;
    uint64_t before;  // number of the earlier collective that used the same slots (seq % RING); it must have finished
    size_t count;     // elements of a block (all_reduce, reduce, broadcast, send/recv: of the tensor)
    double delay;     // seconds by which a spec delays this collective (ms_dist_set_delay)
    int64_t lines;    // lines of the prompt that this rank had ended when it issued the collective
    ms_operand in, out;
    int n_pieces;
    ms_piece *pieces;  // used by all_gather
    int n_parts;
    ms_part *parts;    // for reduce_scatter, if the input consists of several tensors; retained
    const char *unit;  // the full name, interned; NULL: none
    ms_fingerprint fingerprint;
    uint64_t hash;
    bool inline_;        // the input is sent in the slot's payload
    ms_tensor *keep[2];  // the request's input and output, retained
    atomic_bool raised;  // failed because the group is broken
    struct ms_far *far;  // set on the leader: messages that exchange ready slots with other nodes
    // Set by the mover that has prepared the tensors (movers/mover.h). mover NULL: they are in CPU memory.
    const struct ms_mover *mover;
    void *prepared;  // what the mover keeps for this collective
    // How to queue work on tensors that stay on a GPU: c is then complete for the host when its work is queued. NULL:
    // they are in CPU memory.
    const struct ms_bytes *device;
    bool final;          // a library moves the tensors: once committed, this rank cannot leave it
    ms_storage *marked;  // gets the collective's event, too: the output's storage on a GPU
} ms_coll;

// This rank's slot for c.
static inline ms_slot *own_slot(const ms_coll *c) { return member_slot(c->g, c->g->me, c->seq); }
// Tells the members of this node that this rank has completed c.
static inline void set_done(const ms_coll *c)
{
    atomic_store_explicit(&own_slot(c)->done, c->number, memory_order_release);
}

// The root's member number in g; -1 if the operation has no root or the root is not a member.
int ms__coll_root(const ms_group *g, int op, int root);
bool ms__storage_on_gpu(const ms_storage *s);  // false for NULL
bool ms__coll_on_device(const ms_coll *c);     // whether a tensor is on a GPU
// Engine thread: waits until the compute stream may read c's input and write its output.
ms_status ms__coll_sync(ms_coll *c);
void ms__coll_not_inline(ms_coll *c);  // clears c->inline_: the input is not sent in the slot's payload after all

#endif
