-- SPDX-License-Identifier: MIT
local LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

--- Bytes in base 64 (RFC 4648).
---@param bytes string
---@return string
return function(bytes)
  local out = {}
  for at = 1, #bytes, 3 do
    local a, b, c = bytes:byte(at, at + 2)
    local n, four = a * 65536 + (b or 0) * 256 + (c or 0), ""
    for k = 3, 0, -1 do
      local digit = math.floor(n / 64 ^ k) % 64
      four = four .. LETTERS:sub(digit + 1, digit + 1)
    end
    out[#out + 1] = c and four or b and four:sub(1, 3) .. "=" or four:sub(1, 2) .. "=="
  end
  return table.concat(out)
end
