-- SPDX-License-Identifier: MIT
--- Linear and Identity.
local engine = require "moonshard.core.ffi"
local affine = require "moonshard.nn.linear.affine"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.module.parameter".empty

--- y = x W^T + b over the last dimension. weight is [out, in], bias [out].
---@class Linear: Module
---@field weight Parameter  [size_out, size_in]
---@field bias Parameter?  [size_out]; nil without bias
---@overload fun(size_in: integer, size_out: integer, opts?: { bias: boolean, dtype: string, device: string }): Linear
local Linear = Module:extend("Linear")

---@param size_in integer  features of the input, [..., size_in]
---@param size_out integer  features of the output, [..., size_out]
function Linear:init(size_in, size_out, given)
  local o = opts("Linear", given, { bias = true, dtype = opts.string, device = opts.any })
  affine.check_sizes("Linear", size_in, size_out)
  local kind = { dtype = o.dtype, device = o.device }
  self.size_in, self.size_out = size_in, size_out
  self.weight = empty({ size_out, size_in }, kind)
  if o.bias then self.bias = empty({ size_out }, kind) end
  self:reset_parameters()
end

--- Initialises weight and bias again, uniform in +-1/sqrt(in).
function Linear:reset_parameters() affine.reset(self, self.size_in) end

local linear = ops.linear
---@param x Tensor  [..., size_in]
---@return Tensor  [..., size_out]
function Linear:forward(x)
  local slots = self._slots
  return linear(x, slots.weight, slots.bias)
end

local state, linear_parts = engine.state, ops.linear_parts

-- The results of up to 4 plain layers on one input side by side, in one call; nil if they must be called one by one,
-- for their gradients, hooks or adapters.
---@param x Tensor
---@param layers Module[]
---@return Tensor?
function Linear._parts(x, layers)
  if state.grad_mode ~= 0 then return nil end
  local slots = {}
  for k = 1, #layers do
    local m = layers[k]
    slots[k] = rawget(m, "_slots")
    if getmetatable(m) ~= Linear or m._hooked or slots[k].forward or slots[k].weight.id < 0 then return nil end
  end
  return linear_parts(x, slots)
end

function Linear:extra_repr() return ("%d -> %d%s"):format(self.size_in, self.size_out, self.bias and ", bias" or "") end

--- Returns its input. The constructor ignores its arguments.
---@class Identity: Module
---@overload fun(...): Identity
local Identity = Module:extend("Identity")
function Identity.init() end
function Identity.forward(_, ...) return ... end

return { Linear = Linear, Identity = Identity }
