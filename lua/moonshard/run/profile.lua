-- SPDX-License-Identifier: MIT
--- Where the time of one step goes, on every rank: forward, backward, optimizer, waiting for other ranks; forward and
--- backward by layer; waiting by unit. Computed from the ranges that the profiler records on the script's thread.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local places = require "moonshard.core.places"
local ranges = require "moonshard.core.ranges"

local lib, ffi = engine.lib, engine.ffi

local M = {}

local LIMIT = 200000                                    -- most ranges that are recorded
local LAYERS, UNITS = 60, 100                           -- most layers and units in a result, the longest first
local LEAST = 1e-6                                      -- seconds; a unit with less waiting is left out

-- The part of a step that a range counts for, by its category. A range of another category (unit, step, range of the
-- script) counts for no part itself; the ranges inside it do.
local PART = { module = "forward", operator = "forward", backward = "backward", optimizer = "optimizer" }

local function add(t, name, seconds) t[name] = (t[name] or 0) + seconds end

-- The unit that a range's name contains: "layers.1" of "FSDP::all_gather (layers.1)", "root" of those without one, such
-- as "FSDP::root_post_backward"; nil for categories other than fsdp.
local function unit_of(e)
  if e.category ~= "fsdp" then return nil end
  return e.name:match "%((.-)%)$" or "root"
end

-- Removes the sums of the ranges that began at `start` or later from the stack, and returns their totals, in seconds.
-- communication: waiting and collectives; outside: the communication that is in no module; modules: time in modules;
-- parts: forward, backward, optimizer; waits: communication whose unit is not known yet, by the range's name.
local function sums_of(stack, start)
  local sums = { communication = 0, outside = 0, modules = 0, parts = {}, waits = {} }
  while stack[1] and stack[#stack].start >= start do
    local inner = table.remove(stack)
    sums.communication = sums.communication + inner.communication
    sums.outside, sums.modules = sums.outside + inner.outside, sums.modules + inner.modules
    for name, seconds in pairs(inner.parts) do add(sums.parts, name, seconds) end
    for name, seconds in pairs(inner.waits) do add(sums.waits, name, seconds) end
  end
  sums.start = start
  return sums
end

local function is_inside(intervals, time)
  for _, i in ipairs(intervals) do
    if time >= i.start and time <= i.start + i.duration then return true end
  end
  return false
end

--- The summary of the script's ranges. In `events`, a range follows the ranges inside it.
---@param events table[]  each with category, name, detail, start and duration; collectives with their unit
---@param total number  seconds recorded
---@return table summary  total, forward, backward, optimizer, communication, other: seconds; layers: forward and backward
---   by the layer's name; waits: seconds by the unit's name, or by the range's if it has no unit
function M.summary(events, total)
  local layers, waits, stack, passes = {}, {}, {}, {}
  for _, e in ipairs(events) do
    if e.category == "backward" and e.name == "run" then passes[#passes + 1] = e end
  end
  local function layer(name, part, seconds)
    layers[name] = layers[name] or { forward = 0, backward = 0 }
    add(layers[name], part, seconds)
  end
  for _, e in ipairs(events) do
    local s, own = sums_of(stack, e.start), e.duration
    local part = PART[e.category]
    if e.category == "wait" or e.category == "collective" then
      s = { start = e.start, communication = own, outside = own, modules = 0, parts = {}, waits = {} }
      if e.unit then add(waits, e.unit, own) else s.waits[e.name] = own end
    elseif part then
      local computing = own - s.communication
      -- A module that runs inside a backward pass recomputes activations (checkpointing): its time is backward time.
      if e.category == "module" then
        layer(e.name, is_inside(passes, e.start) and "backward" or "forward", own - s.modules - s.outside)
        s.modules, s.outside = own, 0
      elseif e.category == "backward" and e.detail ~= "" then
        layer(e.detail, "backward", own - s.modules - s.outside)
      end
      s.parts = { [part] = computing }
    end
    local unit = unit_of(e)
    if unit then
      for _, seconds in pairs(s.waits) do add(waits, unit, seconds) end
      s.waits = {}
    end
    stack[#stack + 1] = s
  end
  local all = sums_of(stack, -math.huge)
  for name, seconds in pairs(all.waits) do add(waits, name, seconds) end
  local summary = { total = total, communication = all.communication, layers = layers, waits = waits }
  local rest = total - all.communication
  for _, part in ipairs { "forward", "backward", "optimizer" } do
    summary[part] = all.parts[part] or 0
    rest = rest - summary[part]
  end
  summary.other = math.max(0, rest)
  return summary
end

-- The ranges of the script's thread in a trace. The detail of an operator's backward is the module of its forward.
local function events_of(trace)
  local list = {}
  for k = 0, trace.n - 1 do
    local r = trace.ranges[k]
    if r.lane == 0 then
      local e = { category = ffi.string(lib.ms_name_of(ffi.C.MS_NAME_RANGE, r.kind)), name = ffi.string(r.name),
        start = r.start, duration = r.duration }
      e.detail = places.module(tonumber(ffi.string(r.detail):match "^module (%d+)$")) or ""
      local unit = r.collective > 0 and ffi.string(trace.collectives[r.collective - 1].unit) or ""
      e.unit = unit ~= "" and unit or nil
      list[#list + 1] = e
    end
  end
  return list
end

local function finish(trace, before, ok, ...)
  lib.ms_trace_stop(trace)
  ranges.follow_modules(before)
  if not before then engine.state.memory_module = 0 end
  local summary = ok and M.summary(events_of(trace), trace.ended - trace.begun)
  lib.ms_trace_free(trace)
  if not ok then error((...), 0) end
  return summary, ...
end

--- Runs fn(...) and returns this rank's summary and the results of fn.
---@param fn function
---@return table summary
---@return any  the results of fn
function M.measure(fn, ...)
  local trace = lib.ms_trace_start(LIMIT, ffi.C.MS_TRACE_MODULES)
  if trace == nil then errors.fail() end
  -- A module's number is noted with each of its operators, so that their backward is counted as the module's. `before`
  -- is the function that the memory history has set for this, or nil; finish sets it again.
  local before = ranges.follow_modules(places.enter)
  return finish(trace, before, pcall(fn, ...))
end

local function longest(rows, limit, least)
  table.sort(rows, function(a, b)
    if a.sum ~= b.sum then return a.sum > b.sum end
    return a.name < b.name
  end)
  for k, row in ipairs(rows) do
    if k > limit or row.sum < least then rows[k] = nil end
    row.sum = nil
  end
  return rows
end

--- Joins the summaries of all ranks: a list by rank, the layers with the mean of the ranks, and the waits of each rank.
---@param summaries table[]
---@return table[] of_ranks
---@return {name: string, forward: number, backward: number}[] layers
---@return {name: string, seconds: number[]}[] waits
function M.join(summaries)
  local of_ranks, layers, waits, by_layer, by_unit = {}, {}, {}, {}, {}
  for rank, s in ipairs(summaries) do
    of_ranks[rank] = { total = s.total, forward = s.forward, backward = s.backward, optimizer = s.optimizer,
      communication = s.communication, other = s.other }
    for name, l in pairs(s.layers) do
      local row = by_layer[name]
      if not row then
        row = { name = name, forward = 0, backward = 0, sum = 0 }
        by_layer[name], layers[#layers + 1] = row, row
      end
      add(row, "forward", l.forward / #summaries)
      add(row, "backward", l.backward / #summaries)
      row.sum = row.forward + row.backward
    end
    for name, seconds in pairs(s.waits) do
      local row = by_unit[name]
      if not row then
        row = { name = name, seconds = {}, sum = 0 }
        for k = 1, #summaries do row.seconds[k] = 0 end
        by_unit[name], waits[#waits + 1] = row, row
      end
      row.seconds[rank] = seconds
      row.sum = row.sum + seconds
    end
  end
  return of_ranks, longest(layers, LAYERS, 0), longest(waits, UNITS, LEAST)
end

return M
