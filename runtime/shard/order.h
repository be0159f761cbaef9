// SPDX-License-Identifier: MIT
// shard/order.h -- uses of a unit between pre- and post-backward, the order of forward passes, gathers ahead of it.
#ifndef MS_SHARD_ORDER_H
#define MS_SHARD_ORDER_H

#include "shard/root.h"

// A use is a number, whose low bits are the versions of the parameters in its forward.
enum { VERSION_BITS = 20 };
static inline uint64_t ms__use_versions(uint64_t use) { return use & ((1u << VERSION_BITS) - 1); }

// The graph holds a unit's handle, not its address, because the module may be collected before the graph.
static inline void *ms__unit_token(const unit *u) { return (void *)(uintptr_t)(uint64_t)u->handle; }
unit *ms__unit_of_token(void *token);  // NULL if the unit was freed; no error is set

int ms__unit_active(const unit *u, int64_t use);  // -1: not active
ms_status ms__unit_activate(unit *u, int64_t use, ms_run *run);
void ms__unit_deactivate(unit *u, int k);

ms_status ms__order_push(context *c, unit *u, int64_t use, int64_t pass, bool regional);
bool ms__order_pass_waits(const context *c, int at);  // modules of that entry's pass have no backward yet
int ms__order_find(const context *c, int64_t use);
void ms__order_entered(context *c, unit *u);
int ms__order_passes_left(const unit *u);
bool ms__order_extended(const context *c);
ms_status ms__order_take_place(unit *u, int64_t use);
ms_status ms__prefetch_forward(unit *u);
ms_status ms__prefetch_backward(unit *u, int64_t use);

#endif
