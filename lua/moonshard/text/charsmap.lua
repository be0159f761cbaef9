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
  if #text == 0 then return setmetatable({ units = { [0] = 0 }, count = 1, texts = "" }, Charsmap) end
  local size = raw.little(text, 1, 4)
  if #text < 8 or size < 4 or size % 4 ~= 0 or size + 4 > #text then return nil, "is damaged: its trie has no end" end
  local units = {}
  for k = 0, size / 4 - 1 do units[k] = raw.little(text, 5 + 4 * k, 4) end
  return setmetatable({ units = units, count = size / 4, texts = text:sub(size + 5) }, Charsmap)
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

--- The text that replaces the shortest text of the map with which s begins; nil if there is none.
---@param s string
---@return string?
function Charsmap:find(s)
  local units = self.units
  local at = offset_of(units[0])
  for k = 1, #s do
    local place, unit = child(units, at, s:byte(k))
    if not place then return nil end
    at = bit.bxor(place, offset_of(unit))
    if math.floor(unit / 256) % 2 == 1 and units[at] then return self.texts:match("^%Z*", units[at] % 2 ^ 31 + 1) end
  end
end

return M
