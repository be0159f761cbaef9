-- SPDX-License-Identifier: MIT
--- The state of optimizers: state dicts, and the state of one parameter. Classes whose state is not in compiled groups
--- (composed.lua, lbfgs.lua) replace the methods that begin with an underscore.
local bit = require "bit"
local errors = require "moonshard.core.errors"
local groups = require "moonshard.optim.compiled"
local opts = require "moonshard.core.opts"
local rows = require "moonshard.optim.rows"
local tensor = require "moonshard.tensor"
local engine = require "moonshard.core.ffi"
local sorted_pairs = require "moonshard.tensor.util".sorted_pairs

local a_tensor, is_tensor, is_plain, raise = tensor.a_tensor, tensor.is_tensor, opts.is_plain, errors.raise
local STATES = engine.ffi.C.MS_OPTIM_STATES

-- The step and state of parameter k of a group, by name; nil before its first step.
local function entry_of(self, c, k)
  local at = c.first[k]
  local steps = c.steps[at]
  if steps == 0 then return nil end
  local entry, p = { step = steps }, c.params[k]
  for s, name in ipairs(self._row.states) do
    local t = c.tensors[STATES * at + s]
    if t ~= nil and p.id < 0 then
      local parts = {}
      for j = 1, #tensor.flat { p } do parts[j] = c.tensors[STATES * (at + j - 1) + s] end
      t = tensor.rebuild(parts, p)
    end
    entry[name] = t
  end
  return entry
end

-- Adds the methods to the class of optimizers.
return function(Optimizer)
  --- Returns a function that gives the state of parameter k of a group, as a table of its own; nil before its first
  --- step.
  function Optimizer:_entries_of(index, group)
    local c = groups.group(self, index, group)
    groups.take_state(c)
    return function(k) return entry_of(self, c, k) end
  end

  --- Whether every rank keeps this state whole, in a shape of its own, also if the parameter is sharded.
  ---@param _ string  name of the state
  ---@return boolean
  function Optimizer._keeps_whole(_, _) return false end

  --- Returns state by the parameter's position over all groups (from 1), and the groups with positions in place of
  --- parameters. The tensors are the optimizer's own: copy them if later steps must not change them.
  ---@return { state: table<integer, table>, param_groups: table[] }
  function Optimizer:state_dict()
    local sd, position = { state = {}, param_groups = {} }, 0
    for index, group in ipairs(self.param_groups) do
      local entry, out = self:_entries_of(index, group), rows.copy(group)
      out.params = {}
      for k = 1, #group.params do
        position = position + 1
        out.params[k] = position
        sd.state[position] = entry(k)
      end
      sd.param_groups[index] = out
    end
    return sd
  end

  -- The tensor whose shape a parameter's state has: for a sharded parameter, its local tensor.
  local function part_of(p) return rawget(p, "_unit") and p:to_local() or p end

  --- Refuses state that another kind of optimizer made: unknown state would be lost, missing state would start at 0.
  ---@param verb string  the function's name in messages
  ---@param whose string  names the parameter in messages
  ---@param entry table<string, any>  the state of one parameter, by name
  function Optimizer:_check_entry(verb, whose, entry)
    local names = self._row.states
    local known = {}
    for s, name in ipairs(names) do
      known[name] = true
      if bit.band(self._row.needed, 2 ^ (s - 1)) ~= 0 and entry[name] == nil and (entry.step or 1) > 0 then
        raise("%s: %s: %s has no %s in the state; was the state made by another optimizer?", self:class_name(), verb, whose,
          name)
      end
    end
    for name, t in sorted_pairs(entry) do
      if is_tensor(t) and name ~= "step" and not known[name] then
        raise("%s: %s: %s has %s in the state, which %s does not keep; was the state made by another optimizer?",
          self:class_name(), verb, whose, errors.show(name), self:class_name())
      end
    end
  end

  --- The shape of a parameter's state, as text. part: this rank's part of the parameter.
  function Optimizer._state_shape(_, _, part) return tostring(part.shape) end

  --- Drops the state of a group, before a saved state is loaded.
  function Optimizer:_forget(index, group)
    groups.settle(self)
    self._compiled[index] = groups.compile(self, group)
  end

  --- Copies the saved state `entry` to parameter k of a group. part: this rank's part of the parameter.
  function Optimizer:_load_entry(index, k, entry, part)
    local c = self._compiled[index]
    local at, parts = c.first[k], tensor.flat { part }
    for j = 1, #parts do
      local dtype = parts[j].dtype
      if dtype ~= "float32" and dtype ~= "float64" then dtype = "float32" end
      for s, name in ipairs(self._row.states) do
        local given = entry[name] and tensor.flat { entry[name] }
        if given then
          local own = (given[j] or given[1]):detach():clone():to(parts[j].device, dtype):keep()
          c.state[STATES * (at + j - 1) + s - 1] = own.id
          c.tensors[STATES * (at + j - 1) + s] = own
        end
      end
      c.steps[at + j - 1] = entry.step or 1
    end
  end

  --- Checks a state dict; returns a function that loads it.
  ---@return fun() take
  function Optimizer:_prepare_load(sd)
    local who = self:class_name()
    opts.need(is_plain(sd) and is_plain(sd.param_groups) and is_plain(sd.state), sd,
      "a table with state and param_groups", "%s: load_state_dict: argument 1", who)
    if #sd.param_groups ~= #self.param_groups then
      raise("%s: load_state_dict: the number of groups in the state is %d, expected the optimizer's, %d", who, #sd.param_groups, #self.param_groups)
    end
    local names, work = self._row.states, {}
    for index, group in ipairs(self.param_groups) do
      local given = sd.param_groups[index]
      opts.need(is_plain(given) and is_plain(given.params), given, "a group {params = {…}}",
        "%s: load_state_dict: group %d", who, index)
      if #given.params ~= #group.params then
        raise("%s: load_state_dict: the number of parameters of group %d is %d in the state, %d in the optimizer", who, index,
          #given.params, #group.params)
      end
      self:_check(setmetatable({}, { __index = function(_, name)
        if given[name] ~= nil then return given[name] end
        return group[name]
      end }), true)
      for k, p in ipairs(group.params) do
        local entry = sd.state[given.params[k]]
        opts.need(entry == nil or is_plain(entry), entry, "a table", "%s: load_state_dict: state of parameter %d", who, k)
        if entry ~= nil then
          local part = part_of(p)
          opts.need(entry.step == nil or type(entry.step) == "number" and entry.step >= 0, entry.step, "a number from 0",
            "%s: load_state_dict: step of parameter %d", who, k)
          self:_check_entry("load_state_dict", ("parameter %d"):format(k), entry)
          for _, name in ipairs(names) do
            local t = entry[name]
            if t ~= nil then
              opts.expect(t, a_tensor, "%s: load_state_dict: %s of parameter %d", who, name, k)
              local shape = self:_state_shape(p, part, name, t)
              if tostring(t.shape) ~= shape then
                raise("%s: load_state_dict: %s of parameter %d has shape %s, but %s", who, name, k, tostring(t.shape),
                  shape == tostring(part.shape) and "the parameter has shape " .. shape
                    or "its shape should be " .. shape)
              end
            end
          end
          work[#work + 1] = { index, k, entry, part }
        end
      end
    end
    return function()
      for _, group in ipairs(self.param_groups) do
        for _, p in ipairs(group.params) do self._seen[p] = rawget(p, "_unit") or true end
      end
      for index, group in ipairs(self.param_groups) do
        local given = sd.param_groups[index]
        for name, value in pairs(rows.copy(given)) do group[name] = value end
        self:_forget(index, group)
      end
      for _, w in ipairs(work) do self:_load_entry(unpack(w)) end
    end
  end

  --- Loads the state dict of an optimizer with the same groups, by copying tensors. Everything is checked before
  --- anything changes. Errors: different groups or shapes; state of another kind of optimizer.
  ---@param sd { state: table<integer, table>, param_groups: table[] }
  ---   state: the states, by position of the parameter, from 1; param_groups: one table for each group of the optimizer
  function Optimizer:load_state_dict(sd) self:_prepare_load(sd)() end

  --- The state tensors and step of a parameter, by name; nil before its first step. Not copies.
  ---@param p Tensor  a parameter of a group
  ---@return { step: integer }?
  function Optimizer:state_of(p)
    for index, group in ipairs(self.param_groups) do
      for k, q in ipairs(group.params) do
        if rawequal(p, q) then
          local c = groups.group(self, index, group)
          groups.take_state(c)
          return entry_of(self, c, k)
        end
      end
    end
  end
end
