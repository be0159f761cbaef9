-- SPDX-License-Identifier: MIT
--- Decodes JPEG through TurboJPEG, which reports errors as texts: libjpeg's own interface uses longjmp, which would skip
--- Lua's frames.
local engine = require "moonshard.core.ffi"
local log = require "moonshard.core.log"
local raw = require "moonshard.data.raw"
local ffi = engine.ffi

ffi.cdef [[
void *moonshard_jpeg_new(void) __asm__("tjInitDecompress");
int moonshard_jpeg_read(void *, const char *, unsigned long, void *, int, int, int, int, int) __asm__("tjDecompress2");
const char *moonshard_jpeg_error(void *) __asm__("tjGetErrorStr2");
int moonshard_jpeg_error_code(void *) __asm__("tjGetErrorCode");
int moonshard_jpeg_free(void *) __asm__("tjDestroy");
]]

local M = {}

local FORMATS = { [1] = 6, [3] = 0, [4] = 11 }            -- TJPF_GRAY, TJPF_RGB, TJPF_CMYK
local WARNING, LIMIT_SCANS = 0, 32768                     -- TJERR_WARNING, TJFLAG_LIMITSCANS
-- A file of n bytes has at most about 350 n pixels: a block of 8 x 8 needs a bit in each channel.
local PIXELS_PER_BYTE, SMALL = 1000, 2 ^ 20

local function big(text, at) return (text:byte(at) or 0) * 256 + (text:byte(at + 1) or 0) end

-- The size, the number of channels and the Exif data of the segments before the pixels; nil and why they are wrong.
local function segments_of(text)
  local found, at = {}, 3
  while true do
    at = text:find("\255[^%z\255]", at)                   -- the decoder skips other bytes before a marker, too
    if not at then return nil, "is incomplete" end
    at = at + 1
    local marker = text:byte(at)
    local alone = marker == 1 or marker >= 0xd0 and marker <= 0xd8              -- a marker without a segment
    local size = alone and 0 or big(text, at + 1)
    if not alone and size < 2 or at + size > #text then return nil, "is incomplete" end
    if marker >= 0xc0 and marker <= 0xcf and marker ~= 0xc4 and marker ~= 0xc8 and marker ~= 0xcc then
      found.height, found.width, found.channels = big(text, at + 4), big(text, at + 6), text:byte(at + 8)
    elseif marker == 0xe1 and text:sub(at + 3, at + 8) == "Exif\0\0" then
      found.exif = found.exif or text:sub(at + 9, at + size)
    elseif marker == 0xda then
      break
    end
    at = at + size + 1
  end
  if not found.width or found.width == 0 or found.height == 0 then return nil, "is damaged: it has no size" end
  -- Among the pixels, 255 is followed by 0 or belongs to a marker, so this is the end of the image.
  if not text:find("\255\217", at, true) then return nil, "is incomplete: it has no end" end
  return found
end

--- Whether a text begins as a JPEG does.
---@param text string
---@return boolean
function M.is(text) return text:sub(1, 2) == "\255\216" end

--- Decodes a JPEG: 1 channel (grey), 3 (RGB) or 4, in which CMYK is inverted, as Adobe's programs and all others since
--- write it: 255 is no ink. What the decoder warns of, such as bytes between segments, is a warning here.
---@param text string  the file
---@param path string  for warnings
---@param who string  the function that errors name
---@param grey boolean  grey of colours: the file's own brightness
---@return {width: integer, height: integer, channels: integer, bits: integer, pixels: ffi.cdata*, exif: string?}?
---@return string? why  what is wrong with the file
function M.decode(text, path, who, grey)
  local jpeg = raw.library({ "libturbojpeg.so.0", "turbojpeg" }, "libturbojpeg0", who)
  local image, why = segments_of(text)
  if not image then return nil, why end
  local channels = image.channels
  if not FORMATS[channels] then return nil, ("has %d channels, expected 1, 3 or 4"):format(channels or 0) end
  if grey and channels == 3 then channels = 1 end
  local width, height = image.width, image.height
  if width * height > math.max(SMALL, PIXELS_PER_BYTE * #text) or width * height * channels >= 2 ^ 31 then
    return nil, ("is damaged: its %d bytes are too few for %d x %d pixels"):format(#text, width, height)
  end
  local reader = ffi.gc(jpeg.moonshard_jpeg_new(), jpeg.moonshard_jpeg_free)
  local pixels = ffi.new("uint8_t[?]", width * height * channels)
  if jpeg.moonshard_jpeg_read(reader, text, #text, pixels, width, width * channels, height, FORMATS[channels],
    LIMIT_SCANS) ~= 0 then
    why = ffi.string(jpeg.moonshard_jpeg_error(reader))
    if jpeg.moonshard_jpeg_error_code(reader) ~= WARNING then return nil, "cannot be read: " .. why end
    log.warn(("%s: '%s': %s"):format(who, path, why))
  end
  return { width = width, height = height, channels = channels, bits = 8, pixels = pixels, exif = image.exif }
end

return M
