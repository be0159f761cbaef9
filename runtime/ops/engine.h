// SPDX-License-Identifier: MIT
// ops/engine.h -- the random generator: Philox 4x32-10 (ops/philox.h). The seed is the key; the counter is (block,
// offset).
#ifndef MS_ENGINE_H
#define MS_ENGINE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Returns the seed, and the offset for one operator call; the generator's offset increases by 1.
void ms__rng_next(uint64_t *seed, uint64_t *offset);
uint64_t ms__rng_offset(void);  // the offset that the next call will get
uint64_t ms__rng_seed(void);
void ms__rng_rewind(uint64_t offset);  // gives back the offsets of a call that failed

#ifdef __cplusplus
}
#endif

#endif
