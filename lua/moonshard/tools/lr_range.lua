-- SPDX-License-Identifier: MIT
--- The learning rate range test (Smith 2017): a short training with a growing learning rate.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local plot = require "moonshard.plot"
local scope = require "moonshard.tensor.scope"
local util = require "moonshard.tensor.util"

local M = {}

---@class LRRange
---@field lr number[]  the learning rate of each step
---@field loss number[]  the loss of each step, smoothed
---@field suggestion number  the learning rate at which the smoothed loss falls fastest
local LRRange = { __name = "LRRange" }
LRRange.__index = LRRange

--- The curve as a plot: `:text()` draws it in the terminal, `:save "range.svg"` as SVG.
---@return Plot
function LRRange:plot()
  return plot.line({ x = self.lr, y = self.loss, label = "loss" },
    { title = ("suggested learning rate: %.2g"):format(self.suggestion), x_label = "learning rate", x_scale = "log" })
end

function LRRange:__tostring()
  return ("%s\nsuggested learning rate: %.2g"):format(self:plot():text(), self.suggestion)
end

-- Copies of the parameters and of the optimizer's state, which the test changes.
local function copy_of(optimizer)
  local copies = {}
  autograd.no_grad(function()
    for _, group in ipairs(optimizer.param_groups) do
      for _, p in ipairs(group.params) do copies[p] = p:detach():clone():keep() end
    end
  end)
  return { copies = copies, state = util.deepcopy(optimizer:state_dict()) }
end

local function restore(optimizer, saved)
  autograd.no_grad(function()
    for p, copy in pairs(saved.copies) do
      p:copy_(copy)
      p.grad = nil
      copy:release()
    end
  end)
  optimizer:load_state_dict(saved.state)
end

-- The mean of a number over all ranks, so that they stop at the same step.
local function over_ranks(loss)
  if dist.world_size() == 1 then return loss end
  local t = create.tensor({ loss }, { dtype = "float64" })
  dist.all_reduce(t, { op = "avg" })
  return t:item()
end

--- Trains for `steps` steps with a learning rate that grows exponentially from `from` to `to`, and restores parameters
--- and optimizer afterwards. Stops early when, from step 2 on, the loss is not finite or the smoothed loss exceeds
--- `stop` times its lowest value. Every rank makes the call, and the loss is the mean over them. The result prints the
--- curve; `result:plot():save "range.svg"` writes it as SVG. Errors: the test ends before its third step.
---@param optimizer Optimizer  of the model to train
---@param step fun(step: integer): number|Tensor  makes gradients and returns the loss; the test calls the optimizer's step
---@param given? { from: number, to: number, steps: integer, smooth: number, stop: number }
---   from: first learning rate (default: 1e-7); to: last (default: 10); steps: number of steps (default: 100); smooth:
---   weight of the earlier losses in the moving average, from 0 to below 1 (default: 0.9); stop: multiple of the lowest
---   loss that ends the test (default: 4)
---@return LRRange
function M.lr_range_test(optimizer, step, given)
  opts.need(type(optimizer) == "table" and type(optimizer.param_groups) == "table", optimizer, "an optimizer",
    "lr_range_test: argument 1")
  opts.expect(step, opts.fn, "lr_range_test: argument 2")
  local o = opts("lr_range_test", given, { from = opts.option(opts.positive, 1e-7), to = opts.option(opts.positive, 10),
    steps = opts.option(opts.whole_from(3), 100), smooth = 0.9, stop = opts.option(opts.positive, 4) })
  opts.need(o.smooth >= 0 and o.smooth < 1, o.smooth, "a number from 0 to below 1", "lr_range_test: option 'smooth'")
  local saved = copy_of(optimizer)
  local result = setmetatable({ lr = {}, loss = {} }, LRRange)
  local average, lowest = 0, math.huge
  local ok, message = pcall(scope.steps, o.steps, function(k)
    local lr = o.from * (o.to / o.from) ^ ((k - 1) / (o.steps - 1))
    for _, group in ipairs(optimizer.param_groups) do group.lr = lr end
    optimizer:zero_grad()
    local loss = step(k)
    if type(loss) == "table" then loss = loss:item() end
    loss = over_ranks(opts.expect(loss, opts.number, "lr_range_test: the loss of step %d", k))
    average = o.smooth * average + (1 - o.smooth) * loss
    local smoothed = average / (1 - o.smooth ^ k)
    if loss - loss ~= 0 or smoothed > o.stop * lowest then error(result, 0) end
    lowest = math.min(lowest, smoothed)
    result.lr[k], result.loss[k] = lr, smoothed
    optimizer:step()
  end)
  restore(optimizer, saved)
  if not ok and message ~= result then error(message, 0) end
  if #result.lr < 3 then
    errors.raise("lr_range_test: in step %d the loss was not finite, or its moving average exceeded %g times the lowest one; set option 'from' below %g",
      #result.lr + 1, o.stop, o.from)
  end
  -- The slope at a step is the difference of the losses a tenth of all steps after and before it. So the first and the
  -- last tenth have no slope; the losses of the first tenth depend on the batches more than on the learning rate.
  local n = #result.lr
  local span = math.max(1, math.floor(n / 10))
  local steepest = 0
  result.suggestion = result.lr[1]
  for k = span + 1, n - span do
    local slope = result.loss[k + span] - result.loss[k - span]
    if slope < steepest then steepest, result.suggestion = slope, result.lr[k] end
  end
  return result
end

return M
