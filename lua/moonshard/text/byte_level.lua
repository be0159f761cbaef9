-- SPDX-License-Identifier: MIT
--- What byte-level BPE tokenizers share: the patterns that divide text into words, tokenizer.json, and the alphabet in
--- which files of their vocabularies write bytes: a printable sign of Latin-1 stands for itself, the other 68 bytes are
--- the characters from U+0100 on.
local cjson = require "cjson"

local null = cjson.null

local M = { char = {}, byte = {} }

--- Regular expressions by the name of a tokenizer that has them, for files that lack one.
M.PATTERNS = {
  gpt2 = [['s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]],
  cl100k = [['(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s]],
  llama3 = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+]],
  qwen2 = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+]],
  o200k = table.concat({
    [[[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?]],
    [[[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?]],
    [[\p{N}{1,3}]], [[ ?[^\s\p{L}\p{N}]+[\r\n/]*]], [[\s*[\r\n]+]], [[\s+(?!\S)]], [[\s+]] }, "|"),
}

--- The text of tokenizer.json. o.vocab: ids by token; o.merges: pairs of tokens, in order; both are written in the
--- alphabet of bytes. o.added: list of { id, content, special }; o.pattern: divides text into words; o.whole: a word
--- that is a token is not joined from its parts; o.before, o.after: { token, id } that begins or ends texts.
---@param o table
---@return string
function M.json(o)
  local added, level = {}, { type = "ByteLevel", add_prefix_space = false, trim_offsets = false, use_regex = false }
  for k, token in ipairs(o.added) do
    added[k] = { id = token.id, content = token.content, special = token.special, single_word = false, lstrip = false,
      rstrip = false, normalized = false }
  end
  local processor = level
  if o.before or o.after then
    local single, special = {}, {}
    local function add(token)
      if not token then return end
      single[#single + 1] = { SpecialToken = { id = token[1], type_id = 0 } }
      special[token[1]] = { id = token[1], ids = { token[2] }, tokens = { token[1] } }
    end
    add(o.before)
    single[#single + 1] = { Sequence = { id = "A", type_id = 0 } }
    add(o.after)
    local pair = { unpack(single) }
    for _, part in ipairs(single) do
      pair[#pair + 1] = part.Sequence and { Sequence = { id = "B", type_id = 1 } } or part
    end
    processor = { type = "TemplateProcessing", single = single, pair = pair, special_tokens = special }
  end
  local text = cjson.encode { version = "1.0", truncation = null, padding = null, normalizer = null,
    added_tokens = #added > 0 and added or null, decoder = level, post_processor = processor,
    pre_tokenizer = { type = "Sequence", pretokenizers = {
      { type = "Split", pattern = { Regex = o.pattern }, behavior = "Isolated", invert = false }, level } },
    model = { type = "BPE", dropout = null, unk_token = null, continuing_subword_prefix = null, end_of_word_suffix = null,
      fuse_unk = false, byte_fallback = false, ignore_merges = o.whole or false, vocab = o.vocab, merges = o.merges } }
  return (text:gsub('"merges":{}', '"merges":[]'))
end

-- ---- the alphabet of bytes ----------------------------------------------------------------------------

local function utf8_of(code)
  if code < 128 then return string.char(code) end
  return string.char(0xc0 + math.floor(code / 64), 0x80 + code % 64)
end

local next_code = 256
for b = 0, 255 do
  local code = b
  if b < 33 or b > 126 and b < 161 or b == 173 then code, next_code = next_code, next_code + 1 end
  M.char[b] = utf8_of(code)
  M.byte[M.char[b]] = string.char(b)
end

--- The bytes of a text in this alphabet; nil if the text has other characters.
---@param text string
---@return string?
function M.of(text)
  local wrong = false
  local bytes = text:gsub("[%z\1-\127\192-\255][\128-\191]*", function(c)
    local b = M.byte[c]
    if not b then wrong = true end
    return b
  end)
  return not wrong and bytes or nil
end

--- Bytes in this alphabet.
---@param bytes string
---@return string
function M.text(bytes) return (bytes:gsub(".", function(c) return M.char[c:byte()] end)) end

return M
