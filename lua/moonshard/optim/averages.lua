-- SPDX-License-Identifier: MIT
--- Averages of parameters over training: EMA for any parameters, sharded ones too; AveragedModel, a copy of a model
--- with the averages (SWA: Izmailov et al. 2018), and update_bn, which recomputes the statistics of its batch norms.
local autograd = require "moonshard.autograd"
local capture = require "moonshard.autograd.capture"
local class = require "moonshard.core.class"
local shards = require "moonshard.nn.module.shards"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local nn = require "moonshard.nn.module"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"

local no_grad, raise, ipairs, rawget = autograd.no_grad, errors.raise, ipairs, rawget
local share = opts.kind("a number from 0 to 1", function(v) return type(v) == "number" and v >= 0 and v <= 1 end)

-- ---- EMA ------------------------------------------------------------------------------------------

--- An exponential moving average of parameters, or with `mean` their mean over the updates (SWA), kept beside them in
--- float32 or wider. For sharded parameters it covers this rank's part, without communication.
---@class EMA
---@overload fun(params: Tensor[], opts: { decay: number, warmup: boolean, mean: boolean }): EMA
---   params: a list of parameters; decay: share of the average that is kept at an update (default: 0.999); warmup:
---   update k, from 0, keeps at most (1 + k) / (10 + k) of it (default: false); mean: update k, from 0, keeps
---   k / (k + 1) of it (default: false)
---@field updates integer  number of updates so far
local EMA = class.new "EMA"

local function copy_of(p)
  local part = shards.part_of(p):detach()
  return (part.dtype == "float64" and part:clone() or part:float():clone()):keep()
end

function EMA:init(params, given)
  local o = opts("EMA", given, { decay = share, warmup = false, mean = false })
  if o.mean and (o.decay or o.warmup) then
    raise("EMA: options 'mean' and '%s' exclude each other", o.decay and "decay" or "warmup")
  end
  opts.need(opts.is_plain(params) and #params > 0, params, "a list of parameters"
    .. (type(params) == "table" and "; write model:parameters()" or ""), "EMA: argument 1")
  self.decay, self.warmup, self.mean, self.updates = o.decay or 0.999, o.warmup, o.mean, 0
  self._params, self._averages, self._exact, self._units = {}, {}, {}, {}
  for k, p in ipairs(params) do
    opts.expect(p, tensor.a_tensor, "EMA: parameter %d", k)
    if p.id < 0 then raise("EMA: parameter %d is a %s; tensor classes are not supported", k, p:class_name()) end
    shards.expect_trained(p, ("EMA: parameter %d"):format(k), "the EMA")
    self._params[k], self._averages[k], self._units[k] = p, copy_of(p), rawget(p, "_unit") or false
  end
end

-- Raises if the model no longer trains one of the parameters, or has sharded it since the averages were made.
local function expect_trained(self)
  if self._changes == shards.changes() then return end
  for k, p in ipairs(self._params) do
    shards.expect_trained(p, ("EMA: parameter %d"):format(k), "the EMA")
    if (rawget(p, "_unit") or false) ~= self._units[k] then
      raise("EMA: parameter %d was sharded after its average had been made; make the EMA after sharding", k)
    end
  end
  self._changes = shards.changes()
end

local function update(self)
  expect_trained(self)
  local decay = self.decay
  if self.warmup then decay = math.min(decay, (1 + self.updates) / (10 + self.updates)) end
  if self.mean then decay = self.updates / (self.updates + 1) end
  for k, p in ipairs(self._params) do
    local average = self._averages[k]
    average:mul_(decay):add_(shards.part_of(p):detach():to(average.dtype), { alpha = 1 - decay })
  end
  self.updates = self.updates + 1
end

--- Updates the averages with the parameters' present values; to be called after each step of the optimizer.
function EMA:update()
  capture.refuse "EMA:update counts its calls in Lua, and repetitions would not be counted; call it outside of the step"
  no_grad(scope.scope, update, self)
end

-- _exact: by position of the parameter, a copy of the average in float32, kept while the parameter, of another dtype,
-- has the average's rounded values.
local function swap(self)
  expect_trained(self)
  for k, p in ipairs(self._params) do
    local part, average, exact = shards.part_of(p):detach(), self._averages[k], self._exact[k]
    local value = part:clone()
    self._exact[k] = nil
    if exact and value:equal(exact:to(value.dtype)) then
      part:copy_(average)
      average:copy_(exact)
    else
      if part.dtype ~= average.dtype then self._exact[k] = average:clone():keep() end
      part:copy_(average)
      average:copy_(value)
    end
    shards.drop_gathered(p)
  end
end

--- Exchanges the parameters' values and the averages; a second call restores both, bit for bit if
--- nothing has changed in between.
function EMA:swap() no_grad(scope.scope, swap, self) end

--- Runs fn while the parameters have the averages as values, and restores them, also after an error.
---@param fn fun(...): any  the function to run
---@param ... any  its arguments
---@return any  what fn returns
function EMA:apply(fn, ...)
  opts.expect(fn, opts.fn, "EMA: apply: argument 1")
  self:swap()
  local function restore(ok, ...)
    self:swap()
    if not ok then error((...), 0) end
    return ...
  end
  return restore(pcall(fn, ...))
end

--- The averages, by the parameter's position, and the number of updates; for sharded parameters, of this rank's part.
---@return { updates: integer, averages: Tensor[] }
function EMA:state_dict() return { updates = self.updates, averages = listing.copy(self._averages) } end

--- Continues from a state dict, by copying. Errors: another number of parameters, other shapes.
---@param sd { updates: integer, averages: Tensor[] }  updates: the number of updates; averages: one for each parameter
function EMA:load_state_dict(sd)
  expect_trained(self)
  opts.need(type(sd) == "table" and type(sd.averages) == "table", sd, "a table with updates and averages",
    "EMA: load_state_dict: argument 1")
  opts.expect(sd.updates, opts.whole_from(0), "EMA: load_state_dict: updates")
  if #sd.averages ~= #self._averages then
    raise("EMA: load_state_dict: the number of averages is %d, expected the number of parameters, %d", #sd.averages,
      #self._averages)
  end
  for k, t in ipairs(sd.averages) do
    opts.expect(t, tensor.a_tensor, "EMA: load_state_dict: average %d", k)
    local shape = tostring(self._averages[k].shape)
    if tostring(t.shape) ~= shape then
      raise("EMA: load_state_dict: average %d has shape %s, expected %s", k, tostring(t.shape), shape)
    end
  end
  self.updates = sd.updates
  no_grad(function()
    for k, t in ipairs(sd.averages) do self._averages[k]:copy_(t:detach()) end
  end)
end

-- ---- AveragedModel --------------------------------------------------------------------------------

--- A copy of a model whose parameters are averages of the model's: the mean (SWA: Izmailov et al. 2018), or with
--- `decay` an exponential moving average. Calling it calls the copy.
---@class AveragedModel: Module
---@overload fun(model: Module, opts: { decay: number, avg_fn: function, use_buffers: boolean, device: string }): AveragedModel
---   model: not sharded; decay: share of the average that is kept at an update (default: nil, the mean); avg_fn:
---   fn(average, value, n) that returns the new average, where n is the number of earlier updates (default: nil);
---   use_buffers: buffers of floating-point numbers are averaged, too, not copied (default: false); device: where the
---   averages are (default: the model's)
---@field module Module  the copy
---@field n_averaged Tensor  the number of updates so far, int64 []
local AveragedModel = nn.Module:extend "AveragedModel"

local function refuse_sharded(who, model)
  for name, p in model:named_parameters() do
    if rawget(p, "_unit") or rawget(p, "_flat") then
      raise("%s: parameter '%s' is sharded; use optim.EMA, with mean = true for the mean", who, name)
    end
  end
end

function AveragedModel:init(model, given)
  local o = opts("AveragedModel", given, { decay = share, avg_fn = opts.fn, use_buffers = false, device = opts.any })
  opts.need(type(model) == "table" and class.isa(model, nn.Module), model, "a module", "AveragedModel: argument 1")
  refuse_sharded("AveragedModel", model)
  if o.decay and o.avg_fn then raise "AveragedModel: decay and avg_fn are both given, expected at most one of them" end
  self.module = util.deepcopy(model)
  if o.device then self.module:to(o.device) end
  self:register_buffer("n_averaged", create.zeros({}, { dtype = "int64" }))
  self._average, self._with_buffers = o.avg_fn, o.use_buffers
  if o.decay then
    local decay = o.decay
    self._average = function(average, value) return average + (value - average) * (1 - decay) end
  end
end

function AveragedModel:forward(...) return self.module(...) end

local function mean(average, value, n) return average + (value - average) / (n + 1) end

local function take(self, n, average, value)
  value = value:detach():to(average.device)
  average = average:detach()
  if n == 0 or not value:is_floating_point() then
    average:copy_(value)
  else
    average:copy_((self._average or mean)(average, value, n))
  end
end

local function take_all(self, model)
  refuse_sharded("update_parameters", model)
  refuse_sharded("update_parameters: the averaged model's", self.module)
  local n, own, seen = self.n_averaged:item(), {}, 0
  for name, p in self.module:named_parameters() do own[name] = p end
  for name, p in model:named_parameters() do
    if not own[name] then raise("update_parameters: the averaged model has no parameter '%s'", name) end
    take(self, n, own[name], p)
    seen = seen + 1
  end
  own = {}
  for name, b in self.module:named_buffers() do own[name] = b end
  for name, b in model:named_buffers() do
    if own[name] then take(self, self._with_buffers and n or 0, own[name], b) end
  end
  self.n_averaged:add_(1)
end

--- Updates the averages with a model's present parameters, and with use_buffers its floating-point buffers; copies the
--- other buffers.
---@param model Module  has the parameters of the averaged model
function AveragedModel:update_parameters(model)
  opts.need(type(model) == "table" and class.isa(model, nn.Module), model, "a module", "update_parameters: argument 1")
  no_grad(scope.scope, take_all, self, model)
end

-- ---- batch norm -----------------------------------------------------------------------------------

--- Recomputes the running statistics of a model's batch norms as the means over the batches of a loader, in one pass
--- without gradients.
---@param loader fun(): any  an iterator, such as data_loader:epoch(); a batch is a tensor, or a table whose first element
---   is the model's input
---@param model Module  it and its descendants afterwards have the mode (training or evaluation) that it had before
function AveragedModel.update_bn(loader, model)
  opts.expect(loader, opts.fn, "update_bn: argument 1")
  opts.need(type(model) == "table" and class.isa(model, nn.Module), model, "a module", "update_bn: argument 2")
  local norms = {}
  for _, m in ipairs(model:modules()) do
    if m._is_batch_norm and m.running_mean ~= nil then
      norms[#norms + 1] = { m, m.momentum }
      m:reset_running_stats()
      m.momentum = false
    end
  end
  if #norms == 0 then return end
  local was = model.training
  model:train()
  local ok, message = pcall(no_grad, function()
    for batch in loader do
      scope.scope(function() model(opts.is_plain(batch) and batch[1] or batch) end)
    end
  end)
  for _, norm in ipairs(norms) do norm[1].momentum = norm[2] end
  model:train(was)
  if not ok then error(message, 0) end
end

local swa_utils = { AveragedModel = AveragedModel, update_bn = AveragedModel.update_bn }
AveragedModel.update_bn = nil

return { EMA = EMA, swa_utils = swa_utils }
