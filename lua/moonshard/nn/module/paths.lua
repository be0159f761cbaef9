-- SPDX-License-Identifier: MIT
--- Module: modules, parameters and buffers by path, such as "blocks.3.attn", and registration of modules by name.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local base = require "moonshard.nn.module.register"

local raise = errors.raise
local Module, join = base.Module, base.join

-- The module that m wraps, or m itself if it wraps none.
local function unwrapped(m)
  while m._wraps do m = m._slots.module end
  return m
end

-- The direct child with that name, or nil.
local function child_named(self, name)
  local names, children = self:_child_list()
  for i, n in ipairs(names) do
    if n == name then return children[i] end
  end
end

-- Splits a path into the path of the enclosing module and the last name.
local function split(who, path)
  opts.need(type(path) == "string" and path:find "^[^.]" and path:find "[^.]$" and not path:find("..", 1, true), path,
    "names separated by dots", "%s: argument 1", who)
  local parent, name = path:match "^(.*)%.([^.]+)$"
  return parent or "", name or path
end

--- The module at a path such as "blocks.3.attn".
---@param path string  names joined by dots
---@return Module
function Module:get_submodule(path)
  if type(path) ~= "string" then opts.wrong(path, "a path", "get_submodule: argument 1") end
  local m, done = self, ""
  for name in path:gmatch("[^.]+") do
    m = unwrapped(m)
    local child = child_named(m, name)
    if not child then
      local names = m:_child_list()
      raise("get_submodule: %s%s: %s", m:class_name(), done == "" and "" or " '" .. done .. "'",
        errors.unknown("child", name, names))
    end
    m, done = child, join(done, name)
  end
  return m
end

-- The parameter or buffer (kind) at a path. list: the field of modules that lists the names of this kind.
local function value_at(self, who, path, kind, list)
  local parent, name = split(who, path)
  local m = self:get_submodule(parent)
  while m._wraps and m._kind[name] ~= kind do m = m._slots.module end
  local value = m._kind[name] == kind and m._slots[name]
  if not value then raise("%s: %s: %s", who, m:class_name(), errors.unknown(kind, name, m[list])) end
  return value
end

--- The parameter at a path such as "blocks.3.attn.qkv.weight".
---@param path string  names joined by dots
---@return Parameter
function Module:get_parameter(path) return value_at(self, "get_parameter", path, "parameter", "_params") end

--- The buffer at a path such as "norm.running_mean".
---@param path string  names joined by dots
---@return Tensor
function Module:get_buffer(path) return value_at(self, "get_buffer", path, "buffer", "_buffers") end

--- Registers a module under a name, as an assignment to a field does. In Sequential and ModuleList names are
--- positions, such as "3". Errors: a name that a method, or a field that is no module, has.
---@param name string  without a dot
---@param m Module  becomes a child
---@return Module self
function Module:add_module(name, m)
  opts.expect(name, opts.string, "add_module: argument 1")
  opts.expect(m, base.a_module, "add_module: argument 2")
  self:_add_child(name, m)
  return self
end

-- Containers whose children are numbered override this method.
function Module._add_child(self, name, m)
  if rawget(self, "_slots")[name] ~= nil and self._kind[name] ~= "module" then
    raise("add_module: %s already has a field '%s'", self:class_name(), name)
  end
  self[name] = m
end

--- Another name of add_module.
---@param name string  without a dot
---@param m Module  becomes a child
---@return Module self
function Module:register_module(name, m) return self:add_module(name, m) end

--- Puts a module at a path, in place of the one that is there; the last name of the path may be new, unless strict is
--- true.
---@param path string  names joined by dots
---@param m Module  becomes the module at the path
---@param given? { strict: boolean }  strict: the path must have a module (default: false)
---@return Module self
function Module:set_submodule(path, m, given)
  local o = opts("set_submodule", given, { strict = false })
  local parent, name = split("set_submodule", path)
  opts.expect(m, base.a_module, "set_submodule: argument 2")
  if o.strict then self:get_submodule(path) end
  unwrapped(self:get_submodule(parent)):add_module(name, m)
  return self
end

return Module
