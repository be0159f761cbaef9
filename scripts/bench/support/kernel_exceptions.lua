-- SPDX-License-Identifier: MIT
--- Kernels that may fail limits of the static table (kernel_table.lua): ["FILE: KERNEL"] = "limit, limit".
--- spec/cuda/kernel_table_spec.lua checks that the list is exact: it must not have a limit that all instances of the
--- kernel meet.
return {}
