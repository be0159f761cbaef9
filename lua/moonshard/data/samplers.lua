-- SPDX-License-Identifier: MIT
--- Samplers: the order in which positions of a dataset are visited. The library's samplers compute entry j of epoch e
--- from the seed, e and j, without a state, so the order is the same on every device, with any number of threads,
--- workers and ranks, and an epoch can be resumed at any entry.
local class = require "moonshard.core.class"
local dataset = require "moonshard.data.dataset"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local lib, floor, ceil, log = engine.lib, math.floor, math.ceil, math.log
local shuffle, below, share = lib.ms_shuffle, lib.ms_hash_below, lib.ms_hash_share

local M = {}

-- Streams of random numbers: the third argument of ms_shuffle, ms_hash_below and ms_hash_share.
local ORDER, DRAW, BATCHES = 11, 12, 13

-- The size of a dataset, or a number in its place.
local function size_of(source, who)
  if type(source) == "number" then return opts.expect(source, opts.whole_from(0), "%s: argument 1", who) end
  return dataset.expect(source, who .. ": argument 1"):size()
end

--- An order of positions. A class that extends it defines `size()` and `order(epoch)`.
---@class Sampler
---@field seed? integer  the seed of a random order
local Sampler = class "Sampler"
M.Sampler = Sampler

--- A sampler of a function.
---@param given {size: integer, order: fun(epoch: integer): integer[]}  size: entries in an epoch; order: lists the
---   positions of an epoch, counted from 0, or returns a function that gives entry j, from 1
function Sampler:init(given)
  local o = opts("Sampler", given, { size = opts.option(opts.whole_from(0), opts.required),
    order = opts.option(opts.fn, opts.required) })
  self.count, self.fn = o.size, o.order
end

function Sampler:__tostring() return ("%s(%d)"):format(class.name(self), self:size()) end

--- The number of entries in an epoch.
---@return integer
function Sampler:size() return self.count end

--- The order of an epoch: a function that gives entry j, from 1.
---@param epoch integer  from 0
---@return fun(j: integer): any
function Sampler:order(epoch)
  local order = self.fn(epoch)
  if opts.fn.test(order) then return order end
  opts.need(type(order) == "table" and #order == self.count, order, ("a list of %d positions"):format(self.count),
    "%s: the order of epoch %d", class.name(self), epoch)
  return function(j) return order[j] end
end

--- The entries of an epoch as a list.
---@param epoch? integer  from 0 (default: 0)
---@return any[]
function Sampler:tolist(epoch)
  local at, list = self:order(epoch or 0), {}
  for j = 1, self:size() do list[j] = at(j) end
  return list
end

--- Positions in ascending order.
---@class SequentialSampler
local SequentialSampler = Sampler:extend "SequentialSampler"
M.SequentialSampler = SequentialSampler

---@param source Dataset|integer  the dataset, or its size
function SequentialSampler:init(source) self.count = size_of(source, "SequentialSampler") end

function SequentialSampler:order() return function(j) return j end end   -- luacheck: ignore 212

--- Positions in random order, or drawn with replacement; each epoch has another order.
---@class RandomSampler
local RandomSampler = Sampler:extend "RandomSampler"
M.RandomSampler = RandomSampler

--- Without replacement, if there are more samples than items, several random orders follow one another.
---@param source Dataset|integer  the dataset, or its size
---@param given? {replacement: boolean, num_samples: integer, seed: integer}
---   replacement: each entry is drawn from all items; num_samples: entries in an epoch (default: the number of items);
---   seed: the seed of the order (default: that of ms.manual_seed)
function RandomSampler:init(source, given)
  local o = opts("RandomSampler", given, { replacement = false, num_samples = opts.whole_from(1), seed = opts.whole })
  self.items = size_of(source, "RandomSampler")
  self.count, self.replacement, self.seed = o.num_samples or self.items, o.replacement, o.seed or dataset.default_seed()
  if self.count > 0 and self.items == 0 then errors.raise "RandomSampler: the dataset has no items to draw from" end
end

function RandomSampler:order(epoch)
  local n, seed = self.items, self.seed
  if self.replacement then
    local key = below(seed, epoch, DRAW, 2 ^ 52)
    return function(j) return below(key, j, DRAW, n) + 1 end
  end
  if self.count <= n then return function(j) return shuffle(seed, epoch, ORDER, j - 1, n) + 1 end end
  local key = below(seed, epoch, ORDER, 2 ^ 52)
  return function(j)
    local round = floor((j - 1) / n)
    return shuffle(round == 0 and seed or key, round == 0 and epoch or round, ORDER, (j - 1) % n, n) + 1
  end
end

--- Positions drawn with probabilities in proportion to weights.
---@class WeightedRandomSampler
local WeightedRandomSampler = Sampler:extend "WeightedRandomSampler"
M.WeightedRandomSampler = WeightedRandomSampler

---@param weights number[]|Tensor  one for each item, not negative
---@param num_samples integer  entries in an epoch
---@param given? {replacement: boolean, seed: integer}
---   replacement: an item can be drawn more than once in an epoch (default: true); seed: the seed of the draws
---   (default: that of ms.manual_seed)
function WeightedRandomSampler:init(weights, num_samples, given)
  local o = opts("WeightedRandomSampler", given, { replacement = true, seed = opts.whole })
  if tensor.is_tensor(weights) then weights = weights:tolist() end
  opts.expect(weights, opts.table, "WeightedRandomSampler: argument 1")
  self.count = opts.expect(num_samples, opts.whole_from(1), "WeightedRandomSampler: argument 2")
  self.weights, self.sums, self.replacement = weights, {}, o.replacement
  self.seed = o.seed or dataset.default_seed()
  local sum, positive = 0, 0
  for k, w in ipairs(weights) do
    opts.need(type(w) == "number" and w >= 0 and w < math.huge, w, "a finite number from 0",
      "WeightedRandomSampler: weight %d", k)
    sum = sum + w
    positive = positive + (w > 0 and 1 or 0)
    self.sums[k] = sum
  end
  if sum <= 0 then errors.raise "WeightedRandomSampler: the weights add up to 0, expected a positive sum" end
  if not o.replacement and num_samples > positive then
    errors.raise("WeightedRandomSampler: %d samples without replacement need as many positive weights, got %d", num_samples,
      positive)
  end
end

-- The positions of positive weight, sorted by exponentially distributed keys (Efraimidis and Spirakis 2006).
local function without_replacement(self, key)
  local list, keys = {}, {}
  for k, w in ipairs(self.weights) do
    if w > 0 then
      list[#list + 1] = k
      keys[k] = -log(1 - share(key, k, DRAW) * (1 - 2 ^ -53)) / w
    end
  end
  table.sort(list, function(a, b) return keys[a] < keys[b] or keys[a] == keys[b] and a < b end)
  return function(j) return list[j] end
end

function WeightedRandomSampler:order(epoch)
  local sums, key = self.sums, below(self.seed, epoch, DRAW, 2 ^ 52)
  if not self.replacement then return without_replacement(self, key) end
  local n, total = #sums, sums[#sums]
  return function(j)
    local x, low, high = share(key, j, DRAW) * total, 1, n           -- finds the first sum above x
    while low < high do
      local middle = floor((low + high) / 2)
      if sums[middle] > x then high = middle else low = middle + 1 end
    end
    while self.weights[low] == 0 do low = low - 1 end                -- reached only if x equals the total
    return low
  end
end

--- The share of one rank in the positions of an epoch: entries rank + 1, rank + 1 + num_replicas, ... of an order that
--- all ranks share. Every rank has equally many entries, unless `pad` is false.
---@class DistributedSampler
local DistributedSampler = Sampler:extend "DistributedSampler"
M.DistributedSampler = DistributedSampler

-- The rank and the number of ranks that options give; the defaults are those of the job.
local function place(o, who)
  local rank, world = o.rank, o.num_replicas
  if not rank or not world then
    local dist = require "moonshard.dist"
    rank, world = rank or dist.rank(), world or dist.world_size()
  end
  if rank >= world then
    errors.raise("%s: rank is %d, expected less than num_replicas, %d", who, rank, world)
  end
  return rank, world
end

--- If the items do not divide among the ranks, the last ranks repeat items from the beginning of the order, or, with
--- drop_last, the last items are left out. With pad = false neither happens: the first ranks have an item more.
---@param source Dataset|integer  the dataset, or its size
---@param given? {num_replicas: integer, rank: integer, shuffle: boolean, seed: integer, drop_last: boolean, pad: boolean}
---   num_replicas: number of ranks (default: that of the job); rank: this rank, from 0 (default: that of the job);
---   shuffle: random order, another in each epoch; seed: the same on every rank; drop_last: leaves out the last items,
---   so that the others divide among the ranks; pad: repeats items (default: true); false: each item comes once
function DistributedSampler:init(source, given)
  local who = "DistributedSampler"
  local o = opts(who, given, { num_replicas = opts.whole_from(1), rank = opts.whole_from(0), shuffle = true,
    seed = opts.option(opts.whole, 0), drop_last = false, pad = true })
  if o.drop_last and not o.pad then
    errors.raise("%s: option 'drop_last' leaves out items, which 'pad = false' forbids; give one of them", who)
  end
  self.items, self.shuffle, self.seed, self.drop_last = size_of(source, who), o.shuffle, o.seed, o.drop_last
  self.rank, self.num_replicas = place(o, who)
  local each = self.items / self.num_replicas
  self.count = o.drop_last and floor(each) or ceil(each)
  if not o.pad then self.count = ceil((self.items - self.rank) / self.num_replicas) end
end

--- Uses this epoch's order for all following epochs, until the next call, as PyTorch does. Without any call every
--- epoch has an order of its own.
---@param epoch integer  from 0
function DistributedSampler:set_epoch(epoch)
  self.epoch = opts.expect(epoch, opts.whole_from(0), "DistributedSampler: set_epoch: argument")
end

function DistributedSampler:order(epoch)
  epoch = self.epoch or epoch
  local n, rank, world, seed = self.items, self.rank, self.num_replicas, self.seed
  if not self.shuffle then return function(j) return ((j - 1) * world + rank) % n + 1 end end
  return function(j) return shuffle(seed, epoch, ORDER, ((j - 1) * world + rank) % n, n) + 1 end
end

--- Lists of positions: batches of a sampler.
---@class BatchSampler
local BatchSampler = Sampler:extend "BatchSampler"
M.BatchSampler = BatchSampler

---@param sampler Sampler|integer[]  the order of positions, or a list of them
---@param batch_size integer  positions in a batch
---@param drop_last? boolean  leaves out the last batch if it is not full (default: false)
function BatchSampler:init(sampler, batch_size, drop_last)
  self.sampler = M.expect(sampler, "BatchSampler: argument 1")
  self.batch_size = opts.expect(batch_size, opts.whole_from(1), "BatchSampler: argument 2")
  if drop_last ~= nil then opts.expect(drop_last, opts.boolean, "BatchSampler: argument 3") end
  self.drop_last = drop_last or false
end

function BatchSampler:size()
  local n = self.sampler:size() / self.batch_size
  return self.drop_last and floor(n) or ceil(n)
end

function BatchSampler:order(epoch)
  local at, n, size = self.sampler:order(epoch), self.sampler:size(), self.batch_size
  return function(k)
    local list = {}
    for j = (k - 1) * size + 1, math.min(k * size, n) do list[#list + 1] = at(j) end
    return list
  end
end

--- Batches of items of similar length, in random order, so that little of a padded batch is padding.
---@class BucketBatchSampler
local BucketBatchSampler = Sampler:extend "BucketBatchSampler"
M.BucketBatchSampler = BucketBatchSampler

--- Cuts a random order into buckets, sorts each by length, cuts it into batches, and visits the batches in random
--- order. Each batch of batch_size * num_replicas items is divided among the ranks; the one that is not full
--- repeats items if the ranks' shares would differ.
---@param lengths integer[]|Tensor  the length of each item
---@param batch_size integer  items in a batch, on each rank
---@param given? {bucket: integer, shuffle: boolean, seed: integer, drop_last: boolean, num_replicas: integer, rank: integer}
---   bucket: batches in a bucket; shuffle: false cuts buckets from the items in order, and visits batches in order;
---   seed: the same on every rank (default: that of ms.manual_seed); drop_last: leaves out the batch that is not full;
---   num_replicas: number of ranks; rank: this rank, from 0
function BucketBatchSampler:init(lengths, batch_size, given)
  local who = "BucketBatchSampler"
  local o = opts(who, given, { bucket = opts.option(opts.whole_from(1), 100), shuffle = true, seed = opts.whole,
    drop_last = false, num_replicas = opts.option(opts.whole_from(1), 1), rank = opts.option(opts.whole_from(0), 0) })
  if tensor.is_tensor(lengths) then lengths = lengths:tolist() end
  opts.expect(lengths, opts.table, "%s: argument 1", who)
  for k, n in ipairs(lengths) do opts.expect(n, opts.number, "%s: length %d", who, k) end
  self.lengths, self.batch_size = lengths, opts.expect(batch_size, opts.whole_from(1), "%s: argument 2", who)
  self.bucket, self.shuffle, self.drop_last = o.bucket, o.shuffle, o.drop_last
  self.seed = o.seed or dataset.default_seed()
  self.rank, self.num_replicas = place(o, who)
end

function BucketBatchSampler:size()
  local n = #self.lengths / (self.batch_size * self.num_replicas)
  return self.drop_last and floor(n) or ceil(n)
end

-- The positions of an epoch, each bucket sorted by length.
local function buckets(self, epoch)
  local n, lengths, whole = #self.lengths, self.lengths, self.bucket * self.batch_size * self.num_replicas
  local all, place_in = {}, {}
  for first = 1, n, whole do
    local part = {}
    for j = first, math.min(first + whole - 1, n) do
      local i = self.shuffle and shuffle(self.seed, epoch, ORDER, j - 1, n) + 1 or j
      part[#part + 1], place_in[i] = i, j
    end
    table.sort(part, function(a, b)
      if lengths[a] ~= lengths[b] then return lengths[a] < lengths[b] end
      return place_in[a] < place_in[b]
    end)
    for _, i in ipairs(part) do all[#all + 1] = i end
  end
  return all
end

function BucketBatchSampler:order(epoch)
  local all, count, world = buckets(self, epoch), self:size(), self.num_replicas
  local whole = self.batch_size * world
  return function(k)
    if self.shuffle then k = shuffle(self.seed, epoch, BATCHES, k - 1, count) + 1 end
    local first = (k - 1) * whole
    local n, list = math.min(whole, #all - first), {}
    for j = self.rank, ceil(n / world) * world - 1, world do list[#list + 1] = all[first + j % n + 1] end
    return list
  end
end

--- Returns x if it is a sampler; makes one of a list of positions. Raises for other values.
---@param x any
---@param label string  names the argument in errors
---@return Sampler
function M.expect(x, label)
  if class.isa(x, Sampler) then return x end
  if opts.is_plain(x) and x[1] ~= nil then
    return Sampler { size = #x, order = function() return x end }
  end
  return opts.wrong(x, "a sampler or a list of positions", "%s", label)
end

return M
