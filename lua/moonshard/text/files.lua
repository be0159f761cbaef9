-- SPDX-License-Identifier: MIT
--- The files of tokenizers: tokenizer.json, vocab.json with merges.txt, tiktoken's, and those of version 1.0.
local cjson = require "cjson"
local base64 = require "moonshard.core.base64"
local decoders = require "moonshard.text.decoders"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local gguf = require "moonshard.text.gguf"
local json = require "moonshard.core.json"
local levels = require "moonshard.text.byte_level"
local models = require "moonshard.text.models"
local nodes = require "moonshard.text.node"
local normalizers = require "moonshard.text.normalizers"
local opts = require "moonshard.core.opts"
local raw = require "moonshard.data.raw"
local splitters = require "moonshard.text.splitters"
local regexes = require "moonshard.text.regex"
local templates = require "moonshard.text.templates"
local sentencepiece = require "moonshard.text.sentencepiece"
local tokenizer = require "moonshard.text.tokenizer"
local vocabulary = require "moonshard.text.vocabulary"
local zlib = require "moonshard.data.zlib"
local lfs = require "lfs"
local ffi = engine.ffi

local M = {}

local WHO = "tokenizer"

-- The splitters of one pattern, whose words are bytes.
local function by_pattern(pattern, path, is_bytes)
  local regex, why = regexes.new(pattern, WHO, is_bytes)
  if not regex then errors.raise("%s: '%s': the pattern is no regular expression: %s", WHO, path, why) end
  return { function(piece, emit)
    splitters.each(regex, piece.s, function(i, j) emit { s = piece.s:sub(i, j), at = piece.at + i - 1,
      first = piece.first, last = piece.last } end)
  end, regex = regex, bytes = true }
end

-- A byte-level tokenizer without normalizer. ids: by bytes.
local function byte_level(ids, model, split, special, named)
  local tokens, list = {}, {}
  for token, id in pairs(ids) do tokens[id] = token end
  for text, id in pairs(special) do list[#list + 1] = { id = id, text = text, special = true } end
  return tokenizer.new({ model = model, tokens = tokens, added = list, splitters = split, template = templates.read(),
    raw = true, named = named }, WHO)
end

-- ---- tokenizer.json -----------------------------------------------------------------------------------

local function added_of(node)
  local list = {}
  for k, of in ipairs(node:list "added_tokens") do
    local special = of:get("special", opts.boolean) or false
    local normalized = of:get("normalized", opts.boolean)
    list[k] = { id = of:get("id", nodes.ID, true), text = of:get("content", opts.string, true), special = special,
      lstrip = of:get("lstrip", opts.boolean), rstrip = of:get("rstrip", opts.boolean),
      single_word = of:get("single_word", opts.boolean), normalized = normalized == nil and not special or normalized }
  end
  return list
end

-- The tokenizer of a text of tokenizer.json.
local function from_json(text, path, named)
  local node = nodes.new(text, path, WHO)
  local split = splitters.read(node:child "pre_tokenizer", {})
  local model, ids = models.read(node:child("model", true), split.bytes)
  local decoder, decodes_bytes = decoders.read(node:child "decoder")
  local is_raw, tokens = split.bytes and decodes_bytes, {}
  for token, id in pairs(ids) do
    if tokens[id] then node:fail("model.vocab", ("has id %d twice"):format(id)) end
    tokens[id] = is_raw and levels.of(token) or token
  end
  return tokenizer.new({ model = model, tokens = tokens, added = added_of(node), splitters = split, decoder = decoder,
    normalizer = normalizers.read(node:child "normalizer"), template = templates.read(node:child "post_processor"),
    raw = is_raw, named = named, source = text }, WHO)
end
M.from_json = from_json

-- ---- other formats ------------------------------------------------------------------------------------

local function from_pair(vocab_path, merges_path, named)
  local node = nodes.new(raw.read(vocab_path, WHO), vocab_path, WHO)
  local ids, lines = models.vocabulary(node), {}
  for line in zlib.read_text(merges_path, WHO):gmatch "[^\r\n]+" do
    if not (#lines == 0 and line:find "^#version") then lines[#lines + 1] = line end
  end
  local merges = setmetatable({ value = lines, file = merges_path, who = WHO, path = "line" }, getmetatable(node))
  local list, special = models.merges(merges, ids, 0), {}
  for token, id in pairs(ids) do
    if token:find "^<|.*|>$" then special[token] = id end
  end
  local by_bytes = models.by_bytes(ids)
  return byte_level(by_bytes, vocabulary.new { ids = by_bytes, merges = list, by_byte = true },
    by_pattern(levels.PATTERNS.gpt2, vocab_path), special, named)
end

local function from_tiktoken(text, path, o)
  local ids, scores, line_number = {}, {}, 0
  for line in text:gmatch "[^\r\n]+" do
    line_number = line_number + 1
    local code, rank = line:match "^(%S+) (%d+)$"
    local token, id = code and base64.decode(code), tonumber(rank)
    if not token or not nodes.ID.test(id) then
      errors.raise("%s: '%s': line %d is not a token in base 64 and its rank", WHO, path, line_number)
    end
    ids[token], scores[id] = id, -id
  end
  for b = 0, 255 do
    if not ids[string.char(b)] then errors.raise("%s: '%s' has no token for byte %d", WHO, path, b) end
  end
  local pattern = o.pattern or "cl100k"
  local model = vocabulary.new { ids = ids, scores = scores, joins = true, whole = true, by_byte = true }
  return byte_level(ids, model, by_pattern(levels.PATTERNS[pattern] or pattern, path), o.special_tokens or {}, o.named)
end

-- The file of data.train_tokenizer, which ms.text.train_bpe replaced in version 1.1: pairs of ids. Words are cut after
-- 256 bytes.
local OWN = table.concat({ " [A-Za-z\\x80-\\xff]{1,255}", "[A-Za-z\\x80-\\xff]{1,256}", " [0-9]{1,255}", "[0-9]{1,256}",
  " [^\\sA-Za-z0-9\\x80-\\xff]{1,255}", "[^\\sA-Za-z0-9\\x80-\\xff]{1,256}", "\\s{1,256}" }, "|")

local function from_own(text, path)
  local ok, saved = pcall(json.decode, text)
  if not ok or type(saved) ~= "table" or saved.format ~= "moonshard tokenizer 1" or type(saved.merges) ~= "table" then
    errors.raise("%s: '%s' is not a tokenizer that Tokenizer:save wrote", WHO, path)
  end
  local list, sum = cjson.encode(saved.merges), ffi.new "char[17]"
  engine.lib.ms_file_sum(list, #list, sum)
  if saved.sum ~= nil and saved.sum ~= ffi.string(sum) then           -- files of version 1.0 have no sum
    errors.raise("%s: '%s' is damaged: its checksum differs", WHO, path)
  end
  local tokens, ids, merges = {}, {}, {}
  for id = 0, 255 do tokens[id] = string.char(id) end
  for k, pair in ipairs(saved.merges) do
    local a, b = type(pair) == "table" and tokens[pair[1]], type(pair) == "table" and tokens[pair[2]]
    if not (a and b) then
      errors.raise("%s: '%s' is damaged: its token %d is not the merge of two earlier ones", WHO, path, 255 + k)
    end
    local at = 4 * k
    tokens[255 + k], merges[at - 3], merges[at - 2], merges[at - 1], merges[at] = a .. b, pair[1], pair[2], k, 255 + k
  end
  for id = 0, #tokens do ids[tokens[id]] = id end
  local model = vocabulary.new { ids = ids, merges = merges, by_byte = true }
  return byte_level(ids, model, by_pattern(OWN, path, true), {}, {})
end

-- A model of SentencePiece. named: the folder's names of tokens come first.
local function from_pieces(parts, named, adds)
  for name, token in pairs(named) do parts.named[name] = token end
  parts.template = templates.read()
  local of = tokenizer.new(parts, WHO)
  for name, add in pairs(adds) do
    local special = { ids = { of[name] }, type = 0 }
    local single, pair = parts.template.single, parts.template.pair
    if add and #special.ids > 0 and name == "bos_id" then
      table.insert(single, 1, special)
      table.insert(pair, 1, special)
    elseif add and #special.ids > 0 then
      single[#single + 1], pair[#pair + 1] = special, special
    end
  end
  return of
end

local function from_gguf(path)
  local read = gguf.read(path, WHO)
  local of = read.json and from_json(read.json, path, read.named) or from_pieces(read.parts, read.named, read.adds)
  of._o.chat_template = read.chat_template and { text = read.chat_template, file = path } or nil
  return of
end

-- ---- the file -----------------------------------------------------------------------------------------

local function exists(path) return lfs.attributes(path, "mode") == "file" end

local NAMES = { bos_token = "bos_id", eos_token = "eos_id", pad_token = "pad_id" }

-- The chat template of a folder, { text, file }: a file of its own, or part of tokenizer_config.json, which may have
-- several with names.
local function chat_template(folder)
  local path = folder .. "/chat_template.jinja"
  if exists(path) then return { text = raw.read(path, WHO), file = path } end
  path = folder .. "/tokenizer_config.json"
  if not exists(path) then return nil end
  local node = nodes.new(raw.read(path, WHO), path, WHO)
  local text = rawget(node.value, "chat_template")
  for k = 1, type(text) == "table" and #text or 0 do
    local of = node:child("chat_template"):child(k, true)
    if of:get("name", opts.string) == "default" then text = of:get("template", opts.string, true) end
  end
  return type(text) == "string" and { text = text, file = path } or nil
end

-- The names of tokens in tokenizer_config.json and special_tokens_map.json, and which of them begin and end texts.
local function named_in(folder)
  local named, adds = {}, {}
  for _, name in ipairs { "special_tokens_map.json", "tokenizer_config.json" } do
    local path = folder .. "/" .. name
    if exists(path) then
      local node = nodes.new(raw.read(path, WHO), path, WHO)
      for key, field in pairs(NAMES) do
        local value = rawget(node.value, key)
        if type(value) == "table" then value = node:child(key):get("content", opts.string, true) end
        named[field] = type(value) == "string" and value or named[field]
      end
      adds.bos_id, adds.eos_id = node:get("add_bos_token", opts.boolean), node:get("add_eos_token", opts.boolean)
    end
  end
  return named, adds
end

-- Reads a tokenizer's file in a folder.
local function open_file(path, folder, o)
  local adds
  o.named, adds = named_in(folder)
  local merges = path:match "^(.*)vocab%.json$"
  if merges and exists(merges .. "merges.txt") then return from_pair(path, merges .. "merges.txt", o.named) end
  local text = raw.read(path, WHO)
  if text:find "^[%w+/=]+ %d+[\r\n]" then return from_tiktoken(text, path, o) end
  if text:byte() == 10 and not text:find "^%s*{" then
    return from_pieces(sentencepiece.parts(text, path, WHO), o.named, adds)
  end
  if not text:find "^%s*{" and not text:find "^\239\187\191" then
    errors.raise("%s: '%s' is neither tokenizer.json nor a file of tiktoken or SentencePiece", WHO, path)
  end
  if text:find('"format"', 1, true) and text:find("moonshard tokenizer", 1, true) then return from_own(text, path) end
  return from_json(text, path, o.named)
end

--- The folder of a model: the one given, or, of a run of scripts/finetune, that in it. Errors: a run or adapters alone.
---@param folder string
---@param who string  the function that errors name
---@return string
function M.model_folder(folder, who)
  if exists(folder .. "/metrics.jsonl") then
    if exists(folder .. "/model/config.json") then return folder .. "/model" end
    if exists(folder .. "/adapter/adapter_config.json") then
      errors.raise("%s: '%s' is the folder of a run that has written adapters alone: give the model that they are for, and '%s/adapter' as adapter",
        who, folder, folder)
    end
    errors.raise("%s: '%s' is the folder of a run that has written no model", who, folder)
  end
  if exists(folder .. "/adapter_config.json") and not exists(folder .. "/config.json") then
    errors.raise("%s: '%s' has only adapters; ms.hf.load(FOLDER, { adapter = '%s' }) reads them and the model that they are for",
      who, folder, folder)
  end
  return folder
end

--- The tokenizer's file in a folder; nil if there is none.
---@param folder string
---@return string?
function M.find(folder)
  for _, name in ipairs { "tokenizer.json", "vocab.json", "tokenizer.tiktoken", "tokenizer.model", "spiece.model" } do
    if exists(folder .. "/" .. name) then return folder .. "/" .. name end
  end
end

--- Reads a tokenizer: a folder, or one of its files.
---@param path string
---@param given? table
---@return TextTokenizer
function M.open(path, given)
  opts.expect(path, opts.string, "%s: path", WHO)
  local o = opts(WHO, given, { pattern = opts.string, special_tokens = opts.table })
  for text, id in pairs(o.special_tokens or {}) do
    opts.expect(text, opts.string, "%s: a key of option 'special_tokens'", WHO)
    opts.expect(id, nodes.ID, "%s: option 'special_tokens.%s'", WHO, text)
  end
  if path:find "%.gguf$" then return from_gguf(path) end
  local folder
  if lfs.attributes(path, "mode") == "directory" then
    folder = M.model_folder(path, WHO)
    path = M.find(folder)
    if not path then
      errors.raise("%s: folder '%s' has no tokenizer.json, vocab.json, tokenizer.tiktoken, tokenizer.model or spiece.model", WHO, folder)
    end
  else
    folder = path:match "^(.*)/" or "."
  end
  local of = open_file(path, folder, o)
  of._o.chat_template = chat_template(folder)
  return of
end

return M
