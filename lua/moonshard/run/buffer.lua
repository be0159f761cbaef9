-- SPDX-License-Identifier: MIT
--- A buffer of bytes outside of Lua's memory, for lines and records that are written at every step, with one system
--- call.
local ffi = require "ffi"

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

--- Appends a finite number: whole numbers below 2^53 with all their digits, others with 9 digits, which distinguish
--- all float32 values.
---@param x number
function Buffer:number(x)
  if x % 1 == 0 and x < 2 ^ 53 and x > -2 ^ 53 then return self:text(("%.0f"):format(x)) end
  self:text(("%.9g"):format(x))
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
