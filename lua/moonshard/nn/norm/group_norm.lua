-- SPDX-License-Identifier: MIT
--- GroupNorm, and InstanceNorm of 1 to 3 dimensions.
local errors = require "moonshard.core.errors"
local functions = require "moonshard.nn.norm.functions"
local opts = require "moonshard.core.opts"
local init = require "moonshard.nn.initial".init
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.module.parameter".empty
local running_stats = require "moonshard.nn.norm.running_stats"

local a_tensor, raise = require("moonshard.tensor").a_tensor, errors.raise

local function reset_affine(self)
  if self.weight then init.ones_(self.weight) end
  if self.bias then init.zeros_(self.bias) end
end

--- F.group_norm as a module: normalises each sample over groups of channels.
---@class GroupNorm: Module
---@field weight Parameter?  [d]; nil without affine
---@field bias Parameter?  [d]; nil without affine
---@overload fun(groups: integer, d: integer, opts?: { eps: number, affine: boolean, dtype: string, device: string }): GroupNorm
---   groups: number of groups, divides d; d: number of channels; eps: added to the variance
local GroupNorm = Module:extend "GroupNorm"

---@param groups integer  number of groups, divides d
---@param d integer  number of channels
function GroupNorm:init(groups, d, given)
  local o = opts("GroupNorm", given, { eps = 1e-5, affine = true, dtype = opts.string, device = opts.any })
  opts.expect(groups, opts.whole_from(1), "GroupNorm: argument 1, the number of groups,")
  opts.expect(d, opts.whole_from(0), "GroupNorm: argument 2, the number of channels,")
  if d % groups ~= 0 then
    raise("GroupNorm: argument 2, num_channels, is %d, expected a multiple of num_groups (%d)", d, groups)
  end
  self.groups, self.d, self.eps = groups, d, o.eps
  if o.affine then
    local kind = { dtype = o.dtype, device = o.device }
    self.weight = empty({ d }, kind)
    self.bias = empty({ d }, kind)
  end
  self:reset_parameters()
end

--- Sets weight to 1 and bias to 0.
function GroupNorm:reset_parameters() reset_affine(self) end

---@param x Tensor  [N, d, ...]
---@return Tensor  of x's shape
function GroupNorm:forward(x)
  local slots = self._slots
  return functions.group_norm(x, slots.groups, slots.weight, slots.bias, { eps = slots.eps })
end

function GroupNorm:extra_repr()
  return ("%s of %d, eps %g%s"):format(errors.count(self.groups, "group"), self.d, self.eps, self.weight and ", affine" or "")
end

local spec = { eps = 1e-5, momentum = 0.1, affine = false, track_running_stats = false, dtype = opts.string,
  device = opts.any }

local function construct(self, d, given)
  local name = self:class_name()
  local o = opts(name, given, spec)
  opts.expect(d, opts.whole_from(0), "%s: argument 1, the number of channels,", name)
  local kind = { dtype = o.dtype, device = o.device }
  self.d, self.eps, self.momentum, self.track_running_stats = d, o.eps, o.momentum, o.track_running_stats
  self:register_parameter("weight", o.affine and empty({ d }, kind) or nil)
  self:register_parameter("bias", o.affine and empty({ d }, kind) or nil)
  running_stats.register(self, d, o)
  self:reset_parameters()
end

--- Resets the running statistics; sets weight to 1 and bias to 0.
local function reset_parameters(self)
  self:reset_running_stats()
  reset_affine(self)
end

local function forward(self, x)
  local slots = self._slots
  opts.expect(x, a_tensor, "%s: argument", self:class_name())
  local batched = self._dims
  if x.ndim ~= batched and x.ndim ~= batched - 1 then
    raise("expected %dD or %dD input (got %dD input)", batched - 1, batched, x.ndim)
  end
  local single = x.ndim == batched - 1
  local at = single and 1 or 2
  if x:size(at) ~= slots.d and (slots.weight or slots.running_mean) then
    raise("%s: expected input's size at dimension %d to match num_features (%d), but got: %d", self:class_name(), at,
      slots.d, x:size(at))
  end
  local y = functions.instance_norm(single and x:unsqueeze(1) or x, slots.running_mean, slots.running_var, slots.weight,
    slots.bias, { use_input_stats = slots.training or not slots.track_running_stats, momentum = slots.momentum,
      eps = slots.eps })
  return single and y:squeeze(1) or y
end

local function extra_repr(self)
  return ("%d, eps %g, momentum %g%s%s"):format(self.d, self.eps, self.momentum, self.weight and ", affine" or "",
    self.track_running_stats and ", running stats" or "")
end

local function instance_norm_class(name, dims)
  local cls = Module:extend(name)
  cls._dims = dims
  cls.init, cls.forward, cls.extra_repr = construct, forward, extra_repr
  cls.reset_running_stats, cls.reset_parameters = running_stats.reset, reset_parameters
  return cls
end

--- Normalises each channel of each sample of [N, C, H, W] or [C, H, W] by its own statistics; in evaluation with
--- track_running_stats by the running statistics.
---@class InstanceNorm2d: Module
---@field weight Parameter?  [d]; nil without affine
---@field bias Parameter?  [d]; nil without affine
---@field running_mean Tensor?  [d]; nil without track_running_stats
---@field running_var Tensor?  [d]; nil without track_running_stats
---@field num_batches_tracked Tensor?  int64 []; stays 0, as in PyTorch
---@overload fun(d: integer, opts?: { eps: number, momentum: number, affine: boolean, track_running_stats: boolean, dtype: string, device: string }): InstanceNorm2d
---   d: number of channels; eps: added to the variance; momentum: weight of the batch in the running statistics
---   (default: 0.1); affine: adds the parameters weight and bias (default: false); track_running_stats: keeps running
---   statistics (default: false)
---@family

local M = { GroupNorm = GroupNorm }
for dims = 1, 3 do
  local name = ("InstanceNorm%dd"):format(dims)
  M[name] = instance_norm_class(name, dims + 2)
end

return M
