-- SPDX-License-Identifier: MIT
--- data.tokenizer: byte-pair encoding (Gage 1994, Sennrich et al. 2016). A token is a string of bytes: ids 0 to 255 are
--- the bytes, each later one joins two earlier ones. Text is divided into words first, and tokens do not cross words,
--- so that a word is encoded once. Every string can be encoded, and decoding gives it back.
local cjson = require "cjson"
local read_json = require("moonshard.core.json").decode
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local engine = require "moonshard.core.ffi"
local merges = require "moonshard.data.merges"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
local tensor = require "moonshard.tensor"
local ffi = engine.ffi

local M = {}

local FORMAT = "moonshard tokenizer 1"
local BASE = 2 ^ 24                                     -- a pair of ids as one number: first * BASE + second

-- A word is a run of letters and bytes outside of ASCII, a run of digits or a run of other signs, each with at most one
-- space before it; or a run of white space.
local KINDS = { "^ ?[%a\128-\255]+", "^ ?%d+", "^ ?[^%s%w\128-\255]+", "^%s+" }

local LONGEST = 256                                     -- most bytes of a word: encoding takes quadratic time
local CACHED = 2 ^ 17                                   -- number of words whose tokens are remembered

-- Calls fn(word) for the words of a text, in order; together they are the text.
local function each_word(text, fn)
  local at, n = 1, #text
  while at <= n do
    local first, last
    for k = 1, #KINDS do                                -- one of them matches
      first, last = text:find(KINDS[k], at)
      if first then break end
    end
    last = math.min(last, at + LONGEST - 1)
    fn(text:sub(at, last))
    at = last + 1
  end
end

---@class Tokenizer
---@field vocab_size integer  number of tokens
local Tokenizer = { __name = "Tokenizer" }
Tokenizer.__index = Tokenizer

-- A tokenizer of the 256 bytes alone.
local function new()
  local self = setmetatable({ vocab_size = 256, _tokens = {}, _joined = {}, _merges = {}, _words = {}, _cached = 0 },
    Tokenizer)
  for id = 0, 255 do self._tokens[id] = string.char(id) end
  return self
end

-- Adds the token that joins a and b.
local function join(self, a, b)
  local id = self.vocab_size
  self._tokens[id], self._joined[a * BASE + b] = self._tokens[a] .. self._tokens[b], id
  self._merges[#self._merges + 1] = { a, b }
  self.vocab_size = id + 1
  return id
end

local function bytes_of(word)
  local ids = {}
  for k = 1, #word do ids[k] = word:byte(k) end
  return ids
end

-- ---- training --------------------------------------------------------------------------------------

--- Learns tokens from texts: joins the most frequent pair of neighbouring tokens, again and again, until there are
--- vocab_size tokens or no pair occurs twice. Equal texts give equal tokens.
---@param texts string|string[]  what to learn from
---@param given { vocab_size: integer }  vocab_size: number of tokens, at least 256
---@return Tokenizer
function M.train_tokenizer(texts, given)
  local who = "train_tokenizer"
  local o = opts(who, given or {}, { vocab_size = opts.option(opts.whole_from(256), opts.required) })
  if type(texts) == "string" then texts = { texts } end
  opts.need(opts.is_plain(texts), texts, "a string or a list of strings", "%s: argument 1", who)
  for k, text in ipairs(texts) do opts.expect(text, opts.string, "%s: text %d", who, k) end
  local self = new()
  merges.learn(merges.words(texts, each_word, bytes_of), o.vocab_size - 256, function(a, b) return join(self, a, b) end)
  return self
end

-- ---- encoding --------------------------------------------------------------------------------------

-- The ids of a word: joins the pair whose token was learned first, until no pair is a token.
local function encode_word(self, word)
  local ids = self._words[word]
  if ids then return ids end
  ids = bytes_of(word)
  while true do
    local first, a, b
    for k = 1, #ids - 1 do
      local id = self._joined[ids[k] * BASE + ids[k + 1]]
      if id and (not first or id < first) then first, a, b = id, ids[k], ids[k + 1] end
    end
    if not first then break end
    ids = merges.replace(ids, a, b, first)
  end
  if self._cached == CACHED then self._words, self._cached = {}, 0 end
  self._words[word], self._cached = ids, self._cached + 1
  return ids
end

local function list_of(self, text, who)
  opts.need(getmetatable(self) == Tokenizer, self, "a tokenizer (call it with a colon)", "%s: self", who)
  opts.expect(text, opts.string, "%s: the text", who)
  local list, n = {}, 0
  each_word(text, function(word)
    local ids = encode_word(self, word)
    for k = 1, #ids do list[n + k] = ids[k] end
    n = n + #ids
  end)
  return list
end

--- The tokens of a text.
---@param text string  any bytes
---@return Tensor  int64 [n], ids from 0
function Tokenizer:encode(text) return create.tensor(list_of(self, text, "encode"), { dtype = "int64" }) end

--- The text of tokens. Errors: an id that is no token.
---@param ids Tensor|integer[]  ids from 0
---@return string
function Tokenizer:decode(ids)
  opts.need(getmetatable(self) == Tokenizer, self, "a tokenizer (call it with a colon)", "decode: self")
  if tensor.is_tensor(ids) then ids = ids:flatten():tolist() end
  opts.need(opts.is_plain(ids), ids, "a tensor or a list of ids", "decode: argument 1")
  local out = {}
  for k, id in ipairs(ids) do
    out[k] = self._tokens[id]
    if not out[k] then
      errors.raise("decode: id %d is %s, expected 0 to %d", k, errors.show(id), self.vocab_size - 1)
    end
  end
  return table.concat(out)
end

-- ---- files -----------------------------------------------------------------------------------------

-- A checksum of a list of merges.
local function sum_of(list)
  local text, digits = cjson.encode(list), ffi.new "char[17]"
  engine.lib.ms_file_sum(text, #text, digits)
  return ffi.string(digits)
end

--- Writes the tokenizer to a JSON file, for data.tokenizer. Errors: a file that cannot be written.
---@param path string  path of the file
function Tokenizer:save(path)
  opts.need(getmetatable(self) == Tokenizer, self, "a tokenizer (call it with a colon)", "save: self")
  raw.write(path, "save", { cjson.encode { format = FORMAT, merges = self._merges, sum = sum_of(self._merges) } })
end

--- Writes the tokens of a text as a shard that data.corpus reads, with { vocab = tokenizer.vocab_size }. Errors: a file
--- that cannot be written.
---@param path string  path of the file; should end in ".bin"; with "val" in the name it is for validation
---@param text string  any bytes
function Tokenizer:write_shard(path, text)
  local list = list_of(self, text, "write_shard")
  local wide = self.vocab_size > 65536
  local header, ids = ffi.new("int32_t[256]"), ffi.new(wide and "uint32_t[?]" or "uint16_t[?]", #list, list)
  header[0], header[1], header[2] = wide and 20240801 or 20240520, wide and 7 or 1, #list
  raw.write(path, "write_shard", { ffi.string(header, 1024), ffi.string(ids, #list * (wide and 4 or 2)) })
end

--- Reads a tokenizer that Tokenizer:save has written. Errors: any other file; a damaged one.
---@param path string  path of the file
---@return Tokenizer
function M.tokenizer(path)
  local text = raw.read(path, "tokenizer")
  local ok, saved = pcall(read_json, text)
  if not ok or type(saved) ~= "table" or saved.format ~= FORMAT or type(saved.merges) ~= "table" then
    errors.raise("tokenizer: '%s' is not a tokenizer that Tokenizer:save wrote", path)
  end
  -- Files of version 1.0 have no sum.
  if saved.sum ~= nil and saved.sum ~= sum_of(saved.merges) then
    errors.raise("tokenizer: '%s' is damaged: its checksum differs", path)
  end
  local self = new()
  for k, pair in ipairs(saved.merges) do
    local a, b = type(pair) == "table" and pair[1], type(pair) == "table" and pair[2]
    if not (self._tokens[a] and self._tokens[b]) then
      errors.raise("tokenizer: '%s' is damaged: its token %d is not the merge of two earlier ones", path, 255 + k)
    end
    join(self, a, b)
  end
  return self
end

function Tokenizer:__tostring() return ("Tokenizer(%d tokens)"):format(self.vocab_size) end

opts.fix(M, { "tokenizer" })

return M
