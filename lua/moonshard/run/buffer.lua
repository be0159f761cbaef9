-- SPDX-License-Identifier: MIT
--- A buffer of bytes outside of Lua's memory, for lines and records that are written at every step. Numbers and texts
--- are put into it without making strings, which the garbage collector would have to free, and it is written with one
--- system call.
local ffi = require "ffi"
local floor, log10 = math.floor, math.log10

ffi.cdef [[
long moonshard_write(int, const void *, size_t) __asm__("write");
int moonshard_fileno(void *) __asm__("fileno");
char *strerror(int);
]]
local C = ffi.C

---@class Buffer
---@field n integer  bytes in the buffer
---@field bytes ffi.cdata*  uint8_t[size]
---@field size integer  bytes that fit
local Buffer = {}
Buffer.__index = Buffer

local M = {}

--- The file descriptor of an open file.
---@param file file*
---@return integer
function M.fileno(file) return C.moonshard_fileno(file) end

--- Makes an empty buffer.
---@return Buffer
function M.new() return setmetatable({ n = 0, size = 4096, bytes = ffi.new "uint8_t[4096]" }, Buffer) end

--- Makes room for `more` bytes behind the present ones.
---@param more integer
function Buffer:reserve(more)
  if self.n + more <= self.size then return end
  local size = self.size
  repeat size = 2 * size until self.n + more <= size
  local bytes = ffi.new("uint8_t[?]", size)
  ffi.copy(bytes, self.bytes, self.n)
  self.bytes, self.size = bytes, size
end

--- Appends a text.
---@param text string
function Buffer:text(text)
  if self.n + #text > self.size then self:reserve(#text) end
  ffi.copy(self.bytes + self.n, text, #text)
  self.n = self.n + #text
end

-- ---- numbers -----------------------------------------------------------------------------------------

-- Of each whole number below 10000: its four digits as bytes in a word, and how many zeros it begins and ends with.
local four, leading, trailing = ffi.new "uint32_t[10000]", ffi.new "uint8_t[10000]", ffi.new "uint8_t[10000]"
do
  local digits = ffi.new "uint8_t[4]"
  for k = 0, 9999 do
    local text = ("%04d"):format(k)
    ffi.copy(digits, text, 4)
    four[k] = ffi.cast("uint32_t *", digits)[0]
    leading[k], trailing[k] = #text:match "^0*", #text:match "0*$"
  end
end

local word = ffi.typeof "uint32_t *"
local scratch = ffi.new "uint8_t[32]"

-- Writes a whole number below 1e8 as eight digits to scratch, from index `at` on. Returns the numbers that its first
-- four and its last four digits form.
local function eight(at, x)
  local high = floor(x / 1e4)
  ffi.cast(word, scratch + at)[0] = four[high]
  ffi.cast(word, scratch + at + 4)[0] = four[x - high * 1e4]
  return high, x - high * 1e4
end

local function put(self, from, count)
  ffi.copy(self.bytes + self.n, scratch + from, count)
  self.n = self.n + count
end

local function put_whole(self, x)
  if x < 1e8 then
    local high, low = eight(0, x)
    local skip = high > 0 and leading[high] or low > 0 and 4 + leading[low] or 7
    return put(self, skip, 8 - skip)
  end
  local high = floor(x / 1e8)
  put_whole(self, high)
  eight(0, x - high * 1e8)
  put(self, 0, 8)
end

-- Powers of ten with a whole exponent from 0 to 290.
local power = ffi.new "double[291]"
for k = 0, 290 do power[k] = tonumber("1e" .. k) end

-- The nine significant digits of x, whose decimal exponent is e: x * 10^(8 - e), rounded to a whole number.
local function mantissa(x, e)
  return floor((e <= 8 and x * power[8 - e] or x / power[e - 8]) + 0.5)
end

local ZERO, POINT, MINUS = 48, 46, 45

-- Appends a number above 0 in the form of printf's %.9g.
local function put_fraction(self, x)
  local e = floor(log10(x))
  if e < -280 or e > 280 then return self:text(("%.9g"):format(x)) end
  local m = mantissa(x, e)
  if m < 1e8 then                                       -- log10 was rounded up
    e = e - 1
    m = mantissa(x, e)
  elseif m >= 1e9 then
    e = e + 1
    m = mantissa(x, e)
  end
  local first = floor(m / 1e8)
  scratch[0] = ZERO + first
  local high, low = eight(1, m - first * 1e8)
  local count = low > 0 and 9 - trailing[low] or high > 0 and 5 - trailing[high] or 1
  local bytes = self.bytes
  if e >= 9 or e < -4 then                              -- d.ddde+xx
    bytes[self.n], self.n = scratch[0], self.n + 1
    if count > 1 then
      bytes[self.n], self.n = POINT, self.n + 1
      put(self, 1, count - 1)
    end
    self:text(e < 0 and "e-" or "e+")
    e = e < 0 and -e or e
    if e < 10 then self:text "0" end
    return put_whole(self, e)
  elseif e < 0 then                                     -- 0.000ddd
    self:text(e == -1 and "0." or e == -2 and "0.0" or e == -3 and "0.00" or "0.000")
    return put(self, 0, count)
  elseif count <= e + 1 then                            -- rounded to a whole number: its zeros are in scratch
    return put(self, 0, e + 1)
  end
  put(self, 0, e + 1)
  bytes[self.n], self.n = POINT, self.n + 1
  put(self, e + 1, count - e - 1)
end

--- Appends a finite number: whole numbers below 2^53 with all their digits, others with 9 digits, which distinguish
--- all float32 values.
---@param x number
function Buffer:number(x)
  if self.n + 32 > self.size then self:reserve(32) end
  if x < 0 then
    self.bytes[self.n], self.n = MINUS, self.n + 1
    x = -x
  end
  if x < 2 ^ 53 and x % 1 == 0 then return put_whole(self, x) end
  put_fraction(self, x)
end

-- ---- writing -----------------------------------------------------------------------------------------

local EINTR, AT_ONCE = 4, 2 ^ 30
local LIMIT = 2 ^ 20                                    -- bytes that are kept while the disk is full

--- Writes the buffer to an open file with one call, unless a signal or a full disk ends it earlier. What could not be
--- written stays in the buffer for the next call, up to 1 MiB.
---@param file file*
---@return boolean ok
---@return string? err  the reason
---@return boolean? lost  the rest was more than 1 MiB and was dropped
function Buffer:write(file)
  local fd, at = C.moonshard_fileno(file), 0
  while at < self.n do
    local done = tonumber(C.moonshard_write(fd, self.bytes + at, math.min(self.n - at, AT_ONCE)))
    local code = done < 0 and ffi.errno() or 0
    if done > 0 then
      at = at + done
    elseif code ~= EINTR then
      local lost = self.n - at > LIMIT
      ffi.copy(self.bytes, ffi.string(self.bytes + at, self.n - at), self.n - at)
      self.n = lost and 0 or self.n - at
      return false, code == 0 and "nothing was written" or ffi.string(C.strerror(code)), lost
    end
  end
  self.n = 0
  return true
end

return M
