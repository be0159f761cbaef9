-- SPDX-License-Identifier: MIT
--- Writes images as PNG (RFC 2083), uncompressed: deflate's stored blocks need no library.
local bit = require "bit"
local crc32 = require "moonshard.run.crc" (0xedb88320)

local band, rshift = bit.band, bit.rshift

local function big_endian(x)
  return string.char(band(rshift(x, 24), 255), band(rshift(x, 16), 255), band(rshift(x, 8), 255), band(x, 255))
end

local function chunk(name, data)
  local text = name .. data
  return big_endian(#data) .. text .. big_endian(crc32(text))
end

-- Data in the zlib format (RFC 1950): uncompressed blocks (RFC 1951) of at most 65535 bytes, then the checksum
-- Adler-32.
local function zlib(data)
  local parts = { "\120\1" }
  for at = 1, math.max(#data, 1), 65535 do
    local block = data:sub(at, at + 65534)
    local n = #block
    local low, high = n % 256, math.floor(n / 256)
    parts[#parts + 1] = string.char(at + 65535 > #data and 1 or 0, low, high, 255 - low, 255 - high) .. block
  end
  local a, b = 1, 0
  for k = 1, #data do
    a = (a + data:byte(k)) % 65521
    b = (b + a) % 65521
  end
  parts[#parts + 1] = big_endian(b * 65536 + a)
  return table.concat(parts)
end

--- The contents of a PNG file.
---@param width integer
---@param height integer
---@param channels 1|3  grey, or red, green and blue
---@param pixels string  a byte for each channel of each pixel, row by row
---@return string
return function(width, height, channels, pixels)
  local rows, length = {}, width * channels
  for y = 0, height - 1 do rows[y + 1] = "\0" .. pixels:sub(y * length + 1, (y + 1) * length) end   -- filter 0: none
  local header = big_endian(width) .. big_endian(height) .. string.char(8, channels == 3 and 2 or 0, 0, 0, 0)
  return "\137PNG\r\n\26\n" .. chunk("IHDR", header) .. chunk("IDAT", zlib(table.concat(rows))) .. chunk("IEND", "")
end
