-- SPDX-License-Identifier: MIT
--- Conv1d, Conv2d and Conv3d, and ConvTranspose1d, ConvTranspose2d and ConvTranspose3d.
local affine = require "moonshard.nn.linear.affine"
local raise = require("moonshard.core.errors").raise
local opts = require "moonshard.core.opts"
local functions = require "moonshard.nn.conv.functions"
local Module = require("moonshard.nn.module").Module
local empty = require("moonshard.nn.module.parameter").empty
local a_tensor = require("moonshard.tensor").a_tensor

local spec = { stride = opts.any, padding = opts.any, dilation = opts.any, groups = 1, bias = true,
  padding_mode = functions.padding_mode, dtype = opts.string, device = opts.any }
local transposed_spec = { output_padding = opts.any }
for name, kind in pairs(spec) do transposed_spec[name] = kind end

local function product(list)
  local n = 1
  for _, size in ipairs(list) do n = n * size end
  return n
end

-- Initialises a convolution. class: its number of dimensions d, and whether it is transposed.
local function construct(self, class, size_in, size_out, kernel, given)
  local name, d, transposed = self:class_name(), class.d, class.transposed
  local o = opts(name, given, transposed and transposed_spec or spec)
  affine.check_sizes(name, size_in, size_out)
  if o.groups < 1 or o.groups % 1 ~= 0 then raise("groups must be a positive integer, got %s", o.groups) end
  if size_in % o.groups ~= 0 then
    raise("in_channels must be divisible by groups, got in_channels=%d and groups=%d instead", size_in, o.groups)
  end
  if size_out % o.groups ~= 0 then
    raise("out_channels must be divisible by groups, got out_channels=%d and groups=%d instead", size_out, o.groups)
  end
  if transposed and o.padding_mode ~= "zeros" then
    raise("%s: option 'padding_mode' is '%s', expected 'zeros': transposed convolutions have no other", name,
      o.padding_mode)
  end
  local k = functions.sizes(name, "argument 3, the kernel,", kernel, d)
  self.size_in, self.size_out, self.kernel, self.padding, self.padding_mode = size_in, size_out, k, o.padding or 0,
    o.padding_mode
  self.how = functions.setup(name, o, k, transposed)
  local first, second = size_out, size_in
  if transposed then first, second = size_in, size_out end
  local kind, shape = { dtype = o.dtype, device = o.device }, { first, second / o.groups }
  for _, size in ipairs(k) do shape[#shape + 1] = size end
  self.weight = empty(shape, kind)
  if o.bias then self.bias = empty({ size_out }, kind) end
  self:reset_parameters()
end

--- Initialises weight and bias again, uniform in +-1/sqrt(elements of a filter: weight:numel() / weight:size(1)).
local function reset_parameters(self)
  local channels = self.how.transposed and self.size_out or self.size_in
  affine.reset(self, channels / self.how.groups * product(self.kernel))
end

local run = functions.run
local function forward_of(operator)
  return function(self, x)
    local slots = self._slots
    return run(operator, x, slots.weight, slots.bias, slots.how, slots.padding_mode)
  end
end

-- The output padding with which the output has the sizes output_size: in each dimension, the number of elements beyond
-- the smallest output.
local function output_padding(self, x, output_size)
  local name, how, d, more = self:class_name(), self.how, #self.kernel, {}
  opts.need(opts.is_plain(output_size) and (#output_size == d or #output_size == x.ndim), output_size,
    ("a list of %d size%s, or of all sizes of the output"):format(d, d == 1 and "" or "s"),
    "%s: argument 2, the output size,", name)
  for k = 1, d do
    local wanted = output_size[#output_size - d + k]
    local least = (x:size(x.ndim - d + k) - 1) * how.stride[k] - 2 * how.before[k]
      + how.dilation[k] * (self.kernel[k] - 1) + 1
    if wanted < least or wanted >= least + how.stride[k] then
      raise("%s: output size %s of spatial dimension %d, expected a size from %d to %d for the input %s", name, tostring(wanted),
        k, least, least + how.stride[k] - 1, tostring(x.shape))
    end
    more[k] = wanted - least
  end
  return more
end

local function transposed_forward_of(operator)
  return function(self, x, output_size)
    local slots = self._slots
    local how = slots.how
    if output_size ~= nil then
      opts.expect(x, a_tensor, "%s: argument 1", self:class_name())
      how = { stride = how.stride, before = how.before, after = output_padding(self, x, output_size),
        dilation = how.dilation, groups = how.groups }
    end
    return run(operator, x, slots.weight, slots.bias, how)
  end
end

-- A list as text: "3" if all its numbers are 3, "3x5" if they differ. A string is returned as it is.
local function text(v)
  if type(v) == "string" then return v end
  for _, n in ipairs(v) do
    if n ~= v[1] then return table.concat(v, "x") end
  end
  return tostring(v[1])
end

local function extra_repr(self)
  local how, out = self.how, { ("%d -> %d, kernel %s"):format(self.size_in, self.size_out, text(self.kernel)) }
  local function add(what, v, default)
    if text(v) ~= default then out[#out + 1] = what .. " " .. text(v) end
  end
  add("stride", how.stride, "1")
  add("padding", type(self.padding) == "string" and self.padding or how.before, "0")
  if how.transposed then add("output padding", how.after, "0") end
  add("dilation", how.dilation, "1")
  if how.groups ~= 1 then out[#out + 1] = "groups " .. how.groups end
  if self.padding_mode ~= "zeros" then out[#out + 1] = self.padding_mode end
  if self.bias then out[#out + 1] = "bias" end
  return table.concat(out, ", ")
end

local function conv_class(d, transposed)
  local operator = (transposed and "conv_transpose%dd" or "conv%dd"):format(d)
  local cls = Module:extend((transposed and "ConvTranspose%dd" or "Conv%dd"):format(d))
  local class = { d = d, transposed = transposed }
  function cls:init(size_in, size_out, kernel, given) construct(self, class, size_in, size_out, kernel, given) end
  cls.forward, cls.extra_repr = (transposed and transposed_forward_of or forward_of)(operator), extra_repr
  cls.reset_parameters = reset_parameters
  return cls
end

--- Maps images [N, in, H, W] (or [in, H, W]) to [N, out, H', W']. weight is [out, in / groups, KH, KW], bias [out].
--- Defaults: stride 1, padding 0, dilation 1. Errors: in or out is not divisible by groups.
---@class Conv2d: Module
---@field weight Parameter  [size_out, size_in / groups, height, width]
---@field bias Parameter?  [size_out]; nil without bias
---@overload fun(size_in: integer, size_out: integer, kernel: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[]|"same"|"valid", dilation: integer|integer[], groups: integer, bias: boolean, padding_mode: "zeros"|"reflect"|"replicate"|"circular", dtype: string, device: string }): Conv2d
---   size_in: channels of the input; size_out: channels of the output; kernel: height and width, or one number for
---   both; padding_mode: what pads the image: zeros (default), its elements mirrored at the edge ("reflect"), those of
---   the edge ("replicate") or of the opposite side ("circular")
---@family

--- The transposed convolution of images: maps [N, in, H, W] (or [in, H, W]) to [N, out, H', W'] with H' = (H - 1)
--- stride - 2 padding + dilation (KH - 1) + output_padding + 1. weight is [in, out / groups, KH, KW], bias [out]. A
--- second argument of a call, the wanted {H', W'}, replaces output_padding. Defaults: stride 1, padding 0,
--- output_padding 0, dilation 1. Errors: in or out is not divisible by groups; an output size that no output_padding
--- gives.
---@class ConvTranspose2d: Module
---@field weight Parameter  [size_in, size_out / groups, height, width]
---@field bias Parameter?  [size_out]; nil without bias
---@overload fun(size_in: integer, size_out: integer, kernel: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[], output_padding: integer|integer[], dilation: integer|integer[], groups: integer, bias: boolean, padding_mode: "zeros", dtype: string, device: string }): ConvTranspose2d
---   size_in: channels of the input; size_out: channels of the output; kernel: height and width, or one number for
---   both; output_padding: rows and columns that the output has in addition, fewer than the stride or the dilation;
---   padding_mode: only "zeros", as in PyTorch
---@family

local M = {}
for d = 1, 3 do
  M[("Conv%dd"):format(d)], M[("ConvTranspose%dd"):format(d)] = conv_class(d, false), conv_class(d, true)
end

return M
