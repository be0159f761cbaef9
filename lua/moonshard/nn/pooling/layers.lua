-- SPDX-License-Identifier: MIT
--- Layers that pool: F.max_pool2d and its relatives as modules.
local Module = require "moonshard.nn.module".Module
local opts = require "moonshard.core.opts"
local windows = require "moonshard.nn.pooling.windows"

local function text(list)
  for d = 2, #list do
    if list[d] ~= list[1] then return table.concat(list, "x") end
  end
  return tostring(list[1])
end
local function shown(size)
  local list = {}
  for d, n in ipairs(size) do list[d] = n and tostring(n) or "same" end
  return text(list)
end

-- A layer with windows of a fixed size. run: the function of windows.lua that forward calls.
local function windows_class(name, kind, dims, run)
  local cls = Module:extend(name)
  function cls:init(kernel, stride, given) self.how = windows.arguments(name, kind, dims, kernel, stride, given) end
  function cls:forward(x) return run(name, x, dims, self._slots.how) end
  function cls:extra_repr()
    local how = self.how
    local out = { "kernel " .. text(how.kernel), "stride " .. text(how.stride) }
    if text(how.padding) ~= "0" then out[#out + 1] = "padding " .. text(how.padding) end
    if text(how.dilation) ~= "1" then out[#out + 1] = "dilation " .. text(how.dilation) end
    if how.ceil_mode then out[#out + 1] = "ceil mode" end
    if how.return_indices then out[#out + 1] = "with indices" end
    if how.count_include_pad == false then out[#out + 1] = "padding not counted" end
    if how.divisor_override then out[#out + 1] = "divisor " .. how.divisor_override end
    return table.concat(out, ", ")
  end
  return cls
end

--- F.max_pool1d as a module: the largest element of each window of [N, C, L] or [C, L].
---@class MaxPool1d: Module
---@overload fun(kernel: integer, stride?: integer, opts?: { stride: integer, padding: integer, dilation: integer, ceil_mode: boolean, return_indices: boolean }): MaxPool1d
---   kernel: elements of a window; stride: distance of windows (default: kernel), also an option; padding: elements
---   added at both ends, which are never the largest (default: 0); dilation: distance of a window's elements (default:
---   1); ceil_mode: keeps a last window that the input only partly fills; return_indices: also returns positions
local MaxPool1d = windows_class("MaxPool1d", "max", 1, windows.max_pool)

--- F.max_pool2d as a module: the largest element of each window of images [N, C, H, W] or [C, H, W].
---@class MaxPool2d: Module
---@overload fun(kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[], ceil_mode: boolean, return_indices: boolean }): MaxPool2d
---   kernel: height and width of a window, or one number for both; stride: distance of windows (default: kernel), also
---   an option; padding: pixels added on every side, which are never the largest (default: 0); dilation: distance of a
---   window's elements (default: 1); ceil_mode: keeps last windows that the input only partly fills; return_indices:
---   also returns positions
local MaxPool2d = windows_class("MaxPool2d", "max", 2, windows.max_pool)

--- F.max_pool3d as a module: the largest element of each window of volumes [N, C, D, H, W] or [C, D, H, W].
---@class MaxPool3d: Module
---@overload fun(kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[], dilation: integer|integer[], ceil_mode: boolean, return_indices: boolean }): MaxPool3d
---   kernel: depth, height and width of a window, or one number for all; stride: distance of windows (default: kernel),
---   also an option; padding: elements added on every side, which are never the largest (default: 0); dilation:
---   distance of a window's elements (default: 1); ceil_mode: keeps last windows that the input only partly fills;
---   return_indices: also returns positions
local MaxPool3d = windows_class("MaxPool3d", "max", 3, windows.max_pool)

--- F.avg_pool1d as a module: the mean of each window of [N, C, L] or [C, L].
---@class AvgPool1d: Module
---@overload fun(kernel: integer, stride?: integer, opts?: { stride: integer, padding: integer, ceil_mode: boolean, count_include_pad: boolean }): AvgPool1d
---   kernel: elements of a window; stride: distance of windows (default: kernel), also an option; padding: zeros added
---   at both ends (default: 0); ceil_mode: keeps a last window that the input only partly fills; count_include_pad:
---   false: the zeros do not count
local AvgPool1d = windows_class("AvgPool1d", "avg", 1, windows.avg_pool)

--- F.avg_pool2d as a module: the mean of each window of images [N, C, H, W] or [C, H, W].
---@class AvgPool2d: Module
---@overload fun(kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[], ceil_mode: boolean, count_include_pad: boolean, divisor_override: integer }): AvgPool2d
---   kernel: height and width of a window, or one number for both; stride: distance of windows (default: kernel), also
---   an option; padding: zeros added on every side (default: 0); ceil_mode: keeps last windows that the input only
---   partly fills; count_include_pad: false: the zeros do not count; divisor_override: divisor of
---   the sums, in place of the number of elements
local AvgPool2d = windows_class("AvgPool2d", "avg", 2, windows.avg_pool)

--- F.avg_pool3d as a module: the mean of each window of volumes [N, C, D, H, W] or [C, D, H, W].
---@class AvgPool3d: Module
---@overload fun(kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[], ceil_mode: boolean, count_include_pad: boolean, divisor_override: integer }): AvgPool3d
---   kernel: depth, height and width of a window, or one number for all; stride: distance of windows (default: kernel),
---   also an option; padding: zeros added on every side (default: 0); ceil_mode: keeps last windows that the input only
---   partly fills; count_include_pad: false: the zeros do not count; divisor_override: divisor of
---   the sums, in place of the number of elements
local AvgPool3d = windows_class("AvgPool3d", "avg", 3, windows.avg_pool)

-- ---- adaptive ---------------------------------------------------------------------------------------

-- A layer that chooses its windows by the size of the output. indices: whether it can return positions.
local function adaptive_class(name, dims, run, indices)
  local cls = Module:extend(name)
  local function init(self, size) self.size = windows.output_sizes(name, size, dims) end
  if indices then
    function cls:init(size, given)
      self.return_indices = opts(name, given, { return_indices = false }).return_indices
      init(self, size)
    end
  else
    cls.init = opts.fixed(name, init)
  end
  function cls:forward(x)
    local slots = self._slots
    return run(name, x, dims, slots.size, slots.return_indices)
  end
  function cls:extra_repr() return shown(self.size) .. (self.return_indices and ", with indices" or "") end
  return cls
end

--- F.adaptive_avg_pool1d as a module: [N, C, L] becomes [N, C, size], by the mean of windows that cover the input.
---@class AdaptiveAvgPool1d: Module
---@field size integer[]  { size }
---@overload fun(size: integer): AdaptiveAvgPool1d  size: elements of the output
local AdaptiveAvgPool1d = adaptive_class("AdaptiveAvgPool1d", 1, windows.adaptive_avg_pool)

--- F.adaptive_avg_pool2d as a module: images [N, C, H, W] become [N, C, H', W'], by the mean of windows that cover
--- them.
---@class AdaptiveAvgPool2d: Module
---@field size (integer|false)[]  { H', W' }; false: the input's size
---@overload fun(size: integer|integer[]): AdaptiveAvgPool2d
---   size: { H', W' }, or one number for both; false instead of a number keeps the input's size
local AdaptiveAvgPool2d = adaptive_class("AdaptiveAvgPool2d", 2, windows.adaptive_avg_pool)

--- F.adaptive_avg_pool3d as a module: volumes [N, C, D, H, W] become [N, C, D', H', W'], by the mean of windows that
--- cover them.
---@class AdaptiveAvgPool3d: Module
---@field size (integer|false)[]  { D', H', W' }; false: the input's size
---@overload fun(size: integer|integer[]): AdaptiveAvgPool3d
---   size: { D', H', W' }, or one number for all; false instead of a number keeps the input's size
local AdaptiveAvgPool3d = adaptive_class("AdaptiveAvgPool3d", 3, windows.adaptive_avg_pool)

--- F.adaptive_max_pool1d as a module: [N, C, L] becomes [N, C, size], by the largest element of windows that cover the
--- input.
---@class AdaptiveMaxPool1d: Module
---@field size integer[]  { size }
---@overload fun(size: integer, opts?: { return_indices: boolean }): AdaptiveMaxPool1d
---   size: elements of the output; return_indices: also returns positions
local AdaptiveMaxPool1d = adaptive_class("AdaptiveMaxPool1d", 1, windows.adaptive_max_pool, true)

--- F.adaptive_max_pool2d as a module: images [N, C, H, W] become [N, C, H', W'], by the largest element of windows that
--- cover them.
---@class AdaptiveMaxPool2d: Module
---@field size (integer|false)[]  { H', W' }; false: the input's size
---@overload fun(size: integer|integer[], opts?: { return_indices: boolean }): AdaptiveMaxPool2d
---   size: { H', W' }, or one number for both; false instead of a number keeps the input's size; return_indices: also
---   returns positions
local AdaptiveMaxPool2d = adaptive_class("AdaptiveMaxPool2d", 2, windows.adaptive_max_pool, true)

--- F.adaptive_max_pool3d as a module: volumes [N, C, D, H, W] become [N, C, D', H', W'], by the largest element of
--- windows that cover them.
---@class AdaptiveMaxPool3d: Module
---@field size (integer|false)[]  { D', H', W' }; false: the input's size
---@overload fun(size: integer|integer[], opts?: { return_indices: boolean }): AdaptiveMaxPool3d
---   size: { D', H', W' }, or one number for all; false instead of a number keeps the input's size; return_indices: also
---   returns positions
local AdaptiveMaxPool3d = adaptive_class("AdaptiveMaxPool3d", 3, windows.adaptive_max_pool, true)

-- ---- power means, and the inverse of MaxPool ----------------------------------------------------------

local function lp_class(name, dims)
  local cls = Module:extend(name)
  function cls:init(p, kernel, stride, given)
    self.p = opts.expect(p, opts.positive, "%s: argument 1, the power,", name)
    self.how = windows.arguments(name, "power", dims, kernel, stride, given)
  end
  function cls:forward(x)
    local slots = self._slots
    return windows.lp_pool(name, x, slots.p, dims, slots.how)
  end
  function cls:extra_repr()
    local how = self.how
    return ("power %g, kernel %s, stride %s%s"):format(self.p, text(how.kernel), text(how.stride),
      how.ceil_mode and ", ceil mode" or "")
  end
  return cls
end

--- F.lp_pool1d as a module: (sum of x^p)^(1/p) over each window of [N, C, L] or [C, L].
---@class LPPool1d: Module
---@overload fun(p: number, kernel: integer, stride?: integer, opts?: { stride: integer, ceil_mode: boolean }): LPPool1d
---   p: above 0; kernel: elements of a window; stride: distance of windows (default: kernel), also an option;
---   ceil_mode: keeps a last window that the input only partly fills
local LPPool1d = lp_class("LPPool1d", 1)

--- F.lp_pool2d as a module: (sum of x^p)^(1/p) over each window of images [N, C, H, W] or [C, H, W].
---@class LPPool2d: Module
---@overload fun(p: number, kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], ceil_mode: boolean }): LPPool2d
---   p: above 0; kernel: height and width of a window, or one number for both; stride: distance of windows (default:
---   kernel), also an option; ceil_mode: keeps last windows that the input only partly fills
local LPPool2d = lp_class("LPPool2d", 2)

--- F.lp_pool3d as a module: (sum of x^p)^(1/p) over each window of volumes [N, C, D, H, W] or [C, D, H, W].
---@class LPPool3d: Module
---@overload fun(p: number, kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], ceil_mode: boolean }): LPPool3d
---   p: above 0; kernel: depth, height and width of a window, or one number for all; stride: distance of windows
---   (default: kernel), also an option; ceil_mode: keeps last windows that the input only partly fills
local LPPool3d = lp_class("LPPool3d", 3)

local function unpool_class(name, dims)
  local cls = Module:extend(name)
  function cls:init(kernel, stride, given)
    local how = windows.arguments(name, "unpool layer", dims, kernel, stride, given)
    self.how = how
  end
  ---@param x Tensor  [N, C, ...]
  ---@param indices Tensor  int64 of x's shape: MaxPool's second result
  ---@param size? integer[]  sizes of the last dimensions, or the whole shape
  function cls:forward(x, indices, size)
    local how = self._slots.how
    return windows.max_unpool(name, x, indices, dims, { kernel = how.kernel, stride = how.stride, padding = how.padding,
      output_size = size })
  end
  function cls:extra_repr()
    local how = self.how
    return ("kernel %s, stride %s%s"):format(text(how.kernel), text(how.stride),
      text(how.padding) ~= "0" and ", padding " .. text(how.padding) or "")
  end
  return cls
end

--- F.max_unpool1d as a module: layer(x, indices, size) writes the elements that MaxPool1d chose
--- back to their positions. size: sizes of the last dimensions.
---@class MaxUnpool1d: Module
---@overload fun(kernel: integer, stride?: integer, opts?: { stride: integer, padding: integer }): MaxUnpool1d
---   kernel: of MaxPool1d; stride: of MaxPool1d (default: kernel), also an option; padding: of MaxPool1d (default: 0)
local MaxUnpool1d = unpool_class("MaxUnpool1d", 1)

--- F.max_unpool2d as a module: layer(x, indices, size) writes the elements that MaxPool2d chose
--- back to their positions. size: sizes of the last dimensions.
---@class MaxUnpool2d: Module
---@overload fun(kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[] }): MaxUnpool2d
---   kernel: of MaxPool2d; stride: of MaxPool2d (default: kernel), also an option; padding: of MaxPool2d (default: 0)
local MaxUnpool2d = unpool_class("MaxUnpool2d", 2)

--- F.max_unpool3d as a module: layer(x, indices, size) writes the elements that MaxPool3d chose
--- back to their positions. size: sizes of the last dimensions.
---@class MaxUnpool3d: Module
---@overload fun(kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[] }): MaxUnpool3d
---   kernel: of MaxPool3d; stride: of MaxPool3d (default: kernel), also an option; padding: of MaxPool3d (default: 0)
local MaxUnpool3d = unpool_class("MaxUnpool3d", 3)

return {
  MaxPool1d = MaxPool1d, MaxPool2d = MaxPool2d, MaxPool3d = MaxPool3d,
  AvgPool1d = AvgPool1d, AvgPool2d = AvgPool2d, AvgPool3d = AvgPool3d,
  AdaptiveAvgPool1d = AdaptiveAvgPool1d, AdaptiveAvgPool2d = AdaptiveAvgPool2d, AdaptiveAvgPool3d = AdaptiveAvgPool3d,
  AdaptiveMaxPool1d = AdaptiveMaxPool1d, AdaptiveMaxPool2d = AdaptiveMaxPool2d, AdaptiveMaxPool3d = AdaptiveMaxPool3d,
  LPPool1d = LPPool1d, LPPool2d = LPPool2d, LPPool3d = LPPool3d,
  MaxUnpool1d = MaxUnpool1d, MaxUnpool2d = MaxUnpool2d, MaxUnpool3d = MaxUnpool3d,
}
