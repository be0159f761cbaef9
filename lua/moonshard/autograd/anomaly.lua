-- SPDX-License-Identifier: MIT
--- The search for the first value that is nan or inf (runtime/ops/anomaly.c, runtime/autograd/anomaly.c).
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local M = {}
local OFF, NANS, ALL = 0, 1, 2
local mode = OFF

local function switch(to)
  local before = mode
  mode = to
  tensor.search_anomalies(to)
  return before
end

local function restore(before, ok, ...)
  switch(before)
  if not ok then error(..., 0) end
  return ...
end

--- Runs fn(…) and fails at the first value that is nan or inf: in the result of an operator, at its line; in a gradient
--- of backward, with the line at which the operator's forward ran. A nan that was given as a number is no error, nor is
--- inf where an argument has it (a mask of -inf, or the number inf). For debugging: each result is read as a whole, so
--- a GPU is waited for. While the search is off, nothing is slower. It applies to the whole process, not to one
--- coroutine. Steps that ms.capture repeats are not searched.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return any  the results of fn
function M.detect_anomaly(fn, ...)
  opts.expect(fn, opts.fn, "detect_anomaly: argument")
  return restore(switch(ALL), pcall(fn, ...))
end

--- Turns the search of detect_anomaly on or off. Returns whether it was on.
---@param on boolean  whether to search
---@param given? { inf: boolean }  inf: false searches for nan alone (default: true)
---@return boolean
function M.set_detect_anomaly(on, given)
  opts.expect(on, opts.boolean, "set_detect_anomaly: argument 1")
  local o = opts("set_detect_anomaly", given, { inf = true })
  return switch(not on and OFF or o.inf and ALL or NANS) ~= OFF
end


return M
