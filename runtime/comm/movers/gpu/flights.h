// SPDX-License-Identifier: MIT
// comm/movers/gpu/flights.h -- collectives that are queued on this rank's GPU (engine thread, unless stated otherwise).
#ifndef MS_COMM_MOVERS_GPU_FLIGHTS_H
#define MS_COMM_MOVERS_GPU_FLIGHTS_H

#include "comm/coll.h"

typedef struct ms_flight ms_flight;
// Makes an entry of the list of collectives that are queued on a GPU, for a collective of g. NULL with the error set if
// there is no memory.
ms_flight *ms__flight_new(ms_group *g);
// Any thread, when all work of c has been queued: reads the numbers of the members' events from their slots, and
// records the event `passed`.
ms_status ms__flight_queued(ms_flight *f, const ms_coll *c, int index);
// Lists the entry of c until the GPU has passed c; if the work of c was not queued, frees the entry at once. When
// the entry is freed, this rank's two events, of the beginning and the end of c, are given back.
void ms__flight_begin(ms_flight *f, const ms_coll *c, const int events[2]);
void ms__flight_free(ms_flight *f);  // frees an entry that is not listed
void ms__flights_land(void);         // removes the collectives that the GPU has passed, and gives their events back
// Called while the engine thread waits for a GPU or a stream. Fails if a peer's GPU has not done its part of the oldest
// collective within the timeout, or if a peer has reported that.
ms_status ms__flights_check(void);
ms_status ms__flight_event(int index, int *number);  // takes one of this rank's events (memory.h), or makes it

#endif
