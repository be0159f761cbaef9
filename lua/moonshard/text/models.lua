-- SPDX-License-Identifier: MIT
--- The models of tokenizer.json: how a word becomes tokens.
local bytes = require "moonshard.text.byte_level"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local nodes = require "moonshard.text.node"
local opts = require "moonshard.core.opts"
local vocabulary = require "moonshard.text.vocabulary"

local M = {}

local SPACE = "\226\150\129"                          -- U+2581, which stands for a space

--- The object of ids by token at a key.
---@return table<string, integer>
function M.vocabulary(node, key)
  local of, ids = key and node:child(key, true) or node, {}
  for token in pairs(of.value) do
    if type(token) ~= "string" then of:fail(nil, "is a list, expected an object of ids by token") end
    ids[token] = of:get(token, nodes.ID, true)
  end
  return ids
end

--- Ids by the bytes of their tokens. Tokens with other characters than the bytes' alphabet are left out: no text has
--- them.
---@param ids table<string, integer>
---@return table<string, integer>
function M.by_bytes(ids)
  local out = {}
  for token, id in pairs(ids) do
    local as_bytes = bytes.of(token)
    if as_bytes then out[as_bytes] = id end
  end
  return out
end

--- The merges of a list, for vocabulary.new. Each is "a b" or { "a", "b" }.
---@param node table  the list's node
---@param ids table<string, integer>  by token, as the file writes it
---@param skipped integer  number of bytes at the beginning of b that the joined token lacks
---@return integer[]
function M.merges(node, ids, skipped)
  local list = {}
  for k = 1, #node.value do
    local pair, a, b = node.value[k], nil, nil
    if type(pair) == "string" then
      a, b = pair:match "^([^ ]+) ([^ ]+)$"
    elseif type(pair) == "table" and #pair == 2 then
      a, b = pair[1], pair[2]
    end
    if type(a) ~= "string" or type(b) ~= "string" then node:fail(k, "is not a pair of tokens") end
    local first, second, both = ids[a], ids[b], ids[a .. b:sub(skipped + 1)]
    if not (first and second and both) then
      node:fail(k, ("joins %s and %s, of which %s is not in the vocabulary"):format(errors.show(a), errors.show(b),
        not first and "the first" or not second and "the second" or "the token of both"))
    end
    local at = 4 * k
    list[at - 3], list[at - 2], list[at - 1], list[at] = first, second, k - 1, both
  end
  return list
end

local kinds = {}

function kinds.BPE(node, is_bytes)
  node:only("dropout", 0)
  local ids = M.vocabulary(node, "vocab")
  local function text(key)
    local value = node:get(key, opts.string)
    return value ~= "" and value or nil
  end
  local prefix, suffix = text "continuing_subword_prefix", text "end_of_word_suffix"
  local merges = M.merges(node:child("merges", true), ids, prefix and #prefix or 0)
  local unknown, fallback = text "unk_token", nil
  if unknown and not ids[unknown] then node:fail("unk_token", ("is '%s', which vocab lacks"):format(unknown)) end
  if node:get("byte_fallback", opts.boolean) then
    fallback = {}
    for b = 0, 255 do fallback[b] = ids[("<0x%02X>"):format(b)] end
  end
  local cut = not (is_bytes or prefix or suffix) and vocabulary.cut_at(ids, SPACE) or nil
  return vocabulary.new { cut = cut, ids = is_bytes and M.by_bytes(ids) or ids, merges = merges, by_byte = is_bytes,
    whole = node:get("ignore_merges", opts.boolean), prefix = prefix, suffix = suffix,
    unknown = unknown and ids[unknown], apart = not node:get("fuse_unk", opts.boolean), bytes = fallback }, ids
end

-- ---- WordPiece ----------------------------------------------------------------------------------------

local WordPiece = {}
WordPiece.__index = WordPiece

-- The longest token that begins the word, then the longest of the rest with the prefix before it, and so on. A word
-- whose rest has no token is unknown.
local function split_word(self, word)
  local ids, sizes, at = {}, {}, 1
  local unknown = { self.unknown, sizes = { #word } }
  local _, chars = word:gsub("[^\128-\191]", "")
  if chars > self.most then return unknown end
  while at <= #word do
    local stop, id = math.min(#word, at + self.longest - 1), nil
    while stop >= at do
      id = self.ids[(at > 1 and self.prefix or "") .. word:sub(at, stop)]
      if id then break end
      stop = stop - 1
    end
    if not id then return unknown end
    ids[#ids + 1], sizes[#sizes + 1] = id, stop - at + 1
    at = stop + 1
  end
  ids.sizes = sizes
  return ids
end

function WordPiece:encode(word) return vocabulary.remembered(self, word, split_word) end

function kinds.WordPiece(node)
  local ids, longest = M.vocabulary(node, "vocab"), 0
  for token in pairs(ids) do longest = math.max(longest, #token) end
  local unknown = node:get("unk_token", opts.string, true)
  if not ids[unknown] then node:fail("unk_token", ("is '%s', which vocab lacks"):format(unknown)) end
  return setmetatable({ ids = ids, unknown = ids[unknown], longest = longest, _words = {}, _cached = 0,
    prefix = node:get("continuing_subword_prefix", opts.string) or "##",
    most = node:get("max_input_chars_per_word", opts.whole_from(0)) or 100 }, WordPiece), ids
end

local significand = engine.ffi.new "uint64_t[1]"

-- A score as the reference reads it: the digits as a whole number, rounded, over a power of ten. The last bit decides
-- between ways whose tokens are the same in another order.
local function rounded(score)
  local text
  for digits = 15, 17 do
    text = ("%%.%de"):format(digits - 1):format(score)
    if tonumber(text) == score then break end
  end
  local sign, first, rest, exponent = text:match "^(%-?)(%d)%.?(%d*)e([+-]%d+)$"
  if not first then return score end
  rest = rest:gsub("0+$", "")
  significand[0] = 0
  for digit in (first .. rest):gmatch "." do significand[0] = significand[0] * 10 + tonumber(digit) end
  local shift, value = tonumber(exponent) - #rest, tonumber(significand[0])
  if math.abs(shift) > 300 then return score end
  local power = tonumber("1e" .. math.abs(shift))
  value = shift < 0 and value / power or value * power
  return sign == "-" and -value or value
end

-- A list of [token, score].
function kinds.Unigram(node)
  local ids, scores = {}, {}
  for k, pair in ipairs(node:list("vocab", true)) do
    local token = pair:get(1, opts.string, true)
    scores[k - 1] = rounded(pair:get(2, opts.number, true))
    ids[token] = ids[token] or k - 1
  end
  local unknown, fallback = node:get("unk_id", opts.whole_from(0)), nil
  if unknown and not scores[unknown] then node:fail("unk_id", ("is %d, but vocab ends before"):format(unknown)) end
  if node:get("byte_fallback", opts.boolean) then
    fallback = {}
    for b = 0, 255 do fallback[b] = ids[("<0x%02X>"):format(b)] end
  end
  return vocabulary.new { ids = ids, scores = scores, unknown = unknown, bytes = fallback }, ids
end

--- The model of a node of tokenizer.json.
---@param node table
---@param is_bytes boolean  words are bytes
---@return table model  with a method encode
---@return table<string, integer> ids  by token
function M.read(node, is_bytes)
  local kind = node:get("type", opts.string) or node.value.merges and "BPE"
  if not kind then node:fail("type", "is missing") end
  if not kinds[kind] then node:fail("type", ("is '%s', which Moonshard does not have"):format(kind)) end
  return kinds[kind](node, is_bytes)
end

return M
