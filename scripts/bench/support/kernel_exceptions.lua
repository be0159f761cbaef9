-- SPDX-License-Identifier: MIT
--- Kernels that may fail limits of the static table (kernel_table.lua): ["FILE: KERNEL"] = "limit, limit". At present
--- there are none. spec/cuda/kernel_table_spec.lua checks that the list is exact: a limit that a kernel meets must be
--- removed.
return {}
