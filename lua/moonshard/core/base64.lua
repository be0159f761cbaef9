-- SPDX-License-Identifier: MIT
--- Base 64 (RFC 4648), of which neither zlib nor libpng knows anything.
local DIGITS, VALUES = {}, {}
for k = 0, 63 do
  DIGITS[k] = ("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"):byte(k + 1)
  VALUES[DIGITS[k]] = k
end
local floor = math.floor

local M = {}

--- The text for these bytes.
---@param bytes string
---@return string
function M.encode(bytes)
  return (bytes:gsub("..?.?", function(part)
    local a, b, c = part:byte(1, 3)
    local n = a * 65536 + (b or 0) * 256 + (c or 0)
    return string.char(DIGITS[floor(n / 262144)], DIGITS[floor(n / 4096) % 64], b and DIGITS[floor(n / 64) % 64] or 61,
      c and DIGITS[n % 64] or 61)
  end))
end

--- The bytes of a text; nil if it is not in base 64.
---@param text string
---@return string?
function M.decode(text)
  local out = {}
  if #text % 4 ~= 0 then return nil end
  for k = 1, #text, 4 do
    local a, b, c, d = text:byte(k, k + 3)
    local last = k + 4 > #text
    local pads = last and (c == 61 and d == 61 and 2 or d == 61 and 1) or 0
    a, b, c, d = VALUES[a], VALUES[b], pads == 2 and 0 or VALUES[c], pads > 0 and 0 or VALUES[d]
    if not (a and b and c and d) then return nil end
    local n = ((a * 64 + b) * 64 + c) * 64 + d
    out[#out + 1] = string.char(floor(n / 65536), floor(n / 256) % 256, n % 256):sub(1, 3 - pads)
  end
  return table.concat(out)
end

return M
