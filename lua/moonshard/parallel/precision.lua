-- SPDX-License-Identifier: MIT
--- Mixed precision of FSDP or nn.DDP: the dtypes of computation, of reductions and of buffers.
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

local M = {}

--- Returns name if it is nil or a floating point dtype; raises otherwise, naming the option.
---@param name string?  name of a dtype
---@param option string  the option's name
---@param who string  the function's name in messages
---@return string?
function M.floating(name, option, who)
  if name ~= nil and not dtypes.is_float(dtypes.number(name, who .. ": " .. option)) then
    errors.raise("%s: option '%s' is '%s', expected a floating point dtype", who, option, name)
  end
  return name
end

---@class MixedPrecision
---@field param_dtype string?   dtype of gathered parameters and of computation
---@field reduce_dtype string?  dtype of gradient reductions (default: param_dtype, if set)
---@field buffer_dtype string?  dtype of floating point buffers
---@field keep_low_precision_grads boolean  leaves gradients in reduce_dtype
---@field cast_forward_inputs boolean  casts floating point inputs to param_dtype
---@field cast_root_forward_inputs boolean  casts floating point inputs of the root to param_dtype
---@field module_classes_to_ignore table[]  modules of these classes are wrapped separately, in full precision
local Precision = { __name = "MixedPrecision" }
Precision.__index = Precision

--- Dtypes for fsdp.FSDP and nn.DDP: of gathered parameters and computation, of reductions, of floating point buffers.
--- Without an option tensors keep their dtype; reductions then use param_dtype, if it is set.
---@param given? { param_dtype: string, reduce_dtype: string, buffer_dtype: string, keep_low_precision_grads: boolean, cast_forward_inputs: boolean, cast_root_forward_inputs: boolean, module_classes_to_ignore: table[] }
---   param_dtype: dtype of gathered parameters and of computation; reduce_dtype: dtype of gradient reductions (default:
---   param_dtype); buffer_dtype: dtype of floating point buffers; keep_low_precision_grads: leaves gradients in
---   reduce_dtype; cast_forward_inputs: casts floating point inputs to param_dtype; cast_root_forward_inputs: the same
---   for the root's inputs; module_classes_to_ignore: classes of modules that stay in full precision
---@return MixedPrecision
function M.MixedPrecision(given)
  local o = opts("MixedPrecision", given, {
    param_dtype = opts.string, reduce_dtype = opts.string, buffer_dtype = opts.string, keep_low_precision_grads = false,
    cast_forward_inputs = false, cast_root_forward_inputs = true, module_classes_to_ignore = opts.table,
  })
  for _, name in ipairs { "param_dtype", "reduce_dtype", "buffer_dtype" } do
    M.floating(o[name], name, "MixedPrecision")
  end
  return setmetatable(o, Precision)
end

function Precision.__tostring(p)
  return ("MixedPrecision(param_dtype = %s, reduce_dtype = %s, buffer_dtype = %s)"):format(
    tostring(p.param_dtype), tostring(p.reduce_dtype), tostring(p.buffer_dtype))
end

function M.is_precision(x) return getmetatable(x) == Precision end

return M
