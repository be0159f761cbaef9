-- SPDX-License-Identifier: MIT
--- Modules that wrap another module. They add nothing to its parameters' names. Fields, methods and elements (`m[i]`)
--- that they lack are read from the wrapped module; a method found there is called with the wrapped module as `self`,
--- unless the class's table _forwarding has its name: such a method calls the module, so it gets the wrapper.
local methods = require "moonshard.core.methods"

local rawget, rawset, type, getmetatable = rawget, rawset, type, getmetatable

local M = {}

-- Binds a method of the wrapped module; every read returns the same function.
local function bind(self, inner, name, fn)
  local bound = rawget(self, "_bound")
  if not bound then
    bound = {}
    rawset(self, "_bound", bound)
  end
  local entry = bound[name]
  if not entry or entry.fn ~= fn or entry.inner ~= inner then
    entry = { fn = fn, inner = inner, call = function(first, ...)
      if first == self then first = inner end
      return fn(first, ...)
    end }
    bound[name] = entry
  end
  return entry.call
end

--- Makes instances of cls, which have a child `module`, read missing fields from that child. own(self, name) returns a
--- field of the wrapper; if its second result is true, a nil is final and the wrapped module is not searched.
---@param cls table  a class of modules
---@param own? fun(self: Module, name: string): any, boolean?  looks up the wrapper's own fields
function M.read_through(cls, own)
  cls._wraps = true
  rawset(cls, "__index", function(self, name)
    local slots = rawget(self, "_slots")
    local value = slots[name]
    if value ~= nil then return value end
    value = cls[name]
    if value ~= nil then return value end
    if own then
      local known
      value, known = own(self, name)
      if value ~= nil or known then return value end
    end
    local inner = slots.module
    if inner == nil then return nil end
    value = inner[name]
    if type(value) == "function" then
      local forwarding = inner._forwarding
      return forwarding and forwarding[name] and value or bind(self, inner, name, value)
    end
    if value == nil then methods.look(cls, name, 2, getmetatable(inner)) end
    return value
  end)
end

return M
