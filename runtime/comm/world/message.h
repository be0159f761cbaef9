// SPDX-License-Identifier: MIT
// comm/world/message.h -- the transport's lock, and messages between nodes, from any thread. The tags of collectives
// are even (movers/far.c), others odd (watch/break.c, job/clock.c).
#ifndef MS_COMM_WORLD_MESSAGE_H
#define MS_COMM_WORLD_MESSAGE_H

#include <stddef.h>

// Calls of the transport are made under this lock once the job has started.
void ms__transport_lock(void);
void ms__transport_unlock(void);

void *ms__message_send(const void *p, size_t n, int to, int tag);  // returns a request; NULL on failure
void *ms__message_receive(void *p, size_t n, int from, int tag);
int ms__message_test(void **request);  // 1: complete, and *request is NULL; 0: in flight; negative: failed
void ms__message_cancel(void *request);
// Keeps memory that MPI may still access after a message has failed: it is never freed.
void ms__message_keep(void *memory);

#endif
