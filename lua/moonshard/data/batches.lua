-- SPDX-License-Identifier: MIT
--- Batches of a corpus for language models. The sequences of step s are computed from the seed and s, so there is no
--- state to save, any rank can compute its share, and every world size trains on the same sequences.
---
--- An epoch divides the training tokens into windows of `context` tokens, starting at an offset that depends on the
--- epoch, and visits each window once: at position j of epoch e, window ms_shuffle(seed, e, 1, j, windows).
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local dtypes = require "moonshard.core.dtypes"
local tensor = require "moonshard.tensor"
local task = require "moonshard.core.task"

local ffi, lib = engine.ffi, engine.lib
local floor, min, max = math.floor, math.min, math.max

local count = opts.whole_from(1)
local OPTIONS = { context = opts.option(count, opts.required), batch = opts.option(count, opts.required),
  world = opts.option(count, 1), rank = opts.option(opts.whole_from(0), 0), seed = opts.option(opts.whole, 1) }

local IGNORE = -100                     -- the default ignore_index of nn.F.cross_entropy

---@class Batches
---@field context integer  tokens per sequence
---@field batch integer     sequences per step, over all ranks
---@field first integer     this rank's share of a step's sequences: [first, last)
---@field last integer  the end of that share, exclusive
---@field epoch_length integer   sequences per epoch
local Batches = {}
Batches.__index = Batches

--- Batches over a corpus. Each of the `world` ranks gets a share of each batch.
---@param corpus Corpus  from data.corpus
---@param given {context: integer, batch: integer, seed: integer, rank: integer, world: integer}
---   context: tokens per sequence; batch: sequences per step, over all ranks; seed: seed of the order of sequences;
---   rank: this rank, from 0; world: number of ranks
---@return Batches
local function new(corpus, given)
  if type(corpus) ~= "table" or not corpus.train_count then opts.wrong(corpus, "a corpus", "batches: argument 1") end
  local o = opts("batches", given, OPTIONS)
  if o.rank >= o.world then
    errors.raise("batches: option 'rank' is %d, expected less than option 'world', %d", o.rank, o.world)
  end
  local spare = corpus.train_count - o.context
  if spare < 1 then
    errors.raise("batches: %d training tokens are too few for a context of %d, expected at least %d", corpus.train_count,
      o.context, o.context + 1)
  end
  if o.batch < o.world then
    errors.raise("batches: option 'batch' is %d, expected at least one sequence for each of %d ranks", o.batch, o.world)
  end
  local self = setmetatable(o, Batches)
  self.corpus = corpus
  self.offsets = min(o.context, spare)
  self.epoch_length = floor((corpus.train_count - self.offsets) / o.context)
  self.first = floor(o.batch * o.rank / o.world)
  self.last = floor(o.batch * (o.rank + 1) / o.world)
  return self
end

--- The position of the first token of sequence g (counted from 0 over the whole training) among the training tokens.
---@param g integer  from 0
---@return integer
function Batches:start(g)
  local epoch = floor(g / self.epoch_length)
  local window = lib.ms_shuffle(self.seed, epoch, 1, g % self.epoch_length, self.epoch_length)
  return lib.ms_hash_below(self.seed, epoch, 2, self.offsets) + window * self.context
end

local out = ffi.new "ms_id[2]"

local function batch_of(tokens, n, starts, skip, scored, context)
  if lib.ms_tokens_batch(tokens, n, starts, skip, scored, context, IGNORE, out) ~= 0 then errors.fail() end
  local ids, targets = tensor.wrap(out[0]), tensor.wrap(out[1])
  local device = dtypes.default_device()
  if device == "cpu" or device == "meta" then return ids, targets end
  local there, targets_there = ids:to(device), targets:to(device)
  ids:release()
  targets:release()
  return there, targets_there
end

--- Returns part `part` of `parts` of this rank's share of a step: token ids, the ids that follow them in the text (both
--- int64 [sequences, context] on the default device), and the number of sequences.
---@param step integer  from 1
---@param part? integer  from 1 (default: 1)
---@param parts? integer  parts of this rank's share (default: 1)
---@return Tensor ids
---@return Tensor targets
---@return integer sequences
function Batches:train(step, part, parts)
  part, parts = part or 1, parts or 1
  local mine = self.last - self.first
  local first, last = self.first + floor(mine * (part - 1) / parts), self.first + floor(mine * part / parts)
  local starts = self.starts
  if not starts then                                  -- large enough for the largest part
    starts = ffi.new("double[?]", max(mine, 1))
    self.starts = starts
  end
  for k = first, last - 1 do starts[k - first] = self:start((step - 1) * self.batch + k) end
  local ids, targets = batch_of(self.corpus.train, last - first, starts, nil, nil, self.context)
  return ids, targets, last - first
end

--- Windows that score every validation token exactly once, except the first token of a file. Each scored token is
--- preceded by at least half a context (rounded down) of tokens of its file, if the file has so many before it.
local function validation_windows(corpus, context)
  local windows = {}
  for _, d in ipairs(corpus.documents) do
    local target = max(d.train, 1)                    -- the first token of a file has no predecessor
    while target < d.count do
      local start = max(0, min(target - floor(context / 2), d.count - 1 - context))
      local last = min(start + context, d.count - 1)
      windows[#windows + 1] = { start = d.first + start, skip = target - start - 1, scored = last - target + 1 }
      target = last + 1
    end
  end
  return windows
end

--- Iterates over batches of the whole validation split: ids, targets (-100 for a token that is not scored). Every rank
--- gets the same number of batches, because a sharded forward is collective; the last ones may score nothing.
---@param size? integer  sequences per batch (default: 16)
function Batches:validation(size)
  size = size or 16
  self.windows = self.windows or validation_windows(self.corpus, self.context)
  local windows, total = self.windows, #self.windows
  local rounds = math.ceil(total / (size * self.world))
  local starts, skip, scored = ffi.new("double[?]", size), ffi.new("double[?]", size), ffi.new("double[?]", size)
  local round = 0
  return function()
    task.report("validating", round, rounds)
    if round >= rounds then return nil end
    for k = 0, size - 1 do
      local w = windows[(round * self.world + self.rank) * size + k + 1]
      starts[k], skip[k], scored[k] = w and w.start or 0, w and w.skip or 0, w and w.scored or 0
    end
    round = round + 1
    return batch_of(self.corpus.all, size, starts, skip, scored, self.context)
  end
end

return { new = new, Batches = Batches }
