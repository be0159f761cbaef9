-- SPDX-License-Identifier: MIT
--- Kernels that may fail limits of the static table (kernel_table.lua): ["FILE: KERNEL"] = "limit, limit".
--- spec/cuda/kernel_table_spec.lua checks that the list is exact: a limit that a kernel meets must be
--- removed.
return {
  -- Adjacent threads read adjacent numbers of 4 bytes; more than 20 KB are in flight.
  ["fft: product_kernel"] = "width float32",
  -- For halves it reads 8 bytes of float32 per row, its mean and rstd, beside the 16-byte accesses of the row.
  ["norm: norm_rows_kernel"] = "flight float32, width float32",
}
