-- SPDX-License-Identifier: MIT
--- Makes a batch from items.
local class = require "moonshard.core.class"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"
local is_list = require "moonshard.data.dataset".is_list

local function kind_of(x)
  if tensor.is_tensor(x) then return "a tensor" end
  if is_list(x) then return "a list" end
  return opts.is_plain(x) and "a table" or type(x) == "table" and "a " .. class.name(x) or "a " .. type(x)
end

local HINT = "; give a function 'collate' that makes the batch"

local function raise(where, ...) errors.raise("default_collate: " .. (...) .. where .. HINT, select(2, ...)) end

local function stacked(list, where)
  for k = 2, #list do
    if list[k].shape ~= list[1].shape or list[k].dtype ~= list[1].dtype then
      raise(where, "item %d of the batch is %s %s, but item 1 is %s %s", k, list[k].dtype, tostring(list[k].shape),
        list[1].dtype, tostring(list[1].shape))
    end
  end
  return shapes.stack(list)
end

local merge

-- The field `key` of each item, merged.
local function field(list, key, where)
  local parts = {}
  for k, item in ipairs(list) do
    parts[k] = item[key]
    if parts[k] == nil then raise(where, "item %d of the batch has no field %s", k, errors.show(key)) end
  end
  return merge(parts, (" (field %s%s)"):format(errors.show(key), where:gsub("^ %(field ", " of "):gsub("%)$", "")))
end

local function fields(list, where)
  for k = 2, #list do
    if #list[k] ~= #list[1] then
      raise(where, "item %d of the batch has %d values, but item 1 has %d", k, #list[k], #list[1])
    end
  end
  local out = {}
  for j = 1, #list[1] do out[j] = field(list, j, where) end
  return out
end

local function keyed(list, where)
  local out = {}
  for k = 2, #list do
    for key in util.sorted_pairs(list[k]) do
      if list[1][key] == nil then
        raise(where, "item %d of the batch has a field %s, but item 1 has not", k, errors.show(key))
      end
    end
  end
  for key in util.sorted_pairs(list[1]) do out[key] = field(list, key, where) end
  return out
end

function merge(list, where)
  local kind = kind_of(list[1])
  for k = 2, #list do
    if kind_of(list[k]) ~= kind then
      raise(where, "item %d of the batch is %s, but item 1 is %s", k, kind_of(list[k]), kind)
    end
  end
  if kind == "a tensor" then return stacked(list, where) end
  if kind == "a number" or kind == "a boolean" then return create.tensor(list) end
  if kind == "a string" then return list end
  if kind == "a list" then return fields(list, where) end
  if kind == "a table" then return keyed(list, where) end
  return raise(where, "item 1 of the batch is %s, expected tensors, numbers, booleans, strings or tables", kind)
end

--- The batch of a list of items: tensors are stacked along a new first dimension, numbers become a tensor of the
--- default dtype, booleans one of dtype bool, strings a list; tables are merged field by field. Lists give as many
--- results as they have values. Errors: items that differ in shape, dtype or fields.
---@param items any[]  at least one
---@return any  the batch of the items' first values, then those of the others
local function default_collate(items)
  opts.need(is_list(items), items, "a list of items", "default_collate: argument 1")
  local batch = merge(items, "")
  if is_list(items[1]) then return unpack(batch) end
  return batch
end

return default_collate
