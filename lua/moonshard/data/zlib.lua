-- SPDX-License-Identifier: MIT
--- Decompression by zlib, and files that gzip compressed.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local raw = require "moonshard.data.raw"
local ffi = engine.ffi

ffi.cdef [[
typedef struct {
  const uint8_t *next_in; unsigned avail_in; unsigned long total_in;
  uint8_t *next_out; unsigned avail_out; unsigned long total_out;
  const char *msg; void *state; void *zalloc, *zfree, *opaque; int data_type; unsigned long adler, reserved;
} moonshard_z_stream;
int moonshard_inflate_init(moonshard_z_stream *, int, const char *, int) __asm__("inflateInit2_");
int moonshard_inflate(moonshard_z_stream *, int) __asm__("inflate");
int moonshard_inflate_end(moonshard_z_stream *) __asm__("inflateEnd");
unsigned long moonshard_crc32(unsigned long, const uint8_t *, unsigned) __asm__("crc32");
]]

-- Formats of compressed data: deflate alone, within zlib's header and checksum, within gzip's.
local M = { DEFLATE = -15, ZLIB = 15, GZIP = 31 }

local CHUNK, MAGIC = 262144, "\31\139"
local chunk                                              -- a buffer that all calls use: members may be short and many

local function library(who) return raw.library({ "libz.so.1", "z" }, "zlib1g", who) end

--- Decompresses the data that begin at byte `at`.
---@param text string
---@param at integer  from 1
---@param format integer  M.DEFLATE, M.ZLIB or M.GZIP
---@param who string  the function that errors name
---@param limit? integer  stops after the chunk that has this many bytes: a small file may have data of a large one
---@return string
---@return integer? after  the position after the data; nil: they are invalid, incomplete, or longer than the limit
function M.inflate(text, at, format, who, limit)
  local z = library(who)
  chunk = chunk or ffi.new("uint8_t[?]", CHUNK)
  local s, parts, total = ffi.new "moonshard_z_stream", {}, 0
  s.next_in, s.avail_in = ffi.cast("const uint8_t *", text) + at - 1, #text - at + 1
  if z.moonshard_inflate_init(s, format, "1", ffi.sizeof(s)) ~= 0 then errors.raise("%s: no memory for zlib", who) end
  ffi.gc(s, z.moonshard_inflate_end)
  local status
  repeat
    s.next_out, s.avail_out = chunk, CHUNK
    status = z.moonshard_inflate(s, 0)
    parts[#parts + 1] = ffi.string(chunk, CHUNK - s.avail_out)
    total = total + CHUNK - s.avail_out
    local more = status == 0 and (s.avail_in > 0 or s.avail_out == 0) and total <= (limit or math.huge)
  until not more
  local after = #text - s.avail_in + 1
  z.moonshard_inflate_end(ffi.gc(s, nil))
  return table.concat(parts), status == 1 and after or nil
end

--- The CRC of n bytes of a text that begin at byte `at`, as gzip, zip and PNG have it.
---@param text string
---@param at integer  from 1
---@param n integer
---@param who string  the function that errors name
---@return integer
function M.crc(text, at, n, who)
  return tonumber(library(who).moonshard_crc32(0, ffi.cast("const uint8_t *", text) + at - 1, n))
end

--- The contents of a file. Those that gzip compressed are decompressed: all members, one after the other, as
--- `cat a.gz b.gz` has them. Zeros between and after members are skipped, as gzip does.
---@param path string
---@param who string  the function that errors name
---@return string
function M.read(path, who)
  local text = raw.read(path, who)
  if text:sub(1, 2) ~= MAGIC then
    if path:find "%.gz$" then errors.raise("%s: '%s' is not compressed by gzip, which its name says", who, path) end
    return text
  end
  local parts, at = {}, 1
  repeat
    local part, after = M.inflate(text, at, M.GZIP, who)
    if not after then
      errors.raise("%s: '%s' is damaged: its compressed data are invalid or incomplete", who, path)
    end
    parts[#parts + 1] = part
    at = text:find("[^%z]", after)
    if at and text:sub(at, at + 1) ~= MAGIC then
      errors.raise("%s: '%s' has bytes after its compressed data (from byte %d on) that gzip did not write", who, path, at)
    end
  until not at
  return table.concat(parts)
end

--- The contents of a text file, without the byte order mark of UTF-8. Errors: text in UTF-16 or UTF-32.
---@param path string  the file, also compressed by gzip
---@param who string  the function that errors name
---@return string
function M.read_text(path, who)
  local text = M.read(path, who)
  if text:sub(1, 3) == "\239\187\191" then return text:sub(4) end
  local found = raw.marked_encoding(text)
    or (text:find "^[^%z]%z[^%z]%z" or text:find "^%z[^%z]%z[^%z]") and "UTF-16"
  if found then
    errors.raise("%s: '%s' is text in %s, expected UTF-8; `iconv -f %s -t UTF-8 FILE` converts it", who, path, found, found)
  end
  return text
end

return M
