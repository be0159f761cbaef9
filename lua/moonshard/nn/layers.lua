-- SPDX-License-Identifier: MIT
--- Layers that are functions of nn.F with arguments fixed in the constructor (variants of dropout, PixelShuffle), and
--- Bilinear.
local functions = require "moonshard.nn.layer_functions"
local init = require "moonshard.nn.initial".init
local opts = require "moonshard.core.opts"
local Dropout = require "moonshard.nn.dropout".Dropout
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.parameter".empty

-- A subclass of Dropout that calls fn instead of F.dropout.
local function dropout_class(name, fn)
  local cls = Dropout:extend(name)
  function cls:forward(x)
    local slots = self._slots
    return fn(x, slots.p, { training = slots.training })
  end
  return cls
end

--- In training, sets whole channels of [N, C, L] or [C, L] to 0 with probability p, and multiplies the others by
--- 1 / (1 - p).
---@class Dropout1d: Dropout
---@overload fun(p?: number): Dropout1d  p: probability of setting a channel to 0 (default: 0.5)
local Dropout1d = dropout_class("Dropout1d", functions.dropout1d)

--- In training, sets whole channels of [N, C, H, W] to 0 with probability p, and multiplies the others by 1 / (1 - p).
---@class Dropout2d: Dropout
---@overload fun(p?: number): Dropout2d  p: probability of setting a channel to 0 (default: 0.5)
local Dropout2d = dropout_class("Dropout2d", functions.dropout2d)

--- In training, sets whole channels of [N, C, D, H, W] or [C, D, H, W] to 0 with probability p, and multiplies the others
--- by 1 / (1 - p).
---@class Dropout3d: Dropout
---@overload fun(p?: number): Dropout3d  p: probability of setting a channel to 0 (default: 0.5)
local Dropout3d = dropout_class("Dropout3d", functions.dropout3d)

--- F.alpha_dropout as a module: dropout that keeps mean 0 and variance 1 after SELU.
---@class AlphaDropout: Dropout
---@overload fun(p?: number): AlphaDropout  p: probability of dropping an element (default: 0.5)
local AlphaDropout = dropout_class("AlphaDropout", functions.alpha_dropout)

--- F.pixel_shuffle as a module: [..., C * r * r, H, W] becomes [..., C, H * r, W * r].
---@class PixelShuffle: Module
---@field factor integer  the factor by which height and width grow
---@overload fun(r: integer): PixelShuffle  r: the factor by which height and width grow
local PixelShuffle = Module:extend "PixelShuffle"

---@param r integer  the factor by which height and width grow
function PixelShuffle:init(r)
  self.factor = opts.expect(r, opts.whole_from(1), "PixelShuffle: argument 1, the factor,")
end
function PixelShuffle:forward(x) return functions.pixel_shuffle(x, self._slots.factor) end
function PixelShuffle:extra_repr() return tostring(self.factor) end

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

return { Dropout1d = Dropout1d, Dropout2d = Dropout2d, Dropout3d = Dropout3d, AlphaDropout = AlphaDropout,
  PixelShuffle = PixelShuffle, Bilinear = Bilinear }
