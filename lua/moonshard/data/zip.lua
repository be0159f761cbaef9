-- SPDX-License-Identifier: MIT
--- Zip archives, also of more than 65,535 files (zip64). The directory at an archive's end must agree with the size of
--- the file, and the contents of each file with its CRC, so that no damage passes unseen.
local bit = require "bit"
local raw = require "moonshard.data.raw"
local zlib = require "moonshard.data.zlib"

local M = {}

local little = raw.little

---@class ZipEntry
---@field name string
---@field flags integer
---@field method integer  0: stored; 8: deflate
---@field crc integer
---@field size integer   bytes in the archive
---@field whole integer  bytes of the contents
---@field at integer     position of its header in the archive, from 1

-- Where the directory begins, where it ends (exclusive) and its number of files; nil if the archive has no end.
local function directory(text)
  for at = #text - 21, math.max(1, #text - 65556), -1 do
    if text:byte(at) == 80 and text:sub(at, at + 3) == "PK\5\6" and at + 21 + little(text, at + 20, 2) == #text then
      local count, size, from = little(text, at + 10, 2), little(text, at + 12, 4), little(text, at + 16, 4)
      if at > 20 and text:sub(at - 20, at - 17) == "PK\6\7" then                -- the locator of zip64's own end
        at = little(text, at - 12, 8) + 1
        if text:sub(at, at + 3) ~= "PK\6\6" then return nil end
        count, size, from = little(text, at + 32, 8), little(text, at + 40, 8), little(text, at + 48, 8)
      end
      if from + size + 1 ~= at then return nil end
      return from + 1, at, count
    end
  end
end

-- Replaces the sizes and the position that do not fit into 4 bytes by those in zip64's extra field, which begins at
-- `at` and ends before `stop`.
local function widen(entry, text, at, stop)
  while at + 3 < stop do
    local id, bytes = little(text, at, 2), little(text, at + 2, 2)
    if id == 1 then
      local value = at + 4
      for _, name in ipairs { "whole", "size", "at" } do
        if entry[name] == 0xffffffff and value + 8 <= at + 4 + bytes then
          entry[name], value = little(text, value, 8), value + 8
        end
      end
    end
    at = at + 4 + bytes
  end
end

-- Whether a file begins with the header that the directory gives it.
local function agrees(entry, text)
  local at = entry.at
  return text:sub(at, at + 3) == "PK\3\4" and little(text, at + 6, 2) == entry.flags
    and little(text, at + 8, 2) == entry.method and little(text, at + 26, 2) == #entry.name
    and text:sub(at + 30, at + 29 + #entry.name) == entry.name
end

--- The files of an archive, in the order of its directory. Errors: also a file whose header differs from the directory.
---@param text string  the archive
---@return ZipEntry[]?
---@return string? why  what is wrong with the archive
function M.entries(text)
  local here, stop, count = directory(text)
  if not here then return nil, "is not a zip archive, or is incomplete" end
  local list, known = {}, {}
  for k = 1, count do
    if text:sub(here, here + 3) ~= "PK\1\2" or here + 45 >= stop then return nil, "is damaged: its directory is incomplete" end
    local name_length, extra = little(text, here + 28, 2), little(text, here + 30, 2)
    local entry = { name = text:sub(here + 46, here + 45 + name_length), flags = little(text, here + 8, 2),
      method = little(text, here + 10, 2), crc = little(text, here + 16, 4), size = little(text, here + 20, 4),
      whole = little(text, here + 24, 4), at = little(text, here + 42, 4) }
    local first = here + 46 + name_length
    here = first + extra + little(text, here + 32, 2)
    if here > stop then return nil, "is damaged: its directory is incomplete" end
    widen(entry, text, first, first + extra)
    entry.at = entry.at + 1
    if not agrees(entry, text) then
      return nil, ("is damaged: '%s' does not begin as the archive's directory says"):format(entry.name)
    end
    if known[entry.name] then return nil, ("has two files of the name '%s'"):format(entry.name) end
    known[entry.name], list[k] = true, entry
  end
  if here ~= stop then return nil, "is damaged: its directory has more files than it says" end
  return list
end

--- The contents of a file of an archive.
---@param text string  the archive
---@param entry ZipEntry
---@param who string  the function that errors name
---@return string?
---@return string? why  why the file cannot be read
function M.contents(text, entry, who)
  if bit.band(entry.flags, 1) ~= 0 then return nil, "is encrypted" end
  if entry.method ~= 0 and entry.method ~= 8 then
    return nil, ("is compressed by method %d, expected 0 (stored) or 8 (deflate)"):format(entry.method)
  end
  local first = entry.at + 30 + #entry.name + little(text, entry.at + 28, 2)
  if first + entry.size - 1 > #text then return nil, "is damaged: it is cut off" end
  local data = text:sub(first, first + entry.size - 1)
  if entry.method == 8 then
    local whole, after = zlib.inflate(data, 1, zlib.DEFLATE, who, entry.whole)
    if not after then return nil, "is damaged: its compressed data are invalid or incomplete" end
    data = whole
  end
  if #data ~= entry.whole then return nil, ("is damaged: it has %d bytes, expected %d"):format(#data, entry.whole) end
  if zlib.crc(data, 1, #data, who) ~= entry.crc then return nil, "is damaged: its checksum differs" end
  return data
end

return M
