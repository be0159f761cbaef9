-- SPDX-License-Identifier: MIT
--- nn.utils.parametrize: parameters that are computed from others. The module gets the class "Parametrized<Class>",
--- which extends the class it had, and the child `parametrizations`, with a ParametrizationList for each such
--- parameter: its original parameters and the modules that compute. Layers read parameters as fields (`_slots`), so the
--- values are put there while forward runs; at other times, reading the field computes them.
local autograd = require "moonshard.autograd"
local class = require "moonshard.core.class"
local containers = require "moonshard.nn.module.containers"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local base = require "moonshard.nn.module"
local Parameter = require "moonshard.nn.module.parameter".Parameter

local raise, no_grad = errors.raise, autograd.no_grad
local rawget, rawset, ipairs, pcall, error, unpack = rawget, rawset, ipairs, pcall, error, unpack
local is_tensor = tensor.is_tensor

local M = {}

-- ---- the list ------------------------------------------------------------------------------------

-- The parametrizations of one parameter, as children 1, 2 …: the first is called with the originals, each other with
-- the result of the one before. The originals are the parameter "original", or "original0", "original1" … if the right
-- inverse of the first parametrization returns several values.
local List = containers.ModuleList:extend "ParametrizationList"

local function originals(self)
  local list = {}
  for k, name in ipairs(self._params) do list[k] = self._slots[name] end
  return list
end

function List:compute()
  local list = originals(self)
  local value = self[1](unpack(list))
  for k = 2, #self do value = self[k](value) end
  return value
end

-- Returns the values of the originals, a list of tensors, with which compute gives `value`.
local function inverse(self, value, name)
  for k = #self, 1, -1 do
    local m = self[k]
    if not m.right_inverse then
      raise("parametrize: '%s' cannot be set, because the parametrization %s has no right_inverse", name, m:class_name())
    end
    local values = { m:right_inverse(value) }
    if k == 1 then return values end
    value = values[1]
  end
end

-- ---- classes of parametrized modules ---------------------------------------------------------------

local function list_of(self, name)
  local dict = rawget(self, "_slots").parametrizations
  return dict and rawget(dict, "_slots")[name]
end

local function take_out(slots, names, ok, ...)
  for _, name in ipairs(names) do slots[name] = nil end
  if not ok then error((...), 0) end
  return ...
end

local generated = setmetatable({}, { __mode = "k" })

local function class_for(cls)
  if generated[cls] then return generated[cls] end
  local out = class.new("Parametrized" .. rawget(cls, "__name"), cls)
  generated[cls] = out
  out._parametrized = { of = cls }
  local index = rawget(cls, "__index")
  rawset(out, "__index", function(self, name)
    local value = index(self, name)
    if value ~= nil or name == "parametrizations" then return value end
    local list = list_of(self, name)
    return list and list:compute()
  end)
  function out:forward(...)
    local slots = rawget(self, "_slots")
    local dict, names = slots.parametrizations, {}
    for _, name in ipairs(rawget(dict, "_children")) do
      if slots[name] == nil then                        -- not nil: forward was called inside forward
        slots[name] = rawget(dict, "_slots")[name]:compute()
        names[#names + 1] = name
      end
    end
    return take_out(slots, names, pcall(cls.forward, self, ...))
  end
  function out._assign(self, name, value)
    local list = type(name) == "string" and list_of(self, name)
    if not list then return cls._assign(self, name, value) end
    opts.need(is_tensor(value), value, "a tensor", "%s: parametrized '%s'", self:class_name(), name)
    no_grad(function()
      local values = inverse(list, value:detach(), name)
      for k, p in ipairs(originals(list)) do p:copy_(values[k]) end
    end)
  end
  return out
end

-- ---- functions -----------------------------------------------------------------------------------

local function check_module(who, m) opts.expect(m, base.a_module, "%s: argument 1", who) end

-- Returns m's parameter of that name. Raises if there is none, or if it is already sharded.
local function parameter_of(who, m, name)
  opts.expect(name, opts.string, "%s: argument 2", who)
  local p = m._kind[name] == "parameter" and m._slots[name]
  if not p then raise("%s: %s: %s", who, m:class_name(), errors.unknown("parameter", name, m._params)) end
  if rawget(p, "_unit") or rawget(p, "_flat") then
    raise("%s: parameter '%s' of %s is sharded; call this before fully_shard or fsdp.FSDP", who, name, m:class_name())
  end
  return p
end

--- Whether a parameter of the module is computed from others; without a name: whether any is.
---@param m Module  its descendants are not searched
---@param name? string  name of the parameter
---@return boolean
function M.is_parametrized(m, name)
  check_module("is_parametrized", m)
  local dict = m._slots.parametrizations
  if not (dict and getmetatable(m)._parametrized) then return false end
  return name == nil or dict._slots[name] ~= nil
end

--- Makes a parameter the result of a module, the parametrization. The parametrization is called with the original, a
--- parameter whose name in the state dict is, for name = "weight", "parametrizations.weight.original". If the
--- parametrization has a method right_inverse(value), the originals are its results ("original0", "original1" … if
--- they are several), and the parameter can be assigned. A further parametrization of the parameter gets the result of
--- the one before. The value is computed once per forward, and when the field is read. To be called before sharding.
--- Errors: the parametrization changes the shape.
---@param m Module  a layer; its class becomes "Parametrized" followed by its name
---@param name string  name of the parameter
---@param parametrization Module  its forward gets the originals and returns the parameter's value
---@return Module m
function M.register_parametrization(m, name, parametrization)
  local who = "register_parametrization"
  check_module(who, m)
  opts.expect(parametrization, base.a_module, "%s: argument 3", who)
  local existing = M.is_parametrized(m, name) and list_of(m, name)
  local p = not existing and parameter_of(who, m, name)
  no_grad(function()
    local before = existing and existing:compute() or p
    local values, inverted = { before }, false
    if not existing and parametrization.right_inverse then
      values, inverted = { parametrization:right_inverse(p:detach()) }, true
    end
    local after = parametrization(unpack(values))
    if not is_tensor(after) or tostring(after.shape) ~= tostring(before.shape) then
      raise("%s: %s gives %s for '%s' of shape %s, expected a tensor of that shape", who, parametrization:class_name(),
        is_tensor(after) and tostring(after.shape) or errors.kind(after), name, tostring(before.shape))
    end
    if existing then
      existing:append(parametrization)
      return
    end
    local list = List { parametrization }
    for k, value in ipairs(values) do
      local own = inverted and Parameter(value:detach():clone(), { requires_grad = p.requires_grad }) or value
      list[#values == 1 and "original" or "original" .. k - 1] = own
    end
    local dict = m._slots.parametrizations
    if not dict then
      m.parametrizations = containers.ModuleDict()
      dict = m.parametrizations
      setmetatable(m, class_for(getmetatable(m)))
    end
    getmetatable(m)._parametrized.of._assign(m, name, nil)
    dict[name] = list
  end)
  return m
end

-- The original that becomes the ordinary parameter: the last one with the value's shape and dtype. It is used again
-- because optimizers already have it.
local function successor(own, value)
  for k = #own, 1, -1 do
    local p = own[k]
    if tostring(p.shape) == tostring(value.shape) and p.dtype == value.dtype then return p end
  end
end

--- Makes a computed parameter an ordinary one again, with its computed value or that of the original. The parameter is
--- one of the originals, which optimizers already have, or a new one if no original has the value's shape and dtype.
---@param m Module  a layer with parametrizations
---@param name string  name of the parameter
---@param given? { leave_parametrized: boolean }
---   leave_parametrized: true: the parameter gets its computed value; false: it gets the value of the original, of
---   which there must be only one
---@return Module m
function M.remove_parametrizations(m, name, given)
  local who = "remove_parametrizations"
  local o = opts(who, given, { leave_parametrized = true })
  check_module(who, m)
  if not M.is_parametrized(m, name) then
    raise("%s: '%s' of %s is not parametrized", who, tostring(name), m:class_name())
  end
  local dict, list = m._slots.parametrizations, list_of(m, name)
  local own = originals(list)
  if rawget(own[1], "_unit") or rawget(own[1], "_flat") then
    raise("%s: '%s' of %s is sharded; remove it from an unsharded copy", who, name, m:class_name())
  end
  if not o.leave_parametrized and #own > 1 then
    raise("%s: '%s' of %s has %d originals; leave_parametrized = false needs one", who, name, m:class_name(), #own)
  end
  local p = own[1]
  if o.leave_parametrized then
    no_grad(function()
      local value = list:compute():detach():clone()
      p = successor(own, value)
      if p then p:copy_(value) else p = Parameter(value, { requires_grad = own[1].requires_grad }) end
    end)
  end
  local cls = getmetatable(m)._parametrized.of
  dict[name] = nil
  if #dict._children == 0 then
    cls._assign(m, "parametrizations", nil)
    setmetatable(m, cls)
  end
  cls._assign(m, name, p)
  return m
end

--- Removes all parametrizations of a parameter. Raises unless the last of them is of class `cls`.
function M._remove_one(who, m, name, cls)
  check_module(who, m)
  local list = M.is_parametrized(m, name) and list_of(m, name)
  if not (list and list[-1]:isa(cls)) then
    raise("%s: '%s' of %s has no %s as its last parametrization", who, tostring(name), m:class_name(), rawget(cls, "__name"))
  end
  return M.remove_parametrizations(m, name)
end

opts.fix(M, { "is_parametrized", "register_parametrization" })

return M
