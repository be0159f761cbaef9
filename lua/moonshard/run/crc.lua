-- SPDX-License-Identifier: MIT
--- 32-bit cyclic redundancy checks with reflected bits (RFC 1952, section 8), for PNG and TensorBoard's files.
local bit, ffi = require "bit", require "ffi"
local bxor, band, rshift = bit.bxor, bit.band, bit.rshift

local bytes_type = ffi.typeof "const uint8_t *"

--- Returns a function that computes the 32-bit CRC of a string, or of n bytes at a pointer, as a signed integer.
---@param polynomial integer  with its bits reversed
---@return fun(text: string|ffi.cdata*, n: integer?): integer
return function(polynomial)
  local sums = ffi.new "int32_t[256]"
  for n = 0, 255 do
    local c = n
    for _ = 1, 8 do c = band(c, 1) == 1 and bxor(polynomial, rshift(c, 1)) or rshift(c, 1) end
    sums[n] = c
  end
  return function(text, n)
    local bytes, c = ffi.cast(bytes_type, text), bit.tobit(0xffffffff)
    for k = 0, (n or #text) - 1 do c = bxor(sums[band(bxor(c, bytes[k]), 255)], rshift(c, 8)) end
    return bit.bnot(c)
  end
end
