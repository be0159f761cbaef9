-- SPDX-License-Identifier: MIT
--- Mixed precision of a wrapper, FSDP or nn.DDP, in one value: what it computes in, reduces in, and keeps buffers in.
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

local M = {}

--- name, if it is a floating dtype or nil; else an error about that option of who.
---@param name string?
---@param option string
---@param who string
---@return string?
function M.floating(name, option, who)
  if name ~= nil and not dtypes.is_float(dtypes.number(name, who .. ": " .. option)) then
    errors.raise("%s: option '%s' is '%s', expected a floating dtype", who, option, name)
  end
  return name
end

---@class MixedPrecision
---@field param_dtype string?   what parameters are gathered and computed in
---@field reduce_dtype string?  what gradients are reduced in (param_dtype, if that is set)
---@field buffer_dtype string?  what floating buffers are cast to
---@field keep_low_precision_grads boolean
---@field cast_forward_inputs boolean
---@field cast_root_forward_inputs boolean
---@field module_classes_to_ignore table[]  classes whose modules are wrapped by themselves, in full precision
local Precision = { __name = "MixedPrecision" }
Precision.__index = Precision

--- Dtypes of an FSDP or DDP instance; absent ones stay as they are.
---@param given? table  param_dtype, reduce_dtype, buffer_dtype, keep_low_precision_grads, cast_forward_inputs, cast_root_forward_inputs
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
