-- SPDX-License-Identifier: MIT
--- Encodes PNG (ISO/IEC 15948) by libpng's simplified interface, which needs no longjmp, and decodes it here: the
--- interface curves 16-bit samples by a gamma and applies that of the file, while these samples are what the file
--- stores. The checksum of every chunk is compared.
local bit = require "bit"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local raw = require "moonshard.data.raw"
local zlib = require "moonshard.data.zlib"
local ffi = engine.ffi
local band, rshift = bit.band, bit.rshift

ffi.cdef [[
typedef struct {
  void *opaque; uint32_t version, width, height, format, flags, colormap_entries, warning_or_error; char message[64];
} moonshard_png;
int moonshard_png_write(moonshard_png *, void *, size_t *, int, const void *, int32_t, const void *)
  __asm__("png_image_write_to_memory");
void moonshard_png_free(moonshard_png *) __asm__("png_image_free");
]]

local ALPHA, COLOUR = 1, 2                                -- bits of a format of libpng
local FORMATS = { 0, ALPHA, COLOUR, COLOUR + ALPHA }      -- by number of channels

local SIGNATURE = "\137PNG\r\n\26\n"
-- By colour type: the channels in the file, and the depths that it may have.
local KINDS = { [0] = { 1, "1 2 4 8 16" }, [2] = { 3, "8 16" }, [3] = { 1, "1 2 4 8" }, [4] = { 2, "8 16" },
  [6] = { 4, "8 16" } }
local PALETTE = 3
-- The passes of interlacing: the first column and row, and the steps to the next ones.
local WHOLE = { { 0, 0, 1, 1 } }
local ADAM7 = { { 0, 0, 8, 8 }, { 4, 0, 8, 8 }, { 0, 4, 4, 8 }, { 2, 0, 4, 4 }, { 0, 2, 2, 4 }, { 1, 0, 2, 2 },
  { 0, 1, 1, 2 } }

local function big(text, at)
  local a, b, c, d = text:byte(at, at + 3)
  return ((a * 256 + b) * 256 + c) * 256 + d
end

-- The chunks that an image is made of, by name; those of IDAT are joined. nil and why the file is wrong.
local function chunks_of(text, who)
  local chunks, data, at = {}, {}, 9
  while true do
    if at + 11 > #text then return nil, "is incomplete" end
    local size, name = big(text, at), text:sub(at + 4, at + 7)
    if at + 11 + size > #text then return nil, "is incomplete" end
    if zlib.crc(text, at + 4, size + 4, who) ~= big(text, at + 8 + size) then
      return nil, ("is damaged: the checksum of its chunk %s differs"):format((name:gsub("%W", "?")))
    end
    local content = text:sub(at + 8, at + 7 + size)
    if at == 9 and (name ~= "IHDR" or size ~= 13) then return nil, "is damaged: it does not begin with a header" end
    if name == "IDAT" then
      data[#data + 1] = content
    elseif name == "IEND" then
      chunks.IDAT = table.concat(data)
      return chunks
    elseif name ~= "IHDR" and name ~= "PLTE" and name:find "^%u" then
      return nil, ("has a chunk %s, which PNG does not have"):format(name)
    end
    chunks[name] = chunks[name] or content
    at = at + 12 + size
  end
end

-- Adds to each byte of a row what its filter subtracted. prior: the row above, or zeros; step: bytes of a pixel.
local function unfilter(kind, row, prior, n, step)
  if kind == 1 then
    for k = step, n - 1 do row[k] = row[k] + row[k - step] end
  elseif kind == 2 then
    for k = 0, n - 1 do row[k] = row[k] + prior[k] end
  elseif kind == 3 then
    for k = 0, math.min(step, n) - 1 do row[k] = row[k] + rshift(prior[k], 1) end
    for k = step, n - 1 do row[k] = row[k] + rshift(row[k - step] + prior[k], 1) end
  elseif kind == 4 then
    for k = 0, math.min(step, n) - 1 do row[k] = row[k] + prior[k] end
    for k = step, n - 1 do
      local a, b, c = row[k - step], prior[k], prior[k - step]
      local pa, pb = b - c, a - c
      local pc = math.abs(pa + pb)
      pa, pb = math.abs(pa), math.abs(pb)
      row[k] = row[k] + (pa <= pb and pa <= pc and a or pb <= pc and b or c)
    end
  end
  return kind <= 4
end

-- Sample k of a row.
local function sample(row, k, depth)
  if depth == 8 then return row[k] end
  if depth == 16 then return row[2 * k] * 256 + row[2 * k + 1] end
  local at = k * depth
  return band(rshift(row[rshift(at, 3)], 8 - depth - band(at, 7)), 2 ^ depth - 1)
end

-- Returns put(row, w, y, x, step), which stores the w pixels of a row of the file in line y of the image, from column x
-- on with a distance of step columns; it returns false for a colour that the palette lacks. Also the image's channels
-- and its pixels.
local function target(h, chunks)
  local depth, width, palette, clear = h.depth, h.width, nil, chunks.tRNS
  if h.kind == PALETTE then palette = chunks.PLTE or "" end
  if h.kind > PALETTE then clear = nil end               -- the file has an alpha channel itself
  local inside = KINDS[h.kind][1]
  local channels = (palette and 3 or inside) + (clear and 1 or 0)
  local pixels = ffi.new(depth == 16 and "uint16_t[?]" or "uint8_t[?]", width * h.height * channels)
  local scale, opaque = depth < 8 and 255 / (2 ^ depth - 1) or 1, depth == 16 and 65535 or 255
  local key = {}
  for c = 1, clear and not palette and inside or 0 do
    key[c] = (clear:byte(2 * c - 1) or 0) * 256 + (clear:byte(2 * c) or 0)
  end
  local function put(row, w, y, x, step)
    if depth == 8 and channels == inside and not palette and step == 1 then
      ffi.copy(pixels + y * width * channels, row, w * channels)
      return true
    end
    for j = 0, w - 1 do
      local out = (y * width + x + j * step) * channels
      if palette then
        local index = sample(row, j, depth)
        if index * 3 + 3 > #palette then return false end
        pixels[out], pixels[out + 1], pixels[out + 2] = palette:byte(3 * index + 1, 3 * index + 3)
        if clear then pixels[out + 3] = clear:byte(index + 1) or 255 end
      else
        local same = clear ~= nil
        for c = 0, inside - 1 do
          local v = sample(row, j * inside + c, depth)
          pixels[out + c] = v * scale
          if same and v ~= key[c + 1] then same = false end
        end
        if clear then pixels[out + inside] = same and 0 or opaque end
      end
    end
    return true
  end
  return put, channels, pixels
end

-- The passes with pixels: width, height, first column and row, steps and bytes of a row of each; and the bytes of all.
local function passes_of(h)
  local list, total = {}, 0
  for _, p in ipairs(h.interlaced and ADAM7 or WHOLE) do
    local w, n = math.ceil((h.width - p[1]) / p[3]), math.ceil((h.height - p[2]) / p[4])
    if w > 0 and n > 0 then
      local bytes = math.ceil(w * KINDS[h.kind][1] * h.depth / 8)
      list[#list + 1] = { w = w, h = n, x = p[1], y = p[2], dx = p[3], dy = p[4], bytes = bytes }
      total = total + n * (bytes + 1)
    end
  end
  return list, total
end

local M = {}

--- Whether a text begins as a PNG does.
---@param text string
---@return boolean
function M.is(text) return text:sub(1, 4) == SIGNATURE:sub(1, 4) end

--- Decodes a PNG: channels 1 to 4 (grey; grey, alpha; RGB; RGB, alpha), of 8 bits, or 16 if the file has 16.
---@param text string  the file
---@param who string  the function that errors name
---@return {width: integer, height: integer, channels: integer, bits: integer, pixels: ffi.cdata*, exif: string?}?
---@return string? why  what is wrong with the file
function M.decode(text, who)
  if text:sub(1, 8) ~= SIGNATURE then return nil, "is damaged: its signature is not that of PNG" end
  local chunks, why = chunks_of(text, who)
  if not chunks then return nil, why end
  local header = chunks.IHDR
  local depth, kind, deflate, adaptive, interlaced = header:byte(9, 13)
  local h = { width = big(header, 1), height = big(header, 5), depth = depth, kind = kind,
    interlaced = interlaced == 1 }
  if not KINDS[kind] or not (" " .. KINDS[kind][2] .. " "):find(" " .. depth .. " ", 1, true) or deflate ~= 0
    or adaptive ~= 0 or interlaced > 1 or h.width == 0 or h.height == 0 or h.width >= 2 ^ 31 or h.height >= 2 ^ 31 then
    return nil, "has a header that PNG does not have"
  end
  if h.width * h.height >= 2 ^ 28 then
    return nil, ("has %d x %d pixels, expected less than 2^28"):format(h.width, h.height)
  end
  local passes, total = passes_of(h)
  local data = zlib.inflate(chunks.IDAT, 1, zlib.ZLIB, who, total)
  if #data < total then return nil, "is damaged: its compressed data are invalid or incomplete" end
  local put, channels, pixels = target(h, chunks)
  local bytes, at = ffi.new("uint8_t[?]", total), 0
  ffi.copy(bytes, data, total)
  local step = math.ceil(KINDS[kind][1] * depth / 8)
  for _, p in ipairs(passes) do
    local prior = ffi.new("uint8_t[?]", p.bytes)
    for k = 0, p.h - 1 do
      local row = bytes + at + 1
      if not unfilter(bytes[at], row, prior, p.bytes, step) then return nil, "is damaged: a row has an unknown filter" end
      if not put(row, p.w, p.y + k * p.dy, p.x, p.dx) then return nil, "is damaged: its palette lacks a colour" end
      prior, at = row, at + p.bytes + 1
    end
  end
  return { width = h.width, height = h.height, channels = channels, bits = depth == 16 and 16 or 8, pixels = pixels,
    exif = chunks.eXIf }
end

--- Encodes pixels of 8 bits as PNG. Errors: libpng16-16 is missing, or fails.
---@param width integer
---@param height integer
---@param channels integer  1 to 4: grey; grey, alpha; RGB; RGB, alpha
---@param pixels string|ffi.cdata*  a byte for each channel of each pixel, row by row
---@param who string  the function that errors name
---@return string  the contents of the file
function M.encode(width, height, channels, pixels, who)
  local library, image = raw.library({ "libpng16.so.16", "png16" }, "libpng16-16", who), ffi.new "moonshard_png"
  image.version, image.height, image.width, image.format = 1, height, width, FORMATS[channels]
  local room = ffi.new("size_t[1]", math.ceil(width * height * channels * 1.2) + height + 4096)  -- more than needed
  local buffer = ffi.new("char[?]", room[0])
  local ok = library.moonshard_png_write(image, buffer, room, 0, ffi.cast("const void *", pixels), 0, nil)
  local why = ffi.string(image.message)
  library.moonshard_png_free(image)
  if ok == 0 then errors.raise("%s: %s", who, why) end
  return ffi.string(buffer, room[0])
end

return M
