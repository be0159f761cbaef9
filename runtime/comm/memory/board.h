// SPDX-License-Identifier: MIT
// comm/memory/board.h -- the state of every rank of this node, in the control memory.
#ifndef MS_COMM_MEMORY_BOARD_H
#define MS_COMM_MEMORY_BOARD_H

#include "comm/fingerprint.h"
#include "comm/world/world.h"

typedef struct {               // the collective that an executor (the engine thread or a stream's worker) waits in
    _Atomic uint64_t version;  // odd while the executor waits
    double group;
    uint64_t number;
    int64_t since;
    ms_fingerprint fingerprint;
} ms_waiting;

typedef enum { RANK_RUNNING, RANK_LEFT, RANK_RAISED } rank_state;

typedef struct {
    _Atomic int state, engine_waits;  // engine_waits: the stream that the engine thread waits for; -1: none
    int pid;
    _Atomic int n_arenas;
    // Where this rank's directory of GPU memory is (movers/gpu/memory.c): an arena, 0: none; gpu_at: the offset in it
    _Atomic uint32_t gpu_arena;
    uint64_t gpu_at;
    _Atomic int64_t lines;  // number of lines of the prompt that the rank has ended
    // Of a rank on another node: the latest number in the group of dist.recover at which it was waiting for this node
    _Atomic uint64_t recovers;
    struct {
        uint64_t id, bytes, inode;
        int fd;
    } arena[ARENAS];
    ms_waiting wait[MS_STREAMS];
    ms_waiting last;  // the latest collective issued; read only by reports, so an inconsistent read does no harm
} ms_board_rank;

struct ms_board {
    uint64_t nonce;
    _Atomic int ending;  // 1 + the rank whose failure ends the job; 0: none
    // failing: a rank of this node will report why the job ends; reported: a rank has begun to report it
    atomic_bool failing, reported;
    // The latest comparison of clocks, in ns: when, and by how much rank 0's clock was ahead of this node's
    int64_t clock_at, clock_ahead;
    _Atomic int lost;  // 1 + the first rank of a node that has died or cannot be reached (comm/process/link.c); 0: none
    char lost_text[LOST];                // what to say about it; written before `lost`
    _Alignas(128) ms_board_rank rank[];  // indexed by world rank; entries of other nodes are unused
};

// The entry of this rank.
static inline ms_board_rank *ms__board_me(void) { return &ms__world.board->rank[ms__world.rank]; }

#endif
