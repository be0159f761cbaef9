-- SPDX-License-Identifier: MIT
--- Trains byte-level BPE. The tokens are numbered as PyPI's `tokenizers` does: special ones, bytes in the order of their
--- characters, merges.
local errors = require "moonshard.core.errors"
local files = require "moonshard.text.files"
local levels = require "moonshard.text.byte_level"
local merges = require "moonshard.data.merges"
local opts = require "moonshard.core.opts"
local regexes = require "moonshard.text.regex"
local splitters = require "moonshard.text.splitters"

local M = {}

--- As ms.text.train_bpe.
function M.bpe(texts, given)
  local who = "train_bpe"
  local o = opts(who, given or {}, { vocab_size = opts.option(opts.whole_from(256), opts.required),
    special_tokens = opts.table, pattern = opts.option(opts.string, "gpt2") })
  if type(texts) == "string" then texts = { texts } end
  opts.need(opts.is_plain(texts), texts, "a string or a list of strings", "%s: argument 1", who)
  for k, text in ipairs(texts) do opts.expect(text, opts.string, "%s: text %d", who, k) end
  local special = o.special_tokens or {}
  local pattern = levels.PATTERNS[o.pattern] or o.pattern
  local regex, why = regexes.new(pattern, who)
  if not regex then errors.raise("%s: option 'pattern' is no regular expression: %s", who, why) end

  local vocab, tokens, added, n = {}, {}, {}, 0
  local function add(token)
    vocab[token], tokens[n], n = n, token, n + 1
    return n - 1
  end
  for k, text in ipairs(special) do
    opts.expect(text, opts.string, "%s: special token %d", who, k)
    if vocab[text] then errors.raise("%s: special token '%s' is given twice", who, text) end
    added[k] = { id = add(text), content = text, special = true }
  end
  local chars, id_of, list = {}, {}, {}
  for b = 0, 255 do chars[b + 1] = levels.char[b] end
  table.sort(chars)
  for _, char in ipairs(chars) do id_of[levels.byte[char]:byte()] = vocab[char] or add(char) end
  local function each(text, fn)
    splitters.each(regex, text, function(i, j) fn(text:sub(i, j)) end)
  end
  local function ids_of(word)
    local ids = {}
    for k = 1, #word do ids[k] = id_of[word:byte(k)] end
    return ids
  end
  merges.learn(merges.words(texts, each, ids_of), o.vocab_size - n, function(a, b)
    list[#list + 1] = { tokens[a], tokens[b] }
    local both = tokens[a] .. tokens[b]
    return vocab[both] or add(both)
  end)
  return files.from_json(levels.json { vocab = vocab, merges = list, added = added, pattern = pattern }, "trained", {})
end

return M
