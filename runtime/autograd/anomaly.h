// SPDX-License-Identifier: MIT
// autograd/anomaly.h -- the script's line of each recorded operator, and the check of its gradients (ops/anomaly.h).
#ifndef MS_AUTOGRAD_ANOMALY_H
#define MS_AUTOGRAD_ANOMALY_H

#include "autograd/graph.h"
#include "ops/anomaly.h"

// Fails if gin[], the gradients of the node's inputs, have nan, or (if ms__anomaly is 2) inf that the node's gout[] do
// not have. The error names the line of the script that ran the node's forward, if it is known.
ms_status ms__anomaly_gradients(const ms_node *n, ms_tensor *const *gin);

#endif
