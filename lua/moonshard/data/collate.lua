-- SPDX-License-Identifier: MIT
--- Makes a batch from items.
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"
local info_of = tensor.info_of
local is_list = require "moonshard.data.dataset".is_list

local function kind_of(x)
  if tensor.is_tensor(x) then return "a tensor" end
  if is_list(x) then return "a list" end
  return opts.is_plain(x) and "a table" or type(x) == "table" and "a " .. class.name(x) or "a " .. type(x)
end

local HINT = "; give a function 'collate' that makes the batch"

local function raise(where, ...) errors.raise("default_collate: " .. (...) .. where .. HINT, select(2, ...)) end

local ffi, lib = engine.ffi, engine.lib
local sizes = ffi.new("int64_t[?]", engine.MAX_DIMS)

-- Whether t has the shape in `sizes` and this dtype and number of dimensions. Makes no table: batches have many items.
local function is_like(t, dtype, ndim)
  local info = info_of(t)
  if info.dtype ~= dtype or info.ndim ~= ndim then return false end
  local shape = info.shape
  for d = 0, ndim - 1 do
    if shape[d] ~= sizes[d] then return false end
  end
  return true
end

-- Copies plain tensors on the CPU one after the other; nil for other tensors. With ms.stack, a loader of items of 784
-- numbers took three times as long.
local function together(list)
  local shape, dtype = { #list, unpack(list[1].shape) }, list[1].dtype
  if #shape > engine.MAX_DIMS then return nil end
  for k = 1, #list do
    local info = info_of(list[k])
    if list[k].id < 0 or info.device ~= ffi.C.MS_CPU or info.is_contiguous == 0 or info.requires_grad ~= 0
      or info.sharded ~= 0 then
      return nil
    end
  end
  local info = info_of(list[1])
  local bytes = tonumber(info.numel) * lib.ms_dtype_size(info.dtype)
  local out, data = raw.tensor(dtype, shape)
  local to = ffi.cast("char *", data)
  if bytes > 0 then
    for k = 1, #list do ffi.copy(to + (k - 1) * bytes, lib.ms_data_ptr(list[k].id), bytes) end
  end
  return out
end

local function stacked(list, where)
  local first = info_of(list[1])
  local dtype, ndim = first.dtype, first.ndim
  for d = 0, ndim - 1 do sizes[d] = first.shape[d] end
  for k = 2, #list do
    if not is_like(list[k], dtype, ndim) then
      raise(where, "item %d of the batch is %s %s, but item 1 is %s %s", k, list[k].dtype, tostring(list[k].shape),
        list[1].dtype, tostring(list[1].shape))
    end
  end
  return together(list) or shapes.stack(list)
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
        raise(where, "item %d of the batch has a field %s, but item 1 has none", k, errors.show(key))
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
--- default dtype, booleans one of dtype bool, strings a list; tables are merged field by field. Items that are lists
--- give as many results as they have values. Errors: items that differ in shape, dtype or fields.
---@param items any[]  at least one
---@return any  the batch of the items' first values, then those of the others
local function default_collate(items)
  opts.need(is_list(items), items, "a list of items", "default_collate: argument 1")
  local batch = merge(items, "")
  if is_list(items[1]) then return unpack(batch) end
  return batch
end

return default_collate
