-- SPDX-License-Identifier: MIT
--- Convolutions and transposed convolutions of nn.F, over 1 to 3 dimensions. `setup` and `run` also serve the layers
--- (nn/conv/layers.lua). tools/families.lua makes the annotations for one and three dimensions of those for two.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local pad = require("moonshard.nn.images.functions").pad
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local a_tensor, raise = tensor.a_tensor, errors.raise
local M, F = {}, {}
M.F = F

-- ---- arguments ------------------------------------------------------------------------------------

local many = { "a whole number", "a whole number or a pair of them", "a whole number or a list of 3 of them" }

--- Returns a list of d whole numbers: v for each dimension, or a copy of the list v. what: names v in messages.
function M.sizes(who, what, v, d)
  local list, good = {}, type(v) == "number" or opts.is_plain(v) and #v == d
  for k = 1, good and d or 0 do
    list[k] = type(v) == "number" and v or v[k]
    good = good and type(list[k]) == "number" and list[k] % 1 == 0
  end
  if not good then opts.wrong(v, many[d], "%s: %s", who, what) end
  return list
end
local sizes = M.sizes

local modes = { "zeros", "reflect", "replicate", "circular" }
M.padding_mode = opts.one_of(modes, "zeros")

-- The padding before and after each dimension. For "same" and an odd amount, the additional element is at the end.
local function paddings(who, padding, how, kernel)
  local before, after, d = {}, {}, #kernel
  if padding == "valid" then
    padding = 0
  elseif padding == "same" then
    for k = 1, d do
      if how.stride[k] ~= 1 then raise("%s: padding='same' is not supported for strided convolutions", who) end
      local total = how.dilation[k] * (kernel[k] - 1)
      before[k], after[k] = math.floor(total / 2), math.ceil(total / 2)
    end
    return before, after
  elseif type(padding) == "string" then
    raise("%s: Invalid padding string '%s', should be one of 'valid', 'same'", who, padding)
  end
  before = sizes(who, "option 'padding'", padding, d)
  return before, before
end

--- The options of a convolution in the form that `run` takes.
---@param who string  the function or layer, in messages
---@param o table  stride, padding, dilation, groups, and output_padding of a transposed convolution
---@param kernel integer[]  the sizes of the kernel
---@param transposed boolean
function M.setup(who, o, kernel, transposed)
  local d = #kernel
  local how = { stride = sizes(who, "option 'stride'", o.stride or 1, d),
    dilation = sizes(who, "option 'dilation'", o.dilation or 1, d), groups = o.groups or 1, transposed = transposed }
  if transposed then
    how.before = sizes(who, "option 'padding'", o.padding or 0, d)
    how.after = sizes(who, "option 'output_padding'", o.output_padding or 0, d)
  else
    how.before, how.after = paddings(who, o.padding or 0, how, kernel)
  end
  return how
end

-- Pads with elements of the image itself: F.pad with this mode.
local function padded(x, how, mode)
  local list = {}
  for k = #how.before, 1, -1 do list[#list + 1], list[#list + 2] = how.before[k], how.after[k] end
  return pad(x, list, { mode = mode })
end

local none = { 0, 0, 0 }

--- Convolves x. An x without a batch dimension is a batch of one.
---@param who string  the operator, such as "conv2d"
---@param x Tensor
---@param w Tensor
---@param b Tensor?
---@param how table  a result of `setup`
---@param mode? string  nil or "zeros": pads with zeros
function M.run(who, x, w, b, how, mode)
  local d, n = #how.stride, x.ndim
  if n ~= d + 1 and n ~= d + 2 then
    raise("Expected %dD (unbatched) or %dD (batched) input to %s, but got input of size: %s", d + 1, d + 2, who,
      tostring(x.shape))
  end
  if n == d + 2 and (mode == nil or mode == "zeros") then return ops.conv(who, x, w, b, how) end
  return scope.scope(function()
    local y = n == d + 2 and x or x:unsqueeze(1)
    if mode == nil or mode == "zeros" then
      y = ops.conv(who, y, w, b, how)
    else
      y = ops.conv(who, padded(y, how, mode), w, b,
        { stride = how.stride, dilation = how.dilation, groups = how.groups, before = none, after = none })
    end
    return n == d + 2 and y or y:squeeze(1)
  end)
end

-- ---- nn.F -----------------------------------------------------------------------------------------

local spec = { stride = opts.any, padding = opts.any, dilation = opts.any, groups = opts.whole_from(1) }
local transposed_spec = { stride = opts.any, padding = opts.any, output_padding = opts.any, dilation = opts.any,
  groups = opts.whole_from(1) }

--- Cross-correlation of images with every filter of w.
---@param x Tensor  [N, in, H, W] or [in, H, W]
---@param w Tensor  [out, in / groups, KH, KW]
---@param b? Tensor  [out]
---@param given? { stride: integer|integer[], padding: integer|integer[]|"same"|"valid", dilation: integer|integer[], groups: integer }  defaults: stride 1, padding 0, dilation 1, groups 1
---@return Tensor  [N, out, H', W'] with H' = floor((H + 2 padding - dilation (KH - 1) - 1) / stride) + 1, and so for W'
---@family nn.F.conv2d(x, w, b, given)

--- Transposed convolution of images: the gradient of conv2d with respect to its input.
---@param x Tensor  [N, in, H, W] or [in, H, W]
---@param w Tensor  [in, out / groups, KH, KW]
---@param b? Tensor  [out]
---@param given? { stride: integer|integer[], padding: integer|integer[], output_padding: integer|integer[], dilation: integer|integer[], groups: integer }  defaults: stride 1, padding 0, dilation 1, groups 1; output_padding: elements that the output has in addition in each dimension (default: 0)
---@return Tensor  [N, out, H', W'] with H' = (H - 1) stride - 2 padding + dilation (KH - 1) + output_padding + 1, and so for W'
---@family nn.F.conv_transpose2d(x, w, b, given)

for d = 1, 3 do
  for name, transposed in pairs { conv = false, conv_transpose = true } do
    local who = ("%s%dd"):format(name, d)
    F[who] = function(x, w, b, given)
      b, given = opts.shift(who, b, given)
      local o = opts(who, given, transposed and transposed_spec or spec)
      opts.expect(x, a_tensor, "%s: argument 1", who)
      opts.expect(w, a_tensor, "%s: weight", who)
      local kernel = {}
      for k = 1, d do kernel[k] = w.shape[k + 2] or 1 end
      return M.run(who, x, w, b, M.setup(who, o, kernel, transposed))
    end
  end
end

return M
