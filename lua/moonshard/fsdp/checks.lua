--- Looking at sharded training: what the schedule did, and whether a sharded model is its reference.
local class = require "moonshard.class"
local engine = require "moonshard.ffi"
local errors = require "moonshard.errors"
local nn = require "moonshard.nn"
local sharded = require "moonshard.fsdp.sharded"
local testing = require "moonshard.testing"

local lib, ffi = engine.lib, engine.ffi
local C = ffi.C

local M = {}

local EVENTS = { [C.MS_UNIT_EV_UNSHARD] = "unshard", [C.MS_UNIT_EV_RESHARD] = "reshard", [C.MS_UNIT_EV_POST_BACKWARD] = "post_backward" }
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

--- Runs fn and returns what the units did meanwhile, in order: an array of
--- `{event = "unshard"|"reshard"|"post_backward", unit, prefetched}`, then fn's results.
---@param fn function
---@return table[] events
function M.record(fn, ...)
  if type(fn) ~= "function" then errors.raise("record: argument is %s, expected a function", errors.kind(fn)) end
  if recording > 0 then errors.raise "record: a recording is under way already" end
  recording = recording + 1
  lib.ms_unit_record(1)
  return finish(pcall(fn, ...))
end

local function compare(name, what, reference, part)
  local ok, message = pcall(testing.assert_close, part, reference)
  if not ok then errors.raise("check_sharded_parity: %s of '%s': %s", what, name, (tostring(message):gsub("^[^\n]-:%d+: ", ""))) end
end

--- Raises on the first difference between a model and its sharded twin: names and their order, each shard, each gradient.
---@param reference table
---@param other table
function M.check_sharded_parity(reference, other)
  if not class.isa(reference, nn.Module) or not class.isa(other, nn.Module) then
    errors.raise("check_sharded_parity: arguments are %s and %s, expected two modules", errors.kind(reference), errors.kind(other))
  end
  local names, params = {}, {}
  for name, p in reference:named_parameters() do names[#names + 1], params[#params + 1] = name, p end
  local k = 0
  for name, p in other:named_parameters() do
    k = k + 1
    if names[k] ~= name then
      errors.raise("check_sharded_parity: parameter %d is '%s' in the reference, '%s' in the sharded model", k, tostring(names[k]), name)
    end
    if not sharded.is_sharded(p) then errors.raise("check_sharded_parity: '%s' is not sharded", name) end
    local whole = params[k]
    if tostring(whole.shape) ~= tostring(p.shape) then
      errors.raise("check_sharded_parity: '%s' has shape %s, %s in the reference", name, tostring(p.shape), tostring(whole.shape))
    end
    compare(name, "the shard", sharded.part_of(p, whole:detach()), p:to_local():detach())
    local g, h = whole.grad, p.grad
    if (g == nil) ~= (h == nil) then
      errors.raise("check_sharded_parity: '%s' has %s gradient, the reference has %s", name, h and "a" or "no", g and "one" or "none")
    end
    if g then compare(name, "the gradient", sharded.part_of(p, g), h:to_local()) end
  end
  if k < #names then errors.raise("check_sharded_parity: the sharded model has no parameter '%s'", names[k + 1]) end
end

return M
