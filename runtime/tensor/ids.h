// SPDX-License-Identifier: MIT
// tensor/ids.h -- ids, by which scripts hold tensors, and their scopes and owners. ms__name gives a tensor its id.
#ifndef MS_IDS_H
#define MS_IDS_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

// The tensor with this id, borrowed. NULL with the error set (MS_ERELEASED, or MS_EINVAL if id <= 0).
ms_tensor *ms__tensor(ms_id id);
// Gives t an id in the innermost scope; without an open scope, an unscoped id. Takes ownership of the caller's
// reference. A tensor that has an id keeps it. Returns 0 with the error set on failure.
ms_id ms__name(ms_tensor *t);
// As ms__name; an error after the tensor's release names made_by, an operator. made_by is not copied.
ms_id ms__name_made(ms_tensor *t, const char *made_by);
ms_id ms__name_unscoped(ms_tensor *t);  // gives t an unscoped id; for a tensor with an owner: a grad, a parameter
ms_status ms__names_reserve(int n, const char *what);  // the next n calls of ms__name cannot fail; n <= MS_MAX_OUT

// Owners in the engine (a leaf's grad, an optimizer's state). An owned id has no scope. After the last ms__disown, an
// id that Lua's collector will release stays unscoped; any other id moves to the innermost scope, or is released if no
// scope is open.
void ms__own(ms_tensor *t);
void ms__disown(ms_tensor *t);

// An operator's name in scripts: add_ for add_scalar_, max for max_all. Valid until the next call.
const char *ms__op_title(const char *op);

#ifdef __cplusplus
}
#endif

#endif
