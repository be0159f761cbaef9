// SPDX-License-Identifier: MIT
// base/env.h -- settings from the environment. A value that makes no sense is refused by name, not passed over.
#ifndef MS_ENV_H
#define MS_ENV_H

#include "base/base.h"

// The number that the environment gives *value; unset or empty: *value stays. MS_EINVAL for what is no number above 0
// (infinity is one).
ms_status ms__env_number(const char *name, const char *expected, double *value);

#endif
