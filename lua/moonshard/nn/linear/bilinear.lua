-- SPDX-License-Identifier: MIT
--- Bilinear.
local functions = require "moonshard.nn.linear.functions"
local init = require "moonshard.nn.initial".init
local opts = require "moonshard.core.opts"
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.module.parameter".empty

--- y = x1^T W x2 + b for each output.
---@class Bilinear: Module
---@field weight Parameter  [out, in1, in2]
---@field bias Parameter?  [out]; nil without bias
---@overload fun(in1: integer, in2: integer, out: integer, opts?: { bias: boolean, dtype: string, device: string }): Bilinear
---   in1: features of the first input; in2: features of the second input; out: features of the output
local Bilinear = Module:extend "Bilinear"

---@param in1 integer  features of the first input
---@param in2 integer  features of the second input
---@param out integer  features of the output
function Bilinear:init(in1, in2, out, given)
  local o = opts("Bilinear", given, { bias = true, dtype = opts.string, device = opts.any })
  opts.expect(in1, opts.whole_from(1), "Bilinear: argument 1, the size of the first input,")
  opts.expect(in2, opts.whole_from(0), "Bilinear: argument 2, the size of the second input,")
  opts.expect(out, opts.whole_from(0), "Bilinear: argument 3, the size of the output,")
  local kind = { dtype = o.dtype, device = o.device }
  self.in1, self.in2, self.out = in1, in2, out
  self.weight = empty({ out, in1, in2 }, kind)
  if o.bias then self.bias = empty({ out }, kind) end
  self:reset_parameters()
end

--- Initialises weight and bias again, uniform in +-1/sqrt(in1).
function Bilinear:reset_parameters()
  local bound = 1 / math.sqrt(self.in1)
  init.uniform_(self.weight, -bound, bound)
  if self.bias then init.uniform_(self.bias, -bound, bound) end
end

---@param x1 Tensor  [..., in1]
---@param x2 Tensor  [..., in2]
---@return Tensor  [..., out]
function Bilinear:forward(x1, x2)
  local slots = self._slots
  return functions.bilinear(x1, x2, slots.weight, slots.bias)
end
function Bilinear:extra_repr()
  return ("%d x %d -> %d%s"):format(self.in1, self.in2, self.out, self.bias and ", bias" or "")
end

return { Bilinear = Bilinear }
