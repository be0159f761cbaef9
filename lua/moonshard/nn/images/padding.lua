-- SPDX-License-Identifier: MIT
--- Layers that pad: F.pad as modules.
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

--- Adds zeros at both ends of the last dimension; negative numbers remove elements.
---@class ZeroPad1d: Module
---@overload fun(padding: integer|integer[]): ZeroPad1d
---   padding: elements to add at both ends, or { before, after }
local ZeroPad1d = padding_class("ZeroPad1d", 1, "constant", false)

--- Adds zeros around images [..., H, W]; negative numbers remove pixels.
---@class ZeroPad2d: Module
---@overload fun(padding: integer|integer[]): ZeroPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }
local ZeroPad2d = padding_class("ZeroPad2d", 2, "constant", false)

--- Adds zeros around volumes [..., D, H, W]; negative numbers remove elements.
---@class ZeroPad3d: Module
---@overload fun(padding: integer|integer[]): ZeroPad3d
---   padding: elements to add on every side, or { left, right, top, bottom, front, back }
local ZeroPad3d = padding_class("ZeroPad3d", 3, "constant", false)

--- Adds elements of one value at both ends of the last dimension; negative numbers remove elements.
---@class ConstantPad1d: Module
---@overload fun(padding: integer|integer[], value: number): ConstantPad1d
---   padding: elements to add at both ends, or { before, after }; value: value of the new elements
local ConstantPad1d = padding_class("ConstantPad1d", 1, "constant", true)

--- Adds pixels of one value around images [..., H, W]; negative numbers remove pixels.
---@class ConstantPad2d: Module
---@overload fun(padding: integer|integer[], value: number): ConstantPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }; value: value of the new elements
local ConstantPad2d = padding_class("ConstantPad2d", 2, "constant", true)

--- Adds elements of one value around volumes [..., D, H, W]; negative numbers remove elements.
---@class ConstantPad3d: Module
---@overload fun(padding: integer|integer[], value: number): ConstantPad3d
---   padding: elements to add on every side, or { left, right, top, bottom, front, back }; value: value of the new
---   elements
local ConstantPad3d = padding_class("ConstantPad3d", 3, "constant", true)

--- Adds the elements beside the border, mirrored, at both ends of the last dimension. Errors: a padding that is not
--- below the size of the dimension.
---@class ReflectionPad1d: Module
---@overload fun(padding: integer|integer[]): ReflectionPad1d
---   padding: elements to add at both ends, or { before, after }
local ReflectionPad1d = padding_class("ReflectionPad1d", 1, "reflect", false)

--- Adds the elements beside the border, mirrored, around images [..., H, W]. Errors: a padding that is not below the
--- size of its dimension.
---@class ReflectionPad2d: Module
---@overload fun(padding: integer|integer[]): ReflectionPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }
local ReflectionPad2d = padding_class("ReflectionPad2d", 2, "reflect", false)

--- Adds the elements beside the border, mirrored, around volumes [..., D, H, W]. Errors: a padding that is not below
--- the size of its dimension.
---@class ReflectionPad3d: Module
---@overload fun(padding: integer|integer[]): ReflectionPad3d
---   padding: elements to add on every side, or { left, right, top, bottom, front, back }
local ReflectionPad3d = padding_class("ReflectionPad3d", 3, "reflect", false)

--- Repeats the border at both ends of the last dimension.
---@class ReplicationPad1d: Module
---@overload fun(padding: integer|integer[]): ReplicationPad1d
---   padding: elements to add at both ends, or { before, after }
local ReplicationPad1d = padding_class("ReplicationPad1d", 1, "replicate", false)

--- Repeats the border around images [..., H, W].
---@class ReplicationPad2d: Module
---@overload fun(padding: integer|integer[]): ReplicationPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }
local ReplicationPad2d = padding_class("ReplicationPad2d", 2, "replicate", false)

--- Repeats the border around volumes [..., D, H, W].
---@class ReplicationPad3d: Module
---@overload fun(padding: integer|integer[]): ReplicationPad3d
---   padding: elements to add on every side, or { left, right, top, bottom, front, back }
local ReplicationPad3d = padding_class("ReplicationPad3d", 3, "replicate", false)

--- Adds the elements of the opposite end at both ends of the last dimension. Errors: a padding above the size of the
--- dimension.
---@class CircularPad1d: Module
---@overload fun(padding: integer|integer[]): CircularPad1d
---   padding: elements to add at both ends, or { before, after }
local CircularPad1d = padding_class("CircularPad1d", 1, "circular", false)

--- Adds the elements of the opposite side around images [..., H, W]. Errors: a padding above the size of its dimension.
---@class CircularPad2d: Module
---@overload fun(padding: integer|integer[]): CircularPad2d
---   padding: pixels to add on every side, or { left, right, top, bottom }
local CircularPad2d = padding_class("CircularPad2d", 2, "circular", false)

--- Adds the elements of the opposite side around volumes [..., D, H, W]. Errors: a padding above the size of its
--- dimension.
---@class CircularPad3d: Module
---@overload fun(padding: integer|integer[]): CircularPad3d
---   padding: elements to add on every side, or { left, right, top, bottom, front, back }
local CircularPad3d = padding_class("CircularPad3d", 3, "circular", false)

return {
  ZeroPad1d = ZeroPad1d, ZeroPad2d = ZeroPad2d, ZeroPad3d = ZeroPad3d,
  ConstantPad1d = ConstantPad1d, ConstantPad2d = ConstantPad2d, ConstantPad3d = ConstantPad3d,
  ReflectionPad1d = ReflectionPad1d, ReflectionPad2d = ReflectionPad2d, ReflectionPad3d = ReflectionPad3d,
  ReplicationPad1d = ReplicationPad1d, ReplicationPad2d = ReplicationPad2d, ReplicationPad3d = ReplicationPad3d,
  CircularPad1d = CircularPad1d, CircularPad2d = CircularPad2d, CircularPad3d = CircularPad3d,
}
