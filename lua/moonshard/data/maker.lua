-- SPDX-License-Identifier: MIT
--- Makes batches of a dataset: in the script's process, or in a worker. While an item is made, the random generator has
--- a seed that depends on the loader's seed, the epoch and the item, so random transforms do not depend on the
--- process that makes the item; afterwards the script's generator continues where it was.
local class = require "moonshard.core.class"
local collate = require "moonshard.data.collate"
local datasets = require "moonshard.data.dataset"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local scope = require "moonshard.tensor.scope"

local lib = engine.lib

---@class Maker
---@field dataset Dataset|IterableDataset
---@field collate? function
---@field seed integer
---@field rank integer
---@field world integer
---@field drop_last boolean
---@field progress? ffi.cdata*  the number of the item being made, in memory that outlives the process
local Maker = {}
Maker.__index = Maker

local M = {}

--- Makes a maker. given: dataset, collate, seed; for iterable datasets also batch_size, rank, world and drop_last.
function M.new(given) return setmetatable(given, Maker) end

local state = engine.ffi.new "double[2]"
local ITEM = 14                                           -- a stream of random numbers, for ms_hash_below

local function restored(seed, offset, ...)
  lib.ms_rng_set(seed, offset)
  return ...
end

-- The results of pcall(fn, ...), called while the generator has the item's seed.
local function seeded(self, epoch, item, fn, ...)
  if self.progress then self.progress[0] = item end
  lib.ms_rng_get(state, state + 1)
  local seed, offset = state[0], state[1]
  lib.ms_manual_seed(lib.ms_hash_below(lib.ms_hash_below(self.seed, epoch, ITEM, 2 ^ 52), item, ITEM, 2 ^ 52))
  return restored(seed, offset, pcall(fn, ...))
end

local function failed(item, why)
  -- An interrupt by Ctrl-C is raised unchanged, because scripts may compare its text.
  if type(why) == "string" and why:find "interrupted" then error(why, 0) end
  errors.raise("DataLoader: item %d: %s", item, tostring(why))
end

-- Returns the results of a pcall after the first; if the call failed, raises its error with the number of the item.
local function unless_failed(item, ok, ...)
  if not ok then failed(item, (...)) end
  return ...
end

local function present(item, value, ...)
  if value == nil then errors.raise("DataLoader: item %d is nil, expected a value", item) end
  return value, ...
end

-- An item of several values becomes a list.
local function as_item(value, ...)
  if value == nil or select("#", ...) == 0 then return value end
  return { value, ... }
end

-- The batch of a list of items: its values, and their number in `n`.
local function collated(self, items, positions)
  if not self.collate then
    local columns = collate.columns(#items)
    for k, item in ipairs(items) do collate.append(columns, k, item) end
    return collate.collated(columns)
  end
  local results = { n = 0, self.collate(items) }
  if results[1] == nil then
    errors.raise("DataLoader: the function 'collate' returned nil for the batch of size %d that begins with item %d, expected a value", #items, positions[1])
  end
  for k in pairs(results) do
    if type(k) == "number" and k > results.n then results.n = k end
  end
  return results
end

local function batch_of(self, epoch, positions)
  local dataset = self.dataset
  local rows = not self.collate and dataset.batch and dataset:batch(positions)
  if rows then
    rows.n = #rows
    return rows
  end
  local function get(i) return present(i, unless_failed(i, seeded(self, epoch, i, dataset.get, dataset, i))) end
  if self.collate then
    local items = {}
    for k, i in ipairs(positions) do items[k] = as_item(get(i)) end
    return collated(self, items, positions)
  end
  local columns = collate.columns(#positions, true)
  for k, i in ipairs(positions) do collate.append(columns, k, get(i)) end
  return collate.collated(columns)
end

--- The batch of the items at positions. The items are released.
---@param epoch integer  from 0
---@param positions integer[]  from 1
---@return table  the batch's values, and their number in `n`
function Maker:batch(epoch, positions) return scope.run("DataLoader", batch_of, self, epoch, positions) end

-- ---- iterable datasets -----------------------------------------------------------------------------------

-- The items of block k (from 0) of the stream: batch k of all ranks. Begins the stream again if it is past block k
-- or of another epoch. holder: a table, in whose field `stream` the stream stays between calls.
local function block(self, holder, epoch, k)
  local size, stream = self.batch_size * self.world, holder.stream
  if not stream or stream.epoch ~= epoch or stream.count > k * size then
    stream = { epoch = epoch, count = 0, next = self.dataset:iterate(epoch) }
    holder.stream = stream
  end
  local items = {}
  while not stream.ended and stream.count < (k + 1) * size do
    local item = as_item(unless_failed(stream.count + 1, seeded(self, epoch, stream.count + 1, stream.next)))
    if item == nil then
      stream.ended = true
    else
      stream.count = stream.count + 1
      if stream.count > k * size then items[#items + 1] = item end
    end
  end
  return items
end

local function batch_of_block(self, holder, epoch, k)
  local items, size, world = block(self, holder, epoch, k), self.batch_size * self.world, self.world
  local n = #items
  if n == 0 or self.drop_last and n < size then return nil end
  local own, positions = {}, {}
  for j = self.rank, math.ceil(n / world) * world - 1, world do
    own[#own + 1], positions[#positions + 1] = items[j % n + 1], k * size + j % n + 1
  end
  return collated(self, own, positions)
end

--- Batch k (from 0) of a stream. A last block that does not divide among the ranks repeats items; drop_last omits a
--- block that is not full.
---@param holder table  where the stream stays between calls: each loop over a loader has its own
---@return table?  nil: the stream has no such batch
function Maker:block(holder, epoch, k) return scope.run("DataLoader", batch_of_block, self, holder, epoch, k) end

function M.is_stream(dataset) return class.isa(dataset, datasets.IterableDataset) end

return M
