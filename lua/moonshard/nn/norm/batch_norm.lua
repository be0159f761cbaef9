-- SPDX-License-Identifier: MIT
--- BatchNorm1d, BatchNorm2d, BatchNorm3d and SyncBatchNorm.
local class = require "moonshard.core.class"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local functional = require "moonshard.nn.functional"
local initial = require "moonshard.nn.initial"
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.module.parameter".empty
local running_stats = require "moonshard.nn.norm.running_stats"
local sync_stats = require "moonshard.nn.norm.sync_stats"

local a_module, a_tensor = require("moonshard.nn.module.register").a_module, require("moonshard.tensor").a_tensor
local raise, show, init = errors.raise, errors.kind, initial.init

local spec = {
  eps = 1e-5, momentum = opts.any, affine = true, track_running_stats = true, dtype = opts.string, device = opts.any,
}

local sync_spec = { process_group = dist._a_group }
for name, kind in pairs(spec) do sync_spec[name] = kind end

local function construct(self, d, given)
  local name = self:class_name()
  local o = opts(name, given, self._synchronized and sync_spec or spec)
  if type(d) ~= "number" or d < 0 or d % 1 ~= 0 then
    raise("%s: the number of channels must be a whole number from 0, got %s%s", name, show(d), opts.by_position(d))
  end
  if o.momentum == nil then o.momentum = 0.1 end
  opts.need(o.momentum == false or type(o.momentum) == "number", o.momentum,
    "a number, or false for the average over all batches", "%s: option 'momentum'", name)
  local kind = { dtype = o.dtype, device = o.device }
  if self._synchronized then self.process_group = o.process_group end
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
  if self._synchronized and slots.training and dist.world_size(slots.process_group) > 1 then
    functional.check_eps(slots.eps, true)
    return sync_stats(x, { mean = mean, var = var, factor = factor },
      { weight = slots.weight, bias = slots.bias, eps = slots.eps, group = slots.process_group })
  end
  return batch_norm(x, mean, var, slots.weight, slots.bias, training, factor, slots.eps)
end

local function extra_repr(self)
  return ("%d, eps %g%s%s%s"):format(self.d, self.eps, self.momentum and (", momentum %g"):format(self.momentum) or "",
    self.affine and ", affine" or "", self.track_running_stats and ", running stats" or "")
end

local function batch_norm_class(name)
  local cls = Module:extend(name)
  cls._is_batch_norm = true
  cls.init, cls.forward, cls.extra_repr = construct, forward, extra_repr
  cls.reset_running_stats, cls.reset_parameters = running_stats.reset, reset_parameters
  return cls
end

--- Computes (x - mean) / sqrt(var + eps) * weight + bias for each channel of images [N, C, H, W]: with the batch's
--- statistics in training and if there are no running ones, with the running statistics in evaluation. With momentum =
--- false the running statistics are the averages over all batches.
---@class BatchNorm2d: Module
---@field weight Parameter?  [d]; nil without affine
---@field bias Parameter?  [d]; nil without affine
---@field running_mean Tensor?  [d]; nil without track_running_stats
---@field running_var Tensor?  [d]; nil without track_running_stats
---@field num_batches_tracked Tensor?  number of training batches so far, int64 []
---@field reset_running_stats fun(self)  sets the running mean to 0, the variance to 1, the number of batches to 0
---@overload fun(d: integer, opts?: { eps: number, momentum: number, affine: boolean, track_running_stats: boolean, dtype: string, device: string }): BatchNorm2d
---   d: number of channels; eps: added to the variance; momentum: weight of the batch in the running statistics
---   (default: 0.1); false: the average over all batches; affine: adds the parameters weight and bias (default: true);
---   track_running_stats: keeps running statistics (default: true)
---@family

local M, plain = {}, {}
for d = 1, 3 do
  local name = ("BatchNorm%dd"):format(d)
  local cls = batch_norm_class(name)
  function cls._check_input(x)
    if x.ndim ~= d + 2 and (d > 1 or x.ndim ~= 2) then
      raise("expected %s%dD input (got %dD input)", d == 1 and "2D or " or "", d + 2, x.ndim)
    end
  end
  M[name], plain[d] = cls, cls
end

--- BatchNorm1d for [N, C, ...] whose statistics in training are those of all ranks' batches together. The batches may
--- have different sizes, 0 included. Every rank of the group calls forward and backward. In evaluation, and in a group
--- of one rank, it computes what BatchNorm1d does. If the ranks' losses are averaged, weighted by the sizes of their
--- batches, gradients are those of BatchNorm1d over all batches as one.
---@class SyncBatchNorm: BatchNorm1d
---@overload fun(d: integer, opts?: { eps: number, momentum: number, affine: boolean, track_running_stats: boolean, process_group: Group, dtype: string, device: string }): SyncBatchNorm
---   d: number of channels; eps: added to the variance; momentum: weight of the batch in the running statistics
---   (default: 0.1); false: the average over all batches; affine: adds the parameters weight and bias (default: true);
---   track_running_stats: keeps running statistics (default: true); process_group: ranks whose batches count (default:
---   all)
local SyncBatchNorm = batch_norm_class "SyncBatchNorm"
SyncBatchNorm._synchronized = true

function SyncBatchNorm._check_input(x)
  if x.ndim < 2 then raise("expected at least 2D input (got %dD input)", x.ndim) end
end

-- A SyncBatchNorm with the parameters, buffers and settings of a batch norm.
local function synchronized(m, group)
  local out = SyncBatchNorm(m.d, { eps = m.eps, momentum = m.momentum, affine = false, track_running_stats = false,
    process_group = group })
  out.affine, out.track_running_stats, out.training = m.affine, m.track_running_stats, m.training
  for name, p in m:named_parameters { recurse = false } do out:register_parameter(name, p) end
  for name, b in m:named_buffers { recurse = false } do out:register_buffer(name, b) end
  return out
end

-- Converts a module and its descendants. done: the replacement of each module so far, because modules may be shared.
local function converted(m, group, done)
  if done[m] then return done[m] end
  done[m] = m
  for _, kind in ipairs(plain) do
    if m:isa(kind) then
      done[m] = synchronized(m, group)
      return done[m]
    end
  end
  local names, children = m:_child_list()
  for k, child in ipairs(children) do
    local new = converted(child, group, done)
    if not rawequal(new, child) then m:set_submodule(names[k], new) end
  end
  return m
end

--- Replaces every batch norm in a module by a SyncBatchNorm with its parameters and buffers. To be called before the
--- module is sharded or wrapped, and before its optimizer is made.
---@param module Module  changed; a batch norm itself is not, but its replacement is returned
---@param group? Group  ranks whose batches count (default: all); { process_group = group } is the same
---@return Module  module, or the replacement of a module that is a batch norm
function SyncBatchNorm.convert_sync_batchnorm(module, group, more)
  if class.is_class(module) then module, group = group, more end     -- called with a colon
  opts.expect(module, a_module, "convert_sync_batchnorm: argument 1")
  if opts.is(group) then group = opts("convert_sync_batchnorm", group, { process_group = dist._a_group }).process_group end
  if group ~= nil then opts.expect(group, dist._a_group, "convert_sync_batchnorm: argument 2") end
  return converted(module, group, {})
end

M.SyncBatchNorm = SyncBatchNorm
return M
