-- SPDX-License-Identifier: MIT
--- L-BFGS with an optional line search.
local capture = require "moonshard.autograd.capture"
local opts = require "moonshard.core.opts"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local places = require "moonshard.core.places"
local scope = require "moonshard.tensor.scope"
local shards = require "moonshard.nn.module.shards"
local shapes = require "moonshard.tensor.shape"
local composed = require "moonshard.optim.composed"
local utils = require "moonshard.nn.utils"

local expect_reduced = require "moonshard.autograd.sparse".expect_reduced
local option, raise = opts.option, errors.raise
local remove, max, min, abs = table.remove, math.max, math.min, math.abs

local positive_whole = opts.whole_from(1)

--- L-BFGS (Nocedal & Wright, Numerical Optimization, algorithms 7.4 and 7.5): one step makes up to max_iter iterations,
--- each with the loss and gradients of the closure. Only for whole parameters in one group. Under nn.DDP, and under
--- FSDP's no_shard, it minimizes the mean of the ranks' losses, whose gradients the ranks share.
---@class LBFGS: Optimizer
---@overload fun(params: Tensor[], opts: { lr: number, max_iter: integer, max_eval: integer, tolerance_grad: number, tolerance_change: number, history_size: integer, line_search_fn: string, maximize: boolean }): LBFGS
---   params: whole leaves; lr: length of a step along the direction (default: 1); max_iter: iterations of a step
---   (default: 20); max_eval: calls of the closure in a step (default: 1.25 max_iter); tolerance_grad: ends the step
---   when no gradient is larger (default: 1e-7); tolerance_change: ends the step when no parameter, or the loss,
---   changes by more (default: 1e-9); history_size: number of changes that approximate the Hessian (default: 100);
---   line_search_fn: "strong_wolfe" or nil (default: nil); maximize: maximizes instead of minimizing (default: false)
local LBFGS = composed.define("LBFGS", { "direction", "last_grad", "changes", "steps" }, {
  lr = option(opts.number_from(0), 1), max_iter = option(positive_whole, 20), max_eval = positive_whole,
  tolerance_grad = option(opts.number_from(0), 1e-7), tolerance_change = option(opts.number_from(0), 1e-9),
  history_size = option(positive_whole, 100), line_search_fn = opts.one_of { "strong_wolfe" }, maximize = false,
})

function LBFGS:_accept(p, k)
  if shards.is_cut(p) then
    raise("%s: parameter %d is sharded; %s only works on whole parameters", self:class_name(), k, self:class_name())
  end
  if p.id < 0 then
    raise("%s: parameter %d is a %s; tensor classes are not supported", self:class_name(), k, p:class_name())
  end
end

function LBFGS:_check_group(_, later)
  if not later and #self.param_groups > 0 then
    raise("%s: there is more than one group, expected one list of parameters", self:class_name())
  end
end

-- ---- the objective --------------------------------------------------------------------------------

-- The gradients of all parameters as one vector, negated with maximize; zeros for a parameter without a gradient.
local function flat_grad(group)
  local list = {}
  for k, p in ipairs(group.params) do
    expect_reduced(p)
    p = shards.part_of(p)
    local g = p.grad
    if g ~= nil and g.is_sparse then g = g:to_dense() end
    list[k] = g and g:detach():reshape(-1) or create.zeros(p:numel(), { dtype = p.dtype, device = p.device })
  end
  local all = shapes.cat(list)
  return group.maximize and -all or all
end

-- Adds t * d to the parameters.
local function move(group, t, d)
  local at = 1
  for _, p in ipairs(group.params) do
    local part = shards.part_of(p)
    local n = part:numel()
    part:add_(d:narrow(1, at, n):view(part.shape), { alpha = t })
    shards.drop_gathered(p)
    at = at + n
  end
end

local function evaluate(group, closure)
  local result = autograd.enable_grad(closure)
  for k, p in ipairs(group.params) do shards.expect_trained(p, ("LBFGS: parameter %d"):format(k), "the optimizer") end
  local loss = type(result) == "number" and result or result:item()
  local replicas = utils._group_of(group.params)
  if replicas then
    local mean = create.tensor({ loss }, { dtype = "float64", device = "cpu" })
    dist.all_reduce(mean, { op = "avg", group = replicas })
    loss = mean:item()
  end
  return group.maximize and -loss or loss, flat_grad(group), result
end

-- ---- the line search ------------------------------------------------------------------------------

-- The minimum in [low, high] of the cubic with the losses and slopes of points a and b (Nocedal & Wright, eq. 3.59), or
-- the middle of [low, high] if the cubic has no minimum.
local function cubic_minimum(a, b, low, high)
  low, high = low or min(a.t, b.t), high or max(a.t, b.t)
  if a.t > b.t then a, b = b, a end
  local d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.t - b.t)
  local square = d1 * d1 - a.slope * b.slope
  if not (square >= 0) then return (low + high) / 2 end
  local d2 = math.sqrt(square)
  local t = b.t - (b.t - a.t) * ((b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2))
  return min(max(t, low), high)
end

local ARMIJO, CURVATURE = 1e-4, 0.9

local function enough(point, start) return point.loss <= start.loss + ARMIJO * point.t * start.slope end
local function flat(point, start) return abs(point.slope) <= -CURVATURE * start.slope end

-- Brackets a point that fulfils the strong Wolfe conditions (algorithm 3.5). Returns the bracket: the two points around
-- it, or such a point alone, or the first and the last point if `limit` evaluations found no bracket. Also returns
-- whether the bracket is a single point, and the number of evaluations after the first.
local function bracket(at, start, t, limit)
  local last, now, n = start, at(t), 0
  while n < limit do
    if not enough(now, start) or (n > 1 and now.loss >= last.loss) then return { last, now }, false, n end
    if flat(now, start) then return { now }, true, n end
    if now.slope >= 0 then return { last, now }, false, n end
    local next = cubic_minimum(last, now, now.t + 0.01 * (now.t - last.t), now.t * 10)
    last, now, n = now, at(next), n + 1
  end
  return { start, now }, false, n
end

-- Narrows a bracket (algorithm 3.6) to a point that fulfils the strong Wolfe conditions, or until it is narrower than
-- `least` or n, the number of evaluations after the first, is `limit`. Returns the best point.
local function narrow(at, start, points, n, limit, least)
  local low, high = points[1], points[2]
  if high.loss < low.loss then low, high = high, low end
  local stuck = false
  while n < limit and abs(high.t - low.t) >= least do
    local t, left, right = cubic_minimum(low, high), min(low.t, high.t), max(low.t, high.t)
    local margin = 0.1 * (right - left)
    -- A point near an end of the bracket is moved away from the end if the previous point was near an end, too, or if
    -- the point does not lie inside of the bracket.
    if min(right - t, t - left) < margin then
      if stuck or t >= right or t <= left then
        t = abs(t - right) < abs(t - left) and right - margin or left + margin
        stuck = false
      else
        stuck = true
      end
    else
      stuck = false
    end
    local now = at(t)
    n = n + 1
    if not enough(now, start) or now.loss >= low.loss then
      high = now
      if high.loss < low.loss then low, high = high, low end
    else
      local done = flat(now, start)
      if not done and now.slope * (high.t - low.t) >= 0 then high = low end
      low = now
      if done then break end
    end
  end
  return low
end

-- ---- steps ----------------------------------------------------------------------------------------

-- The direction - H g, with the inverse Hessian H approximated by the history (algorithm 7.4).
local function direction(entry, g)
  local changes, steps, weights, al = entry.changes, entry.steps, {}, {}
  local q = -g
  for i = #changes, 1, -1 do
    weights[i] = 1 / changes[i]:dot(steps[i]):item()
    al[i] = steps[i]:dot(q):item() * weights[i]
    q = q - changes[i] * al[i]
  end
  local r = q * entry.scale
  for i = 1, #changes do
    r = r + steps[i] * (al[i] - changes[i]:dot(r):item() * weights[i])
  end
  return r
end

-- Adds the last iteration's change of the gradient, and its step, to the history, if their dot product is above 1e-10.
local function remember(entry, g, size)
  local change, step = g - entry.last_grad, entry.direction * entry.length
  local product = change:dot(step):item()
  if product <= 1e-10 then return end
  if #entry.changes == size then
    remove(entry.changes, 1):release()
    remove(entry.steps, 1):release()
  end
  entry.changes[#entry.changes + 1], entry.steps[#entry.steps + 1] = change:keep(), step:keep()
  entry.scale = product / change:dot(change):item()
end

local function keep(entry, name, t)
  if entry[name] then entry[name]:release() end
  entry[name] = t:clone():keep()
end

-- One iteration from a point with this loss and gradient. limits: last (whether it is the last iteration) and
-- evaluations (how many are left). Returns the new point's loss and gradient (those of the given point if the new one
-- was not evaluated), the number of evaluations, and whether the step ends.
local function iterate(self, group, closure, loss, g, limits)
  local entry = self._memory
  entry.iterations = entry.iterations + 1
  local d
  if entry.iterations == 1 then
    d = -g
  else
    remember(entry, g, group.history_size)
    d = direction(entry, g)
  end
  keep(entry, "direction", d)
  keep(entry, "last_grad", g)
  local t = entry.iterations == 1 and min(1, 1 / g:abs():sum():item()) * group.lr or group.lr
  local slope = g:dot(d):item()
  entry.length = t
  if slope > -group.tolerance_change then return loss, g, 0, true end
  local evaluations, before = 0, loss
  if group.line_search_fn then
    local start = { t = 0, loss = loss, grad = g, slope = slope }
    local at_t = 0
    local function at(length)
      move(group, length - at_t, d)
      at_t = length
      local f, grad = evaluate(group, closure)
      evaluations = evaluations + 1
      return { t = length, loss = f, grad = grad, slope = grad:dot(d):item() }
    end
    local points, done, n = bracket(at, start, t, limits.evaluations)
    local best = points[1]
    if not done then
      best = narrow(at, start, points, n, limits.evaluations, 1e-9 / d:abs():max():item())
    end
    move(group, best.t - at_t, d)
    entry.length, loss, g = best.t, best.loss, best.grad
  else
    move(group, t, d)
    if not limits.last then
      loss, g = evaluate(group, closure)
      evaluations = 1
    end
  end
  local done = limits.last or evaluations >= limits.evaluations or g:abs():max():item() <= group.tolerance_grad
    or (d:abs():max():item() * abs(entry.length)) <= group.tolerance_change
    or abs(loss - before) < group.tolerance_change
  return loss, g, evaluations, done
end

local function minimize(self, group, closure)
  local most = group.max_eval or math.floor(group.max_iter * 1.25)
  local loss, g, result = evaluate(group, closure)
  local used = 1
  if g:numel() == 0 or g:abs():max():item() <= group.tolerance_grad then return result end
  self._memory = self._memory or { iterations = 0, length = 0, scale = 1, changes = {}, steps = {} }
  for k = 1, group.max_iter do
    local evaluations, done
    loss, g, evaluations, done = iterate(self, group, closure, loss, g,
      { last = k == group.max_iter, evaluations = most - used })
    used = used + evaluations
    if done then break end
  end
  return result
end

--- Makes up to max_iter iterations.
---@param closure fun(): Tensor  clears the gradients, computes the loss, runs its backward, and returns the loss
---@return Tensor  the closure's first result
function LBFGS:step(closure)
  opts.expect(closure, opts.fn, "%s: step: closure", self:class_name())
  capture.refuse(("the steps of %s are Lua functions, which repetitions would not call"):format(self:class_name()))
  self:_expect_trained()
  local group = self.param_groups[1]
  self:_check(group, true)
  for k, p in ipairs(group.params) do self:_accept(p, k) end
  local result = autograd.no_grad(scope.scope, minimize, self, group, closure)
  places.mark()
  return result
end

function LBFGS:_step_part()
  raise("%s steps all parameters at once, so ZeroRedundancyOptimizer cannot distribute it", self:class_name())
end

-- ---- state ----------------------------------------------------------------------------------------

-- The memory of all iterations is the state of the first parameter.
local function as_entry(self)
  local m = self._memory
  if not m then return nil end
  local n = #m.changes
  return { step = m.iterations, direction = m.direction, last_grad = m.last_grad, length = m.length,
    iterations = m.iterations, scale = m.scale, changes = n > 0 and shapes.stack(m.changes) or nil,
    steps = n > 0 and shapes.stack(m.steps) or nil }
end

function LBFGS:state_of(p) return rawequal(p, self.param_groups[1].params[1]) and as_entry(self) or nil end
function LBFGS._keeps_whole() return true end
function LBFGS._state_shape(_, _, _, _, t) return tostring(t.shape) end
function LBFGS:_forget() self._memory = nil end

function LBFGS:_load_entry(_, _, entry)
  local p = self.param_groups[1].params[1]
  local function own(t) return t:detach():clone():to(p.device):keep() end
  local m = { iterations = entry.iterations, length = entry.length, scale = entry.scale, changes = {}, steps = {},
    direction = own(entry.direction), last_grad = own(entry.last_grad) }
  for k = 1, entry.changes and entry.changes:size(1) or 0 do
    m.changes[k], m.steps[k] = own(entry.changes:select(1, k)), own(entry.steps:select(1, k))
  end
  self._memory = m
end

return { LBFGS = LBFGS }
