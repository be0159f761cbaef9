-- SPDX-License-Identifier: MIT
--- Texts of bytes and of token ids: counts how many of a sample's words occur in the corpus, and makes texts safe to
--- print.
local M = {}

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
