-- SPDX-License-Identifier: MIT
--- Errors for methods of objects that a script calls wrongly: with a dot instead of a colon, as in `optimizer.step()`,
--- or by a name that the class does not have. Without these checks Lua's own message names a line of the library, and
--- does not say which methods exist.
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local hints = require "moonshard.core.hints"
local misspelt = require "moonshard.core.misspelt"
local opts = require "moonshard.core.opts"

local M = {}

-- The wrapper of a method, loaded separately for each method: closures of one prototype share their traces.
local code = string.dump(loadstring [[
  local f, mine, lost = ...
  return function(self, ...)
    if not mine(self) then lost(self) end
    return f(self, ...)
  end]], true)
local here = debug.getinfo(1, "S").source

-- Whether name is that of a public method: no metamethod or internal function, no method that every class has, and none
-- that a script's class defines (init, new, forward).
local function is_public(name, value)
  return type(name) == "string" and type(value) == "function" and name:sub(1, 1) ~= "_" and name ~= "init"
    and name ~= "new" and name ~= "forward" and class.root[name] == nil
end

--- Makes the public methods of a class check that they are called on one of its instances.
---@param cls table  the class, whose methods are defined; its instances have it, or a class that extends it, as
---   metatable
---@param called string  an instance's usual name, such as "optimizer", for "write optimizer:step()"
function M.guard(cls, called)
  local function mine(self)
    local mt = type(self) == "table" and getmetatable(self)
    return mt == cls or mt and class.isa(self, cls)
  end
  for name, fn in pairs(cls) do
    if is_public(name, fn) then
      local function lost(self)
        errors.raise("%s: called on %s; write %s:%s()", name, errors.kind(self), called, name)
      end
      local wrapper = loadstring(code, here)(fn, mine, lost)
      opts.original[wrapper] = fn
      rawset(cls, name, wrapper)
    end
  end
end

--- The names of a class's public methods, with those that it inherits.
---@param cls table
---@return string[]  sorted
function M.names(cls)
  local names, seen = {}, {}
  while cls and cls ~= class.root do
    for name, value in pairs(cls) do
      if is_public(name, value) and not seen[name] then names[#names + 1], seen[name] = name, true end
    end
    cls = rawget(cls, "__base")
  end
  table.sort(names)
  return names
end

local LISTED = 20                     -- the largest number of methods that a message lists

-- class -> field -> true: the name was first read without a call, so it is the script's own field, not a wrong method.
local fields = setmetatable({}, { __mode = "k" })

--- Called when `key` of an instance is nil, by the function that reads fields: raises if a script calls it as a method.
--- After a read that is no call, this field of the class is not checked again: the script tests for a field of its own,
--- or the library for one that modules may have. To find out who reads takes long: only names with advice are checked
--- again after a read by the library.
---@param cls table  the instance's class; its field _advice maps names to what a script must write instead
---@param key any  the field that was read
---@param level integer  stack level of the function that read the field; 1: the caller
---@param inner? table  another class whose methods instances have
function M.look(cls, key, level, inner)
  local seen = fields[cls]
  if not seen then
    seen = {}
    fields[cls] = seen
  end
  if seen[key] then return end
  local hint = cls._advice and cls._advice[key]
  if hint and errors.is_library(level + 1) then return end
  if type(key) ~= "string" or not hint and (key:sub(1, 1) == "_" or errors.is_library(level + 1))
    or not misspelt.is_call(key, level + 1) then

    seen[key] = true
    return
  end
  local names = M.names(cls)
  if inner then
    for _, name in ipairs(M.names(inner)) do names[#names + 1] = name end
  end
  hint = hint or hints.method(key)
  local near = not hint and errors.nearest(key, names)
  local advice = hint and "; " .. hint or near and ("; did you mean '%s'?"):format(near)
    or #names <= LISTED and "; it has " .. table.concat(names, ", ") or ""
  errors.raise("unknown method '%s' of %s%s", key, rawget(cls, "__name"), advice)
end

--- Makes a call of a class's instances an error: a script writes `for x in t do` for something that is no iterator.
---@param cls table  the class; classes that extend it may define their own __call
---@param text string  the message
function M.refuse_call(cls, text)
  cls.__call = function() errors.raise_text(text) end
  cls.__no_function = cls.__call
end

--- Makes it an error to call an unknown method of an instance of cls. An unknown field is nil unless `unknown` raises.
---@param cls table  a class that is its own __index, and is not extended yet
---@param unknown? fun(key: any)  raises when a script reads a field that is nil
function M.close(cls, unknown)
  rawset(cls, "__index", function(self, key)
    local mt = getmetatable(self)
    local value = mt[key]
    if value == nil then
      M.look(mt, key, 2)
      if unknown and not errors.is_library(2) then unknown(key) end
    end
    return value
  end)
end

return M
