-- SPDX-License-Identifier: MIT
--- Kernels that fail limits of the static table (kernel_table.lua) today, with the limits they fail.
--- spec/cuda/kernel_table_spec.lua checks that the list is exact: limits that a kernel meets must be removed.
return {}
