-- SPDX-License-Identifier: MIT
--- The unigram model (Kudo 2018): of all ways to divide a word into tokens, the one with the largest sum of scores
--- (Viterbi 1967).
local bpe = require "moonshard.text.bpe"
local engine = require "moonshard.core.ffi"
local pieces = require "moonshard.text.pieces"

local PENALTY = 10                                      -- an unknown character scores so much less than any token

local Unigram = {}
Unigram.__index = Unigram

local M = {}

local rounded = engine.ffi.new "float[1]"
local function single(x)
  rounded[0] = x
  return rounded[0]
end

--- A model. o.ids: ids by token; o.scores: by id; o.unknown: id of characters without a token; neighbouring ones become
--- one; o.bytes: ids by byte, for these; o.single: sums are rounded to single precision.
function M.new(o)
  local begins, least = {}, 0
  for token, id in pairs(o.ids) do
    for k = 1, #token do begins[token:sub(1, k)] = true end
    least = math.min(least, o.scores[id])
  end
  local unknown = o.single and single(least - PENALTY) or least - PENALTY
  return setmetatable({ _o = o, _begins = begins, _unknown = unknown, _words = {}, _cached = 0 }, Unigram)
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

local function encode_word(self, word)
  local o, begins, n = self._o, self._begins, #word
  local best, from, token = { [0] = 0 }, {}, {}         -- of the way to the end of byte k
  local at = 1
  local function offer(stop, score, id)
    if o.single then score = single(score) end
    if not best[stop] or score > best[stop] then best[stop], from[stop], token[stop] = score, at, id end
  end
  while at <= n do
    local char_stop, has_char = pieces.char_end(word, at), false
    local score = best[at - 1]
    for stop = at, n do
      local text = word:sub(at, stop)
      if not begins[text] then break end
      local id = o.ids[text]
      if id then
        offer(stop, score + o.scores[id], id)
        has_char = has_char or stop == char_stop
      end
    end
    if not has_char then offer(char_stop, score + self._unknown, false) end
    at = char_stop + 1
  end
  local way, stop = {}, n
  while stop > 0 do
    way[#way + 1] = stop
    stop = from[stop] - 1
  end
  local ids, sizes, unknown = {}, {}, nil
  for k = #way, 1, -1 do
    stop = way[k]
    if token[stop] and token[stop] ~= o.unknown then
      if unknown then add_unknown(o, word, unknown, from[stop] - 1, ids, sizes) end
      ids[#ids + 1], sizes[#sizes + 1], unknown = token[stop], stop - from[stop] + 1, nil
    else
      unknown = unknown or from[stop]
    end
  end
  if unknown then add_unknown(o, word, unknown, n, ids, sizes) end
  ids.sizes = sizes
  return ids
end

--- The tokens of a word, as BPE:encode.
---@param word string
---@return integer[]
function Unigram:encode(word) return bpe.remembered(self, word, encode_word) end

return M
