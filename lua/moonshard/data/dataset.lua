-- SPDX-License-Identifier: MIT
--- Datasets: items at positions 1 to size(). An item is what `get(i)` returns: one value, or several, such as an image
--- and its label. A list returned as the only value counts as several values.
---
---   local squares = data.Dataset { size = 100, get = function(i) return ms.tensor(i), ms.tensor(i * i) end }
---   local Squares = data.Dataset:extend "Squares"     -- or a class with `size` and `get`
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local methods = require "moonshard.core.methods"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
require "moonshard.autograd.methods"

local lib, floor = engine.lib, math.floor

local M = {}

--- Items by position. A class that extends it defines `size()` and `get(i)`.
---@class Dataset
---@field items any[]  the items, if the dataset was made from a list
local Dataset = class "Dataset"
M.Dataset = Dataset

-- Whether x is a plain list, such as the fields of an item.
local function is_list(x) return opts.is_plain(x) and x[1] ~= nil end
M.is_list = is_list

local MOST = 7500                                       -- Lua functions return fewer than 8,000 values
--- The values of a list as results. Errors: too many. who, k: the caller and the number of the item, for the error.
---@param list any[]
---@param who string
---@param k integer
function M.results(list, who, k)
  if #list > MOST then
    errors.raise("%s: item %d is a list of %d values, which are as many results, expected at most %d; make it a tensor, "
      .. "as in ms.tensor(list)", who, k, #list, MOST)
  end
  return unpack(list)
end

-- The methods that a class of datasets must define, and that the class of self does not.
local function missing(self)
  local list = {}
  if self.size == Dataset.size then list[1] = "size()" end
  if self.get == Dataset.get then list[#list + 1] = "get(i)" end
  return table.concat(list, " and ")
end

local function undefined(self) errors.raise("%s: the class of a dataset must define %s", class.name(self), missing(self)) end

--- A dataset of a function, or of a list of items.
---@param given {size: integer, get: fun(i: integer): any}
---   size: number of items; get: gives the item at position i, from 1. Or, in place of this table, a list of items
function Dataset:init(given)
  if is_list(given) or opts.is_plain(given) and next(given) == nil then
    self.items = given
    return
  end
  if given == nil and class.name(self) ~= "Dataset" then
    if missing(self) ~= "" then undefined(self) end
    return
  end
  local o = opts("Dataset", given, { size = opts.option(opts.whole_from(0), opts.required),
    get = opts.option(opts.fn, opts.required) })
  self.count, self.fn = o.size, o.get
end

-- This is a field of M, so that packing.lua stores its name when it sends a script's class of datasets to a worker.
function M.index(self, key)
  if type(key) == "number" then return self:item(key) end
  local cls = getmetatable(self)
  local value = cls[key]
  if value == nil then methods.look(cls, key, 2) end
  return value
end
Dataset.__index = M.index

methods.refuse_call(Dataset,
  "a dataset cannot be called; write `for i = 1, dataset:size() do local x, y = dataset:get(i)`")
M.call = Dataset.__call                 -- a field of M for the same reason as M.index

function Dataset:__tostring() return ("%s(%s)"):format(class.name(self), errors.count(self:size(), "item")) end

--- The number of items.
---@return integer
function Dataset:size()
  if self.items then return #self.items end
  return self.count or undefined(self)
end

--- The item at a position. Datasets of a list of lists return the fields of the item as several values.
---@param i integer  from 1 to size()
---@return any  the values of the item
function Dataset:get(i)
  if self.fn then return self.fn(i) end
  local item = (self.items or undefined(self))[i]
  if is_list(item) then return M.results(item, class.name(self), i) end
  return item
end

--- A position from 1 to size(); negative ones count from the end.
local function position(self, i)
  local n = self:size()
  local at = type(i) == "number" and i < 0 and n + 1 + i or i
  if type(at) ~= "number" or at % 1 ~= 0 or at < 1 or at > n then
    errors.raise("%s: item %s does not exist, expected a position from 1 to %d", class.name(self), errors.show(i), n)
  end
  return at
end

local function as_item(...)
  if select("#", ...) <= 1 then return (...) end
  return { ... }
end

--- The item at a position as one value: a list if it has several values. `dataset[i]` is the same.
---@param i integer  from 1 to size(); negative from the end
---@return any
function Dataset:item(i) return as_item(self:get(position(self, i))) end

--- Returns x if it is a dataset; makes one of a list of items, of a table { size, get }, or of a tensor's rows. Raises
--- for other values.
---@param x any
---@param label string  names the argument in errors
---@return Dataset
function M.expect(x, label)
  if class.isa(x, Dataset) then return x end
  if opts.is_plain(x) and (x[1] ~= nil or x.get ~= nil) then return Dataset(x) end
  if tensor.is_tensor(x) then return M.TensorDataset(x) end
  if opts.is_plain(x) and next(x) == nil then
    errors.raise("%s is an empty table, expected a dataset or a list of at least one item; data.Dataset {} has no items", label)
  end
  return opts.wrong(x, "a dataset, a list of items, a table of size and get, or a tensor", "%s", label)
end

-- ---- iterable ------------------------------------------------------------------------------------------

--- Items in one order, for data without positions: a stream, or a file too large to index.
---@class IterableDataset
---@field fn fun(epoch: integer): fun(): any  makes an iterator of items
local IterableDataset = class "IterableDataset"
M.IterableDataset = IterableDataset

--- Every rank and every worker reads the whole stream and keeps its share. The batches of a step, over all ranks, have
--- the same items for any number of workers, and for any number of ranks if `batch_size * world` stays the same;
--- only the last batches may repeat some.
---@param fn fun(epoch: integer): fun(): any  called at the beginning of each epoch, from 0; returns an iterator, whose
---   first nil ends the epoch
function IterableDataset:init(fn) self.fn = opts.expect(fn, opts.fn, "IterableDataset: argument 1") end

--- Makes an iterator of the items of an epoch. A class that extends IterableDataset defines this method.
---@param epoch integer  from 0
---@return fun(): any
function IterableDataset:iterate(epoch) return self.fn(epoch) end

-- ---- of tensors ----------------------------------------------------------------------------------------

--- Rows of tensors: item i has row i of each.
---@class TensorDataset
---@field tensors Tensor[]  of the same first size
local TensorDataset = Dataset:extend "TensorDataset"
M.TensorDataset = TensorDataset

--- The tensors must have the same first size.
---@param ... Tensor  of at least one dimension
function TensorDataset:init(...)
  self.tensors = { ... }
  if #self.tensors == 0 then errors.raise "TensorDataset: no tensors, expected at least one" end
  for k, t in ipairs(self.tensors) do
    opts.expect(t, tensor.a_tensor, "TensorDataset: argument %d", k)
    if t.ndim == 0 then errors.raise("TensorDataset: argument %d has shape [], expected at least one dimension", k) end
    if t:size(1) ~= self.tensors[1]:size(1) then
      errors.raise("TensorDataset: argument %d has shape %s, but argument 1 has %s; their first sizes must be equal", k,
        tostring(t.shape), tostring(self.tensors[1].shape))
    end
    t:keep()
  end
end

function TensorDataset:size() return self.tensors[1]:size(1) end

function TensorDataset:get(i)
  local row = {}
  for k, t in ipairs(self.tensors) do row[k] = t:select(1, i) end
  return unpack(row)
end

--- The batch of several items, as default_collate would make it from them, but faster.
---@param positions integer[]  from 1
---@return any[]  one tensor for each tensor of the dataset
function TensorDataset:batch(positions)
  local ids = engine.ffi.new("double[?]", #positions)
  for k, i in ipairs(positions) do ids[k - 1] = i - 1 end
  local size = engine.ffi.new("int64_t[1]", #positions)
  local where = tensor.wrap_new(lib.ms_from_data(engine.ffi.C.MS_I64, 1, size, ids))
  local rows = {}
  for k, t in ipairs(self.tensors) do rows[k] = t:index_select(1, where:to(t.device)) end
  return rows
end

-- ---- made of others ------------------------------------------------------------------------------------

--- Datasets one after the other.
---@class ConcatDataset
---@field datasets Dataset[]  the datasets, in order
---@field cumulative_sizes integer[]  position of the last item of each dataset
local ConcatDataset = Dataset:extend "ConcatDataset"
M.ConcatDataset = ConcatDataset

---@param datasets Dataset[]  at least one
function ConcatDataset:init(datasets)
  opts.need(type(datasets) == "table" and datasets[1] ~= nil and not class.isa(datasets, Dataset), datasets, "a list of datasets",
    "ConcatDataset: argument 1")
  self.datasets, self.cumulative_sizes = {}, {}
  local total = 0
  for k, d in ipairs(datasets) do
    self.datasets[k] = M.expect(d, ("ConcatDataset: dataset %d"):format(k))
    total = total + self.datasets[k]:size()
    self.cumulative_sizes[k] = total
  end
end

function ConcatDataset:size() return self.cumulative_sizes[#self.cumulative_sizes] end

function ConcatDataset:get(i)
  local low, high = 1, #self.datasets                     -- finds the first dataset that ends at i or later
  while low < high do
    local middle = floor((low + high) / 2)
    if self.cumulative_sizes[middle] < i then low = middle + 1 else high = middle end
  end
  return self.datasets[low]:get(i - (self.cumulative_sizes[low - 1] or 0))
end

--- Chosen items of a dataset.
---@class Subset
---@field dataset Dataset  the whole
---@field indices integer[]  positions in the dataset, from 1
local Subset = Dataset:extend "Subset"
M.Subset = Subset

---@param dataset Dataset  the whole
---@param indices integer[]  positions in it, from 1
function Subset:init(dataset, indices)
  self.dataset = M.expect(dataset, "Subset: argument 1")
  self.indices = opts.expect(indices, opts.table, "Subset: argument 2")
  local n = self.dataset:size()
  for k, i in ipairs(indices) do
    if type(i) ~= "number" or i % 1 ~= 0 or i < 1 or i > n then
      errors.raise("Subset: index %d is %s, expected a position from 1 to %d", k, errors.show(i), n)
    end
  end
end

function Subset:size() return #self.indices end
function Subset:get(i) return self.dataset:get(self.indices[i]) end

function Subset:batch(positions)
  if not self.dataset.batch then return nil end
  local there = {}
  for k, i in ipairs(positions) do there[k] = self.indices[i] end
  return self.dataset:batch(there)
end

-- Sizes from fractions that add up to 1: each is rounded down, and the items left over go to the first subsets.
-- Returns whole numbers that do not add up to 1 unchanged, and raises if fractions do not.
local function sizes_of(lengths, n)
  local sizes, sum, total = {}, 0, 0
  for _, share in ipairs(lengths) do total = total + share end
  if math.abs(total - 1) > 1e-6 then
    for _, share in ipairs(lengths) do
      if share % 1 ~= 0 then errors.raise("random_split: the fractions add up to %g, expected 1", total) end
    end
    return lengths
  end
  for k, share in ipairs(lengths) do
    sizes[k] = floor(n * share + 1e-9)
    sum = sum + sizes[k]
  end
  for k = 1, n - sum do sizes[(k - 1) % #sizes + 1] = sizes[(k - 1) % #sizes + 1] + 1 end
  return sizes
end

--- Splits a dataset at random into subsets that do not overlap.
---@param dataset Dataset  the whole
---@param lengths number[]  sizes that add up to the dataset's, or fractions that add up to 1
---@param given? {seed: integer}  seed: the same seed gives the same subsets (default: the seed of ms.manual_seed)
---@return Subset[]
function M.random_split(dataset, lengths, given)
  dataset = M.expect(dataset, "random_split: argument 1")
  local o = opts("random_split", given, { seed = opts.whole })
  local n, list = dataset:size(), opts.expect(lengths, opts.table, "random_split: argument 2")
  for k, v in ipairs(list) do opts.expect(v, opts.number_from(0), "random_split: length %d", k) end
  local sizes, sum = sizes_of(list, n), 0
  for k, v in ipairs(sizes) do
    opts.expect(v, opts.whole_from(0), "random_split: length %d", k)
    sum = sum + v
  end
  if sum ~= n then errors.raise("random_split: the lengths add up to %.17g, but the dataset has %s", sum, errors.count(n, "item")) end
  local seed, at, subsets = o.seed or M.default_seed(), 0, {}
  for k, size in ipairs(sizes) do
    local indices = {}
    for j = 1, size do indices[j] = lib.ms_shuffle(seed, 0, 7, at + j - 1, n) + 1 end
    at = at + size
    subsets[k] = Subset(dataset, indices)
  end
  return subsets
end

local pair = engine.ffi.new "double[2]"
--- The seed that ms.manual_seed set: the same on every rank of a script that seeds its ranks alike.
---@return integer
function M.default_seed()
  lib.ms_rng_get(pair, pair + 1)
  return pair[0]
end

return M
