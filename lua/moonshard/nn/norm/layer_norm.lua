-- SPDX-License-Identifier: MIT
--- LayerNorm and RMSNorm.
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local check_sizes = require "moonshard.nn.functional".check_sizes
local init = require "moonshard.nn.initial".init
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.module.parameter".empty

-- The sizes of the normalised dimensions, which are the last ones, as an array.
local function sizes_of(who, d)
  local out = {}
  for i, n in ipairs(type(d) == "table" and d or { d }) do
    out[i] = opts.expect(n, opts.whole_from(0), "%s: size %d", who, i)
  end
  if #out == 0 then opts.wrong(d, "the sizes to normalise over", "%s: argument 1", who) end
  return out
end

local function size_text(sizes) return #sizes == 1 and tostring(sizes[1]) or "[" .. table.concat(sizes, ", ") .. "]" end

--- (x - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions. norm(x, residual) normalises x + residual
--- and returns the result and x + residual, in one pass over both.
---@class LayerNorm: Module
---@field weight Parameter?  of the normalised sizes; nil without elementwise_affine
---@field bias Parameter?  of the normalised sizes; nil without bias
---@overload fun(d: integer|integer[], opts?: { eps: number, elementwise_affine: boolean, bias: boolean, dtype: string, device: string }): LayerNorm
---   eps: added to the variance
local LayerNorm = Module:extend("LayerNorm")

---@param d integer|integer[]  the trailing sizes to normalise over
function LayerNorm:init(d, given)
  local o = opts("LayerNorm", given, { eps = 1e-5, elementwise_affine = true, bias = true, dtype = opts.string,
    device = opts.any })
  local sizes = sizes_of("LayerNorm", d)
  local kind = { dtype = o.dtype, device = o.device }
  self.sizes, self.dims, self.eps = sizes, #sizes, o.eps
  if o.elementwise_affine then
    self.weight = empty(sizes, kind)
    if o.bias then self.bias = empty(sizes, kind) end
  end
  self:reset_parameters()
end

--- Sets weight to 1 and bias to 0.
function LayerNorm:reset_parameters()
  if self.weight then init.ones_(self.weight) end
  if self.bias then init.zeros_(self.bias) end
end

local layer_norm, add_layer_norm = ops.layer_norm, ops.add_layer_norm
---@param x Tensor  [..., d]
---@param residual? Tensor  of x's shape
---@return Tensor  of x's shape
---@return Tensor?  x + residual, if there is a residual
function LayerNorm:forward(x, residual)
  local slots = self._slots
  if not slots.weight then check_sizes("layer_norm", x, slots.sizes) end  -- if there is a weight, the engine checks x
  if residual ~= nil then
    return add_layer_norm(x, residual, slots.weight, slots.bias, slots.dims, slots.eps)
  end
  return layer_norm(x, slots.weight, slots.bias, slots.dims, slots.eps)
end

function LayerNorm:extra_repr()
  return ("%s, eps %g%s%s"):format(size_text(self.sizes), self.eps, self.weight and ", weight" or "", self.bias
    and ", bias" or "")
end

--- x / sqrt(mean(x^2) + eps) * weight over the trailing dimensions. If eps is not given, it is the machine epsilon of
--- x's dtype. norm(x, residual) normalises x + residual and returns the result and x + residual, in one pass over both.
---@class RMSNorm: Module
---@field weight Parameter?  of the normalised sizes; nil without elementwise_affine
---@overload fun(d: integer|integer[], opts?: { eps: number, elementwise_affine: boolean, dtype: string, device: string }): RMSNorm
---   eps: added to the mean square; elementwise_affine: learns weight
local RMSNorm = Module:extend("RMSNorm")

---@param d integer|integer[]  the trailing sizes to normalise over
function RMSNorm:init(d, given)
  local o = opts("RMSNorm", given, { eps = opts.number, elementwise_affine = true, dtype = opts.string,
    device = opts.any })
  local sizes = sizes_of("RMSNorm", d)
  self.sizes, self.dims, self.eps = sizes, #sizes, o.eps
  if o.elementwise_affine then self.weight = empty(sizes, { dtype = o.dtype, device = o.device }) end
  self:reset_parameters()
end

--- Sets weight to 1.
function RMSNorm:reset_parameters()
  if self.weight then init.ones_(self.weight) end
end

local rms_norm, add_rms_norm = ops.rms_norm, ops.add_rms_norm
---@param x Tensor  [..., d]
---@param residual? Tensor  of x's shape
---@return Tensor  of x's shape
---@return Tensor?  x + residual, if there is a residual
function RMSNorm:forward(x, residual)
  local slots = self._slots
  if not slots.weight then check_sizes("rms_norm", x, slots.sizes) end
  if residual ~= nil then return add_rms_norm(x, residual, slots.weight, slots.dims, slots.eps) end
  return rms_norm(x, slots.weight, slots.dims, slots.eps)
end

function RMSNorm:extra_repr()
  return ("%s%s%s"):format(size_text(self.sizes), self.eps and (", eps %g"):format(self.eps) or "", self.weight
    and ", weight" or "")
end

return { LayerNorm = LayerNorm, RMSNorm = RMSNorm }
