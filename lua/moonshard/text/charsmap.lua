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

-- Where a node's child is that the byte c leads to; nil if there is none.
local function child(units, at, c)
  at = bit.bxor(at, c)
  local unit = units[at]
  -- Bits 31 and 0 to 7 are the label.
  if c > 0 and unit and unit < 2 ^ 31 and unit % 256 == c then return at, unit end
end

-- The place of the text that replaces a text of the map with which s begins at byte `from`, the shortest or the longest,
-- and that text's size; and the node that all of s leads to.
local function walk(self, s, from, longest)
  local units, found, size = self._units, nil, nil
  local at = offset_of(units[0])
  for k = from, #s do
    local place, unit = child(units, at, s:byte(k))
    if not place then return found, size end
    at = bit.bxor(place, offset_of(unit))
    if math.floor(unit / 256) % 2 == 1 and units[at] then
      found, size = units[at] % 2 ^ 31 + 1, k - from + 1
      if not longest then break end
    end
  end
  return found, size, at
end

--- Whether a text of the map begins with a byte.
---@param byte integer
---@return boolean
function Charsmap:begins(byte) return child(self._units, offset_of(self._units[0]), byte) ~= nil end

--- Whether the map leaves printable characters of ASCII as they are, unless characters beyond ASCII follow: none of its
--- texts has only these, or a space after some of them.
---@return boolean
function Charsmap:keeps_ascii()
  local units, seen = self._units, {}
  local function keeps(at)
    for c = 32, 126 do
      local place, unit = child(units, at, c)
      -- A damaged trie may have circles.
      if place and (c == 32 or seen[place] or math.floor(unit / 256) % 2 == 1) then return false end
      if place then
        seen[place] = true
        if not keeps(bit.bxor(place, offset_of(unit))) then return false end
      end
    end
    return true
  end
  return keeps(offset_of(units[0]))
end

--- The text that replaces the shortest text of the map with which s begins; nil if there is none.
---@param s string
---@return string?
function Charsmap:find(s)
  local found = walk(self, s, 1, false)
  return found and self._texts:match("^%Z*", found)
end

--- The text that replaces the longest text of the map with which s begins at byte `from`, and the size of that text;
--- nil if there is none. goes_on: a text of the map begins with all of s from there, and a space after it.
---@param s string
---@param from integer
---@return string?
---@return integer? size
---@return boolean goes_on
function Charsmap:longest(s, from)
  local found, size, at = walk(self, s, from, true)
  local goes_on = at ~= nil and child(self._units, at, 32) ~= nil
  if found then return self._texts:match("^%Z*", found), size, goes_on end
  return nil, nil, goes_on
end

return M
