-- SPDX-License-Identifier: MIT
--- SentencePiece's model files: a message of Protocol Buffers with pieces, their scores, and how text is normalized.
local bpe = require "moonshard.text.bpe"
local charsmaps = require "moonshard.text.charsmap"
local chunks = require "moonshard.text.chunks"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local pieces = require "moonshard.text.pieces"
local unigram = require "moonshard.text.unigram"
local ffi = engine.ffi

local M = {}

local SPACE = "\226\150\129"                            -- U+2581, which stands for a space
local UNKNOWN, CONTROL, USER, UNUSED, BYTE = 2, 3, 4, 5, 6       -- types of pieces; 1: normal
local UNKNOWN_TEXT = " \226\129\135 "                   -- what an unknown piece is as text

-- ---- Protocol Buffers -----------------------------------------------------------------------------------

local number = ffi.new "union { uint8_t bytes[4]; uint32_t bits; float value; }"

local function varint(s, at)
  local value, factor = 0, 1
  for k = at, at + 9 do
    local c = s:byte(k)
    if not c then return nil end
    value = value + c % 128 * factor
    if c < 128 then return value < 2 ^ 63 and value or -1, k + 1 end       -- the only negative values are -1
    factor = factor * 128
  end
end

-- Calls fn(field, value) for the fields of a message; returns whether it is whole.
local function each_field(s, fn)
  local at = 1
  while at <= #s do
    local key, value
    key, at = varint(s, at)
    if not key then return false end
    local kind = key % 8
    if kind == 0 then
      value, at = varint(s, at)
    elseif kind == 2 then
      value, at = varint(s, at)
      if not value or value < 0 or at + value - 1 > #s then return false end
      value, at = s:sub(at, at + value - 1), at + value
    elseif kind == 5 or kind == 1 then
      local size = kind == 5 and 4 or 8
      if at + size - 1 > #s then return false end
      for k = 0, size == 4 and 3 or -1 do number.bytes[k] = s:byte(at + k) end
      -- LuaJIT takes some NaNs that it did not make for values of other types.
      value, at = number.bits % 2 ^ 31 > 0x7f800000 and 0 / 0 or tonumber(number.value), at + size
    end
    if not value then return false end
    fn(math.floor(key / 8), value)
  end
  return true
end

-- Reads the fields of a message that `names` has, over the defaults in `into`; nil if it is damaged.
local function read(s, names, into)
  local right = type(s) == "string"
  local whole = right and each_field(s, function(field, value)
    local name = names[field]
    if name and into[name] ~= nil and type(into[name]) ~= type(value) then right = false end
    if name then into[name] = value end
  end)
  return right and whole and into or nil
end

-- ---- normalizing ----------------------------------------------------------------------------------------

-- A function that normalizes a string: fn(s, is_space, change) calls change(at, stop, old, new) for its parts, and
-- returns the new string, whether it ends in a space, and whether a space and what follows it could have changed it.
-- is_space: what is before the string ends in a space.
local function mapper(spec, map)
  local squeezes, sign, keeps_ascii = spec.squeezes ~= 0, spec.escapes ~= 0 and SPACE or " ", map:keeps_ascii()
  return function(s, is_space, change)
    if keeps_ascii and not change and s:find "^ *[\33-\126]+$" then
      if squeezes then s = s:gsub("^ +", is_space and "" or " ") end
      return s:gsub(" ", sign), false, false
    end
    local out, at, goes_on = {}, 1, false
    while at <= #s do
      local new, size, more = map:longest(s, at)
      local stop = size and at + size - 1 or pieces.char_end(s, at)
      local old = s:sub(at, stop)
      new = new or (#old == 1 and old:byte() > 127 and "\239\191\189" or old)
      if is_space then new = new:match "^ *(.*)$" end
      if new ~= "" then
        is_space = squeezes and new:sub(-1) == " "
        new = new:gsub(" ", sign)
      end
      out[#out + 1] = new
      if change then change(at, stop, old, new) end
      at, goes_on = stop + 1, goes_on or more
    end
    return table.concat(out), is_space, goes_on
  end
end

local function normalizer(spec, maps)
  local prefix, squeezes = spec.prefix ~= 0, spec.squeezes ~= 0
  local sign = spec.escapes ~= 0 and SPACE or " "
  return function(piece)
    local changes, seen = {}, false
    maps(piece.s, squeezes, function(at, stop, old, new)
      if new ~= "" and not seen and prefix then new = sign .. new end
      seen = seen or new ~= ""
      if new ~= old then changes[#changes + 1] = { at, stop, new, at } end
    end)
    piece = pieces.change(piece, changes)
    local stop = #piece.s
    while squeezes and stop > 0 and piece.s:sub(stop - #sign + 1, stop) == sign do stop = stop - #sign end
    return pieces.part(piece, 1, stop)
  end
end

-- Encodes texts by chunks; nil if tokens could reach from one to the next. added: the tokens that a user has defined.
local function chunks_of(spec, map, maps, model, added)
  if not model.cut or spec.escapes == 0 or map:begins(32) then return nil end
  for _, token in ipairs(added) do
    if token.normalized and token.text:find(SPACE, 1, true) then return nil end
  end
  return chunks.new { model = model, maps = maps, sign = SPACE, prefix = spec.prefix ~= 0,
    squeezes = spec.squeezes ~= 0 }
end

-- ---- decoding -------------------------------------------------------------------------------------------

local function decoder(spec, unknown, bytes)
  local all = spec.squeezes ~= 0
  local strips = spec.prefix ~= 0 or all
  return function(tokens)
    local out, begins = {}, strips
    for k, token in ipairs(tokens) do
      local text = token == unknown and UNKNOWN_TEXT or bytes[token]
      if not text then
        if begins and token:sub(1, #SPACE) == SPACE then
          token, begins = token:sub(#SPACE + 1), all
        end
        text = token:gsub(SPACE, " ")
      end
      if text ~= "" then begins = false end
      out[k] = text
    end
    return out
  end
end

-- ---- the file -------------------------------------------------------------------------------------------

local function whole_is(v) return type(v) == "number" and v % 1 == 0 end

--- The parts of a tokenizer (see tokenizer.new) of a model's pieces.
---@param list { text: string, score: number, type: integer }[]
---@param train { kind: integer, fallback: integer, bos: integer?, eos: integer?, pad: integer? }  kind: 1 is unigram, 2 is BPE
---@param spec { map: string, prefix: integer, squeezes: integer, escapes: integer }
---@param damaged fun(what: string)  raises an error
---@return table
function M.of(list, train, spec, damaged)
  local map, why = charsmaps.new(spec.map)
  if not map then damaged("precompiled_charsmap " .. why) end
  local ids, scores, tokens, added, fallback, texts, unknown = {}, {}, {}, {}, {}, {}, nil
  for k, piece in ipairs(list) do
    local id, kind = k - 1, piece.type
    tokens[id] = kind ~= UNUSED and piece.text or nil
    if kind == UNKNOWN then
      unknown = id
    elseif kind == CONTROL then
      added[#added + 1] = { id = id, text = piece.text, special = true }
    elseif kind == USER then
      added[#added + 1] = { id = id, text = piece.text:gsub(" ", SPACE), normalized = true, verbatim = true }
    elseif kind == BYTE then
      local b = tonumber(piece.text:match "^<0x(%x%x)>$" or "", 16)
      if not b then damaged(("piece %d"):format(id)) end
      fallback[b], texts[piece.text] = id, string.char(b)
    elseif kind ~= UNUSED then
      ids[piece.text], scores[id] = ids[piece.text] or id, piece.score
    end
  end
  if not unknown then damaged "it has no unknown piece" end
  local o = { ids = ids, scores = scores, unknown = unknown, bytes = train.fallback ~= 0 and fallback or nil,
    fuse = true, by_char = true, single = true, cut = bpe.cut_at(ids, SPACE) }
  local named = {}
  for name, id in pairs { bos_id = train.bos, eos_id = train.eos, pad_id = train.pad } do
    named[name] = whole_is(id) and tokens[id] or nil
  end
  local model, maps = train.kind == 2 and bpe.new(o) or unigram.new(o), mapper(spec, map)
  return { model = model, tokens = tokens, added = added, splitters = {}, spans = true,
    normalizer = normalizer(spec, maps), chunks = chunks_of(spec, map, maps, model, added),
    decoder = decoder(spec, tokens[unknown], texts), named = named }
end

--- The parts of a tokenizer (see tokenizer.new) of a model file's bytes.
---@param text string
---@param path string  for errors
---@param who string
---@return table
function M.parts(text, path, who)
  local function damaged(what) errors.raise("%s: '%s' is damaged, or no model of SentencePiece: %s", who, path, what) end
  local list, trainer, normal = {}, nil, nil
  local whole = each_field(text, function(field, value)
    if field == 1 then
      local piece = read(value, { "text", "score", "type" }, { text = "", score = 0, type = 1 })
      if not piece or piece.score ~= piece.score then damaged(("piece %d"):format(#list)) end
      list[#list + 1] = piece
    elseif field == 2 then
      trainer = value
    elseif field == 3 then
      normal = value
    end
  end)
  if not whole or #list == 0 then damaged "it ends within a field, or has no piece" end
  local train = read(trainer, { [3] = "kind", [35] = "fallback", [40] = "unk", [41] = "bos", [42] = "eos", [43] = "pad",
    [24] = "suffix" }, { kind = 1, fallback = 0, unk = 0, bos = 1, eos = 2, pad = -1, suffix = 0 })
  local spec = read(normal, { [2] = "map", [3] = "prefix", [4] = "squeezes", [5] = "escapes" },
    { map = "", prefix = 1, squeezes = 1, escapes = 1 })
  if not train or not spec then damaged "its trainer_spec or normalizer_spec" end
  if train.kind ~= 1 and train.kind ~= 2 or train.suffix ~= 0 then
    errors.raise("%s: '%s': model_type is %d%s, expected 1 (unigram) or 2 (BPE), with spaces before words", who, path,
      train.kind, train.suffix ~= 0 and " and treat_whitespace_as_suffix is set" or "")
  end
  for k, piece in ipairs(list) do
    if piece.type == UNUSED then
      errors.raise("%s: '%s': piece %d is unused, which Moonshard does not have", who, path, k - 1)
    end
  end
  return M.of(list, train, spec, damaged)
end

return M
