-- SPDX-License-Identifier: MIT
--- The tokenizer of ms.text: added tokens, normalizer, splitters, model, template and decoder, as the files say.
local added = require "moonshard.text.added"
local bytes = require "moonshard.text.byte_level"
local create = require "moonshard.tensor.create"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local pieces = require "moonshard.text.pieces"
local raw = require "moonshard.data.raw"
local splitters = require "moonshard.text.splitters"
local templates = require "moonshard.text.templates"
local tensor = require "moonshard.tensor"
local ffi = engine.ffi
local byte_p = ffi.typeof "const uint8_t *"

local M = {}

---@class TextTokenizer
---@field vocab_size integer  number of tokens, with the added ones
---@field bos_id integer?  the token that begins a text
---@field eos_id integer?  the token that ends a text
---@field pad_id integer?  the token that fills batches
local TextTokenizer = { __name = "TextTokenizer" }
TextTokenizer.__index = TextTokenizer

--- A tokenizer of parts: o.model (encode(word) gives ids and sizes); o.tokens: by id; o.added: list of added tokens;
--- o.normalizer, o.splitters, o.template, o.decoder; o.spans: offsets by SentencePiece's rule; o.raw: tokens are bytes, and their concatenation is the text.
function M.new(o, who)
  local self = setmetatable({ _o = o, _ids = {}, _special = {}, _added = {}, vocab_size = 0 }, TextTokenizer)
  local before, after = {}, {}
  for id, token in pairs(o.tokens) do
    self._ids[token] = id
    self.vocab_size = math.max(self.vocab_size, id + 1)
  end
  for _, token in ipairs(o.added) do
    o.tokens[token.id], self._ids[token.text] = token.text, token.id
    self.vocab_size = math.max(self.vocab_size, token.id + 1)
    self._special[token.id], self._added[token.id] = token.special or nil, true
    if token.normalized and o.normalizer then
      local copy = {}
      for key, value in pairs(token) do copy[key] = value end
      copy.text = token.verbatim and token.text or o.normalizer(pieces.new(token.text, 1, true)).s
      after[#after + 1] = copy
    else
      before[#before + 1] = token
    end
  end
  self._model = splitters.model_of(o.splitters, o.model)
  self._in_engine = o.model.add and (#o.splitters == 0 or o.splitters.signs) and true
  if self._in_engine and #o.splitters > 0 and o.splitters.signs.splits then o.model:cut_signs() end
  self._before, self._after = added.new(before, who), added.new(after, who)
  for name, token in pairs(o.named or {}) do self[name] = self._ids[token] end
  return self
end

local function expect_self(self, who)
  opts.need(getmetatable(self) == TextTokenizer, self, "a tokenizer (call it with a colon)", "%s: self", who)
end

-- ---- encoding ---------------------------------------------------------------------------------------

-- A growing list of ids and, if they are wanted, of the first and last bytes.
local List = {}
List.__index = List

local function new_list(offsets)
  return setmetatable({ n = 0, room = 64, ids = ffi.new "int64_t[64]", offsets = offsets and {} or nil }, List)
end

local kept, KEPT = nil, 2 ^ 16                          -- a list that the next text uses; its most room
local MOST_IDS = 2 ^ 27                                 -- of a text; LuaJIT's arrays have less than 2^31 bytes

function List:reserve(more)
  local wanted = self.n + more
  if wanted <= self.room then return self.ids end
  if wanted > MOST_IDS then errors.raise("encode: the text has more than %d tokens", MOST_IDS) end
  local room = math.min(2 * wanted, MOST_IDS)
  local ids = ffi.new("int64_t[?]", room)
  self.room = room
  ffi.copy(ids, self.ids, 8 * self.n)
  self.ids = ids
  return ids
end

function List:add(id, first, last)
  self:reserve(1)[self.n] = id
  self.n = self.n + 1
  if self.offsets then self.offsets[self.n] = { first, last } end
end

-- Widens a range to whole characters of the text.
local function whole(text, i, j)
  while i > 1 and (text:byte(i) or 0) >= 128 and text:byte(i) < 192 do
    local from = i - 1
    while from > 1 and from > i - 4 and text:byte(from) >= 128 and text:byte(from) < 192 do from = from - 1 end
    if pieces.char_end(text, from) < i then break end
    i = from
  end
  if j >= i and text:byte(j) >= 128 then
    local from = j
    while from > 1 and from > j - 3 and text:byte(from) >= 128 and text:byte(from) < 192 do from = from - 1 end
    j = math.max(j, pieces.char_end(text, from))
  end
  return i, j
end

-- The first byte of the character that has byte k.
local function char_start(text, k)
  local from = k
  while from > 1 and from > k - 3 and (text:byte(from) or 0) >= 128 and text:byte(from) < 192 do from = from - 1 end
  return from < k and pieces.char_end(text, from) >= k and from or k
end

-- As pieces.origin, by SentencePiece's rule: a range ends before the character of the next byte, so that it has the
-- spaces that were left out, and is empty if it ends within a character. most: the last byte of the part of the text.
local function span(text, piece, i, j, most)
  local first = char_start(text, (pieces.origin(piece, i, i)))
  local at = piece.at + j
  local stop = not piece.first and at + 1 or piece.first[at + 1] or most + 1
  return first, char_start(text, stop) - 1
end

-- The tokens of a word with offsets: those of a piece. most: for offsets by SentencePiece's rule, as for span.
local function add_piece(list, model, piece, text, most)
  local ids
  if list.sum then ids, list.sum = model:chunk(piece.s, list.sum) else ids = model:encode(piece.s) end
  local buffer, at = list:reserve(#ids), 1
  for k = 1, #ids do
    buffer[list.n] = ids[k]
    list.n = list.n + 1
    if list.offsets then
      local size = ids.sizes[k]
      if most then
        list.offsets[list.n] = { span(text, piece, at, at + size - 1, most) }
      elseif size == 0 then                             -- one more token of the same character
        list.offsets[list.n] = { unpack(list.offsets[list.n - 1]) }
      else
        list.offsets[list.n] = { whole(text, pieces.origin(piece, at, at + size - 1)) }
      end
      at = at + size
    end
  end
end

-- The tokens of s, whose words are the matches of a regular expression and, unless `drops` is set, what is between them.
-- The loop of most texts: no piece is made.
local function add_plain(list, model, regex, s, prefix, drops)
  if prefix and #s > 0 and s:byte() ~= 32 then s = " " .. s end
  local at, stop, n = 1, #s, list.n
  local words, buffer, room = model._words, list.ids, list.room
  while at <= stop do
    local i, j = regex:find(s, at)
    if drops then
      if not i then break end
      at = i
    elseif not i then
      i, j = stop + 1, stop
    end
    local from, to = at, i > at and i - 1 or j          -- a gap is a word, too
    if to < from then to = pieces.char_end(s, from) end
    local word = s:sub(from, to)
    local ids = words[word]
    if not ids then
      ids = model:encode(word)
      words = model._words
    end
    local count = ids.n
    if n + count > room then
      list.n = n
      buffer = list:reserve(count)
      room = list.room
    end
    for k = 1, count do buffer[n + k - 1] = ids[k] end
    n, at = n + count, to + 1
  end
  list.n = n
end

-- Adds the tokens of a part of the text without special tokens.
local function add_part(self, list, text, i, j, skip)
  local o = self._o
  local split, model = o.splitters, o.model
  local part = i == 1 and j == #text and text or text:sub(i, j)
  if o.direct and not list.offsets and o.direct:add(list, part, self._after) then return end
  local piece = pieces.new(part, i, not list.offsets)
  if o.normalizer then piece = o.normalizer(piece) end
  local plain = not list.offsets
  local function add_words(of, starts)
    if plain and split.regex then
      return add_plain(list, self._model, split.regex, of.s, split.prefix, split.drops)
    elseif plain and self._in_engine then
      local s = split.signs and split.signs.plain(of, starts) or of.s
      local sum = model:add(list, ffi.cast(byte_p, s), #s, list.sum or 0)
      list.sum = list.sum and sum
      return
    end
    splitters.words(split, of, function(word)
      if #word.s > 0 then add_piece(list, model, word, text, o.spans and j) end
    end, starts)
  end
  if not self._after then return add_words(piece, i == 1) end
  list.sum = o.spans and 0 or nil                       -- of SentencePiece's scores
  self._after:each(piece.s, function(a, b, id)
    if id and o.spans then list.sum = model:defined(b - a + 1, list.sum) end
    if id and not list.offsets then
      list:add(id)
    elseif id then
      list:add(id, whole(text, pieces.origin(piece, a, b)))
    else
      add_words(pieces.part(piece, a, b), i == 1 and a == 1)
    end
  end, skip)
  list.sum = nil
end

-- The number of characters of white space in a string, at its beginning or end.
local function spaces_in(regex, s)
  local i, j = regex:find(s, 1)
  return i and select(2, s:sub(i, j):gsub("[^\128-\191]", "")) or 0
end

-- Takes spaces off the offsets, as ByteLevel and RobertaProcessing do: one space that begins the first token of several
-- stays, because it was added. Spaces are counted in the token, and taken off as characters of the text.
local function trim(self, list, text)
  local o = self._o
  for k, range in ipairs(list.offsets) do
    local id, first, last = tonumber(list.ids[k - 1]), range[1], range[2]
    local left, right
    if self._added[id] then
      local own = text:sub(first, last)
      left, right = spaces_in(o.template.trim.left, own), spaces_in(o.template.trim.right, own)
    else
      local token = o.raw and o.tokens[id] or bytes.of(o.tokens[id]) or o.tokens[id]
      left, right = #token:match "^ *", #token:match " *$"
    end
    if o.template.trim.prefix and left == 1 and (k == 1 or first == 1) then left = 0 end
    for _ = 1, left do
      if first <= last then first = pieces.char_end(text, first) + 1 end
    end
    local stop = last
    for _ = 1, right do
      while stop > 0 and text:byte(stop) >= 128 and text:byte(stop) < 192 do stop = stop - 1 end
      stop = stop - 1
    end
    if stop >= 0 then last = math.max(stop, first - 1) end
    range[1], range[2] = first, last
  end
end

-- Adds a text's tokens without a template.
local function add_text(self, list, text, skip)
  if not self._before then return add_part(self, list, text, 1, #text, skip) end
  self._before:each(text, function(i, j, id)
    if id then list:add(id, i, j) else add_part(self, list, text, i, j, skip) end
  end, skip)
end

-- The list of a text's tokens without a template.
local function list_of(self, text, offsets, skip)
  local list = new_list(offsets)
  add_text(self, list, text, skip)
  if offsets and self._o.template.trim then trim(self, list, text) end
  return list
end

local function added_by(template)
  local n = 0
  for _, part in ipairs(template) do n = n + (part.ids and #part.ids or 0) end
  return n
end

-- Puts lists into a template. types: the part's number for each token, if wanted.
local function fill(template, lists, types)
  local out = new_list(lists[1].offsets)
  for _, part in ipairs(template) do
    local from = out.n
    if part.ids then
      for _, id in ipairs(part.ids) do out:add(id, 1, 0) end
    else
      local list = lists[part.sequence]
      ffi.copy(out:reserve(list.n) + out.n, list.ids, 8 * list.n)
      for k = 1, list.offsets and list.n or 0 do out.offsets[out.n + k] = list.offsets[k] end
      out.n = out.n + list.n
    end
    for k = from + 1, types and out.n or 0 do types[k] = part.type end
  end
  return out
end

-- Without templates.
local PLAIN = templates.read()

local function is_bare(template) return #template == 1 and template[1].sequence == 1 end

--- The tokens of a text.
---@param text string  in UTF-8; other bytes are tokens of their own, if the vocabulary has them
---@param given? { pair: string, special: boolean, parse: boolean, offsets: boolean }  pair: a second text, for models of two texts; special: adds the tokens with which the model's texts begin and end (default true); parse: special tokens in the text, such as <|endoftext|>, are tokens, not text (default true; false for text that others wrote); offsets: adds where the tokens are
---@return Tensor ids  int64 [n], ids from 0
---@return { offsets: Tensor, types: Tensor }? more  with pair or offsets: types: 0 or 1 for the first or second text; offsets: int64 [n, 2], first and last byte in the token's text, from 1; a token that a template adds has 1 and 0
function TextTokenizer:encode(text, given)
  local who = "encode"
  expect_self(self, who)
  opts.expect(text, opts.string, "%s: the text", who)
  local o = opts(who, given, { pair = opts.string, special = true, parse = true, offsets = false })
  local template = (o.special and self._o.template or PLAIN)[o.pair and "pair" or "single"]
  local more = (o.pair or o.offsets) and {} or nil
  local list
  if not more then
    list, kept = kept or new_list(), nil
    for _, part in ipairs(template) do
      if part.sequence then add_text(self, list, text, not o.parse) end
      for _, id in ipairs(part.ids or {}) do list:add(id) end
    end
  else
    local lists, types = { list_of(self, text, o.offsets, not o.parse) }, {}
    lists[2] = o.pair and list_of(self, o.pair, o.offsets, not o.parse)
    list = fill(template, lists, types)
    more.types = create.tensor(types, { dtype = "int64" })
    if #types == 0 then more.types = create.zeros(0, { dtype = "int64" }) end
    if o.offsets then
      more.offsets = list.n > 0 and create.tensor(list.offsets, { dtype = "int64" })
        or create.zeros(0, 2, { dtype = "int64" })
    end
  end
  local tokens = raw.tensor("int64", { list.n }, list.ids)
  if more then return tokens, more end                  -- a second nil would be a value of print's
  list.n = 0
  if list.room <= KEPT then kept = list end
  return tokens
end

-- Cuts two lists to `most` tokens together: the longer one to the length of the shorter, then both.
local function cut_pair(a, b, most)
  if a.n + b.n <= most then return end
  if a.n > b.n then a, b = b, a end
  a.n = math.min(a.n, math.floor(most / 2))
  b.n = most - a.n
end

--- The tokens of texts, as a batch whose rows are as long as the longest one.
---@param texts (string|string[])[]  at least one; two texts, for models of two texts, as { first, second }
---@param given? { max_length: integer, length: integer, multiple: integer, pad_id: integer, side: "right"|"left", special: boolean, parse: boolean }  max_length: longer rows are cut, of two texts the longer one first; length: the least length of a row; multiple: the length is a multiple of this; pad_id: fills rows (default: the tokenizer's pad_id); side: where rows are filled (default "right"; "left" for generation); special, parse: as for encode
---@return Tensor ids  int64 [texts, length]
---@return Tensor mask  bool [texts, length], true for the texts' tokens
---@return Tensor? types  int64 [texts, length], if there are pairs: 0 or 1 for the first or second text, and 0 where rows are filled
function TextTokenizer:encode_batch(texts, given)
  local who = "encode_batch"
  expect_self(self, who)
  opts.need(opts.is_plain(texts) and #texts > 0, texts, "a list of strings", "%s: argument 1", who)
  local o = opts(who, given, { max_length = opts.whole_from(1), length = opts.option(opts.whole_from(0), 0),
    multiple = opts.option(opts.whole_from(1), 1), pad_id = opts.whole_from(0),
    side = opts.one_of({ "right", "left" }, "right"), special = true, parse = true })
  local lists, types, length, same = {}, nil, o.length, true
  for k, text in ipairs(texts) do
    local first, second = text, nil
    if type(text) == "table" then
      opts.need(opts.is_plain(text) and #text == 2, text, "a string or two", "%s: text %d", who, k)
      first, second = text[1], opts.expect(text[2], opts.string, "%s: the second of text %d", who, k)
      types = types or {}
    end
    opts.expect(first, opts.string, "%s: text %d", who, k)
    local template = (o.special and self._o.template or PLAIN)[second and "pair" or "single"]
    local most = (o.max_length or math.huge) - added_by(template)
    if most < 0 then
      errors.raise("%s: option 'max_length' is %d, but the template adds %d tokens", who, o.max_length,
        added_by(template))
    end
    local of = { list_of(self, first, false, not o.parse), second and list_of(self, second, false, not o.parse) }
    if second then cut_pair(of[1], of[2], most) else of[1].n = math.min(of[1].n, most) end
    local list_types = second and {} or nil
    lists[k] = is_bare(template) and of[1] or fill(template, of, list_types)
    if types then types[k] = list_types end
    length, same = math.max(length, lists[k].n), same and lists[k].n == lists[1].n
  end
  length = math.ceil(length / o.multiple) * o.multiple
  local pad = o.pad_id or self.pad_id
  if not pad and not (same and lists[1].n == length) then
    errors.raise("%s: the texts have different lengths and the tokenizer has no pad_id: pass option 'pad_id'", who)
  end
  local ids, data = raw.tensor("int64", { #texts, length }, nil)
  local mask, bits = raw.tensor("bool", { #texts, length }, nil)
  data, bits = ffi.cast("int64_t *", data), ffi.cast("uint8_t *", bits)
  local type_ids = types and create.zeros(#texts, length, { dtype = "int64" })
  for k, list in ipairs(lists) do
    local row, from = (k - 1) * length, o.side == "left" and length - list.n or 0
    for t = 0, length - 1 do
      local inside = t >= from and t < from + list.n
      data[row + t], bits[row + t] = inside and list.ids[t - from] or pad or 0, inside and 1 or 0
    end
    if types and types[k] and list.n > 0 then
      type_ids[k]:narrow(1, from + 1, list.n):copy_(create.tensor(types[k], { dtype = "int64" }))
    end
  end
  if types then return ids, mask, type_ids end           -- a third nil would be a value of print's
  return ids, mask
end

-- ---- decoding ---------------------------------------------------------------------------------------

local function decoded(self, ids, from, to, special)
  local tokens = {}
  for k = from, to do
    if special or not self._special[ids[k]] then tokens[#tokens + 1] = self._o.tokens[ids[k]] end
  end
  return table.concat(self._o.raw and tokens or self._o.decoder(tokens))
end

-- Models have more ids than their tokenizers have tokens, to fill up a matrix: such an id is no text.
local function check_id(self, id, k, who)
  if type(id) ~= "number" or id % 1 ~= 0 or id < 0 then
    errors.raise("%s: id %d is %s, expected a token's, 0 to %d", who, k, errors.show(id), self.vocab_size - 1)
  end
end

--- The text of tokens. An id from 0 that no token has is no text. Errors: an id that is no whole number from 0.
---@param ids Tensor|integer[]  ids from 0
---@param given? { special: boolean }  special: with the special tokens (default false)
---@return string
function TextTokenizer:decode(ids, given)
  local who = "decode"
  expect_self(self, who)
  local o = opts(who, given, { special = false })
  if tensor.is_tensor(ids) then ids = ids:flatten():tolist() end
  opts.need(opts.is_plain(ids), ids, "a tensor or a list of ids", "%s: argument 1", who)
  for k, id in ipairs(ids) do check_id(self, id, k, who) end
  return decoded(self, ids, 1, #ids, o.special)
end

---@class TextStream
local TextStream = { __name = "TextStream" }
TextStream.__index = TextStream

--- A decoder for ids that arrive one by one: stream:push(id) returns the text that the id completes.
---@param given? { special: boolean }  special: with the special tokens (default false)
---@return TextStream
function TextTokenizer:stream(given)
  expect_self(self, "stream")
  local o = opts("stream", given, { special = false })
  return setmetatable({ _of = self, _special = o.special, _ids = {}, _read = 0, _sent = 0 }, TextStream)
end

--- Adds a token and returns the text that it completes: never a part of a character, often "".
---@param id integer  of the token, from 0
---@return string
function TextStream:push(id)
  check_id(self._of, id, 1, "push")
  local ids = self._ids
  ids[#ids + 1] = id
  local text = decoded(self._of, ids, 1, #ids, self._special)
  local stop = #text - pieces.incomplete(text)
  local new = text:sub(self._sent + 1, stop)
  if stop < #text or new == "" then
    self._sent = math.max(self._sent, stop)
    return new
  end
  -- The ids before the last complete text are dropped; the rest says how the next token is joined. Alone it must be
  -- some text: of pieces that are spaces, decoders leave out those that begin a text.
  local rest = self._read == 0 and text or decoded(self._of, ids, self._read + 1, #ids, self._special)
  if rest == "" then
    self._sent = stop
    return new
  end
  if self._read > 0 then
    for k = 1, #ids do ids[k] = ids[k + self._read] end
  end
  self._read, self._sent = #ids, #rest
  return new
end

--- The bytes that remain at the end: "" unless the last character is incomplete.
---@return string
function TextStream:finish()
  local text = decoded(self._of, self._ids, 1, #self._ids, self._special)
  local rest = text:sub(self._sent + 1)
  self._ids, self._read, self._sent = {}, 0, 0
  return rest
end

--- Writes the tokenizer as tokenizer.json, which other libraries read, too. Errors: a tokenizer that was not read from
--- such a file, or trained; a file that cannot be written.
---@param path string  path of the file
function TextTokenizer:save(path)
  expect_self(self, "save")
  if not self._o.source then
    errors.raise "save: this tokenizer was not read from tokenizer.json; copy the files that it was read from"
  end
  raw.write(path, "save", { self._o.source })
end

--- Writes the tokens of a text as a shard that data.corpus reads, with { vocab = tokenizer.vocab_size }. Errors: a file
--- that cannot be written.
---@param path string  path of the file; should end in ".bin"; with "val" in the name it is for validation
---@param text string  any bytes; special tokens in it, such as <|endoftext|>, are tokens
function TextTokenizer:write_shard(path, text)
  expect_self(self, "write_shard")
  opts.expect(text, opts.string, "write_shard: the text")
  local list, wide = self:encode(text, { special = false }):tolist(), self.vocab_size > 65536
  local header, ids = ffi.new("int32_t[256]"), ffi.new(wide and "uint32_t[?]" or "uint16_t[?]", #list, list)
  header[0], header[1], header[2] = wide and 20240801 or 20240520, wide and 7 or 1, #list
  raw.write(path, "write_shard", { ffi.string(header, 1024), ffi.string(ids, #list * (wide and 4 or 2)) })
end

-- ---- names ------------------------------------------------------------------------------------------

--- The id of a token; nil if there is no such token.
---@param token string  as decode gives it: bytes, for byte-level vocabularies
---@return integer?
function TextTokenizer:id(token)
  expect_self(self, "id")
  return self._ids[opts.expect(token, opts.string, "id: the token")]
end

--- The token of an id; nil if there is none.
---@param id integer  from 0
---@return string?
function TextTokenizer:token(id)
  expect_self(self, "token")
  return self._o.tokens[id]
end

function TextTokenizer:__tostring() return ("TextTokenizer(%d tokens)"):format(self.vocab_size) end

M.TextTokenizer = TextTokenizer

return M
