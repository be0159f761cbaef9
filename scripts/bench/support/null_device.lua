-- SPDX-License-Identifier: MIT
--- Reads the counts of the null device (spec/support/cuda/null), in a process that runs with MOONSHARD_CUDA=null.
local ffi = require "ffi"

ffi.cdef [[
typedef struct {
    double launches, products, flops, to_device, to_host, on_device, copies, fills, allocations, frees, waits, events;
} ms_null_totals;
typedef struct {
    const char *op, *kernel;
    double bytes[3], flops;
    int32_t blocks, threads, shared;
} ms_null_launch;
const ms_null_totals *ms_null_count(void);
int ms_null_launches(const ms_null_launch **out);
void ms_null_reset(void);
void ms_null_forget(void);
void ms_null_parameters(const char *kernel, int n, const int *sizes);
]]

local M = {}
local COUNTS = { "launches", "products", "flops", "to_device", "to_host", "on_device", "copies", "fills", "allocations",
  "frees", "waits", "events" }

local lib
--- Opens the device. Returns true, or false and the reason if device cuda is not available; raises if it is another
--- device.
---@param build string  the build folder
function M.open(build)
  local cuda = require("moonshard").cuda
  if not cuda.is_available() then return false, cuda.why_unavailable() end
  if not cuda.device_name():find "^null device" then
    error(("device cuda is '%s', not the null device; start with MOONSHARD_CUDA=null"):format(cuda.device_name()), 2)
  end
  lib = ffi.load(build .. "/libmoonshard_cuda_null.so")
  return true
end

function M.reset() lib.ms_null_reset() end

--- The totals since reset: launches of kernels, products by cuBLASLt and their flops, bytes to the device, to the host
--- and on the device, copies, fills, allocations and frees of the driver, waits of the host, events.
---@return table<string, number>
function M.count()
  local totals, out = lib.ms_null_count(), {}
  for _, name in ipairs(COUNTS) do out[name] = tonumber(totals[name]) end
  return out
end

--- The launches and products since reset, in order: op, kernel (symbol; "product", "copy", "set"), blocks, threads,
--- shared (bytes of dynamic shared memory), flops, and bytes of halves, of float32 and of other data, where the
--- kernels' parameters are known.
---@return table[]
function M.launches()
  local list = ffi.new "const ms_null_launch *[1]"
  local n, out = lib.ms_null_launches(list), {}
  for k = 0, n - 1 do
    local l = list[0][k]
    out[k + 1] = { op = ffi.string(l.op), kernel = ffi.string(l.kernel), blocks = l.blocks, threads = l.threads,
      shared = l.shared, flops = l.flops, half = l.bytes[0], float32 = l.bytes[1], other = l.bytes[2] }
  end
  return out
end

--- Runs a step three times; records the bytes that launches touch from the second time on. Returns `rows` by the
--- kernel's symbol, and the launches and totals of the third time.
---@param rows table[]  of kernel_table.rows
---@param step fun()
function M.watch(rows, step)
  local by_symbol = {}
  lib.ms_null_forget()                                  -- addresses that other steps used
  step()
  for _, row in ipairs(rows) do
    by_symbol[row.symbol] = row
    local n = #row.parameters
    lib.ms_null_parameters(row.symbol, n, ffi.new("int[?]", n, row.parameters))
  end
  step()
  M.reset()
  step()
  return by_symbol, M.launches(), M.count()
end

return M
