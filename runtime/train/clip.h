// SPDX-License-Identifier: MIT
// train/clip.h -- the norm of the gradients of some leaves, for an optimizer step that scales them where it reads them.
#ifndef MS_TRAIN_CLIP_H
#define MS_TRAIN_CLIP_H

#include "device/device.h"

typedef struct ms_clip ms_clip;

// Checks the leaves and allocates the lists, the partial sums and the result. *out is NULL on failure. Neither
// ms__clip_new nor ms__clip_measure changes a gradient.
ms_status ms__clip_new(ms_clip **out, int n, const ms_id *leaves, double max_norm, double p);
// Computes the norm over all ranks. Collective if some leaves are sharded.
ms_status ms__clip_measure(ms_clip *c);
// Returns the factor by which the optimizer step multiplies all gradients; *there is then NULL. If the factor is on a
// GPU, returns 1 and sets *there, which the step reads; room: where **there is stored.
double ms__clip_factor(const ms_clip *c, ms_cuda_step *room, const ms_cuda_step **there);
// A new tensor with the norm before clipping; 0 on failure.
ms_id ms__clip_result(ms_clip *c);
void ms__clip_free(ms_clip *c);

#endif
