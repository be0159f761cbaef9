-- SPDX-License-Identifier: MIT
--- Composed: the base of optimizers whose steps are tensor functions called from Lua, one parameter after the other.
--- Optimizers that treat every element alike are rows of the engine's table instead (kernels/formulas/optim).
---
--- A class has `_row` (its name, and the names of its states), `_options` (the argument of define), and `_update(group,
--- p, part, g, entry)`, which changes `part`, this rank's part of the parameter p, by its gradient g, and keeps states in
--- `entry`. It may have `_check_group(group, later)`, and `_accept(p, k)`, which raises for a parameter that the
--- optimizer cannot step.
local capture = require "moonshard.autograd.capture"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local places = require "moonshard.core.places"
local autograd = require "moonshard.autograd"
local scope = require "moonshard.tensor.scope"
local shards = require "moonshard.nn.module.shards"
local hooks = require "moonshard.optim.hooks"
local rows = require "moonshard.optim.rows"
local Optimizer = require "moonshard.optim.optimizer".Optimizer

local expect_reduced = require "moonshard.autograd.sparse".expect_reduced
local raise = errors.raise
local ipairs, pairs = ipairs, pairs

local Composed = Optimizer:extend "Composed"

--- Makes a class of optimizers.
---@param name string
---@param states string[]  the names of the states
---@param options table<string, any>  by name: default values, or kinds of values (core/opts.lua)
function Composed.define(name, states, options)
  local cls = Composed:extend(name)
  cls._row, cls._options = { name = name, states = states, needed = 0 }, options
  return cls
end

function Composed:init(params, given)
  self._entries = setmetatable({}, { __mode = "k" })
  self:_construct(params, given, rows.copy(self._options))
end

--- Checks a group's options and, when it is added, its parameters. later: the group was added before this call.
function Composed:_check(group, later)
  local given = {}
  for name in pairs(self._defaults) do given[name] = group[name] end   -- the order of pairs does not affect the copy
  opts(self:class_name(), given, self._options)
  if self._check_group then self:_check_group(group, later) end
  if later or not self._accept then return end
  for k, p in ipairs(group.params) do self:_accept(p, k) end
end

--- Refuses a flat parameter, for optimizers whose steps depend on whole parameters.
function Composed:_refuse_flat(p, k)
  if rawget(p, "_flat") then
    raise("%s: parameter %d is a flat parameter, which concatenates several parameters; give fsdp.FSDP use_orig_params = true",
      self:class_name(), k)
  end
end

local function step_parameter(self, group, p, k)
  if p.id < 0 then
    raise("%s: parameter %d is a %s; tensor classes are not supported", self:class_name(), k, p:class_name())
  end
  if self._accept then self:_accept(p, k) end
  expect_reduced(p)
  local part = shards.part_of(p)
  local g = part.grad
  if g == nil then return end
  local entry = self._entries[p] or { step = 0 }
  local before = {}
  for _, name in ipairs(self._row.states) do before[name] = entry[name] end
  scope.scope(function()
    self:_update(group, p, part, g, entry)
    for _, name in ipairs(self._row.states) do
      if entry[name] and not rawequal(entry[name], before[name]) then entry[name] = entry[name]:detach():keep() end
    end
  end)
  entry.step = entry.step + 1
  self._entries[p] = entry
  shards.drop_gathered(p)
end

local function step_groups(self, has)
  capture.refuse(("the steps of %s are Lua functions, which repetitions would not call"):format(self:class_name()))
  self:_expect_trained()
  for _, group in ipairs(self.param_groups) do
    self:_check(group, true)                            -- scripts may have changed options since the last step
    for k, p in ipairs(group.params) do
      if has == nil or has[p] then step_parameter(self, group, p, k) end
    end
  end
end

--- Makes one step with all parameters that have a gradient.
---@param closure? fun(): any  recomputes the loss and runs backward, before the step
---@return any  the closure's result, or true
function Composed:step(closure)
  local result = true
  if closure ~= nil then
    opts.expect(closure, opts.fn, "%s: step: closure", self:class_name())
    result = autograd.enable_grad(closure)
  end
  autograd.no_grad(step_groups, self)
  places.mark()
  return result
end

hooks.around(Composed)

function Composed:_step_part(has) autograd.no_grad(step_groups, self, has) end

-- ---- state ---------------------------------------------------------------------------------------

function Composed:state_of(p) return self._entries[p] end

function Composed:_entries_of(_, group)
  return function(k)
    local entry, out = self:state_of(group.params[k]), {}
    for name, value in pairs(entry or {}) do out[name] = value end        -- the order of pairs does not affect the copy
    return entry and out
  end
end

--- The shape of a state, as text: by default, that of this rank's part of the parameter.
function Composed._state_shape(_, p) return tostring(shards.part_of(p).shape) end

function Composed:_forget(_, group)
  for _, p in ipairs(group.params) do self._entries[p] = nil end
end

function Composed:_load_entry(index, k, entry)
  local p = self.param_groups[index].params[k]
  local own = { step = entry.step or 1 }
  for _, name in ipairs(self._row.states) do
    if entry[name] then
      local part = shards.part_of(p)
      own[name] = entry[name]:detach():clone():to(part.device):keep()
    end
  end
  self._entries[p] = own
end

return Composed
