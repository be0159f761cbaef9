-- SPDX-License-Identifier: MIT
--- Operators and tensors through the C interface, for scripts/bench/kernels.
local F = require "moonshard.core.ffi"
local ffi, lib = F.ffi, F.lib
local M = {}

function M.check(id)
  if id == 0 then error(ffi.string(lib.ms_error()), 0) end
  return id
end

--- A function that calls an operator with a list of inputs, integers and numbers, and returns its arguments.
function M.caller(name)
  local op, a = lib.ms_op_find(name), ffi.new "ms_args"
  if op < 0 then error(("kernels: there is no operator %s"):format(name), 0) end
  return function(inputs, i, f)
    a.n_in, a.n_i, a.n_f = #inputs, i and #i or 0, f and #f or 0
    for k = 1, a.n_in do a["in"][k - 1] = inputs[k] end
    for k = 1, a.n_i do a.i[k - 1] = i[k] end
    for k = 1, a.n_f do a.f[k - 1] = f[k] end
    if lib.ms_call_op(op, a) ~= 0 then error(("kernels: %s: %s"):format(name, ffi.string(lib.ms_error())), 0) end
    return a
  end
end
--- The same, but returns the first output.
function M.call(name)
  local fn = M.caller(name)
  return function(inputs, i, f) return fn(inputs, i, f).out[0] end
end

function M.empty(dtype, ...)
  local shape = { ... }
  return M.check(lib.ms_empty(dtype, 0, #shape, ffi.new("int64_t[?]", #shape, shape)))
end
local randn_ = M.call "randn_"
function M.random(dtype, ...) return randn_({ M.empty(dtype, ...) }, nil, { 0, 1 }) end

return M
