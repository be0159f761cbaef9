-- SPDX-License-Identifier: MIT
--- Sequential, ModuleList, ModuleDict. The first two keep their children as array elements, so that Lua's own `#list`,
--- `ipairs(list)` and `list[i]` work. Lua does not report an assignment to an existing element, so elements are checked
--- when the children are listed, for example by parameters().
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local base = require "moonshard.nn.module"
local ops = require "moonshard.nn.ops"

local raise = errors.raise
local Module, is_module, check_cycle = base.Module, base.is_module, base.check_cycle
local rawget, rawset, rawequal, type, select, ipairs, tostring, unpack = rawget, rawset, rawequal, type, select, ipairs,
  tostring, unpack
local release_made_here, is_tensor = ops.drop, tensor.is_tensor
local sorted_pairs = require "moonshard.tensor.util".sorted_pairs

local function check_element(self, i, m)
  if class.is_class(m) then
    raise("%s: element %d is the class %s, expected an instance: %s(…)", self:class_name(), i, m.__name, m.__name)
  end
  opts.expect(m, base.a_module, "%s: element %d", self:class_name(), i)
  return m
end

-- Makes the modules, given as arguments or as one table, the elements of self.
local function take(self, ...)
  local n, first = select("#", ...), (...)
  if n == 1 and type(first) == "table" and not is_module(first) and not class.is_class(first) then
    for i, m in ipairs(first) do rawset(self, i, check_element(self, i, m)) end
    for key in pairs(first) do
      if type(key) ~= "number" then
        raise("%s: children are numbered, got the key '%s'; use ModuleDict for names", self:class_name(), tostring(key))
      end
    end
    return
  end
  for i = 1, n do rawset(self, i, check_element(self, i, (select(i, ...)))) end
end

local function child_list(self)
  local names, modules = {}, {}
  for i, m in ipairs(self) do names[i], modules[i] = tostring(i), check_element(self, i, m) end
  local slots = self._slots
  for _, name in ipairs(self._children) do names[#names + 1], modules[#modules + 1] = name, slots[name] end
  return names, modules
end

-- Converts i, which may count from the end, to a position in 1 .. last.
local function position(self, what, i, last)
  opts.need(opts.whole.test(i), i, "a whole number", "%s: %s: argument 1", self:class_name(), what)
  local at = i < 0 and #self + 1 + i or i
  if at < 1 or at > last then
    raise("%s: %s: position %d is out of range for %d element%s", self:class_name(), what, i, #self,
      #self == 1 and "" or "s")
  end
  return at
end

local function index(self, key)
  if type(key) == "number" then return key < 0 and rawget(self, #self + 1 + key) or nil end
  return Module.__index(self, key)
end

local function assign(self, key, value)
  if type(key) ~= "number" then return Module._assign(self, key, value) end
  local at = position(self, "assignment", key, #self + 1)
  if value == nil then
    if at ~= #self then
      raise("%s: assigning nil can only remove the last element, not element %d of %d", self:class_name(), at, #self)
    end
  else
    check_cycle(self, at, check_element(self, at, value))
  end
  rawset(self, at, value)
end

--- Adds a module at the end.
---@param m Module  becomes the last element
---@return Module self
local function append(self, m)
  check_cycle(self, #self + 1, check_element(self, #self + 1, m))
  rawset(self, #self + 1, m)
  return self
end

--- Inserts a module at position i; later modules move back. Errors: i outside of 1 to #self + 1.
---@param i integer  from 1; negative from the end
---@param m Module  becomes element i
---@return Module self
local function insert(self, i, m)
  local at = position(self, "insert", i, #self + 1)
  check_cycle(self, at, check_element(self, at, m))
  for k = #self, at, -1 do rawset(self, k + 1, rawget(self, k)) end
  rawset(self, at, m)
  return self
end

--- Removes the module at position i; later modules move forward. Errors: i outside of 1 to #self.
---@param i? integer  from 1; negative from the end (default: -1)
---@return Module  the removed module
local function pop(self, i)
  local at = position(self, "pop", i == nil and -1 or i, #self)
  local m = rawget(self, at)
  for k = at, #self do rawset(self, k, rawget(self, k + 1)) end
  return m
end

local function add_child(self, name, m)
  local at = tonumber(name)
  if not at then
    raise("%s: add_module: children are numbered, got the name '%s'; use append, or ModuleDict for names",
      self:class_name(), name)
  end
  assign(self, at, m)
end

local function list_class(name)
  local cls = Module:extend(name)
  cls.init, cls._child_list, cls._assign = take, child_list, assign
  cls._add_child = add_child
  cls.append, cls.insert, cls.pop = append, insert, pop
  cls.__index = index
  return cls
end

-- Returns a child's first result and, if there are others, a list of those.
local function first_and_others(y, ...)
  local n = select("#", ...)
  if n > 0 then return y, { n = n, ... } end
  return y
end

-- Runs the children from number i on. Each may accept and return several values.
local function forward_from(self, i, ...)
  if i > #self then return ... end
  return forward_from(self, i + 1, self[i](...))
end

--- Calls its children in order, each with everything that the previous one returned, as `c(b(a(x)))` does in Lua; its
--- results are all those of the last child. Values that a child's forward does not take are dropped: `nn.Linear` after
--- `nn.GRU` gets the output, and the state is lost; a second `nn.GRU` gets the state of the first as its own. Where that
--- is not meant, call the children in a forward of your own.
---@class Sequential: Module
---@field append fun(self, m: Module): Sequential  adds a module at the end
---@field insert fun(self, i: integer, m: Module): Sequential  inserts a module at position i
---@field pop fun(self, i?: integer): Module  removes the module at position i (default: the last) and returns it
---@overload fun(...: Module): Sequential  ...: in the order of their calls, as arguments or one list
local Sequential = list_class("Sequential")

-- Releases a layer's input, if it was made during this call, as soon as the layer's output exists; memory that the
-- graph, a view or a field needs is kept. If a layer has several inputs, they may belong to the caller, so none is
-- released.
function Sequential:forward(x, ...)
  if select("#", ...) > 0 then return forward_from(self, 1, x, ...) end
  local given = x
  for i = 1, #self do
    local y, others = first_and_others(self[i](x))
    if others then return forward_from(self, i + 1, y, unpack(others, 1, others.n)) end
    if not rawequal(x, given) and not rawequal(x, y) and is_tensor(y) then release_made_here(x) end
    x = y
  end
  return x
end

--- A list of modules, which are registered as its children. It has no forward. Its `parameters()` are those of all its
--- modules, for example for one optimizer of two models.
---@class ModuleList: Module
---@field append fun(self, m: Module): ModuleList  adds a module at the end
---@field insert fun(self, i: integer, m: Module): ModuleList  inserts a module at position i
---@field pop fun(self, i?: integer): Module  removes the module at position i (default: the last) and returns it
---@overload fun(...: Module): ModuleList  ...: as arguments or one list
local ModuleList = list_class("ModuleList")

--- Modules by name, in order: `ModuleDict{{"name", module}, …}`. A table with names as keys is sorted by name.
---@class ModuleDict: Module
---@overload fun(entries: table): ModuleDict  entries: pairs { name, module } in order, or a table by name
local ModuleDict = Module:extend("ModuleDict")

function ModuleDict:init(entries)
  if entries == nil then return end
  if type(entries) ~= "table" or is_module(entries) then opts.wrong(entries, "a table", "ModuleDict: argument 1") end
  local function add(name, m)
    if type(name) ~= "string" then opts.wrong(name, "a string", "ModuleDict: a name") end
    opts.expect(m, base.a_module, "ModuleDict: '%s'", name)
    self[name] = m
  end
  if entries[1] ~= nil or next(entries) == nil then
    for i, entry in ipairs(entries) do
      opts.need(type(entry) == "table" and not is_module(entry), entry, "a pair {\"name\", module}",
        "ModuleDict: entry %d", i)
      add(entry[1], entry[2])
    end
  else
    for name, m in sorted_pairs(entries) do add(name, m) end
  end
end

return { Sequential = Sequential, ModuleList = ModuleList, ModuleDict = ModuleDict }
