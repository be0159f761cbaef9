-- SPDX-License-Identifier: MIT
--- Classes: `local Net = class("Net", Base)`, `Base:extend("Net")`, `Net(…)`, `obj:isa(Net)`, `obj:class_name()`. A
--- class is the metatable of its instances. A subclass copies metamethods, which Lua looks up raw, and inherits methods
--- through `__base`. `__construct(Class, …)` makes an instance. `__refused[name]` is called, and raises, when a script
--- defines that name in the class.
local class_meta = {}

local function is_class(x) return type(x) == "table" and getmetatable(x) == class_meta end

-- Tensor classes keep their methods in a table `methods`, because their own __index is a function that looks up fields.
function class_meta.__index(class, key)
  local methods = rawget(class, "methods")
  local method = methods and methods[key]
  if method ~= nil then return method end
  local base = rawget(class, "__base")
  return base and base[key]
end

function class_meta.__newindex(class, key, value)
  local refused = rawget(class, "__refused")
  if refused and refused[key] then refused[key](class) end
  local methods = rawget(class, "methods")
  if methods and type(key) == "string" and key:sub(1, 2) ~= "__" then methods[key] = value else rawset(class, key,
    value) end
end

function class_meta.__call(class, ...) return class.__construct(class, ...) end

function class_meta.__tostring(class) return "class " .. rawget(class, "__name") end

local root = {}

function root.__construct(class, ...)
  local self = setmetatable({}, class)
  local init = class.init
  if init then init(self, ...) end
  return self
end

local M = {}

--- Makes a class.
---@param name string  shown in messages and by tostring
---@param base? table  the class to extend (default: the root of all classes)
function M.new(name, base)
  local class = { __name = name, __base = base or root, __isa = {} }
  for ancestor in pairs(base and base.__isa or {}) do class.__isa[ancestor] = true end
  class.__isa[class] = true
  if base then
    for key, value in pairs(base) do
      if type(key) == "string" and key:sub(1, 2) == "__" and rawget(class, key) == nil then class[key] = value end
    end
    if rawget(base, "__index") == base then class.__index = class end
  else
    class.__index = class
    class.__tostring = root.__tostring
  end
  return setmetatable(class, class_meta)
end

--- Makes a subclass: `local Net = Base:extend("Net")`.
function root.extend(base, name) return M.new(name, base) end

--- Whether obj is an instance of class or of a class that extends it.
function M.isa(obj, class)
  local mt = type(obj) == "table" and getmetatable(obj)
  local ancestors = mt and rawget(mt, "__isa")
  return ancestors ~= nil and ancestors ~= false and ancestors[class] == true
end

--- Whether the object is an instance of a class or of a class that extends it.
---@param class table  such as nn.Linear
---@return boolean
function root.isa(obj, class) return M.isa(obj, class) end

--- The name of obj's class; for other values the name of their Lua type.
function M.name(obj)
  local mt = type(obj) == "table" and getmetatable(obj)
  return mt and rawget(mt, "__name") or type(obj)
end

--- The name of the object's class.
---@return string
function root.class_name(obj) return M.name(obj) end

function root.__tostring(obj) return M.name(obj) end

M.is_class = is_class
M.root = root

return setmetatable(M, { __call = function(_, name, base) return M.new(name, base) end })
