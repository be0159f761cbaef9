-- SPDX-License-Identifier: MIT
--- Checks the execution order of FSDP units at debug level "detail": all ranks must run their units in the same order,
--- and every iteration in the order of the first one.
---
--- In the first iteration, until the end of its first backward, each forward in training mode is compared between the
--- ranks; a difference is an error on all ranks. In later iterations each rank compares with its own first iteration,
--- without a collective, and warns of a difference: at once, or at the end of an iteration with fewer units. At every
--- debug level a difference between ranks is an error, because the fingerprints of collectives name the unit.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local flat = require "moonshard.parallel.fsdp.flat"
local log = require "moonshard.core.log"
local module = require "moonshard.parallel.fsdp.module"
local no_grad = autograd.no_grad
local scope = require "moonshard.tensor.scope"

local lib, ffi = engine.lib, engine.ffi

local M = {}

---@class ExecOrder
---@field names table<FSDPUnit, string>   names of a unit's parameters for messages
---@field number table<FSDPUnit, integer>  the number by which ranks name a unit
---@field first FSDPUnit[]                the sequence of the first iteration
---@field first_iteration boolean  true until the end of the first backward
---@field position integer                number of forwards of units in this iteration; 0 in the first iteration
---@field status "none"|"warning"|"warned"  "warning": this iteration has warned; "warned": nothing is checked any more

local roots = setmetatable({}, { __mode = "k" })        -- root unit -> its ExecOrder
local listening = false

local function names_of(unit, name_of)
  local names = {}
  for k, p in ipairs(unit.originals) do names[k] = "'" .. tostring(name_of[p]) .. "'" end
  return "[[" .. table.concat(names, ", ") .. "]]"
end

local function integers(dist, group, value)
  local all
  scope.scope(function()
    no_grad(function()
      local mine = create.tensor({ value }, { dtype = "int32" })
      local out = create.empty(dist.world_size(group), { dtype = "int32" })
      dist.all_gather(out, mine, { group = group })
      all = out:tolist()
    end)
  end)
  return all
end

--- Begins the checks of a root that was just initialized, if it was made at debug level "detail".
function M.start(root, m)
  if not root.checks_order then return end
  local order = {
    names = {}, number = {}, by_number = {}, first = {}, first_iteration = true, position = 0, status = "none",
    group = root.placed.given, root = root, backwards = 0,
  }
  if type(order.group) == "table" and getmetatable(order.group) == nil then order.group = root.placed.group end
  local name_of = flat.names_below(m)
  for _, unit in ipairs(module.units_below(m)) do
    if unit.classic and #unit.originals > 0 then
      order.by_number[#order.by_number + 1] = unit
      order.number[unit] = #order.by_number
      order.names[unit] = names_of(unit, name_of)
      unit.order = order
      errors.check(lib.ms_unit_set(unit.handle, ffi.C.MS_UNIT_CHECKED, 1))
    end
  end
  roots[root] = order
  if not listening then
    listening = true
    autograd.at_end(M.after_backward, nil, true)
  end
end

local function across_ranks(order, unit)
  local dist = require "moonshard.dist"
  local group = order.group
  local ranks = dist.group_ranks(group)
  local numbers = integers(dist, group, order.number[unit])
  for a = 1, #ranks do
    for b = a + 1, #ranks do
      if numbers[a] ~= numbers[b] then
        errors.raise("Forward order differs across ranks: rank %d is all-gathering parameters for %s while rank %d is all-gathering parameters for %s",
          ranks[a], order.names[order.by_number[numbers[a]]], ranks[b], order.names[order.by_number[numbers[b]]])
      end
    end
  end
end

--- Checks a unit's forward before it runs: in the first iteration against the other ranks, later against the first
--- iteration.
function M.check(unit, m)
  local order = unit.order
  if not m.training or order.status == "warned" or engine.state.run_depth > 0 then return end
  if order.first_iteration then
    across_ranks(order, unit)
    order.first[#order.first + 1] = unit
    return
  end
  order.position = order.position + 1
  local expected = order.first[order.position]
  if expected == unit then return end
  order.status = "warning"
  log.warn(("Forward order differs from that of the first iteration on rank %d.\n%s%s")
    :format((require "moonshard.dist").rank(),
      expected and ("Expected to all-gather for %s but trying to all-gather parameters for "):format(
        order.names[expected])
        or "Expected to not all-gather any more parameters in the forward but trying to all-gather parameters for ",
      order.names[unit] or "a newly-added parameter since construction time"))
end

-- Ends an iteration; warns if fewer units ran than in the first one. Communicates nothing.
local function close_iteration(order)
  if order.first_iteration then
    order.first_iteration = false
    return
  end
  if order.status == "warning" then order.status = "warned" end
  if order.status == "none" and order.position > 0 and order.position ~= #order.first then
    order.status = "warned"
    log.warn(("Forward order differs from that of the first iteration on rank %d.\n"
      .. "Expected to all-gather for %d units but the forward ended after %d"):format((require "moonshard.dist").rank(),
      #order.first, order.position))
  end
  order.position = 0
end

--- At the end of an outermost backward, ends the iteration of each checked root whose units ran in the backward.
function M.after_backward()
  local ended = {}
  for root, order in pairs(roots) do
    local n = lib.ms_unit_get_state(root.handle).backwards
    if n ~= order.backwards then
      order.backwards = n
      ended[#ended + 1] = order
    end
  end
  -- Sorted, so that warnings of several roots come in the same order on every rank.
  table.sort(ended, function(a, b) return a.root.handle < b.root.handle end)
  for _, order in ipairs(ended) do close_iteration(order) end
end

return M
