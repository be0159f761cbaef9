-- SPDX-License-Identifier: MIT
--- The options `ignored_modules` and `ignored_states` of an FSDP instance (docs/semantics.md#ignored).
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local log = require "moonshard.core.log"
local Module = require "moonshard.nn.module".Module
local Parameter = require "moonshard.nn.module.parameter".Parameter
local tensor = require "moonshard.tensor"

local raise = errors.raise

local M = {}

local function types_of(list)
  local names = {}
  for k, x in ipairs(list) do names[k] = errors.show(x) end
  return "[" .. table.concat(names, ", ") .. "]"
end

local function all(list, test)
  for _, x in ipairs(list) do
    if not test(x) then return false end
  end
  return true
end

local function is_module(x) return class.isa(x, Module) end
local function is_parameter(x) return class.isa(x, Parameter) end

-- The modules and the parameters that the options list.
local function given_lists(o)
  local modules, states = o.ignored_modules, o.ignored_states
  if modules ~= nil and states ~= nil then
    raise "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states."
  end
  if states ~= nil then
    opts.need(type(states) == "table" and not is_module(states) and not tensor.is_tensor(states), states,
      "a list of parameters or of modules", "FSDP: option 'ignored_states'")
    if all(states, is_parameter) then return {}, states end
    if all(states, is_module) then return states, {} end
    raise("ignored_states expects all nn.Parameter or all nn.Module list elements but got types %s", types_of(states))
  end
  if modules == nil then return {}, {} end
  if type(modules) ~= "table" or is_module(modules) or tensor.is_tensor(modules) then
    raise("`ignored_modules` should be an iterable of `nn.Module`s but got %s", errors.show(modules))
  end
  if not all(modules, is_module) then
    raise("ignored_modules expects nn.Module list elements but got types %s", types_of(modules))
  end
  return modules, {}
end

--- The sets of modules and parameters that the FSDP instance of root ignores: those that the options list, descendants
--- of listed modules (except FSDP instances), and those that instances below root ignore.
---@param root Module  the module to wrap
---@param o table       options of FSDP
---@param is_fsdp fun(m: any): boolean  whether m is an FSDP instance
---@return table<Module, boolean> modules, table<Parameter, boolean> params
function M.resolve(root, o, is_fsdp)
  local listed, params_listed = given_lists(o)
  local modules, params = {}, {}
  local function ignore(m)
    if modules[m] or is_fsdp(m) then return end
    modules[m] = true
    for _, name in ipairs(m._params) do
      local p = m._slots[name]
      if p ~= nil and not rawget(p, "_unit") then params[p] = true end
    end
    for _, child in ipairs(m:children()) do ignore(child) end
  end
  for _, m in ipairs(listed) do
    if is_fsdp(m) then raise "`ignored_modules` should not include FSDP modules" end
  end
  for _, m in ipairs(listed) do
    if m == root then
      log.warn(("Trying to ignore the top-level module passed into the FSDP constructor itself will result in all parameters being ignored "
        .. "and is not well-supported: %s"):format(tostring(root)))
    end
    ignore(m)
  end
  for _, p in ipairs(params_listed) do params[p] = true end
  for _, m in ipairs(root:modules()) do
    local unit = rawget(m, "_fsdp")
    if unit and unit.classic then
      for inner in pairs(unit.ignored_modules) do modules[inner] = true end
      for p in pairs(unit.ignored_params) do params[p] = true end
    end
  end
  return modules, params
end

return M
