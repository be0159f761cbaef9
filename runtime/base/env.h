// SPDX-License-Identifier: MIT
// base/env.h -- settings from the environment. An invalid value is an error that names the variable.
#ifndef MS_ENV_H
#define MS_ENV_H

#include "base/base.h"

// Sets *value to the number in the variable. If the variable is unset or empty, *value stays unchanged. MS_EINVAL if
// its text is not a number greater than 0 (infinity is allowed).
ms_status ms__env_number(const char *name, const char *expected, double *value);

#endif
