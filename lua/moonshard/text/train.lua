-- SPDX-License-Identifier: MIT
--- Trains byte-level BPE. The tokens are numbered as PyPI's `tokenizers` does: special ones, bytes in the order of their
--- characters, merges. The most frequent pair of neighbouring tokens becomes a token, again and again; of equally
--- frequent pairs, that of the smallest ids.
local errors = require "moonshard.core.errors"
local files = require "moonshard.text.files"
local levels = require "moonshard.text.byte_level"
local opts = require "moonshard.core.opts"
local regexes = require "moonshard.text.regex"
local splitters = require "moonshard.text.splitters"

local M = {}

local BASE = 2 ^ 24                                     -- a pair of ids as one number: first * BASE + second

-- The words of all texts as { ids, count }, in the order in which they first occur.
---@param texts string[]
---@param each fun(text: string, fn: fun(word: string))  calls fn with each word of a text
---@param ids_of fun(word: string): integer[]
---@return table[]
local function words_of(texts, each, ids_of)
  local list, by_word = {}, {}
  local function count(word)
    local entry = by_word[word]
    if not entry then
      entry = { ids = ids_of(word), count = 0 }
      by_word[word], list[#list + 1] = entry, entry
    end
    entry.count = entry.count + 1
  end
  for _, text in ipairs(texts) do each(text, count) end
  return list
end

-- Returns a new list of ids, in which each pair a, b is replaced by id.
---@param ids integer[]
---@return integer[]
local function replaced(ids, a, b, id)
  local out, k = {}, 1
  while k <= #ids do
    if ids[k] == a and ids[k + 1] == b then
      out[#out + 1], k = id, k + 2
    else
      out[#out + 1], k = ids[k], k + 1
    end
  end
  return out
end

-- A heap of { count, pair }, the best first.
local function better(x, y) return x[1] > y[1] or x[1] == y[1] and x[2] < y[2] end

local function push(heap, entry)
  local k = #heap + 1
  while k > 1 do
    local up = math.floor(k / 2)
    if not better(entry, heap[up]) then break end
    heap[k], k = heap[up], up
  end
  heap[k] = entry
end

local function pop(heap)
  local top, n = heap[1], #heap
  local entry, k = heap[n], 1
  heap[n] = nil
  n = n - 1
  if n == 0 then return top end
  while true do
    local down = 2 * k
    if down > n then break end
    if down < n and better(heap[down + 1], heap[down]) then down = down + 1 end
    if not better(heap[down], entry) then break end
    heap[k], k = heap[down], down
  end
  heap[k] = entry
  return top
end

-- Adds sign times the count of word number w to the counts of the pairs in it. where[pair]: the numbers of the words
-- that contain the pair, or did before a join. changed: gets the pairs.
local function count_pairs(counts, where, words, w, sign, changed)
  local ids, n = words[w].ids, sign * words[w].count
  for k = 1, #ids - 1 do
    local pair = ids[k] * BASE + ids[k + 1]
    local count = (counts[pair] or 0) + n
    counts[pair] = count > 0 and count or nil
    where[pair] = where[pair] or {}
    where[pair][w], changed[pair] = true, true
  end
end

-- Learns merges until `most` are learned or no pair occurs twice.
---@param words { ids: integer[], count: integer }[]  the words of the texts, which are changed
---@param most integer
---@param join fun(a: integer, b: integer): integer  called for each merge; returns the new token's id
local function learn(words, most, join)
  local counts, where, changed, heap = {}, {}, {}, {}
  for w = 1, #words do count_pairs(counts, where, words, w, 1, changed) end
  for pair in pairs(changed) do push(heap, { counts[pair], pair }) end
  local done = 0
  while done < most and heap[1] do
    local entry = pop(heap)
    local count, pair = entry[1], entry[2]
    if counts[pair] == count then                       -- else a later entry has the pair's count
      if count < 2 then break end
      local a, b = math.floor(pair / BASE), pair % BASE
      local id, contains = join(a, b), where[pair]
      changed, done = {}, done + 1
      for w in pairs(contains) do                       -- sums do not depend on the order
        count_pairs(counts, where, words, w, -1, changed)
        words[w].ids = replaced(words[w].ids, a, b, id)
        count_pairs(counts, where, words, w, 1, changed)
      end
      where[pair] = nil
      for other in pairs(changed) do
        if counts[other] then push(heap, { counts[other], other }) end
      end
    end
  end
end

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
  learn(words_of(texts, each, ids_of), o.vocab_size - n, function(a, b)
    list[#list + 1] = { tokens[a], tokens[b] }
    local both = tokens[a] .. tokens[b]
    return vocab[both] or add(both)
  end)
  return files.from_json(levels.json { vocab = vocab, merges = list, added = added, pattern = pattern }, "trained", {})
end

return M
