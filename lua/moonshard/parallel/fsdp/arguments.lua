-- SPDX-License-Identifier: MIT
--- Handles tensors inside the arguments and results of a sharded module's forward: collects them from plain tables,
--- objects whose metatable has __tensors (distributions) and instances of tensor classes, passes them to the engine as
--- an array of ids, and replaces those for which the engine returned another tensor.
local engine = require "moonshard.core.ffi"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local ffi = engine.ffi
local is_tensor, wrap = tensor.is_tensor, tensor.wrap
local getmetatable, type, next, ipairs = getmetatable, type, next, ipairs

local M = {}

-- Ids of the tensors of one call. All calls share the array, so no other code may run between filling it and reading it
-- back.
local ids, ids_cap = ffi.new("ms_id[?]", 64), 64

local function put(n, id)
  if n >= ids_cap then
    local more = ffi.new("ms_id[?]", 2 * ids_cap)
    ffi.copy(more, ids, ids_cap * ffi.sizeof "ms_id")
    ids, ids_cap = more, 2 * ids_cap
  end
  ids[n] = id
  return n + 1
end

local function by_text(a, b) return tostring(a) < tostring(b) end

-- The keys of a plain table in an order that is equal on all ranks: positions first, then those other keys whose values
-- are tables, since only these can contain tensors.
local function keys_of(value)
  local keys, names = {}, nil
  for k = 1, #value do keys[k] = k end
  for k, v in next, value do
    if type(v) == "table" and not (type(k) == "number" and k >= 1 and k <= #value) then
      names = names or {}
      names[#names + 1] = k
    end
  end
  if names then
    table.sort(names, by_text)
    for _, k in ipairs(names) do keys[#keys + 1] = k end
  end
  return keys
end

-- Appends the id of a tensor, or the ids of the inner tensors of an instance of a tensor class.
local put_tensor
function put_tensor(n, t)
  if t.id >= 0 then return put(n, t.id) end
  for _, part in ipairs(tensor.inner(t)) do n = put_tensor(n, part) end
  return n
end

-- Returns t, or the tensor by which the engine replaced t, and the index of the next id.
local get_tensor
function get_tensor(n, t)
  if t.id >= 0 then
    if ids[n] == t.id then return t, n + 1 end
    return wrap(ids[n]), n + 1
  end
  local parts, changed = {}, false
  for k, part in ipairs(tensor.inner(t)) do
    parts[k], n = get_tensor(n, part)
    changed = changed or parts[k] ~= part
  end
  return changed and tensor.rebuild(parts, t) or t, n
end

local collect
function collect(value, n, seen)
  if type(value) ~= "table" then return n end
  if is_tensor(value) then return put_tensor(n, value) end
  if not opts.may_hold_tensors(value) or seen[value] then return n end
  seen[value] = true
  for _, k in ipairs(keys_of(value)) do n = collect(value[k], n, seen) end
  return n
end

-- Traverses value again with the ids that the engine returned. Returns value itself, or a copy if a tensor was
-- replaced.
local replace
function replace(value, n, seen)
  if type(value) ~= "table" then return value, n end
  if is_tensor(value) then return get_tensor(n, value) end
  if not opts.may_hold_tensors(value) or seen[value] then return value, n end
  seen[value] = true
  local copy
  for _, k in ipairs(keys_of(value)) do
    local before = value[k]
    local after
    after, n = replace(before, n, seen)
    if after ~= before then
      if not copy then
        copy = {}
        for other, v in next, value do copy[other] = v end
        setmetatable(copy, getmetatable(value))
      end
      copy[k] = after
    end
  end
  return copy or value, n
end

--- Collects the tensors in values (an array whose length is n). Returns their number and their ids, which are valid
--- until the next call.
---@return number, ffi.cdata*
function M.flatten(values)
  local n, seen = 0, nil
  for k = 1, values.n do
    local v = values[k]
    if is_tensor(v) then
      n = put_tensor(n, v)
    elseif type(v) == "table" then
      seen = seen or {}
      n = collect(v, n, seen)
    end
  end
  return n, ids
end

--- Replaces the tensors that flatten found in values by those whose ids the engine returned.
function M.rebuild(values)
  local n, seen = 0, nil
  for k = 1, values.n do
    local v = values[k]
    if is_tensor(v) then
      values[k], n = get_tensor(n, v)
    elseif type(v) == "table" then
      seen = seen or {}
      values[k], n = replace(v, n, seen)
    end
  end
end

return M
