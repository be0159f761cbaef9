-- SPDX-License-Identifier: MIT
--- Decompression by zlib: files of gzip, and entries of zip archives.
local bit = require "bit"
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
]]

local M = {}

local CHUNK, RAW, GZIP = 262144, -15, 31

local function failed(who, path, what) errors.raise("%s: '%s' is damaged: %s", who, path, what) end

-- Decompresses text. bits: the format (RAW or GZIP).
local function inflate(text, bits, who, path)
  local z = raw.library({ "libz.so.1", "z" }, "zlib1g", who)
  local s, out, parts = ffi.new "moonshard_z_stream", ffi.new("uint8_t[?]", CHUNK), {}
  s.next_in, s.avail_in = ffi.cast("const uint8_t *", text), #text
  if z.moonshard_inflate_init(s, bits, "1", ffi.sizeof(s)) ~= 0 then errors.raise("%s: no memory for zlib", who) end
  local status
  repeat
    s.next_out, s.avail_out = out, CHUNK
    status = z.moonshard_inflate(s, 0)
    parts[#parts + 1] = ffi.string(out, CHUNK - s.avail_out)
    local more = status == 0 and (s.avail_in > 0 or s.avail_out == 0)
  until not more
  z.moonshard_inflate_end(s)
  if status ~= 1 then failed(who, path, "its compressed data are invalid or incomplete") end
  return table.concat(parts)
end

--- The contents of a file, decompressed if it begins as gzip does.
function M.read(path, who)
  local text = raw.read(path, who)
  if text:sub(1, 2) ~= "\31\139" then return text end
  return inflate(text, GZIP, who, path)
end

local function little(text, at, bytes)
  local n = 0
  for k = bytes, 1, -1 do n = n * 256 + text:byte(at + k - 1) end
  return n
end

--- The files of a zip archive: names and contents, in the archive's order.
---@return {name: string, text: string}[]
function M.unzip(path, who)
  local text = raw.read(path, who)
  local ending = math.max(1, #text - 65557)
  local at
  for found in text:sub(ending):gmatch "()PK\5\6" do at = ending + found - 1 end
  if not at or at + 21 > #text then errors.raise("%s: '%s' is not a zip archive, or is incomplete", who, path) end
  local count, here, list = little(text, at + 10, 2), little(text, at + 16, 4) + 1, {}
  for k = 1, count do
    if text:sub(here, here + 3) ~= "PK\1\2" or here + 45 > #text then failed(who, path, "the archive's directory is incomplete") end
    local flags, method = little(text, here + 8, 2), little(text, here + 10, 2)
    local size, whole = little(text, here + 20, 4), little(text, here + 24, 4)
    local name_length = little(text, here + 28, 2)
    local name, entry = text:sub(here + 46, here + 45 + name_length), little(text, here + 42, 4) + 1
    if bit.band(flags, 1) ~= 0 or method ~= 0 and method ~= 8 or size == 0xffffffff or entry == 0x100000000 then
      errors.raise("%s: '%s' in '%s' is encrypted, compressed by a method other than deflate, or in zip64 "
        .. "format (from 4 GiB), which cannot be read", who, name, path)
    end
    if text:sub(entry, entry + 3) ~= "PK\3\4" then failed(who, path, ("'%s' does not begin where the archive's directory says"):format(name)) end
    local first = entry + 30 + little(text, entry + 26, 2) + little(text, entry + 28, 2)
    local data = text:sub(first, first + size - 1)
    if #data < size then failed(who, path, ("'%s' is cut off"):format(name)) end
    if method == 8 then data = inflate(data, RAW, who, path) end
    if #data ~= whole then failed(who, path, ("'%s' has %d bytes, expected %d"):format(name, #data, whole)) end
    list[k] = { name = name, text = data }
    here = here + 46 + name_length + little(text, here + 30, 2) + little(text, here + 32, 2)
  end
  return list
end

return M
