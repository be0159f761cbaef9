-- SPDX-License-Identifier: MIT
--- Tools to inspect sharded training: a record of the gathers and reshards of units, and the comparison of a sharded
--- model with the model before sharding.
local class = require "moonshard.core.class"
local context = require "moonshard.core.context"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local Module = require "moonshard.nn.module".Module
local Parameter = require "moonshard.nn.module.parameter".Parameter
local sharded = require "moonshard.parallel.fsdp.sharded"
local assert_close = require "moonshard.autograd.close".assert_close

local lib, ffi = engine.lib, engine.ffi
local C = ffi.C

local M = {}

local EVENTS = { [C.MS_UNIT_EV_UNSHARD] = "unshard", [C.MS_UNIT_EV_RESHARD] = "reshard",
  [C.MS_UNIT_EV_POST_BACKWARD] = "post_backward" }
local recording = 0

local function finish(ok, ...)
  recording = recording - 1
  local n = lib.ms_unit_recorded(nil, 0)
  local raw = ffi.new("ms_unit_event[?]", math.max(n, 1))
  lib.ms_unit_recorded(raw, n)
  if recording == 0 then lib.ms_unit_record(0) end
  if not ok then error((...), 0) end
  local events = {}
  for k = 1, n do
    local e = raw[k - 1]
    events[k] = { event = EVENTS[e.event], unit = ffi.string(e.unit) }
    if e.event == C.MS_UNIT_EV_UNSHARD then events[k].prefetched = e.prefetched ~= 0 end
  end
  return events, ...
end

--- Runs fn(…) and lists the events of units during the call, in order.
---@param fn function  called with the arguments that follow
---@param ... any  arguments of fn
---@return { event: "unshard"|"reshard"|"post_backward", unit: string, prefetched: boolean }[] list
---@return any  the results of fn
function M.record(fn, ...)
  opts.expect(fn, opts.fn, "record: argument")
  if recording > 0 then errors.raise "record: called by a function that is itself recorded; recordings do not nest" end
  recording = recording + 1
  lib.ms_unit_record(1)
  return finish(pcall(context.block, "fsdp.record", fn, ...))
end

-- The names and parameters of a model, as they were before wrapping, without duplicates.
local function originals(m)
  local names, params, seen = {}, {}, {}
  local listed, values = m:_state()
  for k, name in ipairs(listed) do
    local p = values[k]
    if class.isa(p, Parameter) and not seen[p] then
      seen[p] = true
      names[#names + 1], params[#params + 1] = name, p
    end
  end
  return names, params
end

-- The properties of p to compare: its whole shape (nil in an FSDP instance), this rank's part, and the gradient of that
-- part or nil.
local function parts_of(p, name)
  local unit = rawget(p, "_unit")
  if not unit then errors.raise("check_sharded_parity: '%s' is not sharded", name) end
  local part = p:to_local()
  if not unit.classic then return tostring(p.shape), part:detach(), p.grad and p.grad:to_local() end
  local grad = part.grad
  local flat_param = not rawget(p, "_pieces") and unit.modules[1].flat_param
  if flat_param and flat_param.grad then
    grad = flat_param.grad:narrow(1, lib.ms_unit_flat_offset(p.id) + 1, part:numel())
  end
  return nil, part:detach():reshape(-1), grad and grad:reshape(-1)
end

local function compare(name, what, reference, part)
  local ok, message = pcall(assert_close, part, reference)
  if not ok then
    errors.raise("check_sharded_parity: %s of '%s': %s", what, name, (tostring(message):gsub("^[^\n]-:%d+: ", "")))
  end
end

--- Compares a model with its sharded copy (names and their order, shapes, shards, gradients) and raises at the first
--- difference.
---@param reference table  the model before sharding
---@param other table  its sharded copy
function M.check_sharded_parity(reference, other)
  if not class.isa(reference, Module) or not class.isa(other, Module) then
    errors.raise("check_sharded_parity: arguments are %s and %s, expected two modules", errors.kind(reference),
      errors.kind(other))
  end
  local names, params = originals(reference)
  local other_names, other_params = originals(other)
  for k, name in ipairs(other_names) do
    if names[k] ~= name then
      errors.raise("check_sharded_parity: parameter %d of the sharded model is '%s', in the reference %s", k, name,
        names[k] and ("it is '%s'"):format(names[k]) or "there is none")
    end
    local p, whole = other_params[k], params[k]
    local shape, part, h = parts_of(p, name)
    if shape and tostring(whole.shape) ~= shape then
      errors.raise("check_sharded_parity: '%s' has shape %s, but %s in the reference", name, shape, tostring(whole.shape))
    end
    compare(name, "the shard", sharded.part_of(p, whole:detach()), part)
    local g = whole.grad
    -- A flat parameter has one gradient for all parameters, so zeros count as equal to a missing gradient.
    if g == nil and h ~= nil and rawget(p, "_unit").classic and (h:numel() == 0 or h:eq(0):all():item()) then
      h = nil
    end
    if (g == nil) ~= (h == nil) then
      errors.raise("check_sharded_parity: '%s' has %s gradient, the reference has %s", name, h and "a" or "no", g
        and "one" or "none")
    end
    if g then compare(name, "the gradient", sharded.part_of(p, g), h) end
  end
  if #other_names < #names then
    errors.raise("check_sharded_parity: the sharded model has no parameter '%s'", names[#other_names + 1])
  end
end

return M
