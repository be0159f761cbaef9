-- SPDX-License-Identifier: MIT
--- TensorBoard's event files: scalars, texts, images, histograms. A file is a sequence of TFRecords, each with a masked
--- CRC32C; a record is an Event in the encoding of protocol buffers. Field numbers are those of TensorFlow's
--- event.proto, summary.proto and tensor.proto.
local bit, ffi, lfs = require "bit", require "ffi", require "lfs"
local crc32c = require "moonshard.run.crc" (0x82f63b78)

local rshift, lshift, bor = bit.rshift, bit.lshift, bit.bor

-- ---- TFRecord ------------------------------------------------------------------------------------

local word = ffi.new "int32_t[1]"
local function masked_crc(text)
  local c = crc32c(text)
  word[0] = bit.tobit(bor(rshift(c, 15), lshift(c, 17)) + 0xa282ead8)
  return ffi.string(word, 4)
end

local length = ffi.new "uint64_t[1]"
local function record(data)
  length[0] = #data
  local head = ffi.string(length, 8)
  return head .. masked_crc(head) .. data .. masked_crc(data)
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

local double1, float1 = ffi.new "double[1]", ffi.new "float[1]"
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

local M = { record = record }

-- Seconds since 1970 with a fraction: os.time has only whole seconds.
local clock = ffi.typeof "struct { long sec, nsec; }"
ffi.cdef "int moonshard_clock(int, void *) __asm__(\"clock_gettime\");"
local now = clock()
local function wall_time()
  ffi.C.moonshard_clock(0, now)
  return tonumber(now.sec) + tonumber(now.nsec) * 1e-9
end

local INTERVAL = 1                                      -- seconds between writes to the disk

local function put(self, fields)
  local seconds = wall_time()
  self.file:write(record(double(1, seconds) .. fields))
  if seconds - self.written >= INTERVAL or seconds < self.written then
    self.file:flush()
    self.written = seconds
  end
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
  file:setvbuf("full", 65536)
  local self = setmetatable({ file = file, path = path, written = 0, heads = {} }, Events)
  put(self, bytes(3, "brain.Event:2"))
  put(self, whole(2, first) .. bytes(7, whole(1, 1)))    -- session_log { status: START }
  return self
end

local function summary(self, step, values) put(self, whole(2, step) .. bytes(5, values)) end

--- Writes the numbers of a step.
---@param step integer
---@param object table<string, any>  values that are not numbers are left out
---@param names string[]  names of the values to write
function Events:scalars(step, object, names)
  local parts, n = self.parts or {}, 0
  self.parts = parts
  for k = 1, #names do
    local name, value = names[k], object[names[k]]
    if type(value) == "number" and name ~= "step" and name ~= "time" then
      local head = self.heads[name]
      if not head then                                  -- Value { tag, simple_value } without the 4 bytes of its float
        local tag = bytes(1, name) .. varint(2 * 8 + 5)
        head = varint(1 * 8 + 2) .. varint(#tag + 4) .. tag
        self.heads[name] = head
      end
      float1[0] = value
      parts[n + 1], parts[n + 2], n = head, ffi.string(float1, 4), n + 2
    end
  end
  if n > 0 then summary(self, step, table.concat(parts, "", 1, n)) end
end

--- Writes an image.
---@param png string  the contents of a PNG file
function Events:image(step, name, width, height, channels, png)
  local image = whole(1, height) .. whole(2, width) .. whole(3, channels) .. bytes(4, png)
  summary(self, step, bytes(1, bytes(1, name) .. bytes(4, image)))
end

--- Writes a text: a tensor of strings, for the plugin "text".
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

function Events:flush() self.file:flush() end

function Events:close() self.file:close() end

return M
