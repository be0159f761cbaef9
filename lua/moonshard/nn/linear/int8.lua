-- SPDX-License-Identifier: MIT
--- Int8Linear: a linear layer whose frozen weight is int8. Adapters (nn.lora) can train it.
local affine = require "moonshard.nn.linear.affine"
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local base = require "moonshard.nn.module"
local parameter = require "moonshard.nn.module.parameter"
local quantize_rows = require "moonshard.nn.linear.quantize".quantize_rows
local Linear = require "moonshard.nn.linear.linear".Linear
local no_grad = autograd.no_grad

--- y = x (scale W)^T + b over the last dimension, where W is int8 and every row has a scale: a quarter of float32's
--- memory, and of its time for a few rows of x. W and scale are not trained. A new layer computes its bias, which is 0,
--- until it is loaded; Int8Linear.from_linear makes one of a Linear.
---@class Int8Linear: Module
---@field weight Parameter  [size_out, size_in], int8; requires no gradient
---@field scale Tensor  [size_out]; a buffer of the layer's dtype
---@field bias Parameter?  [size_out]; nil without bias
---@overload fun(size_in: integer, size_out: integer, opts?: { bias: boolean, dtype: string, device: string }): Int8Linear
local Int8Linear = base.Module:extend("Int8Linear")

---@param size_in integer  features of the input, [..., size_in]
---@param size_out integer  features of the output, [..., size_out]
---@param given? { bias: boolean, dtype: string, device: string }
---   bias: whether the layer has one (default: true); dtype: that of scale and bias; device: where the tensors are
function Int8Linear:init(size_in, size_out, given)
  local o = opts("Int8Linear", given, { bias = true, dtype = opts.string, device = opts.any })
  affine.check_sizes("Int8Linear", size_in, size_out)
  self.size_in, self.size_out = size_in, size_out
  self.weight = parameter.Parameter(create.empty(size_out, size_in, { dtype = "int8", device = o.device }),
    { requires_grad = false })
  self:register_buffer("scale", create.empty(size_out, { dtype = o.dtype, device = o.device }))
  if o.bias then self.bias = parameter.empty({ size_out }, { dtype = o.dtype, device = o.device }) end
  self:reset_parameters()
end

--- Sets weight and bias to 0, and scale to 1.
function Int8Linear:reset_parameters()
  no_grad(function()
    self.weight:zero_()
    self.scale:fill_(1)
    if self.bias then self.bias:zero_() end
  end)
end

local int8_linear = ops.int8_linear
---@param x Tensor  [..., size_in]
---@return Tensor  [..., size_out]
function Int8Linear:forward(x)
  local slots = self._slots
  return int8_linear(x, slots.weight, slots.bias, slots.scale)
end

function Int8Linear:extra_repr()
  return ("%d -> %d%s"):format(self.size_in, self.size_out, self.bias and ", bias" or "")
end

--- The layer with the weight of a Linear, rounded to int8 by nn.utils.quantize_rows. The bias stays the same parameter.
--- Errors: a subclass of Linear that has a forward of its own; a weight that is sharded or not finite.
---@param linear Linear  keeps its own weight
---@return Int8Linear
function Int8Linear.from_linear(linear)
  opts.expect(linear, base.a_module, "from_linear: argument 1")
  if base.forward_of(linear) ~= Linear.forward then
    errors.raise("from_linear: argument 1 is %s, expected a Linear", linear:class_name())
  end
  local weight = linear.weight
  local self = Int8Linear(linear.size_in, linear.size_out, { bias = false, dtype = weight.dtype, device = "meta" })
  no_grad(function()
    local q, scale = quantize_rows(weight)
    self.weight, self.scale = parameter.Parameter(q, { requires_grad = false }), scale
  end)
  self.bias = linear.bias
  return self:train(linear.training)
end

-- The module with its layers replaced. made: the replacements so far, by layer.
local function converted(m, path, accepts, made)
  if getmetatable(m) == Linear then
    if not made[m] and accepts(path, m) then made[m] = Int8Linear.from_linear(m) end
    return made[m] or m
  end
  local names, children = m:_child_list()
  for k, child in ipairs(children) do
    local new = converted(child, base.join(path, names[k]), accepts, made)
    if not rawequal(new, child) then m:set_submodule(names[k], new) end
  end
  return m
end

--- Replaces the linear layers of a model, those of subclasses excepted, by Int8Linear, in place. A layer that is at
--- several places is replaced by one layer. To be called before nn.lora, and before the model is sharded or wrapped.
---@param model Module  changed; a Linear itself is not, but its replacement is returned
---@param given? { target: fun(name: string, m: Linear): boolean }
---   target: whether to replace the layer m at a path (default: every layer)
---@return Module  model, or the replacement of a model that is a Linear
function Int8Linear.convert_linear(model, given)
  opts.expect(model, base.a_module, "convert_linear: argument 1")
  local o = opts("convert_linear", given, { target = opts.fn })
  return converted(model, "", o.target or function() return true end, {})
end

return { Int8Linear = Int8Linear }
