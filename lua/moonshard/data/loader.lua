-- SPDX-License-Identifier: MIT
--- Batches of a dataset, epoch by epoch. The items of a batch are computed from the seed, the epoch and the batch's
--- number (samplers.lua), so the state of a loader is a few numbers, and any number of ranks can resume from it.
local class = require "moonshard.core.class"
local methods = require "moonshard.core.methods"
local dataset = require "moonshard.data.dataset"
local errors = require "moonshard.core.errors"
local makers = require "moonshard.data.maker"
local opts = require "moonshard.core.opts"
local samplers = require "moonshard.data.samplers"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
local dtypes = require "moonshard.core.dtypes"
local workers = require "moonshard.data.workers"

--- Batches of a dataset.
---@class DataLoader
---@field dataset Dataset|IterableDataset  where items come from
---@field epochs integer  number of the epoch of the batch that was returned last, from 0; at its end, of the next one
---@field done integer  number of batches of this epoch that have been returned
local DataLoader = class "DataLoader"
methods.close(DataLoader)

local count = opts.whole_from(1)
local OPTIONS = { batch_size = opts.option(count, 1), shuffle = false, sampler = opts.any, batch_sampler = opts.any,
  collate = opts.fn, drop_last = false, seed = opts.whole, rank = opts.option(opts.whole_from(0), 0),
  world = opts.option(count, 1), device = opts.string, workers = opts.option(opts.whole_from(0), 0),
  prefetch = opts.option(count, 2), timeout = opts.option(opts.number_from(0), 0),
  pin_memory = false, pad = true }

local function check(source, o)
  local function both(a, b) errors.raise("DataLoader: options '%s' and '%s' exclude each other", a, b) end
  if o.sampler and o.shuffle then both("sampler", "shuffle") end
  if o.batch_sampler then
    for _, name in ipairs { "sampler", "shuffle", "drop_last" } do
      if o[name] then both("batch_sampler", name) end
    end
    if o.batch_size ~= 1 then both("batch_sampler", "batch_size") end
  end
  if (o.sampler or o.batch_sampler) and o.world > 1 then
    errors.raise("DataLoader: option 'world' is %d, expected 1 with a sampler, which itself decides which rank gets an item",
      o.world)
  end
  if o.rank >= o.world then
    errors.raise("DataLoader: option 'rank' is %d, expected less than option 'world', %d", o.rank, o.world)
  end
  if o.drop_last and not o.pad then both("drop_last", "pad = false") end
  if makers.is_stream(source) then
    for _, name in ipairs { "sampler", "batch_sampler", "shuffle" } do
      if o[name] then errors.raise("DataLoader: an IterableDataset has its own order; leave out option '%s'", name) end
    end
  end
end

local function order_of(source, o)
  if o.sampler then return samplers.expect(o.sampler, "DataLoader: option 'sampler'") end
  if o.world > 1 then
    return samplers.DistributedSampler(source, { rank = o.rank, num_replicas = o.world, shuffle = o.shuffle,
      seed = o.seed, drop_last = o.drop_last, pad = o.pad })
  end
  if o.shuffle then return samplers.RandomSampler(source, { seed = o.seed }) end
  return samplers.SequentialSampler(source)
end

--- An epoch is `for x, y in loader:epoch() do ... end`; each iteration is a scope, as a step of
--- ms.steps is.
---@param source Dataset|IterableDataset|any[]|Tensor  the dataset, a list of items, or a tensor whose rows are items
---@param given? {batch_size: integer, shuffle: boolean, sampler: Sampler, batch_sampler: Sampler, collate: fun(items: any[]): any, drop_last: boolean, seed: integer, rank: integer, world: integer, device: string, workers: integer, prefetch: integer, timeout: number, pin_memory: boolean, pad: boolean}
---   batch_size: items in a batch, on each rank; shuffle: random order, another in each epoch; sampler: order of
---   positions; batch_sampler: lists of positions; collate: makes a batch from a list of items (default:
---   data.default_collate); drop_last: leaves out the last batch if it is not full; seed: the seed of the order and of
---   random transforms, equal on all ranks (default: that of ms.manual_seed); rank: this rank, from 0; world: number
---   of ranks that share each epoch, as DistributedSampler does; device: where batches are moved (default: the default
---   device); workers: processes that make batches ahead (0: this process makes them), which are not ranks and cannot
---   use ms.dist; prefetch: batches that each worker makes ahead; timeout: seconds after which a worker that made no
---   batch is an error (0: never); pin_memory: pins the tensors of a batch (see Tensor:pin_memory), so that the host
---   does not wait for copies to a GPU, also those of option device; pad: where the items do not divide among ranks,
---   the last ranks repeat some (default: true); false, for evaluation: each item comes once, and ranks may have
---   different numbers of batches
function DataLoader:init(source, given)
  local o = opts("DataLoader", given, OPTIONS)
  if not makers.is_stream(source) then source = dataset.expect(source, "DataLoader: argument 1") end
  check(source, o)
  self.dataset, self.batch_size, self.drop_last, self.device = source, o.batch_size, o.drop_last, o.device
  self.pin_memory = o.pin_memory
  o.seed = o.seed or dataset.default_seed()
  if not makers.is_stream(source) then
    self.batch_sampler = o.batch_sampler and samplers.expect(o.batch_sampler, "DataLoader: option 'batch_sampler'")
      or samplers.BatchSampler(order_of(source, o), o.batch_size, o.drop_last)
  end
  self.maker = makers.new { dataset = source, collate = o.collate, seed = o.seed, batch_size = o.batch_size,
    rank = o.rank, world = o.world, drop_last = o.drop_last }
  self.worker_count, self.prefetch, self.timeout = o.workers, o.prefetch, o.timeout
  self.epochs, self.done, self.upcoming, self.walks = 0, 0, 0, {}
end

function DataLoader:__tostring()
  local n = self:size()
  return ("DataLoader(%s%s)"):format(tostring(self.dataset), n and (", %d %s"):format(n, n == 1 and "batch" or "batches") or "")
end

methods.refuse_call(DataLoader, "DataLoader: a loader cannot be called; write `for x, y in loader:epoch() do`")

--- The number of batches in an epoch; nil for an IterableDataset.
---@return integer?
function DataLoader:size() return self.batch_sampler and self.batch_sampler:size() end

-- A walk is one pass through an epoch, such as a loop over loader:epoch(): its `epoch`, which its first batch chooses,
-- and `done`, the number of its batches that were returned. Walks do not affect each other.

-- The positions of batch k (from 1) of a walk; nil if there is no such batch.
local function positions_of(self, walk, k)
  if k > self.batch_sampler:size() then return nil end
  walk.order = walk.order or self.batch_sampler:order(walk.epoch)
  local list = walk.order(k)
  opts.need(dataset.is_list(list), list, "a list of positions", "DataLoader: batch %d of the sampler", k)
  local n = self.dataset:size()
  for _, i in ipairs(list) do
    if type(i) ~= "number" or i % 1 ~= 0 or i < 1 or i > n then
      errors.raise("DataLoader: the sampler gave item %s, expected a position from 1 to %d", errors.show(i), n)
    end
  end
  return list
end

-- Batch k (from 1) of a walk, made by the workers, which the first call starts.
local function make_by_workers(self, walk, k)
  if not self.pool then
    local m = self.maker
    self.pool = workers.new({ dataset = m.dataset, collate = m.collate, seed = m.seed, batch_size = m.batch_size,
      rank = m.rank, world = m.world, drop_last = m.drop_last }, self.worker_count, self.prefetch, self.timeout)
  end
  local pool = self.pool
  self.pool = nil                                          -- set again below, unless an error ends the workers
  local ok, batch = pcall(pool.batch, pool, walk, k, self.maker.seed, function(j)
    if not self.batch_sampler then return false end
    return positions_of(self, walk, j)
  end)
  if pool.list[1] then self.pool = pool end
  if not ok then error(batch, 0) end
  return batch
end

-- Batch k (from 1) of a walk: its values and, in `n`, their number; nil if there is no such batch.
local function make(self, walk, k)
  if self.worker_count > 0 then return make_by_workers(self, walk, k) end
  if not self.batch_sampler then return self.maker:block(walk, walk.epoch, k - 1) end
  local positions = positions_of(self, walk, k)
  return positions and self.maker:batch(walk.epoch, positions)
end

-- Replaces the tensors of a value, also those in its tables, by what change(tensor) returns. name, argument: the method
-- by which an object in these tables, such as a packed sequence, does the same to its own tensors, and its argument.
local function changed(value, change, name, argument)
  if tensor.is_tensor(value) then return change(value) end
  if not opts.is_plain(value) then return value end
  if class.is_class(getmetatable(value)) and value[name] then return value[name](value, argument) end
  for key, v in pairs(value) do value[key] = changed(v, change, name, argument) end
  return value
end

local function pinned(t) return t.device == "cpu" and t:pin_memory() or t end

-- Makes the next batch of a walk the loader's position; at the walk's end, the beginning of the next epoch.
local function advance(self, walk)
  if walk.ended then return nil end
  if not walk.begun then walk.epoch, walk.done = self.upcoming, self.resumed and self.done or 0 end
  local batch = make(self, walk, walk.done + 1)
  if not walk.begun then walk.begun, self.upcoming, self.resumed = true, walk.epoch + 1, nil end
  if batch then
    walk.done = walk.done + 1
    self.epochs, self.done, self.latest = walk.epoch, walk.done, walk
  else
    walk.ended, walk.order = true, nil
    self.epochs, self.done, self.latest = self.upcoming, 0, nil
  end
  return batch
end

-- The values of the next batch of a walk; nil at its end.
local function following(self, walk)
  local batch = advance(self, walk)
  if not batch then return nil end
  local device = self.device or dtypes.default_device()
  local function moved(t)
    local there = t:to(device)
    if there ~= t then t:release() end
    return there
  end
  for k = 1, batch.n do
    if self.pin_memory then batch[k] = changed(batch[k], pinned, "pin_memory") end
    if device ~= "cpu" and device ~= "meta" then batch[k] = changed(batch[k], moved, "to", device) end
  end
  return unpack(batch, 1, batch.n)
end

--- The batches of an epoch. After load_state_dict it continues the epoch of that state; after a `break` the next call
--- begins another epoch. Loops over one loader may be nested: each is an epoch of its own. Errors: an item that cannot
--- be made; the message has its position.
---@return fun(): any  an iterator of the batches' values
function DataLoader:epoch()
  local walk = {}
  local iterator, loop = scope.each(function() return following(self, walk) end)
  walk.loop = loop
  for k = #self.walks, 1, -1 do
    if self.walks[k].ended or not scope.is_running(self.walks[k].loop) then table.remove(self.walks, k) end
  end
  self.walks[#self.walks + 1] = walk
  return iterator, loop
end

local function present(self, first, ...)
  if first == nil then errors.raise("DataLoader: epoch %d has no batches", self.epochs - 1) end
  return first, ...
end

local function or_next(self, first, ...)
  if first ~= nil then return first, ... end
  self.steady = {}
  return present(self, following(self, self.steady))
end

--- The next batch, without end: after the last batch of an epoch comes the first of the next. Loops over `epoch`
--- between two calls do not matter; the first call continues a loop that was left. The batch belongs to the scope
--- around the call, such as a step of ms.steps.
---@return any  the batch's values
function DataLoader:next()
  local walk = self.steady                                 -- that of the calls of `next`
  if not walk or walk.ended then walk = self.latest or {} end
  self.steady = walk
  return or_next(self, following(self, walk))
end

--- Chooses the epoch that the next call of `epoch` begins.
---@param epoch integer  from 0
function DataLoader:set_epoch(epoch)
  self.epochs, self.done, self.resumed = opts.expect(epoch, opts.whole_from(0), "set_epoch: argument"), 0, nil
  self.upcoming, self.latest, self.steady = self.epochs, nil, nil
end

--- Ends the workers. They also end when the loader is collected, and with the script.
function DataLoader:close()
  if self.pool then self.pool:close() end
  self.pool = nil
end

-- ---- state ---------------------------------------------------------------------------------------------

local function with_seed(sampler)
  while sampler and sampler.seed == nil do sampler = sampler.sampler end
  return sampler
end

-- The number of items of a batch, over all ranks.
local function items_of(self)
  local s = self.batch_sampler
  if not s then return self.batch_size * self.maker.world end
  local ranks = s.num_replicas or s.sampler and s.sampler.num_replicas or 1
  return (s.batch_size or 1) * ranks
end

-- The epoch and the number of batches at which a checkpoint continues: those of the outermost loop that runs or,
-- without a loop, of the batch that was returned last.
local function position_of(self)
  for _, walk in ipairs(self.walks) do
    if walk.begun and not walk.ended and scope.is_running(walk.loop) then return walk.epoch, walk.done end
  end
  return self.epochs, self.done
end

--- The state for a checkpoint: after load_state_dict, a loader of the same dataset continues with the batch after the
--- last one that was returned; of nested loops, to the outermost one. The number of ranks may differ if a batch has the
--- same number of items over all ranks.
---@return {epoch: integer, batches: integer, items: integer, seed: integer, size: integer?}  epoch: from 0; batches: number of batches of this epoch that were returned; items: number of items of a batch, over all ranks; size: number of items of the dataset
function DataLoader:state_dict()
  local random = with_seed(self.batch_sampler)
  local epoch, done = position_of(self)
  return { epoch = epoch, batches = done, items = items_of(self), seed = random and random.seed or self.maker.seed,
    size = self.batch_sampler and self.dataset:size() or nil }
end

--- Continues from a state dict, at the next call of `epoch` or `next`. Errors: the dataset or the batches have another
--- size.
---@param sd table  from state_dict
function DataLoader:load_state_dict(sd)
  local who = "DataLoader: load_state_dict: "
  opts.expect(sd, opts.table, who .. "argument 1")
  for _, name in ipairs { "epoch", "batches", "items" } do opts.expect(sd[name], opts.whole_from(0), "%s%s", who, name) end
  opts.expect(sd.seed, opts.whole, "%sseed", who)
  local n = self.batch_sampler and self.dataset:size()
  if sd.size ~= n and sd.size and n then
    errors.raise("%sthe state is of a dataset of size %d, but this one has size %d", who, sd.size, n)
  end
  if sd.items ~= items_of(self) then
    errors.raise("%sthe state is of batches of size %d over all ranks, but this loader's have size %d", who, sd.items,
      items_of(self))
  end
  local random = with_seed(self.batch_sampler)
  if random then random.seed = sd.seed end
  self.maker.seed, self.latest, self.steady = sd.seed, nil, nil
  self.epochs, self.upcoming, self.done, self.resumed = sd.epoch, sd.epoch, sd.batches, true
end

methods.guard(DataLoader, "loader")

return DataLoader
