// SPDX-License-Identifier: MIT
// comm/process/peer.h -- processes of peers on this node, observed from outside.
#ifndef MS_COMM_PROCESS_PEER_H
#define MS_COMM_PROCESS_PEER_H

#include "base/activity.h"
#include "base/base.h"

typedef struct {
    uint64_t calls, bytes, run;
    int64_t at;
} ms_progress;  // engine calls begun, bytes read and written, ns run on a processor, time of the last progress
typedef enum { PEER_BUSY, PEER_IDLE, PEER_STOPPED } ms_peer_state;
void ms__activity_share(void);
const ms_activity *ms__peer_activity(int pid);  // NULL: that process has not loaded the engine
// What a peer does. PEER_BUSY: it is inside an engine call, runs another program, has begun an engine call, read or
// written since *before, or waits for a processor or a disk. Updates *before if it is busy, unless it only waits.
ms_peer_state ms__peer_watch(int pid, const ms_activity *page, ms_progress *before);
// Reads a file under /proc/PID as a string; "" if it cannot be read. Returns the length.
size_t ms__peer_file(int pid, const char *name, char *text, size_t n);
int ms__peer_rank(
    int pid);  // its rank, from its launcher's variables; -1: none, or not yet known (between fork and exec)

#endif
