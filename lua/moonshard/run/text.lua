-- SPDX-License-Identifier: MIT
--- Generates text with a language model, counts how many of its words occur in the corpus, and makes texts safe to
--- print.
local create = require "moonshard.tensor.create"
local no_grad = require "moonshard.autograd".no_grad
local scope = require "moonshard.tensor.scope".scope
local lib = require("moonshard.core.ffi").lib
local task = require "moonshard.core.task"

local M = {}

--- Generates `n` tokens after `prompt`, each sampled from softmax(logits / temperature) with a random number that
--- depends only on the seed and the position; the state of the generator does not change. Collective if the model is
--- sharded: every rank generates the same tokens. The model's input is the last `context` tokens.
---@param model Module      ids [1, T] -> logits [1, T, vocab]
---@param prompt integer[]  at least one token, 0-based ids
---@param n integer  number of tokens to generate
---@param given {context: integer, temperature: number, seed: integer, each?: fun(id: integer)}
---   context: tokens of the model's input; temperature: 0 always takes the most likely token; seed: seed of the random
---   numbers; each: called with every new token
---@return integer[]  the new tokens
function M.generate(model, prompt, n, given)
  local ids, first = {}, #prompt
  for k, id in ipairs(prompt) do ids[k] = id end
  local training = model.training
  model:eval()
  no_grad(function()
    for k = 1, n do
      if not given.each then task.report("generating", k - 1, n) end
      local from = math.max(1, #ids - given.context + 1)
      local used = #ids - from + 1
      -- Pads the end, which does not affect earlier positions of a causal model, to a multiple of 32, at most to
      -- `context`: few shapes instead of hundreds.
      local length = math.min(given.context, math.ceil(used / 32) * 32)
      local row = {}
      for j = 1, length do row[j] = ids[from + j - 1] or 0 end
      ids[#ids + 1] = scope(function()
        local logits = model(create.tensor({ row }, { dtype = "int64" })):select(1, 1):select(1, used):float()
        if given.temperature == 0 then return logits:argmax():item() end
        local below = (logits / given.temperature):softmax(-1):cumsum(-1)
        local u = lib.ms_hash_share(given.seed, first + k, 3)
        return math.min(below:le(u):sum():item(), below:numel() - 1)
      end)
      if given.each then given.each(ids[#ids]) end
    end
    task.report("generating", n, n)
  end)
  model:train(training)
  local new = {}
  for k = first + 1, #ids do new[#new + 1] = ids[k] end
  return new
end

--- The bytes of a text, as token ids.
---@param text string  any string
---@return integer[]
function M.bytes(text)
  local ids = {}
  for k = 1, #text do ids[k] = text:byte(k) end
  return ids
end

--- Converts token ids to text: bytes if kind is "text", otherwise numbers.
---@param ids integer[]  token ids, from 0
---@param kind "text"|"tokens"  the kind of the corpus
function M.show(ids, kind)
  if kind ~= "text" then return table.concat(ids, " ") end
  local parts = {}
  for k, id in ipairs(ids) do parts[k] = string.char(id) end
  return table.concat(parts)
end

-- The length of the UTF-8 character at a position; nil if there is none.
local function character(text, at)
  local b = text:byte(at)
  local n = b < 0x80 and 1 or b < 0xe0 and 2 or b < 0xf0 and 3 or 4
  if b >= 0x80 and b < 0xc2 or b > 0xf4 or not text:find("^" .. ("[\128-\191]"):rep(n - 1), at + 1) then return nil end
  local second = text:byte(at + 1) or 0
  local wrong = b == 0xe0 and second < 0xa0 or b == 0xed and second > 0x9f or b == 0xf0 and second < 0x90
    or b == 0xf4 and second > 0x8f
  return not wrong and n or nil
end

--- Makes a text valid UTF-8: each byte that belongs to no valid character becomes U+FFFD.
function M.utf8(text)
  if not text:find "[\128-\255]" then return text end
  local parts, at = {}, 1
  while at <= #text do
    local n = character(text, at)
    parts[#parts + 1] = n and text:sub(at, at + n - 1) or "\239\191\189"
    at = at + (n or 1)
  end
  return table.concat(parts)
end

--- Makes a text safe for a terminal: bytes beyond ASCII and control characters except newline and tab become '?'.
function M.printable(text) return (text:gsub("[^\n\t\32-\126]", "?")) end

--- The set of words in some texts. A word is a maximal sequence of letters.
---@param texts {text: string}[]  the texts of a corpus
function M.words_of(texts)
  local words = {}
  for _, t in ipairs(texts) do
    for word in t.text:gmatch "%a+" do words[word] = true end
  end
  return words
end

--- Counts how many words of a sample are among `words`. Ignores a word at the very beginning or end of the sample,
--- because the sample may begin or end inside it.
---@param sample string  a generated text
---@param words table<string, boolean>  the known words, as keys
---@return integer known
---@return integer total
function M.known_words(sample, words)
  local known, total = 0, 0
  for from, word, to in sample:gmatch "()(%a+)()" do
    if to <= #sample and from > 1 then
      total = total + 1
      if words[word] then known = known + 1 end
    end
  end
  return known, total
end

return M
