// SPDX-License-Identifier: MIT
// comm/fingerprint.h -- what one rank requests, and how messages name it.
#ifndef MS_COMM_FINGERPRINT_H
#define MS_COMM_FINGERPRINT_H

#include "comm/limits.h"
#include "comm/ops.h"
#include "tensor/tensor.h"

// What one rank requests. The fields that ms__fingerprint_hash reads must be equal on all members; otherwise the
// collective fails before data moves.
typedef struct {
    uint8_t op, dtype, reduction, pad;  // pad: 0
    int32_t root;                       // world rank, or -1
    uint64_t refused;                   // number of calls of the group that the rank has refused in this epoch
    uint64_t count;                     // number of elements
    uint64_t agreed;  // hash of ms_request.agreed, `native`, pieces or parts, scale, the script's shape
    uint64_t part;    // hash of the part of the unit that is communicated; 0: the whole unit
    int64_t step;     // number of the step of ms.steps; -1: none
    char site[SITE], unit[UNIT_NAME];  // site: the script's line, used only in messages
    uint32_t model;                    // distinguishes models whose units have equal names
    char part_of[PART_OF];             // description of the part
    uint8_t native;                    // moved between GPUs by the transport's library; used in messages
    uint8_t alias;                     // index in ms__coll_aliases; used in messages
    uint8_t shaped;                    // number of dimensions + 1 of the script's tensor; 0: no shape
    uint32_t shape[MS_MAX_DIMS];       // used in messages
} ms_fingerprint;

const char *ms__request_name(const ms_fingerprint *p);  // as which the script called it
void ms__fingerprint_text(const ms_fingerprint *p, char *out, size_t n);
uint64_t ms__fingerprint_hash(const ms_fingerprint *p, bool with_step);

#endif
