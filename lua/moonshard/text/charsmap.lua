-- SPDX-License-Identifier: MIT
--- SentencePiece's map of characters: a trie of texts in a double array (Aoe 1989, as darts-clone writes it), and the
--- texts that replace them. Bytes: the trie's size, 4-byte units, texts that end in a zero byte.
local raw = require "moonshard.data.raw"

local Charsmap = {}
Charsmap.__index = Charsmap

local M = {}

--- The map of its bytes.
---@param text string?
---@return table? map
---@return string? why  what is wrong
function M.new(text)
  if not text then return nil, "is not in base 64" end
  if #text == 0 then return setmetatable({ _units = { [0] = 0 }, _texts = "" }, Charsmap) end
  local size = raw.little(text, 1, 4)
  if #text < 8 or size < 4 or size % 4 ~= 0 or size + 4 > #text then return nil, "is damaged: its trie has no end" end
  local units = {}
  for k = 0, size / 4 - 1 do units[k] = raw.little(text, 5 + 4 * k, 4) end
  return setmetatable({ _units = units, _texts = text:sub(size + 5) }, Charsmap)
end

-- A unit's distance to its children. Bit 9: in units of 256.
local function offset_of(unit)
  local far = math.floor(unit / 512) % 2 == 1
  return bit.lshift(math.floor(unit / 1024), far and 8 or 0)
end

-- The place of the text that replaces a text of the map with which s begins at byte `from`, the shortest or the longest,
-- and that text's size.
local function walk(self, s, from, longest)
  local units, found, size = self._units, nil, nil
  local at = offset_of(units[0])
  for k = from, #s do
    local c = s:byte(k)
    at = bit.bxor(at, c)
    local unit = units[at]
    -- Bits 31 and 0 to 7 are the label.
    if c == 0 or not unit or unit >= 2 ^ 31 or unit % 256 ~= c then break end
    at = bit.bxor(at, offset_of(unit))
    if math.floor(unit / 256) % 2 == 1 and units[at] then
      found, size = units[at] % 2 ^ 31 + 1, k - from + 1
      if not longest then break end
    end
  end
  return found, size
end

--- The text that replaces the shortest text of the map with which s begins; nil if there is none.
---@param s string
---@return string?
function Charsmap:find(s)
  local found = walk(self, s, 1, false)
  return found and self._texts:match("^%Z*", found)
end

--- The text that replaces the longest text of the map with which s begins at byte `from`, and the size of that text;
--- nil if there is none.
---@param s string
---@param from integer
---@return string?
---@return integer? size
function Charsmap:longest(s, from)
  local found, size = walk(self, s, from, true)
  if found then return self._texts:match("^%Z*", found), size end
end

return M
