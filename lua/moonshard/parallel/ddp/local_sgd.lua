-- SPDX-License-Identifier: MIT
--- Post-local SGD for nn.DDP (Lin et al. 2020; docs/semantics.md#ddp-hooks). In the first iterations gradients are
--- averaged over all ranks or a group. Later they are averaged over a subgroup, or not at all, and an averager averages
--- parameters, over all ranks or a group, every few steps.
---
---   local hooks = nn.ddp_hooks
---   ddp:register_comm_hook(hooks.PostLocalSGDState(nil, nil, { start_localSGD_iter = 100 }), hooks.post_localSGD_hook)
---   local averager = hooks.PeriodicModelAverager { period = 4, warmup_steps = 100 }
---   local optimizer = hooks.PostLocalSGDOptimizer(optim.SGD(ddp:parameters(), { lr = 0.1 }), averager)
local autograd = require "moonshard.autograd"
local calls = require "moonshard.dist.calls"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local shape = require "moonshard.tensor.shape"

local raise = errors.raise

local M = {}

local function check_group(who, what, group)
  if group ~= nil then opts.expect(group, dist._a_group, "%s: %s", who, what) end
end

local function whole_number(who, what, value, least)
  opts.expect(value, opts.whole_from(least), "%s: option '%s'", who, what)
end

-- ---- the hook ------------------------------------------------------------------------------------

---@class PostLocalSGDState
---@field iter integer  iterations that the hook has counted; stops at start_localSGD_iter
local State = { __name = "PostLocalSGDState" }
State.__index = State

function State.__tostring(s) return ("PostLocalSGDState(from iteration %d)"):format(s.start_localSGD_iter) end

-- The group of the ranks on this machine. Collective over the world.
local function of_this_machine()
  local hosts, members, mine = {}, {}, nil
  for r, host in ipairs(dist.all_gather_object(dist.rank() - dist.local_rank())) do
    if not members[host] then hosts[#hosts + 1], members[host] = host, {} end
    table.insert(members[host], r - 1)
  end
  for _, host in ipairs(hosts) do
    local group = #hosts == 1 and dist.default_group() or dist.new_group(members[host])
    if dist.rank(group) then mine = group end
  end
  return mine
end

--- Makes the state of post_localSGD_hook. group: the ranks whose gradients are averaged before iteration
--- start_localSGD_iter (nil: all). subgroup: the ranks whose gradients are averaged from then on (nil: those of this
--- machine; making the state is then collective over the world). With post_local_gradient_allreduce = false gradients
--- are not averaged from then on.
---@param group Group?  nil: all ranks
---@param subgroup Group?  nil: the ranks of this machine
---@param given {start_localSGD_iter: integer, post_local_gradient_allreduce: boolean}
---   start_localSGD_iter: first iteration that averages over subgroup; post_local_gradient_allreduce: false: gradients
---   stay local from then on
---@return PostLocalSGDState
function M.PostLocalSGDState(group, subgroup, given)
  if opts.is(group) then group, given = nil, group elseif opts.is(subgroup) then subgroup, given = nil, subgroup end
  local o = opts("PostLocalSGDState", given, { start_localSGD_iter = opts.required,
    post_local_gradient_allreduce = true })
  check_group("PostLocalSGDState", "argument 1", group)
  check_group("PostLocalSGDState", "argument 2", subgroup)
  whole_number("PostLocalSGDState", "start_localSGD_iter", o.start_localSGD_iter, 0)
  o.group, o.subgroup, o.iter = group, subgroup, 0
  if o.post_local_gradient_allreduce and not subgroup then o.subgroup = of_this_machine() end
  return setmetatable(o, State)
end

--- The communication hook of post-local SGD.
---@param state PostLocalSGDState  one for each model
---@param bucket table  given by DDP; its gradients are replaced
function M.post_localSGD_hook(state, bucket)
  if getmetatable(state) ~= State then opts.wrong(state, "a PostLocalSGDState", "post_localSGD_hook: the state") end
  local group = state.group
  if state.iter >= state.start_localSGD_iter then
    if not state.post_local_gradient_allreduce then return end
    group = state.subgroup
  end
  if bucket.last and state.iter < state.start_localSGD_iter then
    state.iter = state.iter + 1
    bucket:on_end(function(ok)
      if not ok then state.iter = state.iter - 1 end
    end)
  end
  bucket.flat:div_(dist.world_size(group))
  return dist.all_reduce(bucket.flat, { group = group, async = true })
end

-- ---- averagers -----------------------------------------------------------------------------------

-- Makes an averager's average_parameters raise on all ranks if it fails on one.
local function together(average_parameters)
  return calls.several(average_parameters, function(self)
    return self.levels ~= nil or dist.world_size(self.process_group) > 1
  end)
end

-- Replaces each parameter by its mean over the group's ranks, with one collective for each dtype and device.
local function average(params, group)
  local kinds, lists = {}, {}
  for _, p in ipairs(params) do
    local kind = p.dtype .. p.device
    if not lists[kind] then kinds[#kinds + 1], lists[kind] = kind, {} end
    if p:numel() > 0 then table.insert(lists[kind], p) end
  end
  autograd.no_grad(function()
    for _, kind in ipairs(kinds) do
      local parts = {}
      for k, p in ipairs(lists[kind]) do parts[k] = p:detach():reshape(-1) end
      if #parts > 0 then
        local flat = shape.cat(parts, 1)
        flat:div_(dist.world_size(group))
        dist.all_reduce(flat, { group = group })
        local at = 1
        for _, p in ipairs(lists[kind]) do
          p:copy_(flat:narrow(1, at, p:numel()):view(p.shape))
          at = at + p:numel()
        end
      end
    end
  end)
end

local function check_params(who, params)
  opts.need(opts.is_plain(params), params, "a list of parameters", "%s: argument 1", who)
end

---@class ModelAverager
---@field step integer  number of calls of average_parameters
---@field average_parameters fun(self: ModelAverager, params: Parameter[])  collective over its group
local Periodic = { __name = "PeriodicModelAverager" }
Periodic.__index = Periodic

function Periodic.__tostring(a)
  return ("PeriodicModelAverager(every %s from step %d)"):format(errors.count(a.period, "step"), a.warmup_steps)
end

--- Averages parameters over the group every `period` steps, from step warmup_steps on.
---@param given {period: integer, warmup_steps: integer, process_group: Group?}
---   period: steps from one average to the next; warmup_steps: steps before the first average; process_group: the ranks
---   to average over (nil: all)
---@return ModelAverager
function M.PeriodicModelAverager(given)
  local o = opts("PeriodicModelAverager", given, { period = opts.required, warmup_steps = 0, process_group = opts.any })
  whole_number("PeriodicModelAverager", "warmup_steps", o.warmup_steps, 0)
  whole_number("PeriodicModelAverager", "period", o.period, 1)
  check_group("PeriodicModelAverager", "option 'process_group'", o.process_group)
  if o.period == 1 then
    log.warn("When period is 1, no need to use model averaging because the communication cost of all-reducing parameters will be no less than the "
      .. "cost of all-reducing gradients by DistributedDataParallel in the backward pass. Therefore, only DistributedDataParallel should be used "
      .. "for this case.")
  end
  o.step = 0
  return setmetatable(o, Periodic)
end

---@param params Parameter[]  the parameters to average, in place
function Periodic:average_parameters(params)
  check_params("average_parameters", params)
  if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0 then
    average(params, self.process_group)
  end
  self.step = self.step + 1
end

Periodic.average_parameters = together(Periodic.average_parameters)

local Hierarchical = { __name = "HierarchicalModelAverager" }
Hierarchical.__index = Hierarchical

function Hierarchical.__tostring(a)
  local parts = {}
  for k, level in ipairs(a.levels) do
    parts[k] = ("%s every %s"):format(errors.count(level.size, "rank"), errors.count(level.period, "step"))
  end
  return ("HierarchicalModelAverager(%s, from step %d)"):format(table.concat(parts, ", "), a.warmup_steps)
end

--- Averages over larger groups at longer periods. period_group_size is { [period] = number of consecutive ranks }; the
--- longest period covers all ranks. If a step ends several periods, only the longest of them averages. Collective over
--- the world.
---@param given {period_group_size: table<integer, integer>, warmup_steps: integer}
---   period_group_size: number of ranks to average over, by period in steps; warmup_steps: steps before the first
---   average
---@return ModelAverager
function M.HierarchicalModelAverager(given)
  local who = "HierarchicalModelAverager"
  local o = opts(who, given, { period_group_size = opts.table, warmup_steps = 0 })
  whole_number(who, "warmup_steps", o.warmup_steps, 0)
  local world, levels = dist.world_size(), {}
  -- The order of pairs() does not matter: the list is sorted below.
  for period, size in pairs(o.period_group_size or {}) do levels[#levels + 1] = { period = period, size = size } end
  if #levels == 0 then
    raise("%s: option 'period_group_size' is empty, expected { [period] = number of ranks }", who)
  end
  for _, level in ipairs(levels) do
    opts.expect(level.period, opts.whole_from(1), "%s: a period in option 'period_group_size'", who)
    opts.expect(level.size, opts.whole_from(1), "%s: a group size in option 'period_group_size'", who)
  end
  table.sort(levels, function(a, b) return a.period < b.period end)
  for k, level in ipairs(levels) do
    local below = levels[k - 1] and levels[k - 1] or { period = 1, size = 1 }
    if level.size < below.size or level.size % below.size ~= 0 or level.period % below.period ~= 0 then
      raise("%s: %d ranks every %d steps: expected multiples of the next smaller entry, %d ranks every %d steps", who,
        level.size, level.period, below.size, below.period)
    end
  end
  if levels[#levels].size ~= world then
    raise("%s: the groups of the longest period, %d steps, have %d ranks, expected the number of all ranks, %d", who, levels[#levels].period,
      levels[#levels].size, world)
  end
  for _, level in ipairs(levels) do
    if world % level.size ~= 0 then raise("%s: %d ranks cannot be split into groups of %d", who, world, level.size) end
    if level.size == world then
      level.group = dist.default_group()
    else
      for first = 0, world - 1, level.size do
        local members = {}
        for k = 1, level.size do members[k] = first + k - 1 end
        local group = dist.new_group(members)
        if dist.rank(group) then level.group = group end
      end
    end
  end
  return setmetatable({ levels = levels, warmup_steps = o.warmup_steps, step = 0 }, Hierarchical)
end

---@param params Parameter[]  the parameters to average, in place
function Hierarchical:average_parameters(params)
  check_params("average_parameters", params)
  if self.step >= self.warmup_steps then
    for k = #self.levels, 1, -1 do
      if (self.step - self.warmup_steps) % self.levels[k].period == 0 then
        if self.levels[k].size > 1 then average(params, self.levels[k].group) end
        break
      end
    end
  end
  self.step = self.step + 1
end

Hierarchical.average_parameters = together(Hierarchical.average_parameters)

-- ---- an optimizer that averages -----------------------------------------------------------------

local Optimizer = { __name = "PostLocalSGDOptimizer" }

-- Fields that this class lacks are read from the inner optimizer.
function Optimizer.__index(self, name)
  local own = rawget(Optimizer, name)
  if own ~= nil then return own end
  local value = self.optim[name]
  if type(value) ~= "function" then return value end
  return function(_, ...) return value(self.optim, ...) end
end

function Optimizer.__tostring(self)
  return ("PostLocalSGDOptimizer(%s, %s)"):format(tostring(self.optim), tostring(self.averager))
end

--- An optimizer that calls the averager after each step.
---@param optim Optimizer  the optimizer that steps
---@param averager ModelAverager  called after each step
function M.PostLocalSGDOptimizer(optim, averager)
  opts.need(type(optim) == "table" and type(optim.step) == "function" and optim.param_groups, optim, "an optimizer",
    "PostLocalSGDOptimizer: argument 1")
  opts.need(type(averager) == "table" and type(averager.average_parameters) == "function", averager,
    "a model averager", "PostLocalSGDOptimizer: argument 2")
  return setmetatable({ optim = optim, averager = averager }, Optimizer)
end

function Optimizer:step(...)
  local result = self.optim:step(...)
  local params = {}
  for _, group in ipairs(self.optim.param_groups) do
    for _, p in ipairs(group.params) do params[#params + 1] = p end
  end
  self.averager:average_parameters(params)
  return result
end

--- The inner optimizer's state dict; it also contains the averager's step.
function Optimizer:state_dict()
  local sd = self.optim:state_dict()
  sd.step = self.averager.step
  return sd
end

function Optimizer:load_state_dict(sd)
  local inner = {}
  for key, value in pairs(sd) do inner[key] = value end
  inner.step = nil
  self.optim:load_state_dict(inner)
  if sd.step == nil then
    log.warn "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0."
  end
  self.averager.step = sd.step or 0
end

return M
