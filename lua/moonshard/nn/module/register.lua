-- SPDX-License-Identifier: MIT
--- The Module class: registration by assignment, listings, printing. Paths are in paths.lua, calls in call.lua, modes
--- and state in state.lua and state_hooks.lua; init.lua puts these files together.
---
--- What a script assigns to a named field of an instance is in its table `_slots`. `_kind` maps registered names to their
--- kind; `_params`, `_buffers` and `_children` list them in order. The instance itself has no other fields than those
--- whose names begin with "_" and array elements, so __newindex is called when a script assigns to a named field. The
--- array elements of containers are their children (containers.lua).
local advice = require "moonshard.core.advice"
local capture = require "moonshard.autograd.capture"
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local log = require "moonshard.core.log"
local methods = require "moonshard.core.methods"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local lib, state, raise = engine.lib, engine.state, errors.raise
local is_tensor = tensor.is_tensor
local concat, remove = table.concat, table.remove
local getmetatable, setmetatable, rawget, rawset = getmetatable, setmetatable, rawget, rawset
local type, tostring, ipairs = type, tostring, ipairs

--- The base of all modules. `local Net = nn.Module:extend "Net"` makes a class; its init initialises an instance, and
--- its forward computes. `Net(…)` makes an instance; calling the instance runs hooks and forward. A Parameter or Module
--- assigned to a field is registered under that name; nil removes it; any other value in its place is an error.
---@class Module
---@operator call: any
---@field training boolean  set by train() and eval()
local Module = class("Module")
Module._advice = advice.plain

--- Whether x is a module.
local function is_module(x) return class.isa(x, Module) end

local function is_parameter(x) return is_tensor(x) and getmetatable(x).__param == true end

local show = errors.kind

--- Makes a class of modules that extends `base`: it inherits init, forward and all methods.
---@param name string  name of the class
---@return table class
function Module.extend(base, name)
  if not class.is_class(base) then raise("extend: call it on a class, as in nn.Module:extend(\"Net\")") end
  if type(name) ~= "string" or name == "" then opts.wrong(name, "a class name", "extend: argument 1") end
  return class.new(name, base)
end

-- Refuses names of constructors in other class libraries: a function with such a name would never be called.
local function refuse_constructor(cls)
  raise("%s: the constructor of a Module is init: function %s:init(...)", rawget(cls, "__name"), rawget(cls, "__name"))
end
Module.__refused = {}
for _, name in ipairs { "__init", "__init__", "_init", "__new", "constructor" } do
  Module.__refused[name] = refuse_constructor
end

-- Raises for `Net:new(...)`, the constructor in other class libraries.
function Module.new()
  raise "new: a module is made by calling its class, as in Net(...)"
end
Module.__refused.new = refuse_constructor

-- Warns about fields, assigned by init, whose contents modules() and parameters() do not list: plain tables of modules
-- or parameters, and leaves that are not parameters. Warns once per class and field.
local warned = {}
local function warn_unregistered(self)
  local registered
  for name, value in next, self._slots do
    local what
    if is_tensor(value) then
      if not self._kind[name] and not is_parameter(value) and value.is_leaf and value.requires_grad then
        what = "a leaf tensor that parameters() does not list; wrap it in nn.Parameter"
      end
    elseif opts.is_plain(value) then
      for _, element in next, value do
        if is_module(element) or is_parameter(element) then
          if not registered then
            registered = {}
            for _, m in ipairs(self:modules()) do registered[m] = true end
            for _, p in ipairs(self:parameters()) do registered[p] = true end
          end
          if not registered[element] then
            what = is_module(element)
              and "a plain table of modules, which parameters() does not see; use nn.ModuleList, nn.ModuleDict or nn.Sequential"
              or "a plain table of parameters, which parameters() does not list; use nn.ParameterList, nn.ParameterDict or one field each"
            break
          end
        end
      end
    end
    local key = what and self:class_name() .. "." .. tostring(name)
    if key and not warned[key] then
      warned[key] = true
      log.warn(("%s: field '%s' is %s"):format(self:class_name(), tostring(name), what))
    end
  end
end

-- A class's own __call would skip hooks and, where the module is sharded, the gathering of its parameters.
local function refuse_call(cls)
  local name = rawget(cls, "__name")
  raise("%s: a call of a module runs its forward; define function %s:forward(...) in place of __call", name, name)
end

function Module.__construct(cls, ...)
  if rawget(cls, "__call") ~= rawget(cls, "__runs_forward") then refuse_call(cls) end
  local self = setmetatable({
    _slots = { training = true }, _kind = {}, _params = {}, _buffers = {}, _children = {}, _transient = false,
    _hooked = false, _pre = false, _post = false, _back = false, _before = false, _scope = rawget(cls, "__name"),
  }, cls)
  local init = cls.init
  if init then
    init(self, ...)
    warn_unregistered(self)
  elseif cls.initialize then
    -- `initialize` is a constructor in other class libraries. It is not refused: a script may call such a method itself.
    local name = rawget(cls, "__name")
    log.warn_once(("%s: %s(...) does not call %s:initialize; the constructor of a Module is init: function %s:init(...)")
      :format(name, name, name, name))
  end
  return self
end

-- In `model.forward(x)`, with a dot instead of a colon, forward would treat x as the module. Scripts therefore get a
-- function that checks its first argument and calls forward; the library calls forward_of instead.
local guards = setmetatable({}, { __mode = "kv" })
local function guarded(forward)
  local guard = guards[forward]
  if not guard then
    guard = function(self, ...)
      if not is_module(self) then raise("forward: called on %s; write model(x) or model:forward(x)", show(self)) end
      return forward(self, ...)
    end
    guards[forward] = guard
  end
  return guard
end

local function forward_of(self) return rawget(self, "_slots").forward or getmetatable(self).forward end

function Module.__index(self, name)
  local value = rawget(self, "_slots")[name]
  if value ~= nil then return value end
  local cls = getmetatable(self)
  value = cls[name]
  if name == "forward" and value then return guarded(value) end
  if value == nil then methods.look(cls, name, 2) end
  return value
end

function Module.__newindex(self, name, value)
  capture.touch()
  return self._assign(self, name, value)
end

-- ---- registration -------------------------------------------------------------------------------

local lists = { parameter = "_params", buffer = "_buffers", module = "_children" }

local function forget(self, name)
  local kind = self._kind[name]
  if kind then
    local list = self[lists[kind]]
    for i = 1, #list do if list[i] == name then remove(list, i) break end end
    self._kind[name] = nil
    if self._transient then self._transient[name] = nil end
  end
  self._slots[name] = nil
end

local function enlist(self, name, kind, value)
  local now = self._kind[name]
  if now ~= kind then
    if now then forget(self, name) end
    local list = self[lists[kind]]
    list[#list + 1] = name
    self._kind[name] = kind
  end
  self._slots[name] = value
end

local function check_name(self, name, what)
  if type(name) ~= "string" then opts.wrong(name, "a name", "register %s: argument 1", what) end
  if name == "" then raise("register %s: the name is empty", what) end
  if name:find(".", 1, true) then raise("register %s: name '%s' contains a dot", what, name) end
  if Module[name] ~= nil and name ~= "new" then
    raise("%s: '%s' is a method of Module; choose another name for the %s", self:class_name(), name, what)
  end
end

-- A tensor that is assigned to a field leaves its scope. When the last field that has it is overwritten, it moves to
-- the scope that is open at that time. `_held` counts the fields; unscoped tensors are not counted.
local own
function own(t)
  if not is_tensor(t) or is_parameter(t) then return end
  if t.id < 0 then
    for _, part in ipairs(tensor.inner(t)) do own(part) end
    return
  end
  local held = rawget(t, "_held")
  if held then
    rawset(t, "_held", held + 1)
  elseif lib.ms_scope_of(t.id) ~= 0 then
    rawset(t, "_held", 1)
    lib.ms_keep(t.id)
    tensor.own(t)
  end
end

local disown
function disown(t)
  if is_tensor(t) and t.id < 0 then
    for _, part in ipairs(tensor.inner(t)) do disown(part) end
    return
  end
  local held = is_tensor(t) and rawget(t, "_held")
  if not held then return end
  if held > 1 then
    rawset(t, "_held", held - 1)
  else
    rawset(t, "_held", nil)
    if state.scope ~= 0 then lib.ms_adopt(t.id) end
  end
end

-- Whether `wanted` is m itself or a descendant of m. A module must not contain itself.
local function below(m, wanted, seen)
  if m == wanted then return true end
  if seen[m] then return false end
  seen[m] = true
  local _, children = m:_child_list()
  for i = 1, #children do
    if below(children[i], wanted, seen) then return true end
  end
  return false
end

local function check_cycle(self, name, value)
  if rawequal(self, value) then
    raise("%s: cannot make the module its own child '%s'", self:class_name(), tostring(name))
  end
  if below(value, self, {}) then
    raise("%s: cannot make %s its child '%s': that module contains this one", self:class_name(), value:class_name(),
      tostring(name))
  end
end

-- Assigns module[name] = value. Containers, which keep children elsewhere, override this function.
function Module._assign(self, name, value)
  if type(name) == "number" and not is_module(value) then
    if is_parameter(value) then
      raise("%s: parameters are named, not numbered; got [%s]", self:class_name(), tostring(name))
    end
    rawset(self, name, value)
    return
  end
  local slots, kind = rawget(self, "_slots"), rawget(self, "_kind")[name]
  local old = slots[name]
  if old == value and value ~= nil then return end
  if value == nil then
    forget(self, name)
  elseif is_module(value) then
    if kind ~= "module" then check_name(self, name, "module") end
    check_cycle(self, name, value)
    enlist(self, name, "module", value)
  elseif is_parameter(value) then
    if kind ~= "parameter" then check_name(self, name, "parameter") end
    enlist(self, name, "parameter", value)
  elseif kind == "buffer" and is_tensor(value) then
    slots[name] = value
  elseif kind then
    local wanted = kind == "module" and "a Module" or kind == "parameter" and "an nn.Parameter" or "a Tensor"
    raise("%s: cannot assign %s to %s '%s': %s or nil expected", self:class_name(), show(value), kind, name, wanted)
  else
    if Module[name] ~= nil and name ~= "new" and type(value) ~= "function" then
      raise("%s: '%s' is a method of Module; choose another name for the field", self:class_name(), tostring(name))
    end
    slots[name] = value
  end
  own(value)
  disown(old)
end

-- Registers a buffer or parameter under a name that no other field uses.
local function register(self, who, kind, name, value)
  local old = self._slots[name]
  if self._kind[name] ~= kind then
    check_name(self, name, kind)
    if old ~= nil then raise("%s: %s already has a field '%s'", who, self:class_name(), name) end
  end
  enlist(self, name, kind, value)
  if old ~= value then
    own(value)
    disown(old)
  end
end

--- Registers a tensor that is part of the state but not trained. buffers() lists it, and it is saved unless persistent
--- is false. Errors: a name that a method or another field has.
---@param name string  without a dot
---@param t Tensor?  nil reserves the name for a later assignment
---@param given? { persistent: boolean }  persistent: false: not in state_dict
function Module:register_buffer(name, t, given)
  local o = opts("register_buffer", given, { persistent = true })
  if t ~= nil and not is_tensor(t) then
    raise("register_buffer: cannot assign %s to buffer '%s': a Tensor or nil expected", show(t), tostring(name))
  end
  register(self, "register_buffer", "buffer", name, t)
  if not o.persistent then
    if not self._transient then rawset(self, "_transient", {}) end
    self._transient[name] = true
  end
  return self
end

--- Registers a parameter; nil reserves the name for a later assignment.
---@param name string  without a dot
---@param p Parameter?  nil reserves the name for a later assignment
function Module:register_parameter(name, p)
  if p ~= nil and not is_parameter(p) then
    raise("register_parameter: cannot assign %s to parameter '%s': an nn.Parameter or nil expected", show(p),
      tostring(name))
  end
  register(self, "register_parameter", "parameter", name, p)
  return self
end

-- ---- listings -----------------------------------------------------------------------------------

-- Returns the names and the modules of the children, in order. Containers override this function to add their elements.
function Module._child_list(self)
  local names, modules = {}, {}
  local slots = self._slots
  for i, name in ipairs(self._children) do names[i], modules[i] = name, slots[name] end
  return names, modules
end

local function join(prefix, name) return prefix == "" and name or prefix .. "." .. name end

-- Appends the module and its descendants to names and modules: each module once, or under every name if seen is nil.
-- `path` contains the enclosing modules, to detect a module that contains itself (assignments to list elements cannot
-- be checked). A wrapper (a class with `_wraps`) and its child `module` get the same name.
local function walk(self, prefix, seen, names, modules, path)
  if path[self] then raise("%s: the module contains itself, as '%s'", self:class_name(), prefix) end
  if seen then
    if seen[self] then return end
    seen[self] = true
  end
  path[self] = true
  names[#names + 1], modules[#modules + 1] = prefix, self
  local child_names, children = self:_child_list()
  for i, child in ipairs(children) do
    walk(child, self._wraps and prefix or join(prefix, child_names[i]), seen, names, modules, path)
  end
  path[self] = nil
end

local function iterate(names, values)
  local i = 0
  return function()
    i = i + 1
    return names[i], values[i]
  end
end

-- Returns names and values of the parameters or buffers of self and, with recurse, of its descendants; each value once.
-- Values whose `_hidden` function returns true are omitted.
local function collect(self, list, prefix, recurse)
  local names, values, modules = {}, {}, {}
  if recurse then
    walk(self, prefix, {}, names, modules, {})
  else
    names[1], modules[1] = prefix, self
  end
  local out, seen = {}, {}
  for i, m in ipairs(modules) do
    for _, name in ipairs(m[list]) do
      local value = m._slots[name]
      local hidden = value ~= nil and rawget(value, "_hidden")
      if value ~= nil and not seen[value] and not (hidden and hidden(value)) then
        seen[value] = true
        out[#out + 1], values[#values + 1] = join(names[i], name), value
      end
    end
  end
  return out, values
end

-- Returns the values of a listing without their names.
local function values_of(self, who, list, given)
  return listing.new((select(2, collect(self, list, "", opts(who, given, { recurse = true }).recurse))))
end
local function named(self, who, list, given)
  local o = opts(who, given, { prefix = "", recurse = true })
  return iterate(collect(self, list, o.prefix, o.recurse))
end

--- Parameters: a module's own ones first, then depth first; shared ones once. A list: `#`, `ipairs` and positions work,
--- and so does `for p in model:parameters() do`.
---@param given? { recurse: boolean }  recurse: includes those of descendants (default: true)
---@return Parameter[]
function Module:parameters(given) return values_of(self, "parameters", "_params", given) end

--- Buffers: a module's own ones first, then depth first; shared ones once.
---@param given? { recurse: boolean }  recurse: includes those of descendants (default: true)
---@return Tensor[]
function Module:buffers(given) return values_of(self, "buffers", "_buffers", given) end

--- Iterates over names and parameters. Uses a snapshot: the module may change during the iteration.
---@param given? { prefix: string, recurse: boolean }  prefix: put before the names; recurse: includes descendants (default: true)
---@return fun(): string, Parameter
function Module:named_parameters(given) return named(self, "named_parameters", "_params", given) end

--- Iterates over names and buffers.
---@param given? { prefix: string, recurse: boolean }  prefix: put before the names; recurse: includes descendants (default: true)
---@return fun(): string, Tensor
function Module:named_buffers(given) return named(self, "named_buffers", "_buffers", given) end

--- Iterates over names and modules; this module comes first, with the prefix as its name (default: "").
---@param given? { prefix: string, recurse: boolean }  prefix: put before the names; recurse: includes descendants (default: true)
---@return fun(): string, Module
function Module:named_modules(given)
  local o = opts("named_modules", given, { prefix = "", recurse = true })
  local names, modules = {}, {}
  if o.recurse then walk(self, o.prefix, {}, names, modules, {}) else names[1], modules[1] = o.prefix, self end
  return iterate(names, modules)
end

--- This module and its descendants, depth first; shared ones once.
---@return Module[]
function Module:modules()
  local names, modules = {}, {}
  walk(self, "", {}, names, modules, {})
  return listing.new(modules)
end

--- Iterates over names and children; a child that is registered twice occurs once.
---@param given? { prefix: string, recurse: boolean }  prefix: put before the names; recurse: has no effect
---@return fun(): string, Module
function Module:named_children(given)
  local o = opts("named_children", given, { prefix = "", recurse = false })
  local names, children = self:_child_list()
  local out, values, seen = {}, {}, {}
  for i, child in ipairs(children) do
    if not seen[child] then
      seen[child] = true
      out[#out + 1], values[#values + 1] = join(o.prefix, names[i]), child
    end
  end
  return iterate(out, values)
end

--- The modules registered in this module, in order.
---@return Module[]
function Module:children()
  local values = {}
  for _, child in self:named_children() do values[#values + 1] = child end
  return listing.new(values)
end

-- ---- printing -----------------------------------------------------------------------------------

--- The text in the parentheses of `tostring(m)`; layers override it.
---@return string
function Module.extra_repr(_) return "" end

function Module.__tostring(self)
  local names, children = self:_child_list()
  local head = self:class_name() .. "("
  local extra = self:extra_repr()
  if #children == 0 then return head .. extra .. ")" end
  local lines = { head .. extra }
  for i, child in ipairs(children) do
    local text = below(child, self, {}) and child:class_name() .. "(which contains this one)" or tostring(child)
    lines[#lines + 1] = "  (" .. names[i] .. "): " .. text:gsub("\n", "\n  ")
  end
  lines[#lines + 1] = ")"
  return concat(lines, "\n")
end

-- Copies field by field; the copied tensors belong to the copy.
function Module.__deepcopy(self, memo, copy)
  local out = {}
  memo[self] = out
  for key, value in next, self do rawset(out, key, copy(value)) end
  for _, value in next, out._slots do
    if is_tensor(value) then
      rawset(value, "_held", nil)
      own(value)
    end
  end
  if out._back then Module._renew_key(out) end
  return setmetatable(out, getmetatable(self))
end

return {
  Module = Module, is_module = is_module, a_module = opts.kind("a module", is_module), is_parameter = is_parameter,
  walk = walk, join = join, own = own, check_cycle = check_cycle, forward_of = forward_of,
}
