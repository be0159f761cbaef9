// SPDX-License-Identifier: MIT
// tensor/ids.h -- ids of tensors, which scripts hold, and their scopes and owners. To name a tensor is to give it an
// id.
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
// The same; an error after its release names the operator. made_by is not copied.
ms_id ms__name_made(ms_tensor *t, const char *made_by);
ms_id ms__name_unscoped(ms_tensor *t);                 // for a tensor with an owner: a grad, a parameter
ms_status ms__names_reserve(int n, const char *what);  // afterwards n tensors can be named: n <= MS_MAX_OUT

// Owners in the engine (a leaf's grad, an optimizer's state). An owned id has no scope. After the last disown it joins
// the innermost scope; with none open it is released, unless Lua's collector releases it.
void ms__own(ms_tensor *t);
void ms__disown(ms_tensor *t);

// An operator's name in scripts: add_ for add_scalar_, max for max_all. Valid until the next call.
const char *ms__op_title(const char *op);

#ifdef __cplusplus
}
#endif

#endif
