-- SPDX-License-Identifier: MIT
--- Rows of tokens made of examples, several to a row: no position attends to another example, and positions count from
--- 0 in each, so losses and gradients are those of the examples one by one.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local engine = require "moonshard.core.ffi"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"

local ffi, lib = engine.ffi, engine.lib
local floor, min = math.floor, math.min

local M = {}

local WHO = "pack"
local IGNORE = -100                     -- the default ignore_index of nn.F.cross_entropy
local ORDER = 15                        -- a stream of random numbers, for ms_shuffle

---@class TextRows
---@field length integer  tokens of a row
---@field count integer  number of rows
---@field tokens integer  tokens of all examples
---@field learned integer  tokens whose loss counts, of all rows
---@field cut integer  examples that were longer than a row, and lost their end
---@field lost integer[]  numbers of the examples of which nothing is learned: they teach nothing, or lost all of it with
---   their end
local TextRows = { __name = "TextRows" }
TextRows.__index = TextRows

-- The pieces of an example, { example, from, size }: an example all of whose tokens are learned is continued in further
-- pieces, another one is cut, because its end would lack the beginning.
local function pieces_of(example, length, list, separate)
  local n, whole = #example.ids, not separate
  for k = 1, n do whole = whole and example.learned[k] end
  if n <= length or not whole then
    list[#list + 1] = { example = example, from = 1, size = min(n, length) }
    return n > length
  end
  -- A piece knows the token that follows it, so the last token needs no place.
  for from = 1, n - 1, length do
    list[#list + 1] = { example = example, from = from, size = min(length, n - from) }
  end
  return false
end

-- The number of tokens that a piece's positions learn.
local function learned_in(piece)
  local learned, n = piece.example.learned, 0
  for t = piece.from + 1, piece.from + piece.size do n = n + (learned[t] and 1 or 0) end
  return n
end

-- Best fit: a piece goes into the row with the least room that holds it; the longest pieces first. open[room]: rows.
local function fill(list, length)
  local rows, open = {}, {}
  for k, piece in ipairs(list) do piece.order = k end
  table.sort(list, function(a, b) return a.size > b.size or a.size == b.size and a.order < b.order end)
  for _, piece in ipairs(list) do
    local row
    for room = piece.size, length - 1 do
      if open[room] and #open[room] > 0 then
        row = table.remove(open[room])
        break
      end
    end
    if not row then
      row = { room = length, learned = 0 }
      rows[#rows + 1] = row
    end
    row[#row + 1] = piece
    row.room, row.learned = row.room - piece.size, row.learned + learned_in(piece)
    open[row.room] = open[row.room] or {}
    table.insert(open[row.room], row)
  end
  return rows
end

--- Packs examples into rows of tokens. Rows are in a new order in each epoch, which depends only on the seed; every
--- world size takes the same steps.
---@param examples { ids: integer[], learned: boolean[] }[]  as ms.text.examples gives them
---@param given { length: integer, batch: integer, seed: integer, rank: integer, world: integer, separate: boolean }  length: tokens of a row; batch: rows of a step, over all ranks (default: 1); seed: of the order (default: 1); rank, world: this rank's share of a step (default: 0, 1); separate: one example in a row, which ends with the longest of its batch
---@return TextRows
function M.pack(examples, given)
  opts.need(opts.is_plain(examples) and #examples > 0, examples, "a list of examples", "%s: argument 1", WHO)
  local o = opts(WHO, given, { length = opts.option(opts.whole_from(2), opts.required), separate = false,
    batch = opts.option(opts.whole_from(1), 1), seed = opts.option(opts.whole_from(0), 1),
    rank = opts.option(opts.whole_from(0), 0), world = opts.option(opts.whole_from(1), 1) })
  if o.rank >= o.world then
    errors.raise("%s: option 'rank' is %d, expected less than option 'world', %d", WHO, o.rank, o.world)
  end
  local self = setmetatable({ length = o.length, cut = 0, lost = {}, tokens = 0, learned = 0, _o = o }, TextRows)
  local list = {}
  for k, example in ipairs(examples) do
    local ok = opts.is_plain(example) and opts.is_plain(example.ids) and opts.is_plain(example.learned)
    opts.need(ok, example, "a table { ids, learned }", "%s: example %d", WHO, k)
    self.tokens = self.tokens + #example.ids
    local before = #list
    if pieces_of(example, o.length, list, o.separate) then self.cut = self.cut + 1 end
    if #list == before + 1 and learned_in(list[#list]) == 0 then
      self.lost[#self.lost + 1] = k
      -- A row of it would only take a step's place. Rows of their own are numbered, so they stay.
      if not o.separate then list[#list] = nil end
    end
  end
  if o.separate then
    self._rows = {}
    for k, piece in ipairs(list) do self._rows[k] = { piece, learned = learned_in(piece) } end
  else
    self._rows = fill(list, o.length)
  end
  self.count = #self._rows
  for _, row in ipairs(self._rows) do self.learned = self.learned + row.learned end
  if self.learned == 0 then
    local least = math.huge
    for _, example in ipairs(examples) do
      for t = #example.ids, 2, -1 do least = example.learned[t] and min(least, t - 1) or least end
    end
    if least == math.huge then
      errors.raise("%s: nothing is learned of %s: no completion, and no message of the assistant, has a token", WHO,
        errors.count(#examples, "example"))
    end
    errors.raise("%s: nothing is learned of %s: rows of %d tokens end before it; it needs %d or more", WHO,
      errors.count(#examples, "example"), o.length, least)
  end
  return self
end

-- Tensors of rows. segments: 0 where a row is filled up, which no loss sees.
local function tensors(self, rows)
  local B, T = #rows, self._o.separate and 1 or self.length
  for _, row in ipairs(rows) do T = math.max(T, row[1].size) end
  local ids, at = raw.tensor("int64", { B, T }, nil)
  local targets, to = raw.tensor("int64", { B, T }, nil)
  local positions, pos = raw.tensor("int64", { B, T }, nil)
  local segments, seg = raw.tensor("int64", { B, T }, nil)
  at, to, pos, seg = ffi.cast("int64_t *", at), ffi.cast("int64_t *", to), ffi.cast("int64_t *", pos),
    ffi.cast("int64_t *", seg)
  local learned, several = 0, false
  for k, row in ipairs(rows) do
    local n = (k - 1) * T
    local stop = n + T
    for s, piece in ipairs(row) do
      local of, is_learned = piece.example.ids, piece.example.learned
      for t = 0, piece.size - 1 do
        local from = piece.from + t
        at[n], pos[n], seg[n] = of[from], t, s
        to[n] = is_learned[from + 1] and of[from + 1] or IGNORE
        n = n + 1
      end
    end
    for rest = n, stop - 1 do at[rest], to[rest], pos[rest], seg[rest] = 0, IGNORE, 0, 0 end
    learned, several = learned + row.learned, several or #row > 1
  end
  local given = { targets = targets }
  if several then given.positions, given.segments = positions, segments end
  return ids, given, learned
end

TextRows._tensors = tensors

-- Row g of the whole training, from 0.
local function row_at(self, g)
  local epoch = floor(g / self.count)
  return self._rows[lib.ms_shuffle(self._o.seed, epoch, ORDER, g % self.count, self.count) + 1]
end

--- The rows of part `part` of `parts` of this rank's share of a step, and the learned tokens of the whole step.
function TextRows:_share(step, part, parts)
  opts.expect(step, opts.whole_from(1), "step: argument 1")
  part, parts = part or 1, parts or 1
  local o = self._o
  local base, total = (step - 1) * o.batch, 0
  for k = 0, o.batch - 1 do total = total + row_at(self, base + k).learned end
  local first, last = floor(o.batch * o.rank / o.world), floor(o.batch * (o.rank + 1) / o.world)
  local mine, rows = last - first, {}
  for k = first + floor(mine * (part - 1) / parts), first + floor(mine * part / parts) - 1 do
    rows[#rows + 1] = row_at(self, base + k)
  end
  return rows, total
end

--- Part `part` of `parts` of this rank's share of a step.
---@param step integer  from 1
---@param part? integer  from 1 (default: 1)
---@param parts? integer  parts of the share (default: 1)
---@return Tensor? ids  int64 [rows, length]; nil if the part has no row
---@return { targets: Tensor, positions: Tensor, segments: Tensor } given  options of the model's forward
---@return integer learned  tokens whose loss counts, in this part
---@return integer total  those of the whole step, over all ranks
function TextRows:step(step, part, parts)
  local rows, total = self:_share(step, part, parts)
  if #rows == 0 then return nil, {}, 0, total end
  local ids, given, learned = tensors(self, rows)
  return ids, given, learned, total
end

--- Iterates over lists of rows: all rows once, this rank's share of them. Every rank gets the same number of lists,
--- because a sharded forward is collective; where it has no row left, it gets the first one, and false.
function TextRows:_lists(size)
  local o, round = self._o, 0
  local rounds = math.ceil(self.count / (size * o.world))
  return function()
    if round == rounds then return nil end
    local rows = {}
    for k = 1, size do rows[k] = self._rows[(round * size + k - 1) * o.world + o.rank + 1] end
    round = round + 1
    if #rows == 0 then return { self._rows[1] }, false end
    return rows, true
  end
end

--- Iterates over all rows once, this rank's share of them: ids, options of the model's forward, learned tokens. Every
--- rank gets the same number of batches; the last ones may learn nothing.
---@param size? integer  rows of a batch (default: 8)
function TextRows:each(size)
  local lists = self:_lists(opts.expect(size or 8, opts.whole_from(1), "each: argument 1"))
  return function()
    local rows, counts = lists()
    if not rows then return nil end
    local ids, given, learned = tensors(self, rows)
    if counts then return ids, given, learned end
    given.targets = create.full(ids.shape, IGNORE, { dtype = "int64" })
    return ids, given, 0
  end
end

function TextRows:__tostring()
  return ("TextRows(%d rows of %d tokens, %.0f %% full)"):format(self.count, self.length,
    100 * min(1, self.tokens / (self.count * self.length)))
end

return M
