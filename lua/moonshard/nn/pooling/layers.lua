-- SPDX-License-Identifier: MIT
--- Layers that pool: F.max_pool2d and its relatives as modules. Annotations of the others of a family:
--- tools/families.lua.
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
local function windows_class(name, dims, kind, run)
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

--- F.max_pool2d as a module: the largest element of each window of images [N, C, H, W] or [C, H, W].
---@class MaxPool2d: Module
---@like nn.F.max_pool2d(kernel, stride, given)
---@family

--- F.avg_pool2d as a module: the mean of each window of images [N, C, H, W] or [C, H, W].
---@class AvgPool2d: Module
---@like nn.F.avg_pool2d(kernel, stride, given)
---@family

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

--- F.adaptive_avg_pool2d as a module: images [N, C, H, W] become [N, C, H', W'], by the mean of windows that cover
--- them.
---@class AdaptiveAvgPool2d: Module
---@field size (integer|false)[]  { H', W' }; false: the input's size
---@like nn.F.adaptive_avg_pool2d(size)
---@family

--- F.adaptive_max_pool2d as a module: images [N, C, H, W] become [N, C, H', W'], by the largest element of windows that
--- cover them.
---@class AdaptiveMaxPool2d: Module
---@field size (integer|false)[]  { H', W' }; false: the input's size
---@like nn.F.adaptive_max_pool2d(size, given)
---@family

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

--- F.lp_pool2d as a module: (sum of x^p)^(1/p) over each window of images [N, C, H, W] or [C, H, W].
---@class LPPool2d: Module
---@like nn.F.lp_pool2d(p, kernel, stride, given)
---@family

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

--- F.max_unpool2d as a module: layer(x, indices, size) writes the elements that MaxPool2d chose
--- back to their positions. size: sizes of the last dimensions.
---@class MaxUnpool2d: Module
---@overload fun(kernel: integer|integer[], stride?: integer|integer[], opts?: { stride: integer|integer[], padding: integer|integer[] }): MaxUnpool2d
---   kernel: of MaxPool2d; stride: of MaxPool2d (default: kernel), also an option; padding: of MaxPool2d (default: 0)
---@family

local M = {}
for dims = 1, 3 do
  local function add(name, make, ...)
    name = ("%s%dd"):format(name, dims)
    M[name] = make(name, dims, ...)
  end
  add("MaxPool", windows_class, "max", windows.max_pool)
  add("AvgPool", windows_class, "avg", windows.avg_pool)
  add("AdaptiveAvgPool", adaptive_class, windows.adaptive_avg_pool)
  add("AdaptiveMaxPool", adaptive_class, windows.adaptive_max_pool, true)
  add("LPPool", lp_class)
  add("MaxUnpool", unpool_class)
end

return M
