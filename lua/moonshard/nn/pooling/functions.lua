-- SPDX-License-Identifier: MIT
--- Functions of nn.F that pool.
local opts = require "moonshard.core.opts"
local windows = require "moonshard.nn.pooling.windows"

local M = {}

-- ---- windows of a fixed size ------------------------------------------------------------------------

--- The largest element of each window. NaN is larger than every number. Errors: windows that do not fit the input.
---@param x Tensor  [N, C, L] or [C, L], floating point
---@param kernel integer  elements of a window
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer, padding: integer, dilation: integer, ceil_mode: boolean, return_indices: boolean }
---   padding: elements added at both ends, which are never the largest (default: 0); dilation: distance of a window's
---   elements (default: 1); ceil_mode: keeps a last window that the input only partly fills; return_indices: also
---   returns positions
---@return Tensor  [N, C, L'] with L' = floor((L + 2 padding - dilation (kernel - 1) - 1) / stride) + 1
---@return Tensor? indices  with return_indices: int64, the position of each largest element in its row, from 0
function M.max_pool1d(x, kernel, stride, given)
  return windows.max_pool("max_pool1d", x, 1, windows.arguments("max_pool1d", "max", 1, kernel, stride, given))
end

--- The largest element of each window of an image. NaN is larger than every number. Errors: windows that do not fit
--- the input.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param kernel integer|integer[]  height and width of a window, or one number for both
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[], ceil_mode: boolean, return_indices: boolean }
---   padding: pixels added on every side, which are never the largest (default: 0); dilation: distance of a window's
---   elements (default: 1); ceil_mode: keeps last windows that the input only partly fills; return_indices: also
---   returns positions
---@return Tensor  [N, C, H', W'] with H' = floor((H + 2 padding - dilation (KH - 1) - 1) / stride) + 1
---@return Tensor? indices  with return_indices: int64, the position of each largest element in its image, y * W + x from 0
function M.max_pool2d(x, kernel, stride, given)
  return windows.max_pool("max_pool2d", x, 2, windows.arguments("max_pool2d", "max", 2, kernel, stride, given))
end

--- The largest element of each window of a volume. NaN is larger than every number. Errors: windows that do not fit
--- the input.
---@param x Tensor  [N, C, D, H, W] or [C, D, H, W], floating point
---@param kernel integer|integer[]  depth, height and width of a window, or one number for all
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[], ceil_mode: boolean, return_indices: boolean }
---   padding: elements added on every side, which are never the largest (default: 0); dilation: distance of a window's
---   elements (default: 1); ceil_mode: keeps last windows that the input only partly fills; return_indices: also
---   returns positions
---@return Tensor  [N, C, D', H', W']
---@return Tensor? indices  with return_indices: int64, the position of each largest element in its volume, from 0
function M.max_pool3d(x, kernel, stride, given)
  return windows.max_pool("max_pool3d", x, 3, windows.arguments("max_pool3d", "max", 3, kernel, stride, given))
end

--- The mean of each window. Errors: windows that do not fit the input.
---@param x Tensor  [N, C, L] or [C, L], floating point
---@param kernel integer  elements of a window
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer, padding: integer, ceil_mode: boolean, count_include_pad: boolean }
---   padding: zeros added at both ends (default: 0); ceil_mode: keeps a last window that the input only partly fills;
---   count_include_pad: false: the zeros do not count
---@return Tensor  [N, C, L'] with L' = floor((L + 2 padding - kernel) / stride) + 1
function M.avg_pool1d(x, kernel, stride, given)
  return windows.avg_pool("avg_pool1d", x, 1, windows.arguments("avg_pool1d", "avg", 1, kernel, stride, given))
end

--- The mean of each window of an image. Errors: windows that do not fit the input.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param kernel integer|integer[]  height and width of a window, or one number for both
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], ceil_mode: boolean, count_include_pad: boolean, divisor_override: integer }
---   padding: zeros added on every side (default: 0); ceil_mode: keeps last windows that the input only partly fills;
---   count_include_pad: false: the zeros do not count; divisor_override: divisor of the sums, in place of
---   the number of elements
---@return Tensor  [N, C, H', W'] with H' = floor((H + 2 padding - KH) / stride) + 1
function M.avg_pool2d(x, kernel, stride, given)
  return windows.avg_pool("avg_pool2d", x, 2, windows.arguments("avg_pool2d", "avg", 2, kernel, stride, given))
end

--- The mean of each window of a volume. Errors: windows that do not fit the input.
---@param x Tensor  [N, C, D, H, W] or [C, D, H, W], floating point
---@param kernel integer|integer[]  depth, height and width of a window, or one number for all
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], ceil_mode: boolean, count_include_pad: boolean, divisor_override: integer }
---   padding: zeros added on every side (default: 0); ceil_mode: keeps last windows that the input only partly fills;
---   count_include_pad: false: the zeros do not count; divisor_override: divisor of the sums, in place of
---   the number of elements
---@return Tensor  [N, C, D', H', W']
function M.avg_pool3d(x, kernel, stride, given)
  return windows.avg_pool("avg_pool3d", x, 3, windows.arguments("avg_pool3d", "avg", 3, kernel, stride, given))
end

--- (sum of x^p)^(1/p) over each window.
---@param x Tensor  [N, C, L] or [C, L], floating point
---@param p number  above 0
---@param kernel integer  elements of a window
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer, ceil_mode: boolean }  ceil_mode: keeps a last window that the input only partly fills
---@return Tensor  [N, C, L']
function M.lp_pool1d(x, p, kernel, stride, given)
  return windows.lp_pool("lp_pool1d", x, p, 1, windows.arguments("lp_pool1d", "power", 1, kernel, stride, given))
end

--- (sum of x^p)^(1/p) over each window of an image.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param p number  above 0
---@param kernel integer|integer[]  height and width of a window, or one number for both
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], ceil_mode: boolean }  ceil_mode: keeps last windows that the input only partly fills
---@return Tensor  [N, C, H', W']
function M.lp_pool2d(x, p, kernel, stride, given)
  return windows.lp_pool("lp_pool2d", x, p, 2, windows.arguments("lp_pool2d", "power", 2, kernel, stride, given))
end

--- (sum of x^p)^(1/p) over each window of a volume.
---@param x Tensor  [N, C, D, H, W] or [C, D, H, W], floating point
---@param p number  above 0
---@param kernel integer|integer[]  depth, height and width of a window, or one number for all
---@param stride? integer|integer[]  distance of windows (default: kernel); also an option
---@param given? { stride: integer|integer[], ceil_mode: boolean }  ceil_mode: keeps last windows that the input only partly fills
---@return Tensor  [N, C, D', H', W']
function M.lp_pool3d(x, p, kernel, stride, given)
  return windows.lp_pool("lp_pool3d", x, p, 3, windows.arguments("lp_pool3d", "power", 3, kernel, stride, given))
end

-- ---- adaptive windows -------------------------------------------------------------------------------

--- The mean of each of `size` windows of nearly equal lengths, which cover the input.
---@param x Tensor  [N, C, L] or [C, L], floating point
---@param size integer  elements of the output
---@return Tensor  [N, C, size]
function M.adaptive_avg_pool1d(x, size)
  return windows.adaptive_avg_pool("adaptive_avg_pool1d", x, 1, windows.output_sizes("adaptive_avg_pool1d", size, 1))
end

--- The mean of each of H' x W' windows of nearly equal sizes, which cover the image.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param size integer|integer[]  { H', W' }, or one number for both; false instead of a number keeps the input's size
---@return Tensor  [N, C, H', W']
function M.adaptive_avg_pool2d(x, size)
  return windows.adaptive_avg_pool("adaptive_avg_pool2d", x, 2, windows.output_sizes("adaptive_avg_pool2d", size, 2))
end

--- The mean of each of D' x H' x W' windows of nearly equal sizes, which cover the volume.
---@param x Tensor  [N, C, D, H, W] or [C, D, H, W], floating point
---@param size integer|integer[]  { D', H', W' }, or one number for all; false instead of a number keeps the input's size
---@return Tensor  [N, C, D', H', W']
function M.adaptive_avg_pool3d(x, size)
  return windows.adaptive_avg_pool("adaptive_avg_pool3d", x, 3, windows.output_sizes("adaptive_avg_pool3d", size, 3))
end

local adaptive = { return_indices = false }
local function adaptive_max(who, x, dims, size, given)
  local o = opts(who, given, adaptive)
  return windows.adaptive_max_pool(who, x, dims, windows.output_sizes(who, size, dims), o.return_indices)
end

--- The largest element of each of `size` windows of nearly equal lengths, which cover the input.
---@param x Tensor  [N, C, L] or [C, L], floating point
---@param size integer  elements of the output
---@param given? { return_indices: boolean }  return_indices: also returns positions
---@return Tensor  [N, C, size]
---@return Tensor? indices  with return_indices: int64, the position of each largest element in its row, from 0
function M.adaptive_max_pool1d(x, size, given) return adaptive_max("adaptive_max_pool1d", x, 1, size, given) end

--- The largest element of each of H' x W' windows of nearly equal sizes, which cover the image.
---@param x Tensor  [N, C, H, W] or [C, H, W], floating point
---@param size integer|integer[]  { H', W' }, or one number for both; false instead of a number keeps the input's size
---@param given? { return_indices: boolean }  return_indices: also returns positions
---@return Tensor  [N, C, H', W']
---@return Tensor? indices  with return_indices: int64, the position of each largest element in its image, y * W + x from 0
function M.adaptive_max_pool2d(x, size, given) return adaptive_max("adaptive_max_pool2d", x, 2, size, given) end

--- The largest element of each of D' x H' x W' windows of nearly equal sizes, which cover the volume.
---@param x Tensor  [N, C, D, H, W] or [C, D, H, W], floating point
---@param size integer|integer[]  { D', H', W' }, or one number for all; false instead of a number keeps the input's size
---@param given? { return_indices: boolean }  return_indices: also returns positions
---@return Tensor  [N, C, D', H', W']
---@return Tensor? indices  with return_indices: int64, the position of each largest element in its volume, from 0
function M.adaptive_max_pool3d(x, size, given) return adaptive_max("adaptive_max_pool3d", x, 3, size, given) end

-- ---- the inverse of max_pool ------------------------------------------------------------------------

--- Writes the elements that max_pool1d chose back to their positions; the others are 0. Where positions repeat, one of
--- the elements remains. Errors: a position outside of the output.
---@param x Tensor  [N, C, L'] or [C, L']
---@param indices Tensor  int64 of x's shape: max_pool1d's second result
---@param kernel integer  of max_pool1d
---@param stride? integer|integer[]  of max_pool1d (default: kernel); also an option
---@param given? { stride: integer, padding: integer, output_size: integer|integer[] }
---   padding: of max_pool1d (default: 0); output_size: L, or the whole shape (default: (L' - 1) stride - 2 padding +
---   kernel)
---@return Tensor  [N, C, L]
function M.max_unpool1d(x, indices, kernel, stride, given)
  return windows.max_unpool("max_unpool1d", x, indices, 1,
    windows.arguments("max_unpool1d", "unpool", 1, kernel, stride, given))
end

--- Writes the elements that max_pool2d chose back to their positions; the others are 0. Where positions repeat, one of
--- the elements remains. Errors: a position outside of the output.
---@param x Tensor  [N, C, H', W'] or [C, H', W']
---@param indices Tensor  int64 of x's shape: max_pool2d's second result
---@param kernel integer|integer[]  of max_pool2d
---@param stride? integer|integer[]  of max_pool2d (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], output_size: integer[] }
---   padding: of max_pool2d (default: 0); output_size: { H, W }, or the whole shape (default: (H' - 1) stride - 2
---   padding + KH, and so for W)
---@return Tensor  [N, C, H, W]
function M.max_unpool2d(x, indices, kernel, stride, given)
  return windows.max_unpool("max_unpool2d", x, indices, 2,
    windows.arguments("max_unpool2d", "unpool", 2, kernel, stride, given))
end

--- Writes the elements that max_pool3d chose back to their positions; the others are 0. Where positions repeat, one of
--- the elements remains. Errors: a position outside of the output.
---@param x Tensor  [N, C, D', H', W'] or [C, D', H', W']
---@param indices Tensor  int64 of x's shape: max_pool3d's second result
---@param kernel integer|integer[]  of max_pool3d
---@param stride? integer|integer[]  of max_pool3d (default: kernel); also an option
---@param given? { stride: integer|integer[], padding: integer|integer[], output_size: integer[] }
---   padding: of max_pool3d (default: 0); output_size: { D, H, W }, or the whole shape
---@return Tensor  [N, C, D, H, W]
function M.max_unpool3d(x, indices, kernel, stride, given)
  return windows.max_unpool("max_unpool3d", x, indices, 3,
    windows.arguments("max_unpool3d", "unpool", 3, kernel, stride, given))
end

opts.fix(M, { "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d" })

return M
