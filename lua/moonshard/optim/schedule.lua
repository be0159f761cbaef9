-- SPDX-License-Identifier: MIT
--- The class of learning rate schedules. A schedule computes a learning rate for each group from the number of steps
--- taken, so a checkpoint needs little more than that number.
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local log = require "moonshard.core.log"
local methods = require "moonshard.core.methods"
local opts = require "moonshard.core.opts"

local raise = errors.raise

---@class LRScheduler
---@field last_lr number[]  the learning rate of each group
---@field optimizer table  the optimizer whose groups' lr is set
local Scheduler = {}
Scheduler.__index = Scheduler
Scheduler.__name = "LRScheduler"

-- The learning rate that a schedule set for a group, and the initial one: { set, initial }. A second schedule of the
-- optimizer, as in `sequential`, then begins with the initial rate, unless the script has changed the rate since.
local set_by_schedule = setmetatable({}, { __mode = "k" })

local function initial_lr(group)
  local was = set_by_schedule[group]
  return was and was[1] == group.lr and was[2] or group.lr
end

local function begin_group(self, k, lr)
  self.base_lrs[k] = self.base_lrs[k] or lr
  for _, part in ipairs(self.parts or {}) do begin_group(part, k, lr) end
end

-- Sets the groups' learning rates of the current step.
local function apply(self)
  local groups = self.optimizer.param_groups
  self.last_lr = {}
  for k, group in ipairs(groups) do
    if not self.base_lrs[k] then begin_group(self, k, initial_lr(group)) end   -- the group was added later
    local lr = self:lr_at(self.count, k)
    if type(lr) ~= "number" or lr ~= lr then
      opts.wrong(lr, "a number other than NaN", "lr_scheduler.%s: the learning rate of step %d", self.kind, self.count)
    end
    group.lr, self.last_lr[k] = lr, lr
    set_by_schedule[group] = { lr, self.base_lrs[k] }
    if self.each then self:each(group, self.count, k) end
  end
end

--- To be called after each step of the optimizer: the next step uses the next learning rate.
function Scheduler:step()
  local optimizer = self.optimizer
  if optimizer._expect_trained then
    optimizer:_expect_trained(("lr_scheduler.%s: step: the optimizer"):format(self.kind), "the optimizer and its schedule")
  end
  self.count = self.count + 1
  apply(self)
end

--- The learning rates that the next step uses, one for each group of the optimizer; the field `last_lr` is the same.
---@return number[]
function Scheduler:get_last_lr() return self.last_lr end

--- The state for a checkpoint: steps taken, the initial learning rates, and what the kind of schedule remembers.
---@return { step: integer, base_lrs: number[], parts: table[]? }
---   parts: the states of the schedules that `sequential` or `chained` is made of
function Scheduler:state_dict()
  local sd = { step = self.count, base_lrs = listing.copy(self.base_lrs) }
  for _, name in ipairs(self.remembers or {}) do sd[name] = self[name] end
  if self.parts then
    sd.parts = {}
    for k, part in ipairs(self.parts) do sd.parts[k] = part:state_dict() end
  end
  return sd
end

-- Checks a state dict. where: the entry of the script's state dict that has it, or "".
local function check_state(self, sd, where)
  local who = "lr_scheduler: load_state_dict: "
  opts.need(type(sd) == "table" and type(sd.step) == "number" and type(sd.base_lrs) == "table", sd,
    "a table with step and base_lrs", who .. (where == "" and "argument 1" or where:sub(1, -2)))
  opts.expect(sd.step, opts.whole_from(0), "%s%sstep", who, where)
  local groups = self.optimizer.param_groups
  if #sd.base_lrs ~= #groups then
    raise("%sthe number of %sbase_lrs is %d, expected that of the optimizer's groups, %d", who, where, #sd.base_lrs, #groups)
  end
  for k, lr in ipairs(sd.base_lrs) do
    opts.need(type(lr) == "number" and lr == lr, lr, "a number other than NaN", "%s%sbase_lrs[%d]", who, where, k)
  end
  for _, name in ipairs(self.remembers or {}) do opts.expect(sd[name], opts.number, "%s%s%s", who, where, name) end
  if not self.parts or sd.parts == nil then return end
  opts.expect(sd.parts, opts.table, "%s%sparts", who, where)
  if #sd.parts ~= #self.parts then
    raise("%sthe number of %sparts is %d, expected that of the schedule's, %d", who, where, #sd.parts, #self.parts)
  end
  for k, part in ipairs(self.parts) do check_state(part, sd.parts[k], ("%sparts[%d]."):format(where, k)) end
end

local function begin_with(self, lrs)
  self.base_lrs = listing.copy(lrs)
  for _, part in ipairs(self.parts or {}) do begin_with(part, lrs) end
end

local function take_state(self, sd)
  begin_with(self, sd.base_lrs)         -- states of version 1.0 have no parts
  self.count = sd.step
  for _, name in ipairs(self.remembers or {}) do self[name] = sd[name] end
  for k, part in ipairs(sd.parts and self.parts or {}) do take_state(part, sd.parts[k]) end
end

--- Continues from a state dict.
---@param sd { step: integer, base_lrs: number[], parts: table[]? }
---   step: steps taken; base_lrs: one for each group; parts: the states of the schedules that this one is made of
function Scheduler:load_state_dict(sd)
  check_state(self, sd, "")
  take_state(self, sd)
  if self.redo then
    for k, group in ipairs(self.optimizer.param_groups) do self:redo(group, self.count, k) end
  end
  apply(self)
end

function Scheduler:__tostring()
  return ("LRScheduler(%s, step %d, lr %s)"):format(self.kind, self.count, table.concat(self.last_lr, ", "))
end

methods.guard(Scheduler, "schedule")
methods.close(Scheduler)

local M = { Scheduler = Scheduler, initial_lr = initial_lr }

--- Declares that a schedule set a group's present learning rate, in the run whose checkpoint was loaded.
---@param group table  a group of an optimizer
---@param initial number  the group's initial learning rate
function M.continue(group, initial) set_by_schedule[group] = { group.lr, initial } end

--- For opts.expect: accepts only schedules.
M.a_schedule = opts.kind("a schedule", function(x) return getmetatable(x) == Scheduler end)

--- Makes a schedule and sets the learning rates of step 0.
---@param kind string  the function's name
---@param optimizer Optimizer
---@param fields table  lr_at(self, step, k): the learning rate of group k; each(self, group, step, k): called afterwards
---   for what else the schedule sets; redo(self, group, step, k): sets that anew for all steps until this one, where
---   `each` alone would not, after a state was loaded; remembers: names of number fields that belong to the state;
---   parts: the schedules that this one is made of; other fields are the schedule's own
---@return LRScheduler
function M.new(kind, optimizer, fields)
  opts.need(type(optimizer) == "table" and type(optimizer.param_groups) == "table", optimizer, "an optimizer",
    "lr_scheduler.%s: argument 1", kind)
  local self = fields
  self.kind, self.optimizer, self.count, self.base_lrs = kind, optimizer, 0, {}
  setmetatable(self, Scheduler)
  for k, group in ipairs(optimizer.param_groups) do self.base_lrs[k] = initial_lr(group) end
  apply(self)
  return self
end

--- Makes a schedule that multiplies the initial learning rates by factor(step).
function M.of_factor(kind, optimizer, factor)
  return M.new(kind, optimizer, { lr_at = function(self, t, k)
    local f = factor(t)
    if type(f) ~= "number" or f ~= f then
      opts.wrong(f, "a number other than NaN", "lr_scheduler.%s: the factor of step %d", kind, t)
    end
    return self.base_lrs[k] * f
  end })
end

--- Text for messages about 0 steps: Lua's # of a loader is 0, and scripts compute numbers of steps from it.
M.no_batches = "; a loader has loader:size() batches, and #loader is 0 in Lua"

--- Warns if a schedule has 0 steps: every step of the optimizer then has the last factor.
---@param kind string  the function's name
---@param steps integer  its option `steps`
function M.warn_of_none(kind, steps)
  if steps > 0 then return end
  log.warn_once(("lr_scheduler.%s: option 'steps' is 0, so every step has the last factor%s"):format(kind, M.no_batches))
end

-- Other names of options: those of earlier versions, of PyTorch and of Transformers.
local SAME = {
  total_iters = "steps", total_steps = "steps", T_max = "steps", T_0 = "steps", anneal_steps = "steps",
  anneal_epochs = "steps", num_training_steps = "steps", warmup_steps = "warmup", num_warmup_steps = "warmup",
  decay_steps = "decay", num_decay_steps = "decay", min_lr_ratio = "min_factor",
}

--- Checks the options of a schedule and returns them. Accepts other names of the options, which messages then use.
---@param kind string  the function's name
---@param given table?  the options
---@param spec table<string, any>  kinds or defaults of the options, by name
---@return table
function M.options(kind, given, spec)
  local renamed = {}
  for _, name in ipairs(opts.is_plain(given) and errors.names(SAME) or {}) do
    local ours = SAME[name]
    if given[name] ~= nil and spec[ours] ~= nil then
      local other = given[ours] ~= nil and ours or renamed[ours]
      if other then
        errors.raise("lr_scheduler.%s: options '%s' and '%s' mean the same; give one of them", kind, other, name)
      end
      renamed[ours] = name
    end
  end
  if not next(renamed) then return opts("lr_scheduler." .. kind, given, spec) end
  local theirs = {}
  for name, expected in pairs(spec) do theirs[renamed[name] or name] = expected end
  local o = opts("lr_scheduler." .. kind, given, theirs)
  for ours, name in pairs(renamed) do o[ours], o[name] = o[name], nil end
  return o
end

return M
