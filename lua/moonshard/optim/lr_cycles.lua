-- SPDX-License-Identifier: MIT
--- Learning rate schedules with cycles, those that follow a measurement, and those made of others.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local schedule = require "moonshard.optim.schedule"

local raise, new, options = errors.raise, schedule.new, schedule.options
local positive = opts.option(opts.positive, opts.required)

local M = {}

--- Half a cosine period from the initial learning rate to eta_min, repeatedly (SGDR: Loshchilov & Hutter 2017).
---@param optimizer Optimizer  its groups' lr is set
---@param given { steps: integer, T_mult: integer, eta_min: number }
---   steps: number of steps of the first period; T_mult: factor between the lengths of periods (default: 1);
---   eta_min: the learning rate that a period approaches (default: 0)
---@return LRScheduler
function M.cosine_warm_restarts(optimizer, given)
  local o = options("cosine_warm_restarts", given, { steps = opts.option(opts.whole_from(1), opts.required),
    T_mult = opts.option(opts.whole_from(1), 1), eta_min = 0 })
  return new("cosine_warm_restarts", optimizer, { lr_at = function(self, t, k)
    local length = o.steps
    if o.T_mult == 1 then
      t = t % length
    else
      while t >= length do t, length = t - length, length * o.T_mult end
    end
    return o.eta_min + (self.base_lrs[k] - o.eta_min) * (1 + math.cos(math.pi * t / length)) / 2
  end })
end

-- ---- schedules that also move the momentum ------------------------------------------------------------

-- Sets the momentum of a group: SGD's, or the first of Adam's betas.
local function set_momentum(group, value)
  if group.betas then group.betas = { value, group.betas[2] } else group.momentum = value end
end

local function need_momentum(kind, optimizer)
  for k, group in ipairs(type(optimizer) == "table" and optimizer.param_groups or {}) do
    if not group.betas and not (group.momentum and group.momentum > 0) then
      raise("lr_scheduler.%s: group %d has no momentum to cycle; give it one, or set cycle_momentum = false", kind, k)
    end
  end
end

local function cosine_between(from, to, part) return to + (from - to) / 2 * (1 + math.cos(math.pi * part)) end
local function line_between(from, to, part) return from + (to - from) * part end

--- The learning rate rises from max_lr / div_factor to max_lr and falls to a small final value; the momentum moves the
--- other way (one-cycle policy: Smith & Topin 2018). Errors: more steps than `steps`.
---@param optimizer Optimizer  its groups' lr is set, and their momentum
---@param given { max_lr: number, steps: integer, epochs: integer, steps_per_epoch: integer, pct_start: number, anneal_strategy: "cos"|"linear", cycle_momentum: boolean, base_momentum: number, max_momentum: number, div_factor: number, final_div_factor: number, three_phase: boolean }
---   max_lr: the highest learning rate; steps: length of the cycle (default: epochs times steps_per_epoch);
---   epochs: number of epochs; steps_per_epoch: steps of an epoch; pct_start: share of the steps in which the learning
---   rate rises (default: 0.3); anneal_strategy: form of the curve (default: "cos"); cycle_momentum: also moves the
---   momentum (default: true); base_momentum: momentum at the highest learning rate (default: 0.85); max_momentum:
---   momentum at the ends (default: 0.95); div_factor: max_lr divided by the first learning rate (default: 25);
---   final_div_factor: the first learning rate divided by the last (default: 1e4); three_phase: the learning rate first
---   falls to its initial value, in as many steps as it rose (default: false)
---@return LRScheduler
function M.one_cycle(optimizer, given)
  local o = options("one_cycle", given, { max_lr = positive, steps = opts.number, epochs = opts.number,
    steps_per_epoch = opts.number, pct_start = 0.3, anneal_strategy = opts.one_of({ "cos", "linear" }, "cos"),
    cycle_momentum = true, base_momentum = 0.85, max_momentum = 0.95, div_factor = opts.option(opts.positive, 25),
    final_div_factor = opts.option(opts.positive, 1e4), three_phase = false })
  local total = o.steps or (o.epochs and o.steps_per_epoch and o.epochs * o.steps_per_epoch)
  if not total then raise "lr_scheduler.one_cycle: option 'steps' is nil, expected a number, or options epochs and steps_per_epoch" end
  if total == 0 then raise("lr_scheduler.one_cycle: the number of steps is 0, expected a whole number from 1%s", schedule.no_batches) end
  opts.expect(total, opts.whole_from(1), "lr_scheduler.one_cycle: the number of steps")
  opts.need(o.pct_start >= 0 and o.pct_start <= 1, o.pct_start, "a number from 0 to 1",
    "lr_scheduler.one_cycle: option 'pct_start'")
  if o.cycle_momentum then need_momentum("one_cycle", optimizer) end
  local first = o.max_lr / o.div_factor
  local last, low, high = first / o.final_div_factor, o.base_momentum, o.max_momentum
  local up = o.pct_start * total - 1
  -- The phases, each { last step, learning rate at its beginning and end, momentum at its beginning and end }.
  local phases = { { up, first, o.max_lr, high, low }, { total - 1, o.max_lr, last, low, high } }
  if o.three_phase then
    phases = { { up, first, o.max_lr, high, low }, { 2 * up, o.max_lr, first, low, high },
      { total - 1, first, last, high, high } }
  end
  local between = o.anneal_strategy == "cos" and cosine_between or line_between
  local function at(t)
    if t > total then
      raise("lr_scheduler.one_cycle: step %d was asked for, expected at most %d, the number of steps", t, total)
    end
    local from = 0
    for k, phase in ipairs(phases) do
      if t <= phase[1] or k == #phases then
        local part = (t - from) / (phase[1] - from)
        return between(phase[2], phase[3], part), between(phase[4], phase[5], part)
      end
      from = phase[1]
    end
  end
  return new("one_cycle", optimizer, {
    lr_at = function(_, t) return (at(t)) end,
    each = o.cycle_momentum and function(_, group, t) set_momentum(group, select(2, at(t))) end or nil,
  })
end

--- The learning rate moves between base_lr and max_lr in triangles (Smith 2017); the momentum moves the other way.
---@param optimizer Optimizer  its groups' lr is set, and their momentum
---@param given { base_lr: number, max_lr: number, step_size_up: integer, step_size_down: integer, mode: "triangular"|"triangular2"|"exp_range", gamma: number, cycle_momentum: boolean, base_momentum: number, max_momentum: number }
---   base_lr: the lowest learning rate; max_lr: the highest; step_size_up: steps of a rise (default: 2000);
---   step_size_down: steps of a fall (default: step_size_up); mode: "triangular2" halves the height with each cycle,
---   "exp_range" multiplies it by gamma ^ step (default: "triangular"); gamma: the factor of "exp_range" (default: 1);
---   cycle_momentum: also moves the momentum (default: true); base_momentum: momentum at the highest learning rate
---   (default: 0.8); max_momentum: momentum at the lowest (default: 0.9)
---@return LRScheduler
function M.cyclic(optimizer, given)
  local o = options("cyclic", given, { base_lr = positive, max_lr = positive,
    step_size_up = opts.option(opts.whole_from(1), 2000), step_size_down = opts.number,
    mode = opts.one_of({ "triangular", "triangular2", "exp_range" }, "triangular"), gamma = 1, cycle_momentum = true,
    base_momentum = 0.8, max_momentum = 0.9 })
  local down = o.step_size_down and opts.expect(o.step_size_down, opts.whole_from(1),
    "lr_scheduler.cyclic: option 'step_size_down'") or o.step_size_up
  if o.cycle_momentum then need_momentum("cyclic", optimizer) end
  local total = o.step_size_up + down
  local ratio = o.step_size_up / total
  -- The height of the triangles at step t: the learning rate's share of the way from base_lr to max_lr.
  local function height(t)
    local cycle = math.floor(1 + t / total)
    local x = 1 + t / total - cycle
    local h = x <= ratio and x / ratio or (x - 1) / (ratio - 1)
    return h * (o.mode == "triangular2" and 1 / 2 ^ (cycle - 1) or o.mode == "exp_range" and o.gamma ^ t or 1)
  end
  return new("cyclic", optimizer, {
    lr_at = function(_, t) return o.base_lr + (o.max_lr - o.base_lr) * height(t) end,
    each = o.cycle_momentum and function(_, group, t)
      set_momentum(group, o.max_momentum - (o.max_momentum - o.base_momentum) * height(t))
    end or nil,
  })
end

-- ---- schedules that depend on what happened -----------------------------------------------------------

--- Multiplies the learning rate by fn(step) at every step; steps count from 1.
---@param optimizer Optimizer  its groups' lr is set
---@param fn fun(step: integer): number  the factor between the learning rates of step - 1 and step
---@return LRScheduler
function M.multiplicative(optimizer, fn)
  opts.expect(fn, opts.fn, "lr_scheduler.multiplicative: argument 2")
  -- product: the product of the factors of steps 1 to `steps`.
  return new("multiplicative", optimizer, { product = 1, steps = 0, remembers = { "product", "steps" },
    lr_at = function(self, t, k)
      if t < self.steps then self.product, self.steps = 1, 0 end
      while self.steps < t do
        local factor = fn(self.steps + 1)
        opts.need(type(factor) == "number" and factor == factor, factor, "a number other than NaN",
          "lr_scheduler.multiplicative: the factor of step %d", self.steps + 1)
        self.product, self.steps = self.product * factor, self.steps + 1
      end
      return self.base_lrs[k] * self.product
    end })
end

--- Multiplies the learning rate by a factor when a measurement has not improved for some steps: `schedule:step(loss)`.
---@param optimizer Optimizer  its groups' lr is set
---@param given? { mode: "min"|"max", factor: number, patience: integer, threshold: number, threshold_mode: "rel"|"abs", cooldown: integer, min_lr: number, eps: number }
---   mode: "min" if lower is better (default), or "max"; factor: below 1 (default: 0.1); patience: steps without
---   improvement that are tolerated (default: 10); threshold: smallest change that counts as an improvement (default:
---   1e-4); threshold_mode: relative to the best value, or absolute (default: "rel"); cooldown: steps after a reduction
---   that do not count towards patience (default: 0); min_lr: lower limit (default: 0); eps: changes of the learning
---   rate up to this are not made (default: 1e-8)
---@return LRScheduler
function M.reduce_on_plateau(optimizer, given)
  local o = options("reduce_on_plateau", given, { mode = opts.one_of({ "min", "max" }, "min"), factor = 0.1,
    patience = opts.option(opts.whole_from(0), 10), threshold = 1e-4,
    threshold_mode = opts.one_of({ "rel", "abs" }, "rel"), cooldown = opts.option(opts.whole_from(0), 0), min_lr = 0,
    eps = 1e-8 })
  opts.need(o.factor < 1, o.factor, "a number below 1", "lr_scheduler.reduce_on_plateau: option 'factor'")
  local sign = o.mode == "min" and 1 or -1
  local plateau = new("reduce_on_plateau", optimizer, {
    best = sign * math.huge, bad = 0, cooling = 0, reductions = 0,
    remembers = { "best", "bad", "cooling", "reductions" },
    lr_at = function(self, _, k)
      local lr = self.base_lrs[k]
      for _ = 1, self.reductions do
        local lower = math.max(lr * o.factor, o.min_lr)
        if lr - lower > o.eps then lr = lower end
      end
      return lr
    end,
  })
  local function is_better(value)
    local best = plateau.best
    if best == sign * math.huge then return value ~= best end
    return sign * value < sign * best - o.threshold * (o.threshold_mode == "rel" and math.abs(best) or 1)
  end
  local step = schedule.Scheduler.step
  function plateau:step(value)
    if type(value) == "table" and value.item then value = value:item() end
    opts.expect(value, opts.number, "lr_scheduler.reduce_on_plateau: step: argument 1")
    if is_better(value) then self.best, self.bad = value, 0 else self.bad = self.bad + 1 end
    if self.cooling > 0 then self.cooling, self.bad = self.cooling - 1, 0 end
    if self.bad > o.patience then
      self.reductions, self.cooling, self.bad = self.reductions + 1, o.cooldown, 0
    end
    step(self)
  end
  return plateau
end

-- ---- schedules made of others -------------------------------------------------------------------------

local function check_parts(kind, optimizer, schedules)
  opts.expect(schedules, opts.table, "lr_scheduler.%s: schedules", kind)
  if #schedules == 0 then raise("lr_scheduler.%s: the list of schedules is empty, expected at least one", kind) end
  for k, part in ipairs(schedules) do
    opts.expect(part, schedule.a_schedule, "lr_scheduler.%s: schedule %d", kind, k)
    if part.optimizer ~= optimizer then raise("lr_scheduler.%s: schedule %d belongs to another optimizer", kind, k) end
    if part.kind == "reduce_on_plateau" then
      raise("lr_scheduler.%s: schedule %d is reduce_on_plateau, whose steps take a value; step it alone", kind, k)
    end
  end
end

--- One schedule after the other, each counting from its own step 0.
---@param optimizer Optimizer  the optimizer of all schedules
---@param given { schedules: LRScheduler[], milestones: integer[] }
---   schedules: the schedules, in order; milestones: the step at which the second schedule begins, the third, ...
---@return LRScheduler
function M.sequential(optimizer, given)
  local o = options("sequential", given, { schedules = opts.option(opts.table, opts.required),
    milestones = opts.option(opts.table, opts.required) })
  check_parts("sequential", optimizer, o.schedules)
  if #o.milestones ~= #o.schedules - 1 then
    raise("lr_scheduler.sequential: the number of milestones is %d, expected %d, one fewer than schedules", #o.milestones,
      #o.schedules - 1)
  end
  for k, m in ipairs(o.milestones) do
    opts.expect(m, opts.whole_from(k > 1 and o.milestones[k - 1] or 0), "lr_scheduler.sequential: milestones[%d]", k)
  end
  local function part_of(t)
    local k = 1
    while o.milestones[k] and t >= o.milestones[k] do k = k + 1 end
    return o.schedules[k], t - (o.milestones[k - 1] or 0)
  end
  return new("sequential", optimizer, {
    parts = o.schedules,
    lr_at = function(_, t, k)
      local part, since = part_of(t)
      return part:lr_at(since, k)
    end,
    each = function(_, group, t, k)
      local part, since = part_of(t)
      if part.each then part:each(group, since, k) end
    end,
    redo = function(_, group, t, k)
      for j, part in ipairs(o.schedules) do
        local from, last = o.milestones[j - 1] or 0, (o.milestones[j] or math.huge) - 1
        local redo = part.redo or part.each
        if redo and last >= from and t >= from then redo(part, group, math.min(t, last) - from, k) end
      end
    end,
  })
end

--- The learning rate moves from its present value to swa_lr and stays there: for the steps that are averaged (SWA:
--- Izmailov et al. 2018), after another schedule.
---@param optimizer Optimizer  its groups' lr is set
---@param given { swa_lr: number, steps: integer, anneal_strategy: "cos"|"linear" }
---   swa_lr: the final learning rate; steps: number of steps until it is reached (default: 10); anneal_strategy: form
---   of the curve (default: "cos")
---@return LRScheduler
function M.swa(optimizer, given)
  local o = options("swa", given, { swa_lr = positive, steps = opts.option(opts.whole_from(0), 10),
    anneal_strategy = opts.one_of({ "cos", "linear" }, "cos") })
  local fields = { remembers = {} }
  for k, group in ipairs(type(optimizer) == "table" and optimizer.param_groups or {}) do
    local name = "start_" .. k
    fields[name], fields.remembers[k] = group.lr, name
  end
  function fields.lr_at(self, t, k)
    local part = o.steps == 0 and 1 or math.min(1, t / o.steps)
    local between = o.anneal_strategy == "cos" and cosine_between or line_between
    return between(self["start_" .. k] or self.base_lrs[k], o.swa_lr, part)
  end
  return new("swa", optimizer, fields)
end

--- Several schedules at once: the initial learning rate times the factors of all.
---@param optimizer Optimizer  the optimizer of all schedules
---@param schedules LRScheduler[]  schedules that multiply the initial learning rates by a factor
---@return LRScheduler
function M.chained(optimizer, schedules)
  check_parts("chained", optimizer, schedules)
  return new("chained", optimizer, { parts = schedules, lr_at = function(self, t, k)
    local base = self.base_lrs[k]
    local lr = base
    for _, part in ipairs(schedules) do lr = lr * (base == 0 and 1 or part:lr_at(t, k) / base) end
    return lr
  end })
end

return M
