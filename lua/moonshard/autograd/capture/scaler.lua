-- SPDX-License-Identifier: MIT
--- Gradient scalers in captured steps: the engine skips steps and adapts the scale, because a repetition runs no Lua.
local capture = require "moonshard.autograd.capture"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local util = require "moonshard.tensor.util"

local lib, ffi = engine.lib, engine.ffi
local sum = ffi.new "double[1]"

local M = {}

--- Whether a step is being recorded.
M.active = capture.active
--- Whether a value is a Tally.
M.is_tally = capture.is_tally

local function ids_of(found)
  local list = {}
  for _, t in util.sorted_pairs(found) do list[#list + 1] = t.id end
  return #list, ffi.new("ms_id[?]", math.max(#list, 1), list)
end

--- Calls fn; a repetition repeats fn's work only if the repetition's gradients are finite. If a gradient of this call is
--- infinite or nan, fn is not called, and the step is not captured. Returns the sum of found_inf, and fn's result.
---@param found table<string, Tensor>  found_inf by device
---@param fn fun(): any
---@return number, any
function M.unless(found, fn)
  local n, ids = ids_of(found)
  if lib.ms_capture_unless(n, ids, sum) ~= 0 then errors.fail() end
  if sum[0] ~= 0 then
    capture.leave()
    return sum[0]
  end
  local result = fn()
  if lib.ms_capture_unless_end() ~= 0 then errors.fail() end
  return 0, result
end

--- Adapts the scale, now and in repetitions.
---@param scale Tensor
---@param found Tensor[]  found_inf of all optimizers
---@param rule ffi.cdata*  ms_scale_rule
---@param before fun(tally: Tally?)  called before a repetition; must refer to the owner of rule, which then lives as
---   long as the step. tally: counts the steps with finite gradients, if a GPU does
function M.adapt(scale, found, rule, before)
  local n, ids = ids_of(found)
  if lib.ms_capture_adapt(scale.id, n, ids, rule) ~= 0 then errors.fail(scale) end
  capture.note(rule, function(_, list)
    local tally = list.tally(rule, ffi.sizeof(rule))
    list.always(function() before(tally) end)
  end)
end

return M
