-- SPDX-License-Identifier: MIT
--- Learning rate schedules: multiply each group's initial learning rate by a factor that depends on the number of steps
--- taken.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

local raise = errors.raise

---@class LRScheduler
---@field last_lr number[]  the learning rate of each group
---@field optimizer table  the optimizer whose groups' lr is set
local Scheduler = {}
Scheduler.__index = Scheduler
Scheduler.__name = "LRScheduler"

local function apply(self)
  local groups = self.optimizer.param_groups
  self.last_lr = {}
  for k, group in ipairs(groups) do
    if not self.base_lrs[k] then self.base_lrs[k] = group.lr end      -- the group was added later
    local factor = self.factor(self.count)
    if type(factor) ~= "number" or factor ~= factor then
      opts.wrong(factor, "a number", "lr_scheduler.%s: the factor of step %d", self.kind, self.count)
    end
    group.lr = self.base_lrs[k] * factor
    self.last_lr[k] = group.lr
  end
end

--- To be called after each step of the optimizer: the next step uses the next factor.
function Scheduler:step()
  self.count = self.count + 1
  apply(self)
end

--- The state for a checkpoint: steps taken, and the initial learning rates.
---@return { step: integer, base_lrs: number[] }
function Scheduler:state_dict() return { step = self.count, base_lrs = { unpack(self.base_lrs) } } end

--- Continues from a state dict.
---@param sd { step: integer, base_lrs: number[] }  step: steps taken; base_lrs: one for each group
function Scheduler:load_state_dict(sd)
  opts.need(type(sd) == "table" and type(sd.step) == "number" and type(sd.base_lrs) == "table", sd,
    "a table with step and base_lrs", "lr_scheduler: load_state_dict: argument 1")
  opts.expect(sd.step, opts.whole_from(0), "lr_scheduler: load_state_dict: step")
  local groups = self.optimizer.param_groups
  if #sd.base_lrs ~= #groups then
    raise("lr_scheduler: load_state_dict: %d base_lrs, but the optimizer has %d groups", #sd.base_lrs, #groups)
  end
  for k, lr in ipairs(sd.base_lrs) do
    opts.need(type(lr) == "number" and lr == lr, lr, "a number", "lr_scheduler: load_state_dict: base_lrs[%d]", k)
  end
  self.count, self.base_lrs = sd.step, { unpack(sd.base_lrs) }
  apply(self)
end

function Scheduler:__tostring()
  return ("LRScheduler(%s, step %d, lr %s)"):format(self.kind, self.count, table.concat(self.last_lr, ", "))
end

local function new(kind, optimizer, factor)
  opts.need(type(optimizer) == "table" and type(optimizer.param_groups) == "table", optimizer, "an optimizer",
    "lr_scheduler.%s: argument 1", kind)
  local self = setmetatable({ kind = kind, optimizer = optimizer, factor = factor, count = 0, base_lrs = {} },
    Scheduler)
  for k, group in ipairs(optimizer.param_groups) do self.base_lrs[k] = group.lr end
  apply(self)
  return self
end

local M = {}

local count = opts.whole_from(0)
local some_steps = opts.option(count, opts.required)

local function options(kind, given, spec) return opts("lr_scheduler." .. kind, given, spec) end

-- The factor at step t: linear from start to 1 over `steps` steps. Without start it is (t + 1) / steps, which is not 0
-- at step 0.
local function warm(t, steps, start)
  if t >= steps then return 1 end
  if start then return start + (1 - start) * t / steps end
  return (t + 1) / steps
end

--- The factor increases linearly over `steps` steps to 1 and stays there. It begins with start_factor, or with 1 /
--- steps.
---@param optimizer Optimizer  its groups' lr is set
---@param given { steps: integer, start_factor: number }
---   steps: until the factor is 1; start_factor: the first factor (default: 1 / steps)
---@return LRScheduler
function M.linear_warmup(optimizer, given)
  local o = options("linear_warmup", given, { steps = some_steps, start_factor = opts.number })
  return new("linear_warmup", optimizer, function(t) return warm(t, o.steps, o.start_factor) end)
end

--- Linear warmup, then half a cosine period from 1 to min_factor at the last of `steps` steps (Loshchilov & Hutter
--- 2017).
---@param optimizer Optimizer  its groups' lr is set
---@param given { steps: integer, warmup: integer, min_factor: number, start_factor: number }
---   steps: until the last factor, warmup included; warmup: number of steps in which the factor rises linearly
---   (default: 0); min_factor: the last factor (default: 0); start_factor: the first factor of the warmup (default: 1 /
---   warmup)
---@return LRScheduler
function M.cosine(optimizer, given)
  local o = options("cosine", given, { steps = some_steps, warmup = opts.option(count, 0), min_factor = 0, start_factor = opts.number })
  if o.warmup > o.steps then
    raise("lr_scheduler.cosine: option 'warmup' is %d, expected at most option 'steps', %d", o.warmup, o.steps)
  end
  return new("cosine", optimizer, function(t)
    if t < o.warmup then return warm(t, o.warmup, o.start_factor) end
    local span = o.steps - o.warmup
    local part = span > 0 and math.min((t - o.warmup) / span, 1) or 1
    return o.min_factor + (1 - o.min_factor) * 0.5 * (1 + math.cos(math.pi * part))
  end)
end

--- The factor changes linearly from start_factor to end_factor over `steps` steps and stays there.
---@param optimizer Optimizer  its groups' lr is set
---@param given { steps: integer, start_factor: number, end_factor: number }
---   steps: from the first factor to the last; start_factor: the first factor (default: 1); end_factor: the last factor
---   (default: 0)
---@return LRScheduler
function M.linear(optimizer, given)
  local o = options("linear", given, { steps = some_steps, start_factor = 1, end_factor = 0 })
  return new("linear", optimizer, function(t)
    return o.start_factor + (o.end_factor - o.start_factor) * (t < o.steps and t / o.steps or 1)
  end)
end

--- The factor is constant for a number of steps, and 1 after them.
---@param optimizer Optimizer  its groups' lr is set
---@param given? { factor: number, steps: integer }
---   factor: multiplies the initial learning rate; steps: until the factor is 1 (default: never)
---@return LRScheduler
function M.constant(optimizer, given)
  local o = options("constant", given, { factor = 1, steps = opts.number })
  return new("constant", optimizer, function(t)
    return (not o.steps or t < o.steps) and o.factor or 1
  end)
end

--- Multiplies the initial learning rates by fn(step); steps count from 0.
---@param optimizer Optimizer  its groups' lr is set
---@param fn fun(step: integer): number  steps count from 0
---@return LRScheduler
function M.lambda(optimizer, fn)
  opts.expect(fn, opts.fn, "lr_scheduler.lambda: argument 2")
  return new("lambda", optimizer, fn)
end

return M
