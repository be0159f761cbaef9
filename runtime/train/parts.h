// SPDX-License-Identifier: MIT
// train/parts.h -- loops over lists of gradients on the CPU, which are divided into blocks of fixed size.
#ifndef MS_TRAIN_PARTS_H
#define MS_TRAIN_PARTS_H

#include "device/device.h"
#include "ops/parallel.h"

enum { MS_PART_BLOCK = 1 << 14 };

typedef struct {
    int n;
    ms_norm_part *parts;
    double p, factor, *partial;  // partial: a result per block
} ms_part_list;

// The part that contains block b (the last part that begins at or before it), and the block's elements in that part.
const ms_norm_part *ms__part_of(const ms_part_list *list, int64_t b, int64_t *from, int64_t *n);
// Runs fn(list, ...) over all blocks; if there are at most two, on the calling thread.
void ms__parts_run(ms_part_list *list, int64_t blocks, ms_range_fn fn);
// ms__parts_measure stores the sum of |g|^p of each block in partial; for an infinite p, the maximum of |g|.
// ms__parts_scale multiplies the gradients by factor.
void ms__parts_measure(void *arg, int64_t first, int64_t last, int64_t block);
void ms__parts_scale(void *arg, int64_t first, int64_t last, int64_t block);

#endif
