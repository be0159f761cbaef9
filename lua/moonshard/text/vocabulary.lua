-- SPDX-License-Identifier: MIT
--- Models whose tokens the engine finds (runtime/io/text.c): Unigram, and byte-pair encoding: a word's characters are
--- tokens first; then the pair of neighbours that was learned first is joined, again and again, the leftmost of equal
--- pairs first.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local ffi, lib = engine.ffi, engine.lib
local bxor = require "bit".bxor

local M = {}

local SIGN = "\226\150\129"                            -- U+2581, which stands for a space
local PENALTY = 10                                      -- an unknown character scores so much less than any token
local BLOCK = 2 ^ 16                                    -- bytes after which a text is cut, where it can be
local LONGEST = 2 ^ 26                                  -- bytes of a word: LuaJIT's arrays have less than 2^31
local WORDS, REMEMBERED = 2 ^ 17, 256                   -- number of words remembered, and their most bytes

---@class Vocabulary
---@field ids table<string, integer>  ids by token
---@field joins boolean  whether it is a BPE
local Vocabulary = {}
Vocabulary.__index = Vocabulary

local SLOTS, INTS, DOUBLES = ffi.typeof "ms_text_slot[?]", ffi.typeof "int32_t[?]", ffi.typeof "double[?]"
local byte_p, char_p = ffi.typeof "const uint8_t *", ffi.typeof "const char *"

local function single(x) return tonumber(ffi.cast("float", x)) end

local function new_slots(n)
  local slots = ffi.new(SLOTS, n)
  ffi.fill(slots, ffi.sizeof(slots), 255)
  return slots
end

-- A trie as lists: of node k (0: the root), first[k] is the first child, next[k] the next one of the same parent, 0 for
-- none, bytes[k] the byte that leads to it, and tokens[k] the id of the token that ends there, or -1.
-- Frequent tokens have small ids, as a rule, so their nodes come first and lie together.
local function lists_of(ids, last)
  local most, count, by_id = 1, 1, {}
  for token, id in pairs(ids) do most, by_id[id] = most + #token, token end
  local first, next, bytes, tokens = ffi.new(INTS, most), ffi.new(INTS, most), ffi.new("uint8_t[?]", most),
    ffi.new(INTS, most, -1)
  for id = 0, last do
    local token, node = by_id[id] or "", 0
    for k = 1, #token do
      local c, to = token:byte(k), first[node]
      while to ~= 0 and bytes[to] ~= c do to = next[to] end
      if to == 0 then
        to, count = count, count + 1
        bytes[to], next[to], first[node], tokens[to] = c, first[node], to, -1
      end
      node = to
    end
    if node > 0 then tokens[node] = id end
  end
  return first, next, bytes, tokens, count
end

local TRIES = 1024                                      -- slots that are looked at for a node's children

-- The trie of tokens in a double array.
local function trie_of(ids, last)
  local first, next, bytes, tokens, count = lists_of(ids, last)
  local size, low, top = 1024, 1, 256                   -- low: no slot below is free; top: the slots that are in use
  local slots, place = new_slots(size), ffi.new(INTS, count)
  slots[0].a, slots[0].y = 2 ^ 31 - 1, -1
  for k = 0, count - 1 do
    local child = first[k]
    local base = 0
    if child ~= 0 then
      while low < top and slots[low].a >= 0 do low = low + 1 end
      local at, found = low, false
      while at < top and at < low + TRIES and not found do
        base, found = bxor(at, bytes[child]), true
        local other = child
        while other ~= 0 and found do
          found, other = slots[bxor(base, bytes[other])].a < 0, next[other]
        end
        at = at + 1
      end
      if not found then
        base, top = top, top + 256
        if top > size then
          local larger = new_slots(2 * size)
          ffi.copy(larger, slots, ffi.sizeof(slots))
          size, slots = 2 * size, larger
        end
      end
    end
    slots[place[k]].b = base
    while child ~= 0 do
      local slot = bxor(base, bytes[child])
      place[child], slots[slot].a, slots[slot].y = slot, place[k], tokens[child]
      child = next[child]
    end
  end
  return slots
end

-- A table for n pairs, and its bits.
local function table_for(n)
  local bits = 8
  while 2 ^ bits < 2 * n do bits = bits + 1 end
  return new_slots(2 ^ bits), bits
end

local function table_of(merges)
  local slots, bits = table_for(#merges / 4)
  for k = 1, #merges, 4 do lib.ms_text_add(slots, bits, merges[k], merges[k + 1], merges[k + 2], merges[k + 3]) end
  return slots, bits
end

-- The table of the pairs of tokens whose bytes are a token.
local function pairs_of(ids, scores, last)
  local texts, ends, count = {}, ffi.new(INTS, last + 2), 2 * last
  for id = 0, last do texts[id + 1] = "" end
  for token, id in pairs(ids) do texts[id + 1] = token end
  for id = 0, last do ends[id + 1] = ends[id] + #texts[id + 1] end
  local text = table.concat(texts)
  local slots, bits
  repeat
    slots, bits = table_for(count)
    count = lib.ms_text_pairs(text, ends, scores, last + 1, slots, bits)
    if count < 0 then errors.raise("tokenizer: no memory for the pairs of %d tokens", last + 1) end
  until 2 * count <= 2 ^ bits
  return slots, bits
end

--- A model. o.ids: ids by token; o.unknown: id of characters without a token, neighbouring ones of which become one;
--- o.bytes: ids by byte, for these; o.single: sums are rounded to single precision, and tokens of bytes have a byte
--- each; o.cut: the sign of a space, if no token has it after another text. A unigram model has o.scores, by id. A BPE
--- has o.merges: of each pair two ids, its place in the order of learning, and the id of its token, one after another;
--- or o.scores and o.joins: a pair joins to the token of its bytes, the largest score first. Its o.by_byte: words begin
--- as bytes, not as characters; o.apart: unknown neighbours do not become one; o.whole: a word that is a token is not
--- joined from its parts; o.prefix, o.suffix: of the token of a character that does not begin, or that ends, a word.
function M.new(o)
  local model, joins, parts = ffi.new "ms_text_model", o.merges ~= nil or o.joins or false, o.ids
  local least, most, top = 0, 0, 0
  for _, id in pairs(o.ids) do
    local score = o.scores and o.scores[id] or 0
    least, most, top = math.min(least, score), math.max(most, id), math.max(top, score)
  end
  local scores, joined = o.scores and ffi.new(DOUBLES, most + 1), nil
  for _, id in pairs(scores and o.ids or {}) do scores[id] = o.scores[id] end
  if joins then
    if o.merges then joined, model.pair_bits = table_of(o.merges)
    else joined, model.pair_bits = pairs_of(o.ids, scores, most) end
    model.pairs, parts = joined, {}
    local size = (o.by_byte and 1 or 4) + #(o.prefix or "") + #(o.suffix or "")
    for token, id in pairs(o.ids) do parts[token] = #token <= size and id or nil end
  end
  local trie, bytes = trie_of(parts, most), o.bytes and ffi.new(INTS, 256)
  for b = 0, bytes and 255 or -1 do bytes[b] = o.bytes[b] or -1 end
  model.trie, model.scores, model.bytes, model.unknown = trie, scores, bytes, o.unknown or -1
  model.unknown_score = o.single and single(least - PENALTY) or least - PENALTY
  model.single, model.cuts = (o.single or joins) and 1 or 0, o.cut and 1 or 0
  model.by_byte, model.fuses = o.by_byte and 1 or 0, o.apart and 0 or 1
  model.prefix, model.prefix_size = o.prefix, #(o.prefix or "")
  model.suffix, model.suffix_size = o.suffix, #(o.suffix or "")
  return setmetatable({ ids = o.ids, joins = joins, cut = o.cut, _o = o, _model = model, _top = top,
    _kept = { trie, joined, scores, bytes }, _words = {}, _cached = 0 }, Vocabulary)
end

--- Returns `sign` if it is a token and begins words: no token has it after another text. Otherwise nil.
---@param ids table<string, integer>
---@param sign string
---@return string?
function M.cut_at(ids, sign)
  if not ids[sign] then return nil end
  for token in pairs(ids) do
    local at = token:find(sign, 2, true)
    while at do
      if token:sub(at - #sign, at - 1) ~= sign then return nil end
      at = token:find(sign, at + 1, true)
    end
  end
  return sign
end

--- Says that each sign of a space begins a word, whatever is before it.
function Vocabulary:cut_signs() self._model.cuts, self.cut = 2, SIGN end

-- ---- encoding -------------------------------------------------------------------------------------------

local capacity, ends = 0, nil

local found = { ids = nil, sizes = nil }                -- tokens that were found last; sizes: of bytes

local function reserve(n)
  if n <= capacity then return end
  if n > LONGEST then errors.raise "encode: a word has more than 2^26 bytes" end
  local larger = math.min(math.max(4096, 2 * n), LONGEST)
  capacity = 0                                            -- and so it stays if there is no memory
  found.ids, found.sizes = ffi.new(INTS, larger), ffi.new(INTS, larger)
  ends = ffi.new("ms_text_end[?]", larger + 1)
  capacity = larger
end

-- Where a text can be cut from byte `at` on: before a sign of a space that follows another character; its end otherwise.
local function block_end(bytes, at, n)
  local function sign(k) return k + 2 < n and bytes[k] == 0xe2 and bytes[k + 1] == 0x96 and bytes[k + 2] == 0x81 end
  while at < n and (not sign(at) or sign(at - 3)) do at = at + 1 end
  return at
end

--- Finds the tokens of a text of n bytes, or of a part that tokens do not cross, from byte `at` on.
---@param bytes ffi.cdata*  const uint8_t *
---@param at integer  from 0
---@param n integer
---@param sum number  of the scores before it
---@return integer stop  the end of the part
---@return integer count  of tokens
---@return number sum
function Vocabulary:part(bytes, at, n, sum)
  local stop = (n - at <= 2 * BLOCK or not self.cut) and n or block_end(bytes, at + BLOCK, n)
  reserve(stop - at)
  local text = ffi.cast(char_p, bytes + at)
  local count
  if self.joins then
    count = lib.ms_text_bpe(self._model, text, stop - at, found.ids, found.sizes)
  else
    ends[0].best = sum
    count = lib.ms_text_unigram(self._model, text, stop - at, ends, found.ids, found.sizes)
    sum = ends[stop - at].best
  end
  if count < 0 then errors.raise("encode: no memory for a word of %d bytes", stop - at) end
  return stop, count, sum
end

--- The tokens of a word in a text, and the sum of scores after it. Field `n` of the list is their number, `sizes` has
--- their bytes.
---@param word string
---@param sum number  of the scores before it
---@return integer[]
---@return number
function Vocabulary:chunk(word, sum)
  local ids, sizes, n, at = {}, {}, 0, 0
  while at < #word do
    local count
    at, count, sum = self:part(ffi.cast(byte_p, word), at, #word, sum)
    for k = 1, count do ids[n + k], sizes[n + k] = found.ids[k - 1], found.sizes[k - 1] end
    n = n + count
  end
  ids.sizes, ids.n = sizes, n
  return ids, sum
end

--- Adds the tokens of a text to a list.
---@param list table  ids, n, reserve(more)
---@param bytes ffi.cdata*  const uint8_t *
---@param n integer
---@param sum number  of the scores before it
---@return number sum
function Vocabulary:add(list, bytes, n, sum)
  local at = 0
  while at < n do
    local count
    at, count, sum = self:part(bytes, at, n, sum)
    local to, ids = list:reserve(count) + list.n, found.ids
    for k = 0, count - 1 do to[k] = ids[k] end
    list.n = list.n + count
  end
  return sum
end

--- The tokens that encode(self, word) gives, which are remembered in self._words; self._cached is their number.
function M.remembered(self, word, encode)
  local known = self._words[word]
  if known then return known end
  local ids = encode(self, word)
  ids.n = #ids                                          -- # would search for the end at every use
  if #word <= REMEMBERED then
    if self._cached == WORDS then self._words, self._cached = {}, 0 end
    self._words[word], self._cached = ids, self._cached + 1
  end
  return ids
end

local function encode_word(self, word)
  local whole = self._o.whole and self.ids[word]
  if whole then return { whole, sizes = { #word } } end
  return (self:chunk(word, 0))
end

--- The tokens of a word: a list of ids; field `n` is their number, `sizes` has their bytes. Neither may be changed.
---@param word string
---@return integer[]
function Vocabulary:encode(word) return M.remembered(self, word, encode_word) end

--- The sum of scores after a token that a user has defined.
---@param size integer  its bytes
---@param sum number
---@return number
function Vocabulary:defined(size, sum) return single(sum + (single(size * self._top) - 0.1)) end

return M
