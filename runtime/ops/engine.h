// SPDX-License-Identifier: MIT
// ops/engine.h -- the random generator: Philox 4x32-10 (ops/philox.h), keyed by seed, counted by (offset, element).
#ifndef MS_ENGINE_H
#define MS_ENGINE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Draws the offset of an operator call; the element's place is the rest of the counter.
void ms__rng_next(uint64_t *seed, uint64_t *offset);
uint64_t ms__rng_offset(void);         // the offset of the next draw
void ms__rng_rewind(uint64_t offset);  // undoes the draws of a call that failed

#ifdef __cplusplus
}
#endif

#endif
