// SPDX-License-Identifier: MIT
// comm/memory/slot.h -- what the members of a group write for each other in the control memory.
//
// The ranks of a node share a *control memory*: a board (the state of every rank), staging windows, and for every group
// a ring of slots per member. The collectives of a group are counted by `seq`, from 0 in each epoch; each uses entry
// seq % RING of every member's ring. Only the member itself writes its slot, apart from `commit`: a fingerprint, the
// places of its input and output, a small payload, and finally `ready`. The group's leader on this node copies the
// slots of members on other nodes into their slots here, so waiting ranks read local slots only.
//
// The epoch is the number of recoveries (script/recover.c). A collective's `number` is (epoch << 32) + seq + 1: it
// increases with every collective of the group, also across epochs. Messages show the lower 32 bits.
#ifndef MS_COMM_MEMORY_SLOT_H
#define MS_COMM_MEMORY_SLOT_H

#include <stdatomic.h>
#include "comm/fingerprint.h"
#include "comm/request.h"

typedef struct {
    _Atomic uint64_t ready, done;  // numbers of the collectives that the member is ready for and has completed
    uint64_t hash, in_at, out_at;
    uint32_t in_arena, out_arena;  // arenas of input and output, from 1; 0: the control memory. *_at: offsets in them
    uint32_t flags, bytes;         // SLOT_*; size of the payload
    int64_t arrived;               // when the member made the call, in ns of the job's clock; 0: it records no profile
    _Atomic uint64_t commit;       // in the leader's slot: 2 * number + 1: committed, 2 * number: abandoned
    _Atomic uint64_t round;        // staged moves: the round that the member has reached
    // For tensors that stay on a GPU (movers/gpu): numbers of collectives. left: the latest for whose events the member
    // will queue no more waits. refused: the latest in which it could not map a peer's memory. failed: the latest in
    // which it could not queue its part.
    _Atomic uint64_t left, refused, failed;
    uint32_t begin, end;       // the member's events. begin: its tensors are ready; end: it has accessed all tensors
    _Atomic uint64_t reached;  // NCCL: number of the latest collective that the member's GPU has reached
    uint64_t pad1[1];
    ms_fingerprint fingerprint;
    char pad2[SLOT - 128 - sizeof(ms_fingerprint) - PAYLOAD];
    char payload[PAYLOAD];  // a small input, or an ms_part_place per part
} ms_slot;
_Static_assert(sizeof(ms_slot) == SLOT && SLOT % 128 == 0, "slots are aligned");

// DIRECT: peers can map the member's tensors. INLINE: the input is in the payload. GPU: all tensors are in memory of a
// GPU that peers can map; UNTRIED: not all peers have tried to map it.
enum { SLOT_DIRECT = 1, SLOT_INLINE = 2, SLOT_GPU = 4, SLOT_UNTRIED = 8 };

typedef struct {  // where a part's tensor is: arena, offset in it, bytes from one member's block to the next
    uint64_t arena, at, stride;
} ms_part_place;
_Static_assert(MS_PARTS * sizeof(ms_part_place) <= PAYLOAD, "the places of all parts fit into the payload");

typedef struct {              // one per member of a group
    _Atomic uint64_t issued;  // number of the latest collective issued by the member's script
    uint8_t executor[RING];   // for each of the latest collectives, the stream that runs it
    char pad[40];
} ms_head;

typedef struct {  // whether and why a group is broken, the same on every rank of this node
    // 1 + the epoch in which the group was broken. claimed: set by the rank that writes the text; written: set when the
    // text is complete.
    _Atomic uint64_t claimed, written;
    char text[TEXT];
    char pad[48];
} ms_broken;

// To be called before a slot is written that others may read: a reader that finds the same number in `ready` before and
// after reading has read one request.
static inline void ms__slot_open(ms_slot *s)
{
    atomic_store_explicit(&s->ready, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
}

#endif
