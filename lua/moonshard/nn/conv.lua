-- SPDX-License-Identifier: MIT
--- Conv2d.
local affine = require "moonshard.nn.affine"
local raise = require "moonshard.core.errors".raise
local opts = require "moonshard.core.opts"
local functional = require "moonshard.nn.functional"
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.parameter".empty

--- Maps images [N, in, H, W] (or [in, H, W]) to [N, out, H', W']. weight is [out, in / groups, KH, KW], bias [out].
--- Defaults: stride 1, padding 0, dilation 1. Errors: in or out is not divisible by groups.
---@class Conv2d: Module
---@field weight Parameter  [size_out, size_in / groups, height, width]
---@field bias Parameter?  [size_out]; nil without bias
---@overload fun(size_in: integer, size_out: integer, kernel: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[]|"same"|"valid", dilation: integer|integer[], groups: integer, bias: boolean, padding_mode: "zeros", dtype: string, device: string }): Conv2d
---   padding_mode: only "zeros" is supported
local Conv2d = Module:extend("Conv2d")

---@param size_in integer  channels of the input
---@param size_out integer  channels of the output
---@param kernel integer|integer[]  height and width, or one number for both
function Conv2d:init(size_in, size_out, kernel, given)
  local o = opts("Conv2d", given, {
    stride = opts.any, padding = opts.any, dilation = opts.any, groups = 1, bias = true,
    padding_mode = opts.one_of({ "zeros" }, "zeros"), dtype = opts.string, device = opts.any,
  })
  affine.check_sizes("Conv2d", size_in, size_out)
  o.stride, o.padding, o.dilation = o.stride or 1, o.padding or 0, o.dilation or 1
  if o.groups < 1 or o.groups % 1 ~= 0 then raise("groups must be a positive integer, got %s", o.groups) end
  if size_in % o.groups ~= 0 then
    raise("in_channels must be divisible by groups, got in_channels=%d and groups=%d instead", size_in, o.groups)
  end
  if size_out % o.groups ~= 0 then
    raise("out_channels must be divisible by groups, got out_channels=%d and groups=%d instead", size_out, o.groups)
  end
  local kind = { dtype = o.dtype, device = o.device }
  local k = functional.pair("Conv2d", "argument 3, the kernel,", kernel)
  self.size_in, self.size_out, self.kernel, self.padding = size_in, size_out, { k[1], k[2] }, o.padding
  self.how = functional.conv_options("Conv2d", o, k)
  self.weight = empty({ size_out, size_in / o.groups, k[1], k[2] }, kind)
  if o.bias then self.bias = empty({ size_out }, kind) end
  self:reset_parameters()
end

--- Initialises weight and bias again, uniform in +-1/sqrt(number of inputs per output).
function Conv2d:reset_parameters()
  affine.reset(self, self.size_in / self.how.groups * self.kernel[1] * self.kernel[2])
end

local conv2d = functional.conv2d
---@param x Tensor  [N, in, H, W] or [in, H, W]
---@return Tensor  [N, out, H', W'] or [out, H', W']
function Conv2d:forward(x)
  local slots = self._slots
  return conv2d(x, slots.weight, slots.bias, slots.how)
end

local function text(v)
  if type(v) == "string" then return v end
  return v[1] == v[2] and tostring(v[1]) or v[1] .. "x" .. v[2]
end

function Conv2d:extra_repr()
  local how, out = self.how, { ("%d -> %d, kernel %s"):format(self.size_in, self.size_out, text(self.kernel)) }
  local padding = type(self.padding) == "string" and self.padding or { how.padding[1], how.padding[2] }
  if text(how.stride) ~= "1" then out[#out + 1] = "stride " .. text(how.stride) end
  if text(padding) ~= "0" then out[#out + 1] = "padding " .. text(padding) end
  if text(how.dilation) ~= "1" then out[#out + 1] = "dilation " .. text(how.dilation) end
  if how.groups ~= 1 then out[#out + 1] = "groups " .. how.groups end
  if self.bias then out[#out + 1] = "bias" end
  return table.concat(out, ", ")
end

return { Conv2d = Conv2d }
