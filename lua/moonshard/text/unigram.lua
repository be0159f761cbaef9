-- SPDX-License-Identifier: MIT
--- The unigram model (Kudo 2018): of all ways to divide a word into tokens, the one with the largest sum of scores
--- (Viterbi 1967).
local bpe = require "moonshard.text.bpe"
local engine = require "moonshard.core.ffi"
local pieces = require "moonshard.text.pieces"
local ffi = engine.ffi

local PENALTY = 10                                      -- an unknown character scores so much less than any token

local Unigram = {}
Unigram.__index = Unigram

local M = {}

local rounded = ffi.new "float[1]"
local function single(x)
  rounded[0] = x
  return rounded[0]
end

--- A model. o.ids: ids by token; o.scores: by id; o.unknown: id of characters without a token; neighbouring ones become
--- one; o.bytes: ids by byte, for these; o.single: sums are rounded to single precision. o.cut: as for a BPE.
function M.new(o)
  -- A trie: from node k (0: the root) byte c leads to node nodes[256 * k + c], whose token is tokens[node] or false.
  local nodes, tokens, count, least, most, top = {}, {}, 0, 0, 0, 0
  for token, id in pairs(o.ids) do
    local node = 0
    for k = 1, #token do
      local key = 256 * node + token:byte(k)
      node = nodes[key]
      if not node then
        count = count + 1
        node, nodes[key], tokens[count] = count, count, false
      end
    end
    if node > 0 then tokens[node] = id end
    least, top = math.min(least, o.scores[id]), math.max(top, o.scores[id])
    most = math.max(most, math.abs(o.scores[id]))
  end
  local unknown = o.single and single(least - PENALTY) or least - PENALTY
  return setmetatable({ cut = o.cut, _o = o, _nodes = nodes, _tokens = tokens, _unknown = unknown, _top = top,
    reach = math.max(most, math.abs(unknown)), _words = {}, _cached = 0 }, Unigram)
end

-- Adds the tokens of bytes i to j, which have no token: one for each byte if all have one, otherwise the unknown one.
-- The first byte's token has all the bytes, the others have none; with o.single, each has its own.
local function add_unknown(o, word, i, j, ids, sizes)
  local all = o.bytes
  for k = i, all and j or 0 do all = all and o.bytes[word:byte(k)] end
  if not all then
    ids[#ids + 1], sizes[#sizes + 1] = o.unknown, o.unknown and j - i + 1
    return
  end
  for k = i, j do
    ids[#ids + 1], sizes[#sizes + 1] = o.bytes[word:byte(k)], o.single and 1 or k == i and j - i + 1 or 0
  end
end

-- ---- the best way -------------------------------------------------------------------------------------

-- Of the way to byte k: the largest sum; the sum with the second best last token; the byte before the last token, -1
-- before there is a way; the last token's id, -1 for an unknown character.
local capacity, best, second, from, last = 0, nil, nil, nil, nil
local function reserve(n)
  if n <= capacity then return end
  capacity = math.max(256, 2 * n)
  best, second = ffi.new("double[?]", capacity), ffi.new("double[?]", capacity)
  from, last = ffi.new("int32_t[?]", capacity), ffi.new("int32_t[?]", capacity)
end

local function offer(at, stop, score, id)
  if from[stop] < 0 or score > best[stop] then
    second[stop], best[stop], from[stop], last[stop] = best[stop], score, at, id
  elseif score > second[stop] then
    second[stop] = score
  end
end

local byte_p = ffi.typeof "const uint8_t *"

-- Finds the best way through a word. sum: of the scores before it; rounds: sums are rounded.
local function search(self, word, sum, rounds)
  local nodes, tokens, scores, n, at = self._nodes, self._tokens, self._o.scores, #word, 0
  local bytes = ffi.cast(byte_p, word)
  reserve(n + 1)
  for k = 1, n do best[k], from[k] = -math.huge, -1 end
  best[0] = sum
  while at < n do
    local char_stop, has_char, node = pieces.char_end(word, at + 1), false, 0
    for stop = at + 1, n do
      node = nodes[256 * node + bytes[stop - 1]]
      if not node then break end
      local id = tokens[node]
      if id then
        local score = best[at] + scores[id]
        offer(at, stop, rounds and single(score) or score, id)
        has_char = has_char or stop == char_stop
      end
    end
    if not has_char then
      local score = best[at] + self._unknown
      offer(at, char_stop, rounds and single(score) or score, -1)
    end
    at = char_stop
  end
end

-- The tokens of the best way that was found last.
local function way_of(self, word)
  local o, way, stop = self._o, {}, #word
  while stop > 0 do
    way[#way + 1] = stop
    stop = from[stop]
  end
  local ids, sizes, unknown = {}, {}, nil
  for k = #way, 1, -1 do
    stop = way[k]
    if last[stop] >= 0 and last[stop] ~= o.unknown then
      if unknown then add_unknown(o, word, unknown, from[stop], ids, sizes) end
      ids[#ids + 1], sizes[#sizes + 1], unknown = last[stop], stop - from[stop], nil
    else
      unknown = unknown or from[stop] + 1
    end
  end
  if unknown then add_unknown(o, word, unknown, #word, ids, sizes) end
  ids.sizes, ids.n = sizes, #ids
  return ids, way
end

local function encode_word(self, word)
  search(self, word, 0, self._o.single)
  return (way_of(self, word))
end

--- The tokens of a word, as BPE:encode.
---@param word string
---@return integer[]
function Unigram:encode(word) return bpe.remembered(self, word, encode_word) end

--- The tokens of a word in a text, and the sum of scores after it.
---@param word string
---@param sum number  of the scores before it
---@return integer[]
---@return number
function Unigram:chunk(word, sum)
  search(self, word, sum, true)
  return way_of(self, word), best[#word]
end

--- The sum of scores after a token that a user has defined.
---@param size integer  its bytes
---@param sum number
---@return number
function Unigram:defined(size, sum) return single(sum + size * self._top - 0.1) end

--- The tokens of a word in a text, and what tells whether they are the same after any sum of scores: sums that were
--- compared on the way differ by `gap` at least. `steps`: the scores of the way's steps. Each character adds at most
--- self.reach to a sum.
---@param word string
---@return integer[]
function Unigram:remember(word)
  search(self, word, 0, false)
  local ids, way = way_of(self, word)
  local steps, gap = {}, math.huge
  for k = #way, 1, -1 do
    local stop = way[k]
    steps[#steps + 1] = last[stop] >= 0 and self._o.scores[last[stop]] or self._unknown
    gap = math.min(gap, best[stop] - second[stop])
  end
  ids.steps, ids.gap = steps, gap
  return ids
end

return M
