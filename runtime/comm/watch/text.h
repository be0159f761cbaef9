// SPDX-License-Identifier: MIT
// comm/watch/text.h -- what messages say about groups, ranks and collectives.
#ifndef MS_COMM_WATCH_TEXT_H
#define MS_COMM_WATCH_TEXT_H

#include "comm/coll.h"

void ms__group_text(const ms_group *g, char *out, size_t n);
void ms__rank_text(int rank, char *out, size_t n);  // writes what a rank does, as far as this node knows
// Both fail with MS_ECOMM and a text that names the collective.
ms_status ms__coll_fail(const ms_coll *c, const char *what);
ms_status ms__request_fail(const ms_group *g, uint64_t number, const ms_fingerprint *p, const char *what);

#endif
