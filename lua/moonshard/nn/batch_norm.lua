-- SPDX-License-Identifier: MIT
--- BatchNorm1d and BatchNorm2d.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local functional = require "moonshard.nn.functional"
local initial = require "moonshard.nn.initial"
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.parameter".empty
local running_stats = require "moonshard.nn.running_stats"

local a_tensor = require("moonshard.tensor").a_tensor
local raise, show, init = errors.raise, errors.kind, initial.init

local spec = {
  eps = 1e-5, momentum = opts.any, affine = true, track_running_stats = true, dtype = opts.string, device = opts.any,
}

local function construct(self, d, given)
  local name = self:class_name()
  local o = opts(name, given, spec)
  if type(d) ~= "number" or d < 0 or d % 1 ~= 0 then
    raise("%s: the number of channels must be a whole number from 0, got %s", name, show(d))
  end
  if o.momentum == nil then o.momentum = 0.1 end
  opts.need(o.momentum == false or type(o.momentum) == "number", o.momentum,
    "a number, or false for the average over all batches", "%s: option 'momentum'", name)
  local kind = { dtype = o.dtype, device = o.device }
  self.d, self.eps, self.momentum, self.affine, self.track_running_stats = d, o.eps, o.momentum, o.affine,
    o.track_running_stats
  self:register_parameter("weight", o.affine and empty({ d }, kind) or nil)
  self:register_parameter("bias", o.affine and empty({ d }, kind) or nil)
  running_stats.register(self, d, o)
  self:reset_parameters()
end

--- Resets the running statistics; sets weight to 1 and bias to 0.
local function reset_parameters(self)
  self:reset_running_stats()
  if self.weight then init.ones_(self.weight) end
  if self.bias then init.zeros_(self.bias) end
end

local batch_norm = functional.batch_norm
local function forward(self, x)
  local slots = self._slots
  opts.expect(x, a_tensor, "%s: argument", self:class_name())
  self._check_input(x)
  local mean, var = slots.running_mean, slots.running_var
  local training, factor = slots.training or mean == nil, slots.momentum or 0
  if slots.training and slots.track_running_stats and slots.num_batches_tracked then
    slots.num_batches_tracked:add_(1)
    if not slots.momentum then factor = 1 / slots.num_batches_tracked:item() end
  elseif slots.training then
    mean, var = nil, nil
  end
  return batch_norm(x, mean, var, slots.weight, slots.bias, training, factor, slots.eps)
end

local function extra_repr(self)
  return ("%d, eps %g%s%s%s"):format(self.d, self.eps, self.momentum and (", momentum %g"):format(self.momentum) or "",
    self.affine and ", affine" or "", self.track_running_stats and ", running stats" or "")
end

local function batch_norm_class(name)
  local cls = Module:extend(name)
  cls.init, cls.forward, cls.extra_repr = construct, forward, extra_repr
  cls.reset_running_stats, cls.reset_parameters = running_stats.reset, reset_parameters
  return cls
end

--- Computes (x - mean) / sqrt(var + eps) * weight + bias for each channel of [N, C] or [N, C, L]: with the batch's
--- statistics in training and if there are no running ones, with the running statistics in evaluation. With momentum =
--- false the running statistics are the averages over all batches.
---@class BatchNorm1d: Module
---@field weight Parameter?  [d]; nil without affine
---@field bias Parameter?  [d]; nil without affine
---@field running_mean Tensor?  [d]; nil without track_running_stats
---@field running_var Tensor?  [d]; nil without track_running_stats
---@field num_batches_tracked Tensor?  number of training batches so far, int64 []
---@field reset_running_stats fun(self)  sets the running mean to 0, the variance to 1, the number of batches to 0
---@overload fun(d: integer, opts?: { eps: number, momentum: number, affine: boolean, track_running_stats: boolean, dtype: string, device: string }): BatchNorm1d
---   d: number of channels; eps: added to the variance; momentum: weight of the batch in the running statistics
---   (default: 0.1); false: the average over all batches; affine: adds the parameters weight and bias (default: true);
---   track_running_stats: keeps running statistics (default: true)
local BatchNorm1d = batch_norm_class "BatchNorm1d"

function BatchNorm1d._check_input(x)
  local n = x.ndim
  if n ~= 2 and n ~= 3 then raise("expected 2D or 3D input (got %dD input)", n) end
end

--- BatchNorm1d for images [N, C, H, W].
---@class BatchNorm2d: BatchNorm1d
---@overload fun(d: integer, opts?: { eps: number, momentum: number, affine: boolean, track_running_stats: boolean, dtype: string, device: string }): BatchNorm2d
---   d: number of channels; eps: added to the variance; momentum: weight of the batch in the running statistics
---   (default: 0.1); false: the average over all batches; affine: adds the parameters weight and bias (default: true);
---   track_running_stats: keeps running statistics (default: true)
local BatchNorm2d = batch_norm_class "BatchNorm2d"

function BatchNorm2d._check_input(x)
  if x.ndim ~= 4 then raise("expected 4D input (got %dD input)", x.ndim) end
end

return { BatchNorm1d = BatchNorm1d, BatchNorm2d = BatchNorm2d }
