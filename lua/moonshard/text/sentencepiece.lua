-- SPDX-License-Identifier: MIT
--- SentencePiece's model files: a message of Protocol Buffers with pieces, their scores, and how text is normalized.
local charsmaps = require "moonshard.text.charsmap"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local pieces = require "moonshard.text.pieces"
local vocabulary = require "moonshard.text.vocabulary"
local ffi, lib = engine.ffi, engine.lib

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

local Normalizer = {}
Normalizer.__index = Normalizer

local byte_p = ffi.typeof "const uint8_t *"
local room, made, origins = 0, nil, nil                 -- of the text that was normalized last; origins: if traced
local MOST, MOST_TRACED = 2 ^ 30, 2 ^ 27                -- bytes of the room; LuaJIT's arrays have less than 2^31

local function normalizer(spec, map)
  local units = ffi.new("uint32_t[?]", map.count)
  for k = 0, map.count - 1 do units[k] = map.units[k] end
  local of = ffi.new("ms_text_map", { units = units, texts = map.texts, count = map.count, texts_size = #map.texts,
    prefix = spec.prefix ~= 0 and 1 or 0, squeezes = spec.squeezes ~= 0 and 1 or 0,
    escapes = spec.escapes ~= 0 and 1 or 0 })
  return setmetatable({ _map = of, _kept = { units, map.texts } }, Normalizer)
end

-- Normalizes a string into made and, with `traced`, origins; returns its size.
function Normalizer:_run(s, traced)
  local most = traced and MOST_TRACED or MOST
  while true do
    local has_room = room > #s and (origins or not traced)
    local n = has_room and lib.ms_text_normalize(self._map, s, #s, made, traced and origins or nil, room) or -1
    if n >= 0 then return n end
    local larger = math.max(4096, 2 * #s, has_room and 2 * room or 0)
    if larger > most then
      errors.raise("encode: a text of %d bytes is too long%s; divide it", #s, traced and " for offsets" or "")
    end
    made, origins, room = nil, nil, 0                     -- and so they stay if there is no memory
    local bytes, places = ffi.new("char[?]", larger), traced and ffi.new("int[?]", larger) or nil
    made, origins, room = bytes, places, larger
  end
end

--- The normalized piece.
function Normalizer:__call(piece)
  local n = self:_run(piece.s, not piece.plain)
  local from = {}
  for k = 1, piece.plain and 0 or n + 1 do from[k] = pieces.origin(piece, origins[k - 1] + 1, origins[k - 1] + 1) end
  return { s = ffi.string(made, n), at = 0, first = from, last = from, plain = piece.plain }
end

-- Encodes texts without offsets.
local Direct = {}
Direct.__index = Direct

--- Adds the tokens of a text to a list; returns false, and adds none, if it has a token that a user has defined.
---@param list table  ids, n, reserve(more)
---@param s string
---@param defined? table  finds tokens that a user has defined
---@return boolean
function Direct:add(list, s, defined)
  local n = self.normalizer:_run(s)
  if defined and defined:finds(ffi.string(made, n)) then return false end
  self.model:add(list, ffi.cast(byte_p, made), n, 0)
  return true
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
    single = true, cut = vocabulary.cut_at(ids, SPACE), joins = train.kind == 2 }
  local named = {}
  for name, id in pairs { bos_id = train.bos, eos_id = train.eos, pad_id = train.pad } do
    named[name] = whole_is(id) and tokens[id] or nil
  end
  local model, normalizes = vocabulary.new(o), normalizer(spec, map)
  return { model = model, tokens = tokens, added = added, splitters = {}, spans = true, normalizer = normalizes,
    direct = setmetatable({ model = model, normalizer = normalizes }, Direct),
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
      if not piece then damaged(("piece %d"):format(#list)) end
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
  local places = { {}, {} }                             -- of pieces of texts, and of reserved ones, by their text
  for k, piece in ipairs(list) do
    if piece.type == UNUSED then
      errors.raise("%s: '%s': piece %d is unused, which Moonshard does not have", who, path, k - 1)
    end
    local of = places[(piece.type == 1 or piece.type == USER) and 1 or 2]
    if piece.text == "" then damaged(("piece %d is empty"):format(k - 1)) end
    if piece.score - piece.score ~= 0 then
      damaged(("piece %d ('%s') has the score %g"):format(k - 1, piece.text, piece.score))
    end
    if of[piece.text] then damaged(("pieces %d and %d are both '%s'"):format(of[piece.text], k - 1, piece.text)) end
    of[piece.text] = k - 1
  end
  return M.of(list, train, spec, damaged)
end

return M
