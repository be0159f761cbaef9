// SPDX-License-Identifier: MIT
// shard/order.h -- uses of a unit (from pre- to post-backward), the order of forward passes, and early gathers.
#ifndef MS_SHARD_ORDER_H
#define MS_SHARD_ORDER_H

#include "shard/root.h"

// A use of a unit is a number; its low bits are the low bits of the sum of the parameters' versions at the forward.
enum { VERSION_BITS = 20 };
static inline uint64_t ms__use_versions(uint64_t use) { return use & ((1u << VERSION_BITS) - 1); }

// Graphs hold a unit's handle instead of its address, because the module may be collected before the graph.
static inline void *ms__unit_token(const unit *u) { return (void *)(uintptr_t)(uint64_t)u->handle; }
unit *ms__unit_of_token(void *token);  // NULL if the unit was freed; sets no error

int ms__unit_active(const unit *u, int64_t use);  // index of the use in pass.active; -1: not active
ms_status ms__unit_activate(unit *u, int64_t use, ms_run *run);
void ms__unit_deactivate(unit *u, int k);

// Appends an order_entry to c->order.
ms_status ms__order_push(context *c, unit *u, int64_t use, int64_t pass, bool regional);
// Whether some modules of the pass of c->order[at] have had no backward yet.
bool ms__order_pass_waits(const context *c, int at);
int ms__order_find(const context *c, int64_t use);  // index of the use in c->order; -1: none
void ms__order_entered(context *c, unit *u);
int ms__order_passes_left(const unit *u);
bool ms__order_extended(const context *c);  // whether a unit of c has all-gather extensions
ms_status ms__order_take_place(unit *u, int64_t use);
ms_status ms__prefetch_forward(unit *u);
ms_status ms__prefetch_backward(unit *u, int64_t use);

#endif
