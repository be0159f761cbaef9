-- SPDX-License-Identifier: MIT
--- The test for tensors, and the inner tensors of instances of tensor classes (tensor/class.lua). Instances have
--- negative ids.
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local methods = require "moonshard.core.methods"

local getmetatable, setmetatable, rawget, type, ipairs = getmetatable, setmetatable, rawget, type, ipairs

---@class Tensor                 fields and operators: core/types.lua
local Tensor = class.new "Tensor"
methods.refuse_call(Tensor, "a tensor cannot be called; for its rows write `for i = 1, t:size(1) do local row = t[i]`")

-- The metatables of tensors: the plain class and all classes that extend it.
local classes = { [Tensor] = Tensor }

local M = { Tensor = Tensor, classes = classes }

--- Whether x is a tensor.
---@param x any  any value
---@return boolean
local function is_tensor(x)
  local mt = getmetatable(x)
  return mt == Tensor or (mt ~= nil and classes[mt] ~= nil)
end
M.is_tensor = is_tensor

-- objects: instances by id. pending: results by id, until the caller of the operation fetches them.
local objects, pending, last_id = setmetatable({}, { __mode = "v" }), {}, 0

function M.new_id()
  last_id = last_id - 1
  return last_id
end

--- Returns the instance of a tensor class with this id, which is negative. A result that M.hand_over stored is removed
--- from the pending ones.
function M.take(id)
  local t = pending[id]
  if t ~= nil then
    pending[id] = nil
    return t
  end
  return objects[id]
end

function M.new_object(cls)
  local id = M.new_id()
  local self = setmetatable({ id = id }, cls)
  objects[id] = self
  return self
end

--- Stores t under this id until M.take fetches it.
function M.hand_over(id, t) pending[id] = t end

--- Whether x is an instance of a tensor class.
---@return boolean
function M.is_instance(x) return is_tensor(x) and x.id < 0 end

local function class_name(t) return getmetatable(t).__name end
M.class_name = class_name

--- The inner tensors of an instance; nil for a plain tensor.
---@return Tensor[]?
local function inner(t)
  if t.id >= 0 then return nil end
  local fn = t.inner_tensors
  if fn == nil then
    errors.raise("%s: a tensor class must define inner_tensors(), which returns a list of tensors", class_name(t))
  end
  local list = fn(t)
  if type(list) ~= "table" or is_tensor(list) or #list == 0 then
    errors.raise("%s: inner_tensors() returned %s, expected a list of at least one tensor", class_name(t), errors.kind(list))
  end
  for k = 1, #list do
    if not is_tensor(list[k]) then
      errors.raise("%s: inner_tensors() returned %s at position %d, expected a tensor", class_name(t),
        errors.kind(list[k]), k)
    end
  end
  return list
end
M.inner = inner

--- Makes an instance like `like` with other inner tensors.
---@param list Tensor[]  the new inner tensors
---@param like Tensor  an instance of the class
---@return Tensor
local function rebuild(list, like)
  local cls = getmetatable(like)
  cls = rawget(cls, "__plain_class") or cls
  local make = cls.from_inner
  local out
  if make then out = make(list, like) else out = cls(unpack(list)) end
  if not is_tensor(out) then
    errors.raise("%s: from_inner returned %s, expected an instance of the class", class_name(like), errors.kind(out))
  end
  return out
end
M.rebuild = rebuild

--- The tensors of a list; instances are replaced by their inner tensors.
---@param list Tensor[]  plain tensors and instances
---@return Tensor[]
local function flat(list)
  local out
  for k = 1, #list do
    local t = list[k]
    local parts = is_tensor(t) and inner(t)
    if parts and not out then out = { unpack(list, 1, k - 1) } end
    if parts then
      for _, part in ipairs(flat(parts)) do out[#out + 1] = part end
    elseif out then
      out[#out + 1] = t
    end
  end
  return out or list
end
M.flat = flat

return M
