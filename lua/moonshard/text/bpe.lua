-- SPDX-License-Identifier: MIT
--- The model of byte-pair encoding: a word's characters are tokens first; then the pair of neighbours that was learned
--- first is joined, again and again, the leftmost of equal pairs first.
local pieces = require "moonshard.text.pieces"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local ffi = engine.ffi

local BASE = 2 ^ 24                                     -- a pair of ids as one number: first * BASE + second
local SHORT = 96                                        -- longer words find the next pair in a heap
local CACHED, LONGEST = 2 ^ 17, 256                     -- number of words remembered, and their most bytes
local PLACES = 2 ^ 26                                   -- the most bytes of a word

---@class BPE
---@field ids table<string, integer>  ids by token
local BPE = {}
BPE.__index = BPE
BPE.joins = true

local M = { BASE = BASE }

--- A model. o.ids: ids by token. o.ranks, o.joined: for a pair, its place in the order of learning and the id of its
--- token; without them, a pair joins to the token of its bytes, and tokens were learned in the order of their ids.
--- o.whole: a word that is a token is not joined from its parts. o.by_char: words begin as characters, not as bytes.
--- o.prefix, o.suffix: of a character's token that does not begin, or that ends, a word. o.unknown: the id of a
--- character without a token; o.fuse: neighbouring ones become one. o.bytes: ids by byte, for such characters.
--- o.cut: a text that begins a word unless it follows itself: no token has it after another text.
function M.new(o)
  local self = setmetatable({ ids = o.ids, cut = o.cut, _o = o, _words = {}, _cached = 0 }, BPE)
  if o.ranks then
    self._ranks, self._joined = o.ranks, o.joined
    return self
  end
  local tokens, joined = {}, {}
  for token, id in pairs(o.ids) do tokens[id] = token end
  self._joined = setmetatable(joined, { __index = function(_, pair)
    local a = math.floor(pair / BASE)
    local first, second = tokens[a], tokens[pair - a * BASE]
    local id = first and second and o.ids[first .. second] or false
    joined[pair] = id
    return id
  end })
  self._ranks = joined
  return self
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

-- ---- a word's first tokens ----------------------------------------------------------------------------

local capacity, sym, size, nxt, prv, rank = 0, nil, nil, nil, nil, nil
local function reserve(n)
  if n <= capacity then return end
  if n > PLACES then errors.raise "encode: a word has more than 2^26 bytes" end
  capacity = math.max(256, 2 * n)
  sym, size = ffi.new("int32_t[?]", capacity), ffi.new("int32_t[?]", capacity)
  nxt, prv, rank = ffi.new("int32_t[?]", capacity), ffi.new("int32_t[?]", capacity), ffi.new("double[?]", capacity)
end

local function has_all(bytes, char)
  for k = 1, #char do
    if not bytes[char:byte(k)] then return false end
  end
  return true
end

-- Puts the characters of a word into sym and their bytes into size; returns their number.
local function start(self, word)
  local o, n, at, fused = self._o, 0, 1, false
  reserve(#word + 2)
  local ids = self.ids
  while at <= #word do
    local stop = o.by_char and pieces.char_end(word, at) or at
    local char = word:sub(at, stop)
    local token = char
    if o.prefix and at > 1 then token = o.prefix .. token end
    if o.suffix and stop == #word then token = token .. o.suffix end
    local id = ids[token]
    if id then
      sym[n], size[n], n, fused = id, #char, n + 1, false
    elseif o.bytes and has_all(o.bytes, char) then
      for k = 1, #char do sym[n], size[n], n = o.bytes[char:byte(k)], 1, n + 1 end
      fused = false
    elseif o.unknown then
      if fused and o.fuse then
        size[n - 1] = size[n - 1] + #char
      else
        sym[n], size[n], n, fused = o.unknown, #char, n + 1, true
      end
    elseif n > 0 then                                   -- without any token, the character is left out
      size[n - 1] = size[n - 1] + #char
    end
    at = stop + 1
  end
  return n
end

-- ---- joining ------------------------------------------------------------------------------------------

local huge = math.huge

local function join_short(self, n)
  local ranks, joined = self._ranks, self._joined
  for k = 0, n - 2 do rank[k] = ranks[sym[k] * BASE + sym[k + 1]] or huge end
  while n > 1 do
    local at, least = -1, huge
    for k = 0, n - 2 do
      if rank[k] < least then at, least = k, rank[k] end
    end
    if at < 0 then break end
    sym[at], size[at] = joined[sym[at] * BASE + sym[at + 1]], size[at] + size[at + 1]
    n = n - 1
    for k = at + 1, n - 1 do sym[k], size[k], rank[k] = sym[k + 1], size[k + 1], rank[k + 1] end
    if at > 0 then rank[at - 1] = ranks[sym[at - 1] * BASE + sym[at]] or huge end
    if at < n - 1 then rank[at] = ranks[sym[at] * BASE + sym[at + 1]] or huge end
  end
  return n
end

-- A heap of places, ordered by the rank of the pair there, then by place: key = rank * PLACES + place.
local function push(heap, n, key)
  n = n + 1
  local k = n
  while k > 1 do
    local up = math.floor(k / 2)
    if heap[up] <= key then break end
    heap[k], k = heap[up], up
  end
  heap[k] = key
  return n
end

local function pop(heap, n)
  local top, key = heap[1], heap[n]
  n = n - 1
  local k = 1
  while true do
    local down = 2 * k
    if down > n then break end
    if down < n and heap[down + 1] < heap[down] then down = down + 1 end
    if heap[down] >= key then break end
    heap[k], k = heap[down], down
  end
  heap[k] = key
  return top, n
end

local function join_long(self, n)
  local ranks, joined, heap, held = self._ranks, self._joined, {}, 0
  local function offer(k)
    local next_one = nxt[k]
    local r = next_one < n and ranks[sym[k] * BASE + sym[next_one]]
    rank[k] = r or huge
    if r then held = push(heap, held, r * PLACES + k) end
  end
  for k = 0, n - 1 do nxt[k], prv[k] = k + 1, k - 1 end
  for k = 0, n - 2 do offer(k) end
  while held > 0 do
    local key
    key, held = pop(heap, held)
    local k = key % PLACES
    if rank[k] == math.floor(key / PLACES) then         -- else the pair was joined, or is another one now
      local gone = nxt[k]
      sym[k], size[k] = joined[sym[k] * BASE + sym[gone]], size[k] + size[gone]
      nxt[k], rank[gone], size[gone] = nxt[gone], huge, 0
      if nxt[gone] < n then prv[nxt[gone]] = k end
      rank[k] = huge
      if nxt[k] < n then offer(k) end
      if prv[k] >= 0 then offer(prv[k]) end
    end
  end
  local m, k = 0, 0
  while k < n do
    sym[m], size[m], k, m = sym[k], size[k], nxt[k], m + 1
  end
  return m
end

-- The tokens of one word, which are not remembered.
local function encode_word(self, word)
  local whole = self._o.whole and self.ids[word]
  if whole then return { whole, sizes = { #word } } end
  local ids, sizes, n = {}, {}, start(self, word)
  n = n <= SHORT and join_short(self, n) or join_long(self, n)
  for k = 1, n do ids[k], sizes[k] = sym[k - 1], size[k - 1] end
  ids.sizes = sizes
  return ids
end

--- The tokens that encode(self, word) gives, which are remembered in self._words; self._cached is their number.
function M.remembered(self, word, encode)
  local found = self._words[word]
  if found then return found end
  local ids = encode(self, word)
  ids.n = #ids                                          -- # would search for the end at every use
  if #word <= LONGEST then
    if self._cached == CACHED then self._words, self._cached = {}, 0 end
    self._words[word], self._cached = ids, self._cached + 1
  end
  return ids
end

-- Where o.cut begins a word in a text after byte `at`; nil if nowhere.
local function next_cut(text, cut, at)
  local from = text:find(cut, at + 1, true)
  while from and text:sub(from - #cut, from - 1) == cut do from = text:find(cut, from + 1, true) end
  return from
end

--- The tokens of a word: a list of ids; field `n` is their number, `sizes` has their bytes. Neither may be changed.
---@param word string
---@return integer[]
function BPE:encode(word)
  local cut = self._o.cut
  local from = cut and next_cut(word, cut, 1)
  if not from then return M.remembered(self, word, encode_word) end
  local ids, sizes, n, at = {}, {}, 0, 1
  while at <= #word do
    local part = M.remembered(self, word:sub(at, from and from - 1 or #word), encode_word)
    for k = 1, #part do
      n = n + 1
      ids[n], sizes[n] = part[k], part.sizes[k]
    end
    if not from then break end
    at, from = from, next_cut(word, cut, from)
  end
  ids.sizes, ids.n = sizes, n
  return ids
end

return M
