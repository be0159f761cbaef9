-- SPDX-License-Identifier: MIT
--- Functions of nn.F that pool. Annotations of the others of a family: tools/families.lua.
local opts = require "moonshard.core.opts"
local windows = require "moonshard.nn.pooling.windows"

local M = {}

--- The largest element of each window of an image. NaN is larger than every number. Errors: windows that do not fit
--- the input.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param kernel integer|integer[]  height and width of a window, or one number for both
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[], ceil_mode: boolean, return_indices: boolean }
---   padding: pixels added on every side, which are never the largest (default: 0); dilation: distance of a window's
---   elements (default: 1); ceil_mode: keeps last windows that the input only partly fills; return_indices: also
---   returns positions
---@return Tensor  [N, C, H', W'] with H' = floor((H + 2 padding - dilation (kernel - 1) - 1) / stride) + 1, and so for W'
---@return Tensor? indices  with return_indices: int64, the position of each largest element in its image, y * W + x from 0
---@family nn.F.max_pool2d(x, kernel, stride, given)
local function max_pool(who, dims)
  return function(x, kernel, stride, given)
    return windows.max_pool(who, x, dims, windows.arguments(who, "max", dims, kernel, stride, given))
  end
end

--- The mean of each window of an image. Errors: windows that do not fit the input.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param kernel integer|integer[]  height and width of a window, or one number for both
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], ceil_mode: boolean, count_include_pad: boolean, divisor_override: integer }
---   padding: zeros added on every side (default: 0); ceil_mode: keeps last windows that the input only partly fills;
---   count_include_pad: false: the zeros do not count; divisor_override: divisor of the sums, in place of
---   the number of elements
---@return Tensor  [N, C, H', W'] with H' = floor((H + 2 padding - kernel) / stride) + 1, and so for W'
---@family nn.F.avg_pool2d(x, kernel, stride, given)
local function avg_pool(who, dims)
  return function(x, kernel, stride, given)
    return windows.avg_pool(who, x, dims, windows.arguments(who, "avg", dims, kernel, stride, given))
  end
end

--- (sum of x^p)^(1/p) over each window of an image.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param p number  above 0
---@param kernel integer|integer[]  height and width of a window, or one number for both
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], ceil_mode: boolean }  ceil_mode: keeps last windows that the input only partly fills
---@return Tensor  [N, C, H', W']
---@family nn.F.lp_pool2d(x, p, kernel, stride, given)
local function lp_pool(who, dims)
  return function(x, p, kernel, stride, given)
    return windows.lp_pool(who, x, p, dims, windows.arguments(who, "power", dims, kernel, stride, given))
  end
end

--- The mean of each of H' x W' windows of nearly equal sizes, which cover the image.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param size integer|integer[]  { H', W' }, or one number for both; false instead of a number keeps the input's size
---@return Tensor  [N, C, H', W']
---@family nn.F.adaptive_avg_pool2d(x, size)
local function adaptive_avg_pool(who, dims)
  return function(x, size) return windows.adaptive_avg_pool(who, x, dims, windows.output_sizes(who, size, dims)) end
end

local adaptive = { return_indices = false }
--- The largest element of each of H' x W' windows of nearly equal sizes, which cover the image.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param size integer|integer[]  { H', W' }, or one number for both; false instead of a number keeps the input's size
---@param given? { return_indices: boolean }  return_indices: also returns positions
---@return Tensor  [N, C, H', W']
---@return Tensor? indices  with return_indices: int64, the position of each largest element in its image, y * W + x from 0
---@family nn.F.adaptive_max_pool2d(x, size, given)
local function adaptive_max_pool(who, dims)
  return function(x, size, given)
    local o = opts(who, given, adaptive)
    return windows.adaptive_max_pool(who, x, dims, windows.output_sizes(who, size, dims), o.return_indices)
  end
end

--- Writes the elements that max_pool2d chose back to their positions; the others are 0. Where positions repeat, one of
--- the elements remains. Errors: a position outside of the output.
---@param x Tensor  [N, C, H', W'] or [C, H', W']
---@param indices Tensor  int64 of x's shape: max_pool2d's second result
---@param kernel integer|integer[]  of max_pool2d
---@param stride? integer|integer[]  of max_pool2d (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], output_size: integer[]|integer }
---   padding: of max_pool2d (default: 0); output_size: { H, W }, or the whole shape (default: (H' - 1) stride -
---   2 padding + kernel, and so for W)
---@return Tensor  [N, C, H, W]
---@family nn.F.max_unpool2d(x, indices, kernel, stride, given)
local function max_unpool(who, dims)
  return function(x, indices, kernel, stride, given)
    return windows.max_unpool(who, x, indices, dims, windows.arguments(who, "unpool", dims, kernel, stride, given))
  end
end

for name, make in pairs { max_pool = max_pool, avg_pool = avg_pool, lp_pool = lp_pool, max_unpool = max_unpool,
  adaptive_avg_pool = adaptive_avg_pool, adaptive_max_pool = adaptive_max_pool } do
  for dims = 1, 3 do
    local who = ("%s%dd"):format(name, dims)
    M[who] = make(who, dims)
  end
end

opts.fix(M, { "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d" })

return M
