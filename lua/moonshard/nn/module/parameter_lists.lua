-- SPDX-License-Identifier: MIT
--- ParameterList and ParameterDict. Their parameters are ordinary fields, named "1", "2" … in a list, because sharding
--- replaces fields; Lua's `#list` and `ipairs(list)`, which read array elements, therefore do not see them.
local errors = require "moonshard.core.errors"
local listing = require "moonshard.core.listing"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local base = require "moonshard.nn.module"
local Parameter = require "moonshard.nn.module.parameter".Parameter
local sorted_pairs = require "moonshard.tensor.util".sorted_pairs

local raise, is_tensor = errors.raise, tensor.is_tensor
local Module, is_parameter = base.Module, base.is_parameter

-- A tensor becomes a parameter, as in PyTorch.
local function as_parameter(value, label, ...)
  opts.expect(value, tensor.a_tensor, label, ...)
  return is_parameter(value) and value or Parameter(value)
end

--- A list of parameters, named "1", "2" … in the state dict. `list[i]` reads element i, negative from the end, and
--- `list[i] = p` replaces it; `list:len()` is the number of elements, and `for i, p in list:each()` visits them.
--- Tensors become parameters. The list has no forward.
---@class ParameterList: Module
---@overload fun(list?: Tensor[]): ParameterList  list: parameters, or tensors, which become parameters
local ParameterList = Module:extend "ParameterList"
ParameterList._counted = true             -- names of parameters are positions, for count_from (state.lua)

---@param list? Tensor[]  parameters, or tensors, which become parameters
function ParameterList:init(list)
  if list == nil then return end
  opts.need(opts.is_plain(list), list, "a list of parameters", "ParameterList: argument 1")
  for i, p in ipairs(list) do self[i] = as_parameter(p, "ParameterList: element %d", i) end
  for key in pairs(list) do
    if type(key) ~= "number" then
      raise("ParameterList: parameters are numbered, got the key '%s'; use ParameterDict for names", tostring(key))
    end
  end
end

function ParameterList.__index(self, key)
  if type(key) ~= "number" then return Module.__index(self, key) end
  if key < 0 then key = #rawget(self, "_params") + 1 + key end
  return rawget(self, "_slots")[("%d"):format(key)]
end

function ParameterList._assign(self, key, value)
  if type(key) ~= "number" then return Module._assign(self, key, value) end
  local n = #self._params
  opts.expect(key, opts.whole, "ParameterList: position")
  local at = key < 0 and n + 1 + key or key
  if at < 1 or at > n + 1 then
    raise("ParameterList: position %d is out of range for %d element%s", key, n, n == 1 and "" or "s")
  end
  if value == nil then
    if at ~= n then
      raise("ParameterList: assigning nil can only remove the last element, not element %d of %d", at, n)
    end
  else
    value = as_parameter(value, "ParameterList: element %d", at)
  end
  return Module._assign(self, ("%d"):format(at), value)
end

--- The number of parameters.
---@return integer
function ParameterList:len() return #self._params end

--- Iterates over the positions and the parameters.
---@return fun(): integer, Parameter
function ParameterList:each()
  local i, n = 0, #self._params
  return function()
    i = i + 1
    if i <= n then return i, self[i] end
  end
end

--- Adds a parameter at the end.
---@param p Tensor  a parameter, or a tensor, which becomes one
---@return ParameterList self
function ParameterList:append(p)
  self[#self._params + 1] = as_parameter(p, "ParameterList: append: argument 1")
  return self
end

-- The shapes of the parameters as text, each after key(name).
local function shapes(self, key)
  local out = {}
  for k, name in ipairs(self._params) do out[k] = key(name) .. tostring(self._slots[name].shape) end
  return table.concat(out, ", ")
end

function ParameterList:extra_repr() return shapes(self, function() return "" end) end

--- Parameters by name, in order: `ParameterDict{{"name", p}, …}`. A table with names as keys is sorted by name.
--- `dict.name` reads a parameter, `dict.name = p` adds or replaces it, and nil removes it; tensors become parameters.
--- The dict has no forward.
---@class ParameterDict: Module
---@overload fun(entries?: table): ParameterDict  entries: pairs { name, parameter } in order, or a table by name
local ParameterDict = Module:extend "ParameterDict"

---@param entries? table  pairs { name, parameter } in order, or a table by name
function ParameterDict:init(entries)
  if entries == nil then return end
  opts.need(opts.is_plain(entries), entries, "a table", "ParameterDict: argument 1")
  local function add(name, p)
    opts.expect(name, opts.string, "ParameterDict: a name")
    self[name] = as_parameter(p, "ParameterDict: '%s'", name)
  end
  if entries[1] == nil then
    for name, p in sorted_pairs(entries) do add(name, p) end
    return
  end
  for i, entry in ipairs(entries) do
    opts.need(opts.is_plain(entry), entry, "a pair {\"name\", parameter}", "ParameterDict: entry %d", i)
    add(entry[1], entry[2])
  end
end

function ParameterDict._assign(self, name, value)
  if is_tensor(value) and not is_parameter(value) then value = Parameter(value) end
  return Module._assign(self, name, value)
end

--- The names of the parameters, in order.
---@return string[]
function ParameterDict:keys() return listing.copy(self._params) end

function ParameterDict:extra_repr() return shapes(self, function(name) return name .. " " end) end

return { ParameterList = ParameterList, ParameterDict = ParameterDict }
