-- SPDX-License-Identifier: MIT
--- Groups of an optimizer as the engine reads them. A compiled group is kept until the script changes the group's list
--- of parameters.
local engine = require "moonshard.core.ffi"
local listing = require "moonshard.core.listing"
local tensor = require "moonshard.tensor"

local ffi = engine.ffi
local Tensor, STATES = tensor.Tensor, ffi.C.MS_OPTIM_STATES

local M = {}

--- Converts a group to the form that the engine reads: ids of the leaves, STATES state ids per leaf, steps taken.
--- Leaves that are also in `before`, the group's previous form, keep their state. If a parameter belongs to a tensor
--- class, its inner tensors are the leaves: those of parameter k come after index first[k].
function M.compile(self, group, before)
  local leaves, first = tensor.flat(group.params), {}
  local n = #leaves
  if leaves == group.params then
    leaves = listing.copy(leaves)
    for k = 1, n do first[k] = k - 1 end
  else
    local at = 0
    for k, p in ipairs(group.params) do
      first[k] = at
      at = at + #tensor.flat { p }
    end
  end
  local c = {
    n = n, params = group.params, first = first, leaves = leaves, count = #group.params,
    options = ffi.new "ms_optim_options", ids = ffi.new("ms_id[?]", math.max(n, 1)),
    state = ffi.new("ms_id[?]", math.max(STATES * n, 1)), steps = ffi.new("double[?]", math.max(n, 1)),
    tensors = {},                       -- [STATES * (k - 1) + s]: the Lua tensor of that id in `state`
    young = true,                       -- whether a leaf may have no state yet
  }
  c.options.kind = self._row.kind
  local place = {}
  for k = 1, before and before.n or 0 do place[before.ids[k - 1]] = k end
  for k, p in ipairs(leaves) do
    c.ids[k - 1] = p.id
    local old = place[p.id]
    if old then
      c.steps[k - 1] = before.steps[old - 1]
      for s = 1, STATES do
        c.state[STATES * (k - 1) + s - 1] = before.state[STATES * (old - 1) + s - 1]
        c.tensors[STATES * (k - 1) + s] = before.tensors[STATES * (old - 1) + s]
      end
    end
  end
  return c
end

local function unchanged(c, params)
  if c == nil or c.params ~= params or c.count ~= #params then return false end
  local ids, first = c.ids, c.first
  for k = 1, c.count do
    local p = params[k]
    if p.id >= 0 then
      if p.id ~= ids[first[k]] then return false end
    else
      for j, part in ipairs(tensor.flat { p }) do
        if first[k] + j > c.n or part.id ~= ids[first[k] + j - 1] then return false end
      end
    end
  end
  return true
end

--- Before a step that a GPU may skip: notes the groups' counts of steps.
---@param self Optimizer
---@param n integer  number of groups
---@param flag Flag  is not 0 if the step is skipped
function M.note_counts(self, n, flag)
  local last = { flag = flag }
  for k = 1, n do
    local c = self._compiled[k]
    c.before = c.before or ffi.new("double[?]", math.max(c.n, 1))
    ffi.copy(c.before, c.steps, ffi.sizeof "double" * c.n)
    last[k] = c
  end
  self._undecided = last
end

--- Corrects the groups' counts of steps if a GPU decides which steps are skipped: restores the counts from before the
--- last step if it was skipped, or reads the counts that the GPU keeps for a captured step. Waits for the GPU.
---@param self Optimizer
function M.settle(self)
  local last = rawget(self, "_undecided")
  if not last then return end
  if last.tallies then
    for _, tally in ipairs(last.tallies) do tally:read() end
  elseif last.flag:read() ~= 0 then
    for _, c in ipairs(last) do
      ffi.copy(c.steps, c.before, ffi.sizeof "double" * c.n)
      c.young = true                    -- a leaf whose first step was skipped has no state yet
    end
  end
  self._undecided = nil
end

--- For a captured step: returns a function to be called before each repetition, because a repetition may step the
--- groups. Where a GPU decides which steps are skipped, the groups' counts are right only after M.settle.
---@param self Optimizer
---@param n integer  number of groups
---@param list CaptureChecks
---@return fun() begin
function M.begin_repetition(self, n, list)
  local tallies, steps = {}, nil
  for k = 1, n do
    local c = self._compiled[k]
    tallies[#tallies + 1] = c.n > 0 and list.tally(c.steps, ffi.sizeof(c.steps)) or nil
  end
  if #tallies > 0 then steps = { tallies = tallies } end
  return function()
    if rawget(self, "_undecided") == steps then return end
    M.settle(self)
    self._undecided = steps
  end
end

--- The compiled group; compiles it again if the script has changed group.params.
---@param self Optimizer
---@param index integer  the group's position
---@param group table
---@return table
function M.group(self, index, group)
  M.settle(self)
  local c = self._compiled[index]
  if not unchanged(c, group.params) then
    c = M.compile(self, group, c)
    self._compiled[index] = c
  end
  return c
end

--- Makes Lua tensors of new state ids; the optimizer owns them.
---@param c table  a compiled group
function M.take_state(c)
  for at = 1, STATES * c.n do
    local id = c.state[at - 1]
    local t = c.tensors[at]
    if id ~= 0 and (t == nil or t.id ~= id) then
      t = setmetatable({ id = id }, Tensor)
      tensor.own(t)
      c.tensors[at] = t
    end
  end
end

return M
