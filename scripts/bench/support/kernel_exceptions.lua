-- SPDX-License-Identifier: MIT
--- Kernels that fail limits of the static table (kernel_table.lua) today, with the limits they fail.
--- spec/cuda/kernel_table_spec.lua checks that the list is exact: limits that a kernel meets must be removed.
return {
  -- The table counts the bytes in flight for each dtype. A mask of half types adds 16 bytes to the 64 of the float32
  -- scores that the same threads have in flight.
  ["attention: attend_backward_kernel"] = "flight half",
  ["attention: attend_kernel"] = "flight half",
}
