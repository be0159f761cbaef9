-- SPDX-License-Identifier: MIT
--- Gradient scalers: multiply the loss by a scale before backward, so that small float16 gradients do not become 0, and
--- divide gradients by it before the optimizer's step. If a gradient is infinite or NaN, the step is skipped and the
--- scale lowered. All ranks of a ShardedGradScaler skip the same steps.
local autograd = require "moonshard.autograd"
local calls = require "moonshard.dist.calls"
local captured = require "moonshard.autograd.capture.scaler"
local class = require "moonshard.core.class"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local Flag = require "moonshard.optim.flag"
local methods = require "moonshard.core.methods"
local opts = require "moonshard.core.opts"
local engine = require "moonshard.core.ffi"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"

local expect_reduced = require "moonshard.autograd.sparse".expect_reduced
local lib, state = engine.lib, engine.state
local is_tally = captured.is_tally
local is_tensor, raise, no_grad = tensor.is_tensor, errors.raise, autograd.no_grad

local SPEC = { init_scale = 2 ^ 16, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2000, enabled = true }

--- Keeps small float16 gradients from becoming 0 (Micikevicius et al. 2018): the loss is multiplied by a scale before
--- backward, and gradients are divided by it before the step. A step with an infinite or nan gradient is skipped and
--- the scale is multiplied by backoff_factor. After growth_interval consecutive steps without such gradients the scale
--- is multiplied by growth_factor, unless it would exceed the largest float32.
---@class GradScaler
---@overload fun(opts?: { init_scale: number, growth_factor: number, backoff_factor: number, growth_interval: integer, enabled: boolean }): GradScaler
---   init_scale: the first scale; growth_factor: multiplies the scale, above 1; backoff_factor: multiplies the scale
---   after a skipped step, below 1; growth_interval: consecutive steps with finite gradients until the scale grows;
---   enabled: false: scale and unscale_ change nothing
---@field scale_tensor Tensor?  nil until the first `scale`, then one element on the device of the first scaled tensor
local GradScaler = class.new "GradScaler"
methods.close(GradScaler)

-- Whether unscale_ accepts float16 gradients. Only a ShardedGradScaler does: sharded parameters may be float16.
GradScaler._takes_half = false

local function construct(self, given, spec)
  local o = opts(self:class_name(), given, spec)
  if o.enabled and o.growth_factor <= 1 then raise("The growth factor must be > 1.0.") end
  if o.enabled and o.backoff_factor >= 1 then raise("The backoff factor must be < 1.0.") end
  self._enabled, self._init_scale = o.enabled, o.init_scale
  -- The 0 is growth_tracker: the number of steps with finite gradients since the scale changed.
  self._rule = engine.ffi.new("ms_scale_rule", { o.growth_factor, o.backoff_factor, o.growth_interval, 0 })
  self._optimizers = setmetatable({}, { __mode = "k" })         -- optimizer -> its record since the last update
  -- The Flag of the last step, if at its update() only a GPU knew whether it was skipped; the Tally of a captured step
  -- whose repetitions a GPU counts; otherwise false.
  self._undecided = false
  return o
end

function GradScaler:init(given) construct(self, given, SPEC) end

local function number_tensor(value, device)
  return create.full({}, value, { dtype = "float32", device = device }):keep()
end

local function need_scale(self, who)
  if self.scale_tensor then return end
  raise("Attempted %s but scale_tensor is nil. This may indicate your script did not use scaler:scale(loss or outputs) earlier in the iteration.", who)
end

-- ---- scaling -------------------------------------------------------------------------------------

local function multiply(self, t)
  if not self.scale_tensor then self.scale_tensor = number_tensor(self._init_scale, t.device) end
  local scale = self.scale_tensor
  if scale.device ~= t.device then scale = scale:to(t.device) end
  return (t * scale):to(t.dtype)
end

local function scaled(self, outputs)
  if is_tensor(outputs) then return multiply(self, outputs) end
  if type(outputs) == "function" then                   -- an iterator: scale each value when it is read
    return function(...)
      local value = outputs(...)
      if value ~= nil then return scaled(self, value) end
    end
  end
  if type(outputs) ~= "table" or getmetatable(outputs) ~= nil then
    raise("outputs must be a Tensor or an iterable of Tensors")
  end
  local list = {}
  for k, v in util.sorted_pairs(outputs) do list[k] = scaled(self, v) end
  return list
end

--- Multiplies outputs by the scale; dtypes do not change.
---@param outputs Tensor|table|function  tables of tensors to any depth; of an iterator, each value is scaled when it is read
---@return Tensor|table|function
function GradScaler:scale(outputs)
  if not self._enabled then return outputs end
  return scaled(self, outputs)
end

-- ---- unscaling -----------------------------------------------------------------------------------

-- Calls fn(g, p) for every gradient g of an optimizer. p is the tensor that holds g: the parameter, or this rank's part
-- of a sharded one. before: nil, or called with every parameter before its gradient is read.
local function each_gradient(optimizer, fn, before)
  local function visit(p)
    if p.id < 0 and not p.is_sparse then
      for _, part in ipairs(tensor.inner(p)) do visit(part) end
      return
    end
    if before then before(p) end
    local part = p.placements and p:to_local() or p
    local g = part.grad
    if g ~= nil then fn(g, part) end
  end
  for _, group in ipairs(optimizer.param_groups) do
    for _, p in ipairs(group.params) do visit(p) end
  end
end

-- The gradients of all parameters of an optimizer, as plain tensors.
local function gradients(self, optimizer)
  local list = {}
  each_gradient(optimizer, function(g, p)
    if g.dtype == "float16" and not self._takes_half then raise("Attempting to unscale FP16 gradients.") end
    if g.is_sparse then
      if g.dtype == "float16" then  -- add the values at equal positions now, because their sum may overflow
        g = g:float():coalesce():half()
        p.grad = g
      end
      g = g:values()
    end
    list[#list + 1] = g:detach()
  end, expect_reduced)
  return list
end

-- ---- after an error ------------------------------------------------------------------------------

-- A script that survives an error may skip the rest of a step: the optimizer's step and update(). The record of that
-- step must not be used for the next step's gradients, which are not unscaled yet. A record therefore stores which
-- gradients it describes, and how often the optimizer had cleared its gradients.

local function remember(record, optimizer)
  record.gradients, record.any, record.versions = {}, false, 0
  record.cleared, record.failures = optimizer._cleared, state.dist_failures
  each_gradient(optimizer, function(g)
    record.gradients[g.id >= 0 and g.id or g], record.any = true, true
  end)
end

-- Whether all gradients that a record describes have been cleared or replaced. A rank whose parts are all empty has no
-- gradients; for it, a record is also stale if an error has occurred since.
local function is_stale(record, optimizer)
  if record.stage == "ready" then return false end
  if record.cleared ~= optimizer._cleared then return true end
  if not record.any then return record.failures ~= state.dist_failures end
  local kept = false
  each_gradient(optimizer, function(g) kept = kept or record.gradients[g.id >= 0 and g.id or g] ~= nil end)
  return not kept
end

local function sum_of_versions(optimizer)
  local sum = 0
  each_gradient(optimizer, function(g) sum = sum + (g.id >= 0 and tensor.info_of(g).version or 0) end)
  return sum
end

local function one_element(t, name)
  if not is_tensor(t) or t:numel() ~= 1 then raise("%s must be a 1-element tensor.", name) end
end

-- Multiplies gradients on one device by `inverse`, and fills `found` with 1 if one of them is not finite; with `stops`,
-- the first such gradient and those after it stay scaled.
local function unscale_all(list, inverse, found, stops)
  local ids, copies = engine.ffi.new("ms_id[?]", #list), {}
  local flag = found.dtype == "float32" and found or found:to "float32"
  for k, g in ipairs(list) do
    copies[k] = g:contiguous()
    ids[k - 1] = copies[k].id
  end
  if lib.ms_unscale_gradients(#list, ids, inverse:to("float32").id, flag.id, stops and 1 or 0) ~= 0 then
    errors.fail_of(list)
  end
  for k, g in ipairs(list) do
    if not g:is_contiguous() then g:copy_(copies[k]) end
  end
  if flag ~= found then found:copy_(flag) end
end

--- Multiplies an optimizer's gradients by inv_scale. Returns found_inf for each device that has gradients: 1 if one of
--- these is not finite, otherwise the given value. A ShardedGradScaler leaves the device's remaining gradients scaled
--- after one that is not finite; without gradients it returns the given found_inf.
---@param optimizer Optimizer  its groups hold the gradients
---@param inv_scale Tensor   one element
---@param found_inf Tensor   one element; returned for its own device
---@return table<string, Tensor> found_inf  by device
function GradScaler:unscale_grads_(optimizer, inv_scale, found_inf)
  one_element(inv_scale, "inv_scale")
  one_element(found_inf, "found_inf")
  return no_grad(function()
    local by_device, lists = {}, {}
    local list, record = gradients(self, optimizer), self._unscaling
    if record then
      remember(record, optimizer)
      record.stage = "failed"                           -- until all ranks have unscaled their gradients
    end
    for _, g in ipairs(list) do
      local device = g.device
      lists[device] = lists[device] or {}
      table.insert(lists[device], g)
    end
    for device, here in util.sorted_pairs(lists) do
      by_device[device] = device == found_inf.device and found_inf or found_inf:to(device)
      unscale_all(here, inv_scale:to(device), by_device[device], self._stops_at_inf)
    end
    if self._stops_at_inf and next(by_device) == nil then by_device[found_inf.device] = found_inf end
    return by_device
  end)
end

-- The groups over which an optimizer's parameters are sharded (or sharded and replicated), without duplicates, in an
-- order that is equal on all ranks.
local function sharding_groups(optimizer)
  local list, seen = {}, {}
  for _, group in ipairs(optimizer.param_groups) do
    for _, p in ipairs(group.params) do
      local mesh = p.placements and p.device_mesh
      for d = 1, mesh and mesh.ndim or 0 do
        local g = mesh:get_group(d)
        if not seen[g.id] then
          seen[g.id] = true
          list[#list + 1] = g
        end
      end
    end
  end
  return list
end

-- Combines found_inf over ranks: those with parts of the same gradients must skip the same steps. Ranks without
-- gradients take part. On a GPU the host waits for nothing, unless this rank has no gradients.
function GradScaler:_agree(found, optimizer)
  local groups = sharding_groups(optimizer)
  if #groups == 0 then return end
  local any, home = next(found) ~= nil, self.scale_tensor.device
  local all = create.zeros(2, { dtype = "float32", device = home })
  all[1]:fill_(any and 1 or 0)
  for _, t in util.sorted_pairs(found) do all[2]:add_(t:to(home)) end
  for _, g in ipairs(groups) do dist.all_reduce(all, { op = "max", group = g }) end
  if not any then
    if not captured.active() and all[1]:item() == 0 then return end
    found[home] = number_tensor(0, home)
  end
  for _, t in util.sorted_pairs(found) do t:copy_(all[2]:to(t.device)) end
end

-- The record's found_inf, if it is on a GPU and no other device has one: that GPU can decide whether to skip the step.
local function on_one_gpu(record)
  local device, found = next(record.found_inf)
  if device and device:find "^cuda" and next(record.found_inf, device) == nil then return found end
end

-- The sum of found_inf over devices; 0 if all gradients are finite. Cached, because reading it from a GPU waits.
local function total(record)
  if not record.total and record.flag then
    record.total = record.flag:read()
  elseif not record.total then
    record.total = 0
    for _, t in util.sorted_pairs(record.found_inf) do record.total = record.total + t:item() end
  end
  return record.total
end

local function set_scale(self, value)
  no_grad(function() self.scale_tensor:fill_(value) end)
end

-- Updates growth_tracker for the last step, if at its update() only a GPU knew whether it was skipped, or for the
-- repetitions of a captured step.
local function settle(self)
  local flag, rule = self._undecided, self._rule
  if not flag then return end
  if is_tally(flag) then
    flag:read()                                         -- sets rule.growth_tracker
  else
    local grown = rule.growth_tracker + 1 == rule.growth_interval
    rule.growth_tracker = (flag:read() > 0 or grown) and 0 or rule.growth_tracker + 1
  end
  self._undecided = false
end

-- Lets a GPU adapt the scale if only one optimizer has a record, the GPU that has the scale decides whether this
-- optimizer's step is skipped, and the host has not read the decision. Returns whether the GPU adapts the scale.
local function adapt_there(self)
  local optimizer, record = next(self._optimizers)
  if not record or record.total or not record.flag or next(self._optimizers, optimizer) ~= nil then return false end
  local found, rule = on_one_gpu(record), self._rule
  if found.device ~= self.scale_tensor.device then return false end
  settle(self)
  local good = rule.growth_tracker + 1 == rule.growth_interval and rule.growth_factor or 1
  if lib.ms_adapt_scale(self.scale_tensor.id, found.id, rule.backoff_factor, good) ~= 0 then
    errors.fail(self.scale_tensor, found)
  end
  self._undecided = record.flag
  return true
end

-- Returns a function that captured.adapt calls before repetitions.
local function begin_repetition(self)
  return function(tally)
    if self._undecided == (tally or false) then return end
    settle(self)
    self._undecided = tally or false
  end
end

-- Adapts the scale to found_inf of all records. Returns false if no gradients have been checked for infinities.
local function adapt(self)
  settle(self)
  local sum, any, rule = 0, false, self._rule
  if captured.active() then
    local all = {}
    for _, record in pairs(self._optimizers) do
      for _, t in util.sorted_pairs(record.found_inf) do all[#all + 1] = t end
    end
    if #all > 0 then captured.adapt(self.scale_tensor, all, rule, begin_repetition(self)) end
    return #all > 0
  end
  for _, record in pairs(self._optimizers) do           -- in any order: the sum of whole numbers is exact
    any = any or next(record.found_inf) ~= nil
    sum = sum + total(record)
  end
  if not any then return false end
  if sum > 0 then
    set_scale(self, self.scale_tensor:item() * rule.backoff_factor)
    rule.growth_tracker = 0
  else
    rule.growth_tracker = rule.growth_tracker + 1
    if rule.growth_tracker == rule.growth_interval then
      local grown = self.scale_tensor:item() * rule.growth_factor
      if grown <= 3.4028234663852886e38 then set_scale(self, grown) end
      rule.growth_tracker = 0
    end
  end
  return true
end

local function forget_records(self)
  for _, record in pairs(self._optimizers) do
    for _, t in util.sorted_pairs(record.found_inf) do t:release() end
  end
  self._optimizers = setmetatable({}, { __mode = "k" })
end

-- The record of an optimizer's current gradients. If an error made this rank skip update(), adapts the scale now, as
-- update() has done on the other ranks, and raises if the scale changes.
local function record_of(self, optimizer)
  local record = self._optimizers[optimizer]
  if record and is_stale(record, optimizer) then
    local before = self.scale_tensor:item()
    adapt(self)
    forget_records(self)
    local now = self.scale_tensor:item()
    if now ~= before then
      raise("an error skipped update(); the scale is now %g, but these gradients were computed with %g: call zero_grad() and continue "
        .. "with the next step", now, before)
    end
    record = nil
  end
  if not record then
    record = { stage = "ready", found_inf = {}, versions = 0 }
    self._optimizers[optimizer] = record
  end
  if record.stage == "failed" then
    raise("unscale_() has failed, so some of these gradients may already be unscaled: call zero_grad() before the next backward")
  end
  if record.versions > 0 and record.versions ~= sum_of_versions(optimizer) then
    raise("step() has failed after it had unscaled these gradients, and they have changed since: call zero_grad() before the next backward")
  end
  return record
end

-- Whether other ranks make this call, too. They wait for its result, so they must learn of its errors. Unreduced
-- gradients are refused here, before the call, because every rank detects them by itself.
local function has_peers(self, optimizer)
  if type(optimizer) ~= "table" or not optimizer.param_groups then return false end
  if not (self._sums_over_ranks and dist.world_size(self._group) > 1) and #sharding_groups(optimizer) == 0 then
    return false
  end
  local record = self._optimizers[optimizer]
  if not record or record.stage == "ready" or is_stale(record, optimizer) then no_grad(gradients, self, optimizer) end
  return true
end

local function unscale(self, optimizer)
  need_scale(self, "unscale_")
  if optimizer._expect_trained then optimizer:_expect_trained() end
  local record = record_of(self, optimizer)
  if record.stage == "unscaled" then
    raise("unscale_() has already been called on this optimizer since the last update().")
  end
  if record.stage == "stepped" then raise("unscale_() is being called after step().") end
  local device = self.scale_tensor.device
  local inv_scale = no_grad(function() return self.scale_tensor:reciprocal() end)  -- on a GPU without waiting for it
  self._unscaling = record
  local ok, found = pcall(self.unscale_grads_, self, optimizer, inv_scale, number_tensor(0, device))
  self._unscaling = nil
  if not ok then error(found, 0) end
  no_grad(self._agree, self, found, optimizer)
  for _, t in util.sorted_pairs(found) do t:keep() end
  record.found_inf, record.stage = found, "unscaled"
end
local unscale_together = calls.several(unscale)

--- Divides an optimizer's gradients by the scale, at most once between two updates. Call it, for example, before
--- clipping.
---@param optimizer Optimizer  its groups hold the gradients
function GradScaler:unscale_(optimizer)
  if not self._enabled then return end
  local fn = has_peers(self, optimizer) and unscale_together or unscale
  fn(self, optimizer)
end

local function step(self, optimizer, closure)
  if closure ~= nil then raise("Closure use is not currently supported if GradScaler is enabled.") end
  need_scale(self, "step")
  local record = record_of(self, optimizer)
  if record.stage == "stepped" then raise("step() has already been called since the last update().") end
  if record.stage == "ready" then self:unscale_(optimizer) end
  if next(record.found_inf) == nil then raise("No inf checks were recorded for this optimizer.") end
  local ok, result = true, nil
  if captured.active() then
    record.total, result = captured.unless(record.found_inf, function() return optimizer:step() end)
  else
    local there = optimizer._step_unless and not record.total and on_one_gpu(record)
    if there then
      record.flag = record.flag or Flag.new(there)
      ok, result = pcall(optimizer._step_unless, optimizer, { unless = there, flag = record.flag })
    end
    if ok and not result then
      result = nil
      if total(record) == 0 then ok, result = pcall(optimizer.step, optimizer) end
    end
  end
  if not ok then
    record.versions = sum_of_versions(optimizer)
    error(result, 0)
  end
  record.stage, record.versions = "stepped", 0
  return result
end
local step_together = calls.several(step)

--- Runs the optimizer's step on unscaled gradients; skips it if a gradient is not finite. If all gradients are on one
--- GPU, and the optimizer's step is one pass of the engine, the GPU decides: the host does not wait, and the result is
--- the optimizer's in both cases. A lower get_scale() after update() then tells that the step was skipped. Errors: a
--- second step before update.
---@param optimizer Optimizer  its groups hold the gradients
---@param closure? nil  not supported, as in PyTorch
---@return any  the optimizer's result; nil if the host has skipped the step
function GradScaler:step(optimizer, closure)
  if not self._enabled then return optimizer:step(closure) end
  local fn = has_peers(self, optimizer) and step_together or step
  return fn(self, optimizer, closure)
end

-- ---- the scale over time -------------------------------------------------------------------------

--- Lowers the scale after infinities, raises it after growth_interval steps without any; or sets it to new_scale.
---@param new_scale? number|Tensor  one element; nil: adapts to the infinities found
function GradScaler:update(new_scale)
  if not self._enabled then return end
  need_scale(self, "update")
  if new_scale ~= nil then
    if is_tensor(new_scale) then
      if new_scale:numel() ~= 1 or new_scale.requires_grad
        or new_scale.device:match "^%a+" ~= self.scale_tensor.device:match "^%a+" then
        raise("new_scale should be a float or a 1-element FloatTensor on the scaler's device with requires_grad=false.")
      end
      no_grad(function() self.scale_tensor:copy_(new_scale:reshape {}) end)
    elseif type(new_scale) == "number" then
      set_scale(self, new_scale)
    else
      opts.wrong(new_scale, "a number or a tensor", "update: new_scale")
    end
  else
    if not adapt_there(self) and not adapt(self) then raise("No inf checks were recorded prior to update.") end
  end
  forget_records(self)
end

--- The current scale.
---@return number
function GradScaler:get_scale()
  if not self._enabled then return 1 end
  return self.scale_tensor and self.scale_tensor:item() or self._init_scale
end
--- The factor by which the scale grows after growth_interval consecutive steps with finite gradients.
---@return number
function GradScaler:get_growth_factor() return self._rule.growth_factor end
--- The factor by which the scale is multiplied after a skipped step.
---@return number
function GradScaler:get_backoff_factor() return self._rule.backoff_factor end
--- The number of consecutive steps with finite gradients after which the scale grows.
---@return integer
function GradScaler:get_growth_interval() return self._rule.growth_interval end
--- Whether scaling is enabled.
---@return boolean
function GradScaler:is_enabled() return self._enabled end

--- The state for a checkpoint; empty if the scaler is not enabled.
---@return table
function GradScaler:state_dict()
  if not self._enabled then return {} end
  settle(self)
  local rule = self._rule
  return {
    scale = self:get_scale(), growth_factor = rule.growth_factor, backoff_factor = rule.backoff_factor,
    growth_interval = rule.growth_interval, growth_tracker = rule.growth_tracker,
  }
end

--- Continues from a state dict. Errors: the empty state dict of a scaler that was not enabled.
---@param sd table  what state_dict returned
function GradScaler:load_state_dict(sd)
  if not self._enabled then return end
  opts.expect(sd, opts.table, "load_state_dict: the state")
  if next(sd) == nil then
    raise("The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler.")
  end
  for _, name in ipairs { "scale", "growth_factor", "backoff_factor", "growth_interval", "growth_tracker" } do
    opts.expect(sd[name], opts.number, "load_state_dict: %s", name)
  end
  settle(self)
  local rule = self._rule
  self._init_scale, rule.growth_tracker = sd.scale, sd.growth_tracker
  rule.growth_factor, rule.backoff_factor, rule.growth_interval = sd.growth_factor, sd.backoff_factor,
    sd.growth_interval
  if self.scale_tensor then set_scale(self, sd.scale) end
end

function GradScaler:__tostring()
  return ("%s(scale %g%s)"):format(self:class_name(), self:get_scale(), self._enabled and "" or ", disabled")
end

-- ---- over ranks ----------------------------------------------------------------------------------

--- A scaler for sharded parameters. Ranks have different parts of the gradients, so all ranks, including those without
--- gradients, skip a step if one of them found an infinite or NaN gradient.
---@class ShardedGradScaler: GradScaler
---@overload fun(opts?: { init_scale: number, growth_factor: number, backoff_factor: number, growth_interval: integer, enabled: boolean, process_group: Group }): ShardedGradScaler
---   init_scale: the first scale; growth_factor: multiplies the scale, above 1; backoff_factor: multiplies the scale
---   after a skipped step, below 1; growth_interval: consecutive steps with finite gradients until the scale grows;
---   enabled: false: scale and unscale_ change nothing; process_group: the ranks that skip the same steps (default: the
---   world)
local ShardedGradScaler = GradScaler:extend "ShardedGradScaler"
ShardedGradScaler._takes_half = true
ShardedGradScaler._sums_over_ranks = true
ShardedGradScaler._stops_at_inf = true          -- after an infinity, the remaining gradients of the step stay scaled

function ShardedGradScaler:init(given)
  local spec = { process_group = dist._a_group }
  for name, default in pairs(SPEC) do spec[name] = default end
  self._group = construct(self, given, spec).process_group
end

-- Sums found_inf over ranks for every device. The tensor on the CPU is summed on the scaler's device.
function ShardedGradScaler:_agree(found)
  local home, works = self.scale_tensor.device, {}
  for _, t in util.sorted_pairs(found) do
    local here = t.device == "cpu" and home ~= "cpu" and t:to(home) or t
    works[#works + 1] = { t, here, dist.all_reduce(here, { group = self._group, async = true }) }
  end
  for _, w in ipairs(works) do
    w[3]:wait()
    if not rawequal(w[1], w[2]) then no_grad(function() w[1]:copy_(w[2]:to(w[1].device)) end) end
  end
end

methods.guard(GradScaler, "scaler")

return { GradScaler = GradScaler, ShardedGradScaler = ShardedGradScaler }
