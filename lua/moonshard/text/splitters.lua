-- SPDX-License-Identifier: MIT
--- Pre-tokenizers: they divide pieces into words, which tokens do not cross. A splitter is fn(piece, emit, at_start),
--- which calls emit(piece) for each word; at_start: the piece begins the text. The field `regex` of a list of
--- splitters is set if the first one is a regular expression: each match is a word, and each gap, unless `drops` is
--- set; and the others, if there are any, divide equal words in the same way. `prefix` is set if a space is put before
--- texts that begin with none. `signs` is set if the only one makes spaces signs: plain(piece, at_start) is the text
--- with signs; splits: each sign begins a word.
local levels = require "moonshard.text.byte_level"
local opts = require "moonshard.core.opts"
local pieces = require "moonshard.text.pieces"
local regexes = require "moonshard.text.regex"
local vocabulary = require "moonshard.text.vocabulary"

local M = {}

local SIGN = "\226\150\129"                            -- U+2581, which stands for a space

local function regex_of(node, key, pattern)
  local regex, why = regexes.new(pattern, node.who)
  if not regex then node:fail(key, "is no regular expression: " .. why) end
  return regex
end
M.regex_of = regex_of

-- Calls fn(i, j, matches) for the matches of a regular expression and the gaps between them.
local function each(regex, s, fn)
  local at, from = 1, 1
  while from <= #s do
    local i, j = regex:find(s, from)
    if not i then break end
    if j < i then
      from = pieces.char_end(s, i) + 1                  -- an empty match divides nothing
    else
      if i > at then fn(at, i - 1, false) end
      fn(i, j, true)
      at, from = j + 1, j + 1
    end
  end
  if at <= #s then fn(at, #s, false) end
end
M.each = each

local BEHAVIORS = { "Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous" }

-- The ranges into which a regular expression divides a string, by one of the behaviours.
local function ranges_of(regex, s, behavior, invert)
  local list = {}
  each(regex, s, function(i, j, matches)
    local is = matches ~= invert
    local last = list[#list]
    if behavior == "Contiguous" and last and last.is == is
      or behavior == "MergedWithPrevious" and is and last and not last.is then
      last[2], last.is = j, is
    elseif behavior == "MergedWithNext" and last and last.is and not is then
      last[2], last.is = j, false
    elseif behavior ~= "Removed" or not is then
      list[#list + 1] = { i, j, is = is }
    end
  end)
  return list
end

local function split_by(regex, behavior, invert)
  if behavior == "Isolated" or behavior == "Removed" then
    return function(piece, emit)
      each(regex, piece.s, function(i, j, matches)
        if behavior == "Isolated" or matches == invert then emit(pieces.part(piece, i, j)) end
      end)
    end
  end
  return function(piece, emit)
    for _, range in ipairs(ranges_of(regex, piece.s, behavior, invert)) do
      emit(pieces.part(piece, range[1], range[2]))
    end
  end
end

-- Metaspace: a space becomes a sign, usually U+2581, and begins a word.
local function metaspace(node)
  local sign = node:get("replacement", opts.string, true)
  if sign == "" then node:fail("replacement", "is empty") end
  local scheme = node:one_of("prepend_scheme", { "always", "never", "first" })
    or node:get("add_prefix_space", opts.boolean) == false and "never" or "always"
  local split = node:get("split", opts.boolean) ~= false
  local regex = regex_of(node, "replacement", regexes.literal(sign))
  local function prepends(piece, at_start)
    return scheme == "always" or scheme == "first" and at_start and piece.at == 0
  end
  local function plain(piece, at_start)
    local s = piece.s:gsub(" ", sign)
    return prepends(piece, at_start) and #s > 0 and s:sub(1, #sign) ~= sign and sign .. s or s
  end
  return function(piece, emit, at_start)
    local changes, s = {}, piece.s
    if prepends(piece, at_start) and #s > 0 and s:byte() ~= 32 and s:sub(1, #sign) ~= sign then changes[1] = { 1, 0, sign, 1 } end
    local at = s:find(" ", 1, true)
    while at do
      changes[#changes + 1] = { at, at, sign, at }
      at = s:find(" ", at + 1, true)
    end
    piece = pieces.change(piece, changes)
    if not split then return emit(piece) end
    for _, range in ipairs(ranges_of(regex, piece.s, "MergedWithNext", false)) do
      emit(pieces.part(piece, range[1], range[2]))
    end
  end, nil, false, false, sign == SIGN and { plain = plain, splits = split }
end

local kinds = {}

function kinds.ByteLevel(node)
  local prefix = node:get("add_prefix_space", opts.boolean) ~= false
  local regex = node:get("use_regex", opts.boolean) ~= false and regex_of(node, "use_regex", levels.PATTERNS.gpt2) or nil
  local split = regex and split_by(regex, "Isolated", false)
  return function(piece, emit)
    if prefix and #piece.s > 0 and piece.s:byte() ~= 32 then piece = pieces.change(piece, { { 1, 0, " ", 1 } }) end
    if split then split(piece, emit) else emit(piece) end
  end, regex or not prefix and "nothing" or nil, false, prefix
end

function kinds.Split(node)
  local pattern, is_regex = node:pattern "pattern"
  local regex = regex_of(node, "pattern", is_regex and pattern or regexes.literal(pattern))
  local behavior = node:one_of("behavior", BEHAVIORS, true)
  local invert = node:get("invert", opts.boolean) or false
  local split = split_by(regex, behavior, invert)
  if behavior == "Isolated" then return split, regex end  -- a match and a gap are words alike
  if behavior == "Removed" and invert then return split, regex, true end
  return split
end

local function with_pattern(pattern, behavior)
  return function(node) return split_by(regex_of(node, "type", pattern), behavior, false) end
end

kinds.Whitespace = function(node) return split_by(regex_of(node, "type", [[\w+|[^\w\s]+]]), "Removed", true) end
kinds.WhitespaceSplit = with_pattern([[\s+]], "Removed")
kinds.Punctuation = function(node)
  local behavior = node:one_of("behavior", BEHAVIORS) or "Isolated"
  return split_by(regex_of(node, "type", [=[[!-/:-@\[-`{-~\p{P}]]=]), behavior, false)
end
kinds.BertPreTokenizer = function(node)
  local regex = regex_of(node, "type", [=[[!-/:-@\[-`{-~\p{P}]|[^\s!-/:-@\[-`{-~\p{P}]+]=])
  return split_by(regex, "Removed", true), regex, true
end
kinds.Digits = function(node)
  local single = node:get("individual_digits", opts.boolean)
  return split_by(regex_of(node, "type", [[\p{N}]]), single and "Isolated" or "Contiguous", false)
end
kinds.Metaspace = metaspace

--- Adds the splitters of a node of tokenizer.json to a list.
---@param node? table
---@param list table
---@return table list  with field `bytes` if words are bytes from here on
function M.read(node, list)
  if not node then return list end
  local kind = node:get("type", opts.string, true)
  if kind == "Sequence" then
    for _, of in ipairs(node:list("pretokenizers", true)) do M.read(of, list) end
    return list
  end
  if not kinds[kind] then node:fail("type", ("is '%s', which Moonshard does not have"):format(kind)) end
  if list.bytes then node:fail("type", ("is '%s' after ByteLevel, which Moonshard does not have"):format(kind)) end
  local split, regex, drops, prefix, signs = kinds[kind](node)
  list.bytes = kind == "ByteLevel"
  if regex == "nothing" then return list end
  list.signs = #list == 0 and signs or nil
  if #list == 0 then list.regex, list.drops, list.prefix = regex, drops, prefix end
  if kind == "Metaspace" then list.regex = nil end      -- a word that begins the text is another one there
  list[#list + 1] = split
  return list
end

--- Calls emit for each word of a piece.
---@param list table  splitters
---@param piece table
---@param emit fun(piece: table)
---@param at_start boolean  whether the piece begins the text
---@param k? integer
function M.words(list, piece, emit, at_start, k)
  k = k or 1
  if k > #list then return emit(piece) end
  list[k](piece, k == #list and emit or function(part) M.words(list, part, emit, at_start, k + 1) end, at_start)
end

local Divided = {}
Divided.__index = Divided

local function encode_word(self, word)
  local ids, n = {}, 0
  M.words(self._splitters, pieces.new(word, 1, true), function(part)
    local of = self._model:encode(part.s)
    for k = 1, of.n do ids[n + k] = of[k] end
    n = n + of.n
  end, false, 2)
  return ids
end

function Divided:encode(word) return vocabulary.remembered(self, word, encode_word) end

--- A model that encodes the words of the first splitter: the others divide them for `model`. Without their sizes.
---@param list table  splitters, with field regex
---@param model table
---@return table
function M.model_of(list, model)
  if #list < 2 then return model end
  return setmetatable({ _splitters = list, _model = model, _words = {}, _cached = 0 }, Divided)
end

return M
