// SPDX-License-Identifier: MIT
// tensor/ids.h -- names of tensors (ids), which scripts hold, and what they belong to.
#ifndef MS_IDS_H
#define MS_IDS_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// The tensor behind an id, borrowed; NULL with the error set (MS_ERELEASED, or MS_EINVAL for 0).
ms_tensor *ms__tensor(ms_id id);
// Names t in the innermost scope (or unscoped); takes over the caller's reference. A tensor that has a name keeps it.
ms_id ms__name(ms_tensor *t);
// The same; an error after its release names the operator, whose name lives for ever.
ms_id ms__name_made(ms_tensor *t, const char *made_by);
ms_id ms__name_unscoped(ms_tensor *t);                 // owned by something: a grad, a parameter
ms_status ms__names_reserve(int n, const char *what);  // the next n names can be given: n <= MS_MAX_OUT

// Owners beside the script (a leaf's grad, the optimizer's state): while owned, a name has no scope; given up, it
// goes to the innermost scope, to Lua's collector if that looks after it, or away.
void ms__own(ms_tensor *t);
void ms__disown(ms_tensor *t);

// The name of an operator that scripts know: add_scalar_ is add_, max_all max. Valid until the next call.
const char *ms__op_title(const char *op);

#ifdef __cplusplus
}
#endif

#endif
