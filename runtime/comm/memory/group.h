// SPDX-License-Identifier: MIT
// comm/memory/group.h -- the groups of ranks.
#ifndef MS_COMM_MEMORY_GROUP_H
#define MS_COMM_MEMORY_GROUP_H

#include "comm/comm.h"
#include "comm/memory/slot.h"
#include "comm/world/world.h"

struct ms_group {
    double id;
    int n, me;         // me: this rank's member number; -1 if it is not a member
    int *ranks;        // world ranks, in the order of the group
    bool far, single;  // far: has members on other nodes; single: has at most one on each node
    int leader;        // the first member on this node
    ms_slot *slots;
    ms_head *heads;
    ms_broken *broken;
    size_t place, bytes;  // where the group's slots are in the control memory
    bool freed;
    // Number of holders (ms__group_hold): the group's address stays valid for them, also after dist.free_group
    int holders;
    uint64_t seq, epoch;  // number of collectives issued in `epoch`; engine thread only
    uint64_t refused;     // number of refused calls in `epoch`; engine thread only
    uint64_t told;        // 1 + the epoch of the latest break that the script has received; engine thread only
    int in_flight;        // number of the group's queued collectives that are not retired yet; engine thread only
    // For each entry of the ring of slots: number of the latest collective that this rank issued; engine thread only.
    uint64_t issued[RING];
    // For each entry of the ring: number of the latest collective that this rank has finished; the entry may then be
    // reused.
    _Atomic uint64_t finished[RING];
    // For each entry of the ring: number of the latest collective that was committed; written before `finished`.
    uint64_t committed[RING];
    ms_gpu_group *communicator;  // in the transport's library (NCCL); NULL: none
    ms_group *next;
};

static inline ms_slot *member_slot(const ms_group *g, int member, uint64_t seq)
{
    return &g->slots[(size_t)member * RING + seq % RING];
}

// The member number of a world rank; -1: not a member.
static inline int ms__group_member(const ms_group *g, int rank)
{
    for (int k = 0; k < g->n; k++)
        if (g->ranks[k] == rank) return k;
    return -1;
}

enum { WORLD, SELF, MEETING, FIRST_MADE };  // ids of groups; dist.new_group makes the groups from FIRST_MADE on
extern ms_group *ms__meeting;               // the group of all ranks in which dist.recover meets; never broken

ms_status ms__groups_start(void);  // makes the groups that every job has; engine thread, as all below
// Makes a group of n ranks, in ascending order, and gives it a place in the control memory; NULL with the error set.
ms_group *ms__group_make(int n, const int *ranks);
// Ends the group of ms__group_make. used: it has been listed, and its collectives have finished on all members.
void ms__group_end(ms_group *g, bool used);
ms_status ms__groups_grow(const char *call);  // makes room in the list of groups for one more
double ms__group_list(ms_group *g);           // lists the group of ms__group_make, and returns its id

#endif
