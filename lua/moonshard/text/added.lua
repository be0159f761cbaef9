-- SPDX-License-Identifier: MIT
--- Added tokens: texts that are one token wherever they occur, such as <|endoftext|>. The leftmost is found first, the
--- longest of several at one place.
local regexes = require "moonshard.text.regex"

local M = {}

local Added = {}
Added.__index = Added

--- A finder of added tokens; nil for none. Each is { id =, text =, special =, lstrip =, rstrip =, single_word = }.
---@param tokens table[]
---@param who string
---@return table?
function M.new(tokens, who)
  local by_text, texts = {}, {}
  for _, token in ipairs(tokens) do
    if #token.text > 0 and not by_text[token.text] then
      by_text[token.text] = token
      texts[#texts + 1] = token.text
    end
  end
  if #texts == 0 then return nil end
  table.sort(texts, function(a, b)
    if #a ~= #b then return #a > #b end
    return a < b
  end)
  for k, text in ipairs(texts) do texts[k] = regexes.literal(text) end
  local self = setmetatable({ _by_text = by_text, _regex = assert(regexes.new(table.concat(texts, "|"), who, true)) }, Added)
  for _, token in ipairs(tokens) do
    self._strips = self._strips or token.lstrip or token.rstrip or token.single_word
  end
  if self._strips then
    self._spaces = { left = regexes.new([[\s+\z]], who), right = regexes.new([[\G\s+]], who) }
    self._word = { left = regexes.new([[\w\z]], who), right = regexes.new([[\G\w]], who) }
  end
  return self
end

local function spaces_before(regex, s, i)
  local k = i
  while k > 1 do
    local c = s:byte(k - 1)
    if c < 128 then
      if not (c == 32 or c >= 9 and c <= 13) then break end
      k = k - 1
    else
      local from = k - 1
      while from > 1 and s:byte(from) >= 128 and s:byte(from) < 192 do from = from - 1 end
      if not regex:find(s:sub(from, k - 1), 1) then break end
      k = from
    end
  end
  return k
end

local function word_before(regex, s, i)
  local from = i - 1
  while from > 1 and s:byte(from) >= 128 and s:byte(from) < 192 do from = from - 1 end
  return from >= 1 and regex:find(s:sub(from, i - 1), 1) ~= nil
end

--- Whether a text has one of the tokens.
---@param s string
---@return boolean
function Added:finds(s) return self._regex:find(s, 1) ~= nil end

--- Calls fn(i, j, id) for each added token in a text and fn(i, j) for what is between them, in order.
---@param s string
---@param fn fun(i: integer, j: integer, id: integer?)
---@param skip? boolean  true: special tokens are text
function Added:each(s, fn, skip)
  local done, at = 0, 1
  while true do
    local i, j = self._regex:find(s, at)
    if not i then break end
    at = j + 1
    local token = self._by_text[s:sub(i, j)]
    local apart = not token.single_word
      or not (word_before(self._word.left, s, i) or self._word.right:find(s, j + 1) ~= nil)
    if apart and not (skip and token.special) then
      if token.lstrip then i = math.max(spaces_before(self._spaces.left, s, i), done + 1) end
      if token.rstrip then
        local first, last = self._spaces.right:find(s, j + 1)
        if first then j = last end
      end
      if i > done + 1 then fn(done + 1, i - 1) end
      fn(i, j, token.id)
      done = j
    end
  end
  if done < #s then fn(done + 1, #s) end
end

return M
