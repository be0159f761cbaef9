-- SPDX-License-Identifier: MIT
--- TensorBoard's event files: scalars, texts, images, histograms. A file is a sequence of TFRecords, each with a masked
--- CRC32C; a record is an Event in the encoding of protocol buffers. Field numbers are those of TensorFlow's
--- event.proto, summary.proto and tensor.proto.
local bit, ffi, lfs = require "bit", require "ffi", require "lfs"
local buffers = require "moonshard.run.buffer"
local log = require "moonshard.core.log"

local rshift, lshift, bor, bxor, band, floor = bit.rshift, bit.lshift, bit.bor, bit.bxor, bit.band, math.floor

-- ---- TFRecord ------------------------------------------------------------------------------------

-- CRC32C (polynomial of Castagnoli; zlib has only that of Ethernet), by a table over bytes.
local sums = ffi.new "int32_t[256]"
for n = 0, 255 do
  local c = n
  for _ = 1, 8 do c = band(c, 1) == 1 and bxor(0x82f63b78, rshift(c, 1)) or rshift(c, 1) end
  sums[n] = c
end

-- The checksum of n bytes as the format stores it.
local function masked_crc(bytes, n)
  local c = -1
  for k = 0, n - 1 do c = bxor(sums[band(bxor(c, bytes[k]), 255)], rshift(c, 8)) end
  c = bit.bnot(c)
  return bit.tobit(bor(rshift(c, 15), lshift(c, 17)) + 0xa282ead8)
end

local int32, uint64, float32, float64 = ffi.typeof "int32_t *", ffi.typeof "uint64_t *", ffi.typeof "float *",
  ffi.typeof "double *"

local HEAD, FOOT = 12, 4                                -- bytes: the length and its checksum; the data's checksum

-- Ends the record whose data begin HEAD bytes after `at` and reach to the end of the buffer.
local function close_record(buffer, at)
  buffer:reserve(FOOT)
  local start, n = buffer.bytes + at, buffer.n - at - HEAD
  ffi.cast(uint64, start)[0] = n
  ffi.cast(int32, start + 8)[0] = masked_crc(start, 8)
  ffi.cast(int32, start + HEAD + n)[0] = masked_crc(start + HEAD, n)
  buffer.n = buffer.n + FOOT
end

local function record(buffer, data)
  local at = buffer.n
  buffer:reserve(HEAD)
  buffer.n = at + HEAD
  buffer:text(data)
  close_record(buffer, at)
end

-- ---- protocol buffers ------------------------------------------------------------------------------

-- A whole number from 0 to 2^53: seven bits per byte, the lowest first.
local function varint(n)
  if n < 128 then return string.char(n) end
  local parts = {}
  while n >= 128 do
    parts[#parts + 1] = string.char(n % 128 + 128)
    n = math.floor(n / 128)
  end
  parts[#parts + 1] = string.char(n)
  return table.concat(parts)
end

local function whole(field, n) return varint(field * 8) .. varint(n) end
local function bytes(field, text) return varint(field * 8 + 2) .. varint(#text) .. text end

local double1 = ffi.new "double[1]"
local function raw_double(x)
  double1[0] = x
  return ffi.string(double1, 8)
end
local function double(field, x) return varint(field * 8 + 1) .. raw_double(x) end
local function doubles(field, list)
  local parts = {}
  for k, x in ipairs(list) do parts[k] = raw_double(x) end
  return bytes(field, table.concat(parts))
end

-- ---- events ----------------------------------------------------------------------------------------

---@class EventFile
local Events = {}
Events.__index = Events

local M = {}

--- One record with these data, as it stands in a file.
---@param data string
---@return string
function M.record(data)
  local buffer = buffers.new()
  record(buffer, data)
  return ffi.string(buffer.bytes, buffer.n)
end

-- Seconds since 1970 with a fraction: os.time has only whole seconds.
local clock = ffi.typeof "struct { long sec, nsec; }"
ffi.cdef "int moonshard_clock(int, void *) __asm__(\"clock_gettime\");"
local now = clock()
local function wall_time()
  ffi.C.moonshard_clock(0, now)
  return tonumber(now.sec) + tonumber(now.nsec) * 1e-9
end

local INTERVAL = 1                                      -- seconds between writes to the disk

-- Writes the buffer. Stops writing the file if a part of it was dropped, for example because the disk is full: a record
-- in the file may then be incomplete, and readers cannot read beyond it.
local function flush(self)
  local ok, err, lost = self.buffer:write(self.file)
  if lost then
    self.file:close()
    self.file = nil
    log.warn_once(("run: the event file '%s' is no longer written: %s"):format(self.path, err))
  end
  return ok
end

local function flush_if_due(self, seconds)
  if seconds - self.written >= INTERVAL or seconds < self.written then
    self.written = seconds
    flush(self)
  end
end

local function put(self, fields)
  if not self.file then return end
  local seconds = wall_time()
  record(self.buffer, double(1, seconds) .. fields)
  flush_if_due(self, seconds)
end

--- Opens a new event file in a folder. TensorBoard reads all files of a folder as one run, in the order of their names;
--- it then drops what earlier files have from step `first` on.
---@param folder string
---@param first integer  the first step that is written
---@return EventFile? events
---@return string? err
function M.open(folder, first)
  local seconds, path = math.floor(wall_time()), nil
  for n = 0, 999 do
    path = ("%s/events.out.tfevents.%010d.moonshard.%03d"):format(folder, seconds, n)
    if not lfs.attributes(path, "mode") then break end
  end
  local file, err = io.open(path, "wbx")
  if not file then return nil, err end
  local self = setmetatable({ file = file, path = path, written = 0, heads = {}, buffer = buffers.new() }, Events)
  put(self, bytes(3, "brain.Event:2"))
  put(self, whole(2, first) .. bytes(7, whole(1, 1)))    -- session_log { status: START }
  return self
end

local function summary(self, step, values) put(self, whole(2, step) .. bytes(5, values)) end

-- The bytes of a Value { tag, simple_value } that precede the four bytes of its number.
local function head_of(self, name)
  local head = self.heads[name]
  if not head then
    local tag = bytes(1, name) .. varint(2 * 8 + 5)
    head = varint(1 * 8 + 2) .. varint(#tag + 4) .. tag
    self.heads[name] = head
  end
  return head
end

local function put_varint(buffer, n)
  while n >= 128 do
    buffer.bytes[buffer.n], buffer.n = n % 128 + 128, buffer.n + 1
    n = floor(n / 128)
  end
  buffer.bytes[buffer.n], buffer.n = n, buffer.n + 1
end

-- The size in bytes of the values of a line. `names` is the same table as long as a run logs the same names.
local function size_of(self, names)
  if self.names ~= names then
    local size = 0
    for k = 1, #names do
      if names[k] ~= "step" and names[k] ~= "time" then size = size + #head_of(self, names[k]) + 4 end
    end
    self.names, self.size = names, size
  end
  return self.size
end

--- Writes the numbers of a step. Makes strings only for new names, because this record is written at every step.
---@param step integer
---@param object table<string, number>
---@param names string[]  names of the values to write
function Events:scalars(step, object, names)
  local size, buffer, seconds = size_of(self, names), self.buffer, wall_time()
  if size == 0 or not self.file then return end
  local at = buffer.n
  buffer:reserve(HEAD + size + 64 + FOOT)
  buffer.n = at + HEAD + 9
  buffer.bytes[at + HEAD] = 1 * 8 + 1                   -- Event { wall_time, step, summary { value ... } }
  ffi.cast(float64, buffer.bytes + at + HEAD + 1)[0] = seconds
  put_varint(buffer, 2 * 8)
  put_varint(buffer, step)
  put_varint(buffer, 5 * 8 + 2)
  put_varint(buffer, size)
  for k = 1, #names do
    local name = names[k]
    if name ~= "step" and name ~= "time" then
      buffer:text(self.heads[name])
      ffi.cast(float32, buffer.bytes + buffer.n)[0] = object[name]
      buffer.n = buffer.n + 4
    end
  end
  close_record(buffer, at)
  flush_if_due(self, seconds)
end

--- Writes an image.
---@param png string  the contents of a PNG file
function Events:image(step, name, width, height, channels, png)
  local image = whole(1, height) .. whole(2, width) .. whole(3, channels) .. bytes(4, png)
  summary(self, step, bytes(1, bytes(1, name) .. bytes(4, image)))
end

--- Writes a text: a tensor of one string, which TensorBoard's plugin "text" shows.
function Events:text(step, name, text)
  local tensor = whole(1, 7) .. bytes(2, "") .. bytes(8, text)           -- DT_STRING, a scalar
  summary(self, step, bytes(1, bytes(1, name) .. bytes(8, tensor) .. bytes(9, bytes(1, bytes(1, "text")))))
end

--- Writes a histogram.
---@param h {min: number, max: number, count: integer, sum: number, squares: number, limits: number[], counts: integer[]}
---   limits: the right ends of the bins
function Events:histogram(step, name, h)
  local histogram = double(1, h.min) .. double(2, h.max) .. double(3, h.count) .. double(4, h.sum)
    .. double(5, h.squares) .. doubles(6, h.limits) .. doubles(7, h.counts)
  summary(self, step, bytes(1, bytes(1, name) .. bytes(5, histogram)))
end

--- Writes what has not been written yet.
function Events:flush()
  if self.file then flush(self) end
end

function Events:close()
  if not self.file then return end
  if not flush(self) then log.warn_once(("run: the end of the event file '%s' was not written"):format(self.path)) end
  if self.file then self.file:close() end
end

return M
