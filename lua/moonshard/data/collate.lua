-- SPDX-License-Identifier: MIT
--- Makes a batch from items.
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"
local info_of = tensor.info_of
local datasets = require "moonshard.data.dataset"
local is_list = datasets.is_list

local function kind_of(x)
  if tensor.is_tensor(x) then return "a tensor" end
  if is_list(x) then return "a list" end
  return opts.is_plain(x) and "a table" or type(x) == "table" and "a " .. class.name(x) or "a " .. type(x)
end

local HINT = "; give a function 'collate' that makes the batch"

local function raise(where, ...) errors.raise("default_collate: " .. (...) .. where .. HINT, select(2, ...)) end

local ffi, lib = engine.ffi, engine.lib

-- Whether the bytes of t can be copied as they are: t is contiguous, on the CPU, not sharded, and requires no grad.
local function is_simple(t, info)
  return t.id >= 0 and info.device == ffi.C.MS_CPU and info.is_contiguous ~= 0 and info.requires_grad == 0
    and info.sharded == 0
end

-- Returns a column, which collects one value of each of n items: its `out` is a batch of n tensors like t, to whose
-- memory `put` copies the values. With ms.stack, a loader of items of 784 numbers took three times as long. Returns an
-- empty table if t cannot be copied that way.
local function place(n, t)
  local info = info_of(t)
  if info.ndim == engine.MAX_DIMS or not is_simple(t, info) then return {} end
  local sizes = ffi.new("int64_t[?]", engine.MAX_DIMS)
  ffi.copy(sizes, info.shape, 8 * engine.MAX_DIMS)
  local column = { dtype = info.dtype, ndim = info.ndim, numel = tonumber(info.numel), sizes = sizes }
  column.bytes = column.numel * lib.ms_dtype_size(column.dtype)
  local out, data = raw.tensor(dtypes.name(column.dtype), { n, unpack(t.shape) })
  column.out, column.to = out, ffi.cast("char *", data)
  return column
end

-- Whether a tensor has the dtype and sizes of a column's items. Makes no table: batches have many items.
local function has_size(info, column)
  local ndim = column.ndim
  if info.dtype ~= column.dtype or info.ndim ~= ndim or tonumber(info.numel) ~= column.numel then return false end
  if ndim > 1 then
    for d = 0, ndim - 1 do
      if info.shape[d] ~= column.sizes[d] then return false end
    end
  end
  return true
end

-- Copies item k into the batch. Returns false if its bytes cannot be copied as they are, or its dtype or shape differs.
local function put(column, k, t)
  local info = info_of(t)
  if not has_size(info, column) or not is_simple(t, info) then return false end
  if column.bytes > 0 then ffi.copy(column.to + (k - 1) * column.bytes, lib.ms_data_ptr(t.id), column.bytes) end
  return true
end

local function stacked(list, where)
  local first, column = list[1], place(#list, list[1])
  local dtype, shape = first.dtype, first.shape
  local copied = column.out ~= nil
  for k = 1, #list do
    local t = list[k]
    if not (copied and put(column, k, t)) then
      copied = false
      if t.dtype ~= dtype or t.shape ~= shape then
        raise(where, "item %d of the batch is %s %s, but item 1 is %s %s", k, t.dtype, tostring(t.shape), dtype,
          tostring(shape))
      end
    end
  end
  if copied then return column.out end
  if column.out then column.out:release() end
  return shapes.stack(list)
end

local merge

-- The field `key` of all items, merged into one value of the batch.
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
      raise(where, "item %d of the batch has %d value%s, but item 1 has %d", k, #list[k], #list[k] == 1 and "" or "s", #list[1])
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
        raise(where, "item %d of the batch has a field %s, but item 1 does not", k, errors.show(key))
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
  return raise(where, "item 1 of the batch is %s, expected a tensor, number, boolean, string or table", kind)
end

local M = {}

--- The batch of a list of items: tensors are stacked along a new first dimension, numbers become a tensor of the
--- default dtype, booleans one of dtype bool, strings a list; tables are merged field by field. Items that are lists
--- give as many results as they have values. Errors: items that differ in shape, dtype or fields.
---@param items any[]  at least one
---@return any  the batch of the items' first values, then those of the others
function M.default_collate(items)
  opts.need(is_list(items), items, "a list of at least one item", "default_collate: argument 1")
  local batch = merge(items, "")
  if is_list(items[1]) then return datasets.results(batch, "default_collate", 1) end
  return batch
end

-- ---- item by item ----------------------------------------------------------------------------------------

-- These functions make the batch of default_collate item by item, so that a loader needs no table for each item. The
-- tensors of an item are copied when it is added; with `releases` (M.columns), its first two are then released.

-- Makes the column a list, because item k cannot be copied: the items before k become views of what was copied.
local function give_up(column, k)
  for i = 1, k - 1 do column[i] = column.out:select(1, i) end
  column.out = nil
end

-- Adds a value to a column. Returns whether it has been copied.
local function add(columns, j, k, v)
  local column = columns[j]
  if k == 1 then
    column = tensor.is_tensor(v) and place(columns.size, v) or {}
    columns[j] = column
  end
  if column.out then
    if tensor.is_tensor(v) and put(column, k, v) then return true end
    give_up(column, k)
  end
  column[k] = v
  return false
end

local function append(columns, k, a, b, ...)
  local more = select("#", ...) > 0 and { ... } or nil
  local n = more and 2 + #more or b == nil and 1 or 2
  if k == 1 then
    columns.n = n
  elseif n ~= columns.n then
    raise("", "item %d of the batch has %d value%s, but item 1 has %d", k, n, n == 1 and "" or "s", columns.n)
  end
  local first, second = add(columns, 1, k, a), n > 1 and add(columns, 2, k, b)
  for j = 3, n do add(columns, j, k, more[j - 2]) end
  if columns.releases then                                -- after all were copied: they may be the same tensor
    if first then lib.ms_drop(a.id) end
    if second then lib.ms_drop(b.id) end
  end
end

--- Columns for a batch of n items. releases: those of an item's first two tensors that belong to the innermost scope
--- are released once they have been copied.
function M.columns(n, releases) return { size = n, releases = releases } end

--- Adds item k: its values, or one list of them.
function M.append(columns, k, value, ...)
  if select("#", ...) == 0 and is_list(value) then
    return append(columns, k, datasets.results(value, "default_collate", k))
  end
  return append(columns, k, value, ...)
end

--- The batch of the items that were added: its values, and their number in `n`.
---@return table
function M.collated(columns)
  local batch = { n = columns.n }
  for j = 1, columns.n do
    local column, where = columns[j], columns.n > 1 and (" (field %d)"):format(j) or ""
    for k = 1, column.out and 0 or columns.size do
      if column[k] == nil then raise(where, "item %d of the batch has no field %d", k, j) end
    end
    batch[j] = column.out or merge(column, where)
  end
  return batch
end

return M
