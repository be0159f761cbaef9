// SPDX-License-Identifier: MIT
// device/host_pins.h -- blocks of CPU memory that are pinned, so that GPUs copy from and to them directly.
#ifndef MS_HOST_PINS_H
#define MS_HOST_PINS_H

#include "device/pool.h"

// Pins the pages of a block of CPU memory, if it has pages of its own and there is a GPU. The first
// failure is reported; from then on no block is pinned.
void ms__host_pin(const ms_block *b);
bool ms__host_pinned(const ms_block *b);

#endif
