-- SPDX-License-Identifier: MIT
--- Kernels that fail limits of the static table (kernel_table.lua) today, with the limits they fail.
--- spec/cuda/kernel_table_spec.lua checks that the list is exact: limits that a kernel meets must be removed.
return {
  ["attention: attend_backward_kernel"] = "flight float32, flight half, width float32, width half",
  ["attention: attend_kernel"] = "flight float32, flight half, width float32, width half",
  ["attention: delta_kernel"] = "flight half, width float32, width half",
  ["attention: mask_grad_kernel"] = "width float32",
}
