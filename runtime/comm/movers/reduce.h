// SPDX-License-Identifier: MIT
// comm/movers/reduce.h -- arithmetic and copies of collectives.
#ifndef MS_COMM_MOVERS_REDUCE_H
#define MS_COMM_MOVERS_REDUCE_H

#include "comm/coll.h"

// Accumulators: float32 for half types, otherwise the type itself. ms__acc_load starts one, ms__acc_add combines it
// with another rank's values.
int ms__acc_size(int dtype);
void ms__acc_load(void *acc, const void *src, int dtype, size_t n);
void ms__acc_add(const ms_reducer *how, void *acc, const void *src, size_t n);
// The last step: applies mean and scale, and rounds. Changes acc.
void ms__acc_store(const ms_reducer *how, void *dst, void *acc, size_t n);
// Reduces n elements of src[0..n_ranks) and stores the result in each of dst[0..n_dst). A dst may be one of the
// sources.
void ms__reduce(const ms_reducer *how, const char *const *src, int n_dst, char *const *dst, size_t n);
void ms__comm_copy(void *dst, const void *src, size_t n);

#endif
