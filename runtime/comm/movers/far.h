// SPDX-License-Identifier: MIT
// comm/movers/far.h -- members on other nodes.
#ifndef MS_COMM_MOVERS_FAR_H
#define MS_COMM_MOVERS_FAR_H

#include "comm/watch/watch.h"

ms_status ms__far_ready(ms_coll *c);  // on the leader: sends and receives the ready slots that have become available
ms_status ms__far_reduce(ms_waiter *w, char *const *windows, char *result, size_t n);
// Receives the windows of the members on other nodes into mirror, `bytes` bytes each, one after the other.
ms_status ms__far_gather(ms_waiter *w, char *const *windows, char *mirror, size_t bytes);
// For a group without two members on one node: sends `in` to all other members and receives theirs; the bytes[k] bytes
// of member k, this rank's own included, are stored at out + k * stride. `in` may be this rank's place in `out`.
ms_status ms__far_exchange(ms_waiter *w, const char *in, char *out, size_t stride, const size_t *bytes);
// A reduction of two members. Member k reduces bytes[k] bytes; this rank stores its part in `mine`. Each member sends
// the other its values for the other's part, and both add in rank order. The peer's result is stored at `theirs` unless
// that is NULL. source returns bytes [at, at + n) of this rank's values for a member's part; if they are not
// contiguous, it packs them into its buffer k, 0 to 4.
typedef const char *ms_far_source(ms_coll *c, int member, size_t at, size_t n, size_t k);
ms_status ms__far_pair(ms_waiter *w, ms_far_source *source, const size_t *bytes, char *mine, char *theirs);
void ms__far_end(ms_coll *c);

#endif
