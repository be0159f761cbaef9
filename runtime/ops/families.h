// SPDX-License-Identifier: MIT
// ops/families.h -- the list of operator families.
#ifndef MS_FAMILIES_H
#define MS_FAMILIES_H

#include "ops/op.h"

// A NULL-terminated list of NULL-terminated lists.
extern const ms_op *const *const *const ms__op_families;

#endif
