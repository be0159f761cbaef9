-- SPDX-License-Identifier: MIT
--- Tokenizers in GGUF files, as llama.cpp has them: byte-level BPE ("gpt2") with its merges, and SentencePiece's BPE
--- ("llama") with the scores of its pieces.
local errors = require "moonshard.core.errors"
local files = require "moonshard.io.gguf"
local levels = require "moonshard.text.byte_level"
local pieces = require "moonshard.text.pieces"
local sentencepiece = require "moonshard.text.sentencepiece"
local splitters = require "moonshard.text.splitters"
local vocabulary = require "moonshard.text.vocabulary"

local M = {}

local SPACE = "\226\150\129"                            -- U+2581, which stands for a space
local NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6     -- types of tokens
local PREFIX = "tokenizer.ggml."

-- How words are divided: a name in files, the pattern's name, and whether a word that is a token is not joined from its
-- parts. Of several names the first is written.
local PRE = {
  { "gpt-2", "gpt2", false }, { "llama-bpe", "llama3", true }, { "dbrx", "llama3", false }, { "qwen2", "qwen2", false },
  { "llama3", "llama3", true }, { "llama-v3", "llama3", true }, { "smaug-bpe", "llama3", false },
  { "deepseek-r1-qwen", "qwen2", false },
}

-- ---- writing ----------------------------------------------------------------------------------------------

-- The text of which the model's words are made.
local function words_of(o, text)
  local piece, list = pieces.new(text, 1, true), {}
  if o.normalizer then piece = o.normalizer(piece) end
  splitters.words(o.splitters, piece, function(word) list[#list + 1] = word.s end, true)
  return table.concat(list)
end

-- The tokens that begin (at -1) and end (at 1) each text; or nil and the reason.
local function ends_of(template)
  local ends, at = {}, nil
  for k, part in ipairs(template.single) do at = part.sequence and k or at end
  for k, part in ipairs(template.single) do
    if part.ids and #part.ids > 0 then
      if #part.ids > 1 or ends[k < at and -1 or 1] then return nil, "its template adds several tokens" end
      ends[k < at and -1 or 1] = part.ids[1]
    end
  end
  return ends
end

local function byte_level(o, values)
  local split, model = o.splitters, o.model
  local plain, pre = #split == 1 and split.regex and not (split.drops or split.prefix), nil
  local pattern = plain and split.regex:pattern() or nil
  for k = #PRE, 1, -1 do
    if levels.PATTERNS[PRE[k][2]] == pattern and PRE[k][3] == (model._o.whole or false) then pre = PRE[k][1] end
  end
  if not pre then return "its words are divided in a way that llama.cpp lacks" end
  if not model._o.merges then return "it has no list of merges" end
  if words_of(o, "A b\t C") ~= "A b\t C" then return "it changes the text" end
  local list, merges = model._o.merges, {}
  for k = 1, #list, 4 do
    merges[#merges + 1] = levels.text(o.tokens[list[k]]) .. " " .. levels.text(o.tokens[list[k + 1]])
  end
  values("model", "string", "gpt2")
  values("pre", "string", pre)
  values("merges", "strings", merges)
end

-- Scores by id for a model with merges: llama.cpp joins each pair whose text is a token, so that all such pairs must be
-- merges. Otherwise nil.
local function scores_of(model)
  local scores, tokens, list, known = {}, {}, model._o.merges, {}
  for k = 1, #list, 4 do
    local id = list[k + 3]
    scores[id] = math.max(scores[id] or -math.huge, -list[k + 2])
    known[list[k] .. " " .. list[k + 1]] = true
  end
  for token, id in pairs(model.ids) do tokens[id] = token end
  for id in pairs(scores) do
    local token = tokens[id]
    local at = pieces.char_end(token, 1)
    while at < #token do
      local first, second = model.ids[token:sub(1, at)], model.ids[token:sub(at + 1)]
      if first and second and not known[first .. " " .. second] then return nil end
      at = pieces.char_end(token, at + 1)
    end
  end
  return scores
end

local function by_character(o, values, n, types)
  local model = o.model
  local of = model._o
  local shape = words_of(o, " a  b")
  local prefix = words_of(o, "a") == SPACE .. "a"
  if shape ~= (prefix and SPACE or "") .. SPACE .. "a" .. SPACE .. SPACE .. "b" then return "it changes the text" end
  if #o.splitters > 0 and not vocabulary.cut_at(model.ids, SPACE) then return "its tokens have spaces inside" end
  if of.prefix or of.suffix or not of.unknown or not of.bytes then return "it is no BPE of SentencePiece" end
  local scores = of.scores or scores_of(model)
  if not scores then return "its merges do not follow from scores of tokens" end
  local list = {}
  for id = 0, n - 1 do list[id + 1] = scores[id] or 0 end
  for _, id in pairs(of.bytes) do types[id + 1] = BYTE end
  types[of.unknown + 1] = UNKNOWN
  values("model", "string", "llama")
  values("pre", "string", "default")
  values("scores", "f32s", list)
  values("unknown_token_id", "u32", of.unknown)
  values("add_space_prefix", "bool", prefix)
end

--- The values of a tokenizer in a GGUF file, as io.gguf takes them; nil if llama.cpp has no such tokenizer.
---@param t TextTokenizer
---@param n integer  the number of ids that the model has
---@return { [1]: string, [2]: string, [3]: any }[]? values
---@return string? why
function M.values(t, n)
  local o, out, tokens, types = t._o, {}, {}, {}
  local function values(key, kind, value) out[#out + 1] = { PREFIX .. key, kind, value } end
  if t.vocab_size > n then return nil, ("it has %d tokens, the model %d"):format(t.vocab_size, n) end
  if not o.model.joins then return nil, "it is no BPE" end
  for id = 0, n - 1 do
    local token = o.tokens[id]
    if token and o.raw and not t._added[id] then token = levels.text(token) end
    tokens[id + 1] = token or ("[PAD%d]"):format(id)
    types[id + 1] = not token and UNUSED or t._special[id] and CONTROL or t._added[id] and USER or NORMAL
  end
  local ends, why = ends_of(o.template)
  if not ends then return nil, why end
  if o.raw then why = byte_level(o, values) else why = by_character(o, values, n, types) end
  if why then return nil, why end
  values("tokens", "strings", tokens)
  values("token_type", "i32s", types)
  for name, id in pairs { bos = ends[-1] or t.bos_id, eos = ends[1] or t.eos_id, padding = t.pad_id } do
    values(name .. "_token_id", "u32", id)
  end
  table.sort(out, function(a, b) return a[1] < b[1] end)
  values("add_bos_token", "bool", ends[-1] ~= nil)
  values("add_eos_token", "bool", ends[1] ~= nil)
  if o.chat_template then out[#out + 1] = { "tokenizer.chat_template", "string", o.chat_template.text } end
  return out
end

-- ---- reading ----------------------------------------------------------------------------------------------

-- A file's value whose type is checked; nil if the file lacks it.
local function reader(file, who)
  return function(key, kind, required)
    local value = file.values[PREFIX .. key]
    if value == nil and not required then return nil end
    local ok = type(value) == (kind:match "^list" and "table" or kind)
    for k = 1, ok and kind:match "^list" and #value or 0 do ok = ok and type(value[k]) == kind:match "of (%a+)s$" end
    if not ok then
      errors.raise("%s: '%s': key '%s%s' is %s, expected a %s", who, file.path, PREFIX, key,
        type(value) == "table" and "a list" or errors.show(value), kind)
    end
    return value
  end
end

local function json_of(get, tokens, types, ends, fail)
  local name, vocab, size, added, merges, pattern, whole = get("pre", "string") or "default", {}, 0, {}, {}, nil, nil
  for _, pre in ipairs(PRE) do
    if pre[1] == name then pattern, whole = levels.PATTERNS[pre[2]], pre[3] end
  end
  if not pattern then fail("pre", "is '%s', which Moonshard does not have", name) end
  for k, token in ipairs(tokens) do
    if types[k] == CONTROL or types[k] == USER then
      added[#added + 1] = { id = k - 1, content = token, special = types[k] == CONTROL }
    elseif types[k] ~= UNUSED then
      if vocab[token] then fail("tokens", "has '%s' twice", token) end
      vocab[token], size = k - 1, size + 1
    end
  end
  for k, line in ipairs(get("merges", "list of strings", true)) do
    local first, second = line:match "^([^ ]+) ([^ ]+)$"
    if not first then fail("merges", "has %s as merge %d", errors.show(line), k) end
    merges[k] = { first, second }
  end
  -- PyPI's tokenizers keep the id of an added token only if the vocabulary has it, too, or it is the next one after it.
  local last = #added
  while last > 0 and added[last].id == size + last - 1 do last = last - 1 end
  for k = 1, last do vocab[added[k].content] = vocab[added[k].content] or added[k].id end
  local function token(name_of)
    local id = ends[name_of]
    return id and { tokens[id + 1], id } or nil
  end
  return levels.json { vocab = vocab, merges = merges, added = added, pattern = pattern, whole = whole,
    before = token "bos", after = token "eos" }
end

--- Reads a file: for byte-level BPE, the text of tokenizer.json; otherwise the parts of a tokenizer, and which of its
--- tokens it adds.
---@param path string
---@param who string
---@return { json: string?, parts: table?, adds: table, named: table<string, string>, chat_template: string? }
function M.read(path, who)
  local file = files.open(path)
  file:close()
  local get = reader(file, who)
  local function fail(key, format, ...)
    errors.raise("%s: '%s': key '%s%s' " .. format, who, path, PREFIX, key, ...)
  end
  local kind = get("model", "string", true)
  if kind ~= "gpt2" and kind ~= "llama" then fail("model", "is '%s', expected 'gpt2' or 'llama'", kind) end
  local tokens = get("tokens", "list of strings", true)
  local types = get("token_type", "list of numbers") or {}
  local out, ids = { named = {} }, {}
  for _, name in ipairs { "bos", "eos", "padding", "unknown" } do
    local id = get(name .. "_token_id", "number")
    if id and not tokens[id + 1] then fail(name .. "_token_id", "is %s, which is no token", errors.show(id)) end
    ids[name] = id
  end
  for field, name in pairs { bos_id = "bos", eos_id = "eos", pad_id = "padding" } do
    out.named[field] = ids[name] and tokens[ids[name] + 1] or nil
  end
  local adds_bos, adds_eos = get("add_bos_token", "boolean"), get("add_eos_token", "boolean")
  if adds_bos == nil then adds_bos = kind == "llama" or (get("pre", "string") or ""):find "^llama" ~= nil end
  out.adds = { bos_id = adds_bos, eos_id = adds_eos }
  if kind == "gpt2" then
    out.json = json_of(get, tokens, types, { bos = adds_bos and ids.bos or nil, eos = adds_eos and ids.eos or nil },
      fail)
  else
    local scores, list, prefix = get("scores", "list of numbers", true), {}, get("add_space_prefix", "boolean")
    for k, token in ipairs(tokens) do
      list[k] = { text = token, score = scores[k] or 0, type = k - 1 == ids.unknown and UNKNOWN or types[k] or NORMAL }
    end
    out.parts = sentencepiece.of(list, { kind = 2, fallback = 1 },
      { map = "", prefix = prefix == false and 0 or 1, squeezes = 0, escapes = 1 },
      function(what) errors.raise("%s: '%s': the tokenizer is damaged: %s", who, path, what) end)
    -- In llama.cpp, the name of the unknown piece is this piece in text, too.
    local unknown = out.parts.model._o.unknown
    table.insert(out.parts.added, { id = unknown, text = tokens[unknown + 1], special = true })
  end
  local template = file.values["tokenizer.chat_template"]
  out.chat_template = type(template) == "string" and template or nil
  return out
end

return M
