-- SPDX-License-Identifier: MIT
--- Layers that pad: F.pad as modules. Annotations of those for one and three dimensions: tools/families.lua.
local functions = require "moonshard.nn.images.functions"
local opts = require "moonshard.core.opts"
local Module = require "moonshard.nn.module".Module

-- A layer that pads the last n dimensions. mode: that of F.pad; valued: the constructor takes the value of the new
-- elements.
local function padding_class(name, n, mode, valued)
  local cls = Module:extend(name)
  ---@param padding integer|integer[]
  ---   elements to add at every end, or a list: before and after in the last dimension, then in the one before it
  ---@param value? number  value of the new elements; required if `valued`, else refused
  function cls:init(padding, value)
    local list = {}
    local good = type(padding) == "number" or opts.is_plain(padding) and #padding == 2 * n
    for k = 1, good and 2 * n or 0 do
      list[k] = type(padding) == "number" and padding or padding[k]
      good = good and opts.whole.test(list[k])
    end
    opts.need(good, padding, ("a whole number or a list of %d"):format(2 * n), "%s: argument 1, the padding,", name)
    self.padding = list
    if valued then
      self.value = opts.expect(value, opts.number, "%s: argument 2, the value,", name)
    else
      opts.need(value == nil, value, "no more arguments", "%s: argument 2", name)
      self.value = 0
    end
  end
  function cls:forward(x) return functions.pad(x, self.padding, { mode = mode, value = self.value }) end
  function cls:extra_repr()
    return "[" .. table.concat(self.padding, ", ") .. "]" .. (valued and (", value %g"):format(self.value) or "")
  end
  return cls
end

--- Adds zeros around images [..., H, W]; negative numbers remove pixels.
---@class ZeroPad2d: Module
---@overload fun(padding: integer[]|integer): ZeroPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }
---@family

--- Adds pixels of one value around images [..., H, W]; negative numbers remove pixels.
---@class ConstantPad2d: Module
---@overload fun(padding: integer[]|integer, value: number): ConstantPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }; value: value of the new elements
---@family

--- Adds the elements beside the border, mirrored, around images [..., H, W]. Errors: a padding that is not below the
--- size of its dimension.
---@class ReflectionPad2d: Module
---@overload fun(padding: integer[]|integer): ReflectionPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }
---@family

--- Repeats the border around images [..., H, W].
---@class ReplicationPad2d: Module
---@overload fun(padding: integer[]|integer): ReplicationPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }
---@family

--- Adds the elements of the opposite side around images [..., H, W]. Errors: a padding above the size of its dimension.
---@class CircularPad2d: Module
---@overload fun(padding: integer[]|integer): CircularPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }
---@family

local M = {}
for name, mode in pairs { ZeroPad = "constant", ConstantPad = "constant", ReflectionPad = "reflect",
  ReplicationPad = "replicate", CircularPad = "circular" } do
  for dims = 1, 3 do
    local who = ("%s%dd"):format(name, dims)
    M[who] = padding_class(who, dims, mode, name == "ConstantPad")
  end
end

return M
