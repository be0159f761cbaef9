-- SPDX-License-Identifier: MIT
--- Learning rate schedules that multiply each group's initial learning rate by a factor that depends on the number of
--- steps taken. lr_cycles.lua has cyclic ones, and those that also set the momentum, follow a measurement or combine
--- others.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local schedule = require "moonshard.optim.schedule"

local raise, options, new = errors.raise, schedule.options, schedule.of_factor

local M = {}

local count = opts.whole_from(0)
local some_steps = opts.option(count, opts.required)

-- The factor of the learning rate at step t: linear from start to 1 over `steps` steps. Without start it is
-- (t + 1) / steps, which is not 0 at step 0.
local function warm(t, steps, start)
  if t >= steps then return 1 end
  if start then return start + (1 - start) * t / steps end
  return (t + 1) / steps
end

-- PyTorch's schedules of these names have other defaults, so a script that gives the number of steps under PyTorch's
-- name must also give the factors.
local function need_factors(kind, given, factors)
  if not opts.is_plain(given) or given.total_iters == nil then return end
  for _, name in ipairs(errors.names(factors)) do
    if given[name] == nil then
      raise("lr_scheduler.%s: option '%s' is missing, which 'total_iters' needs: PyTorch's default is %s; with 'steps', it is %g", kind,
        name, factors[name][1], factors[name][2])
    end
  end
end

--- The factor of the learning rate increases linearly over `steps` steps to 1 and stays there. It begins with
--- start_factor, or with 1 / steps.
---@param optimizer Optimizer  its groups' lr is set
---@param given { steps: integer, start_factor: number }
---   steps: number of steps until the factor is 1; start_factor: the first factor (default: 1 / steps)
---@return LRScheduler
function M.linear_warmup(optimizer, given)
  local o = options("linear_warmup", given, { steps = some_steps, start_factor = opts.number })
  return new("linear_warmup", optimizer, function(t) return warm(t, o.steps, o.start_factor) end)
end

--- Linear warmup, then half a cosine period from 1 to min_factor, which it reaches after `steps` steps (Loshchilov &
--- Hutter 2017).
---@param optimizer Optimizer  its groups' lr is set
---@param given { steps: integer, warmup: integer, min_factor: number, start_factor: number }
---   steps: number of steps until the last factor, warmup included; warmup: number of steps in which the factor rises
---   linearly (default: 0); min_factor: the last factor (default: 0); start_factor: the first factor of the warmup
---   (default: 1 / warmup)
---@return LRScheduler
function M.cosine(optimizer, given)
  local o = options("cosine", given, { steps = some_steps, warmup = opts.option(count, 0), min_factor = 0, start_factor = opts.number })
  if o.warmup > o.steps then
    raise("lr_scheduler.cosine: option 'warmup' is %d, expected at most option 'steps', %d%s", o.warmup, o.steps,
      o.steps == 0 and schedule.no_batches or "")
  end
  schedule.warn_of_none("cosine", o.steps)
  return new("cosine", optimizer, function(t)
    if t < o.warmup then return warm(t, o.warmup, o.start_factor) end
    local span = o.steps - o.warmup
    local part = span > 0 and math.min((t - o.warmup) / span, 1) or 1
    return o.min_factor + (1 - o.min_factor) * 0.5 * (1 + math.cos(math.pi * part))
  end)
end

--- The factor of the learning rate changes linearly from start_factor to end_factor over `steps` steps and stays there.
---@param optimizer Optimizer  its groups' lr is set
---@param given { steps: integer, start_factor: number, end_factor: number }
---   steps: number of steps from the first factor to the last; start_factor: the first factor (default: 1); end_factor:
---   the last factor (default: 0)
---@return LRScheduler
function M.linear(optimizer, given)
  need_factors("linear", given, { start_factor = { "1/3", 1 }, end_factor = { "1", 0 } })
  local o = options("linear", given, { steps = some_steps, start_factor = 1, end_factor = 0 })
  schedule.warn_of_none("linear", o.steps)
  return new("linear", optimizer, function(t)
    return o.start_factor + (o.end_factor - o.start_factor) * (t < o.steps and t / o.steps or 1)
  end)
end

--- The factor of the learning rate is constant for a number of steps, and 1 after them.
---@param optimizer Optimizer  its groups' lr is set
---@param given? { factor: number, steps: integer }
---   factor: multiplies the initial learning rate; steps: number of steps until the factor is 1 (default: never)
---@return LRScheduler
function M.constant(optimizer, given)
  need_factors("constant", given, { factor = { "1/3", 1 } })
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

--- Multiplies the learning rate by gamma every step_size steps.
---@param optimizer Optimizer  its groups' lr is set
---@param given { step_size: integer, gamma: number }
---   step_size: steps between the changes; gamma: the factor (default: 0.1)
---@return LRScheduler
function M.step(optimizer, given)
  local o = options("step", given, { step_size = opts.option(opts.whole_from(1), opts.required), gamma = 0.1 })
  return new("step", optimizer, function(t) return o.gamma ^ math.floor(t / o.step_size) end)
end

--- Multiplies the learning rate by gamma at each milestone.
---@param optimizer Optimizer  its groups' lr is set
---@param given { milestones: integer[], gamma: number }
---   milestones: numbers of steps after which the rate changes; gamma: the factor (default: 0.1)
---@return LRScheduler
function M.multistep(optimizer, given)
  local o = options("multistep", given, { milestones = opts.option(opts.table, opts.required), gamma = 0.1 })
  for k, m in ipairs(o.milestones) do
    opts.expect(m, opts.whole_from(0), "lr_scheduler.multistep: milestones[%d]", k)
  end
  return new("multistep", optimizer, function(t)
    local passed = 0
    for _, m in ipairs(o.milestones) do passed = passed + (t >= m and 1 or 0) end
    return o.gamma ^ passed
  end)
end

--- Multiplies the learning rate by gamma at every step.
---@param optimizer Optimizer  its groups' lr is set
---@param given { gamma: number }  gamma: the factor of a step
---@return LRScheduler
function M.exponential(optimizer, given)
  local o = options("exponential", given, { gamma = opts.option(opts.number, opts.required) })
  return new("exponential", optimizer, function(t) return o.gamma ^ t end)
end

--- The factor of the learning rate at step t is (1 - t / steps) ^ power: it decreases from 1 to 0, and stays 0.
---@param optimizer Optimizer  its groups' lr is set
---@param given? { steps: integer, power: number }
---   steps: number of steps until the factor is 0 (default: 5); power: exponent (default: 1)
---@return LRScheduler
function M.polynomial(optimizer, given)
  local o = options("polynomial", given, { steps = opts.option(opts.whole_from(1), 5), power = 1 })
  return new("polynomial", optimizer, function(t) return (1 - math.min(t, o.steps) / o.steps) ^ o.power end)
end

--- Warmup, then a constant factor of 1, then a decay to min_factor, reached after `steps` steps (WSD: Hu et al. 2024).
---@param optimizer Optimizer  its groups' lr is set
---@param given { steps: integer, warmup: integer, decay: integer, min_factor: number, shape: "linear"|"cosine"|"sqrt" }
---   steps: number of steps until the last factor, warmup and decay included; warmup: steps in which the factor rises
---   linearly (default: 0); decay: number of steps in which it falls; min_factor: the last factor (default: 0); shape:
---   form of the decay; "sqrt": 1 minus the square root of the part of the decay that has passed (default: "linear")
---@return LRScheduler
function M.wsd(optimizer, given)
  local o = options("wsd", given, { steps = some_steps, warmup = opts.option(count, 0), decay = some_steps,
    min_factor = 0, shape = opts.one_of({ "linear", "cosine", "sqrt" }, "linear") })
  if o.warmup + o.decay > o.steps then
    raise("lr_scheduler.wsd: options 'warmup' and 'decay' are %d and %d, expected at most option 'steps', %d, together%s",
      o.warmup, o.decay, o.steps, o.steps == 0 and schedule.no_batches or "")
  end
  schedule.warn_of_none("wsd", o.steps)
  local shapes = { linear = function(x) return 1 - x end, sqrt = function(x) return 1 - math.sqrt(x) end,
    cosine = function(x) return 0.5 * (1 + math.cos(math.pi * x)) end }
  return new("wsd", optimizer, function(t)
    if t < o.warmup then return warm(t, o.warmup) end
    local left = o.steps - t
    if left >= o.decay then return 1 end
    return o.min_factor + (1 - o.min_factor) * shapes[o.shape](math.min(1 - left / o.decay, 1))
  end)
end

for name, fn in pairs(require "moonshard.optim.lr_cycles") do M[name] = fn end

return M
