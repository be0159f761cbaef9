-- SPDX-License-Identifier: MIT
--- The alphabet in which files of byte-level vocabularies write bytes: a printable sign of Latin-1 stands for itself,
--- the other 68 bytes are the characters from U+0100 on.
local M = { char = {}, byte = {} }

local function utf8_of(code)
  if code < 128 then return string.char(code) end
  return string.char(0xc0 + math.floor(code / 64), 0x80 + code % 64)
end

local next_code = 256
for b = 0, 255 do
  local code = b
  if b < 33 or b > 126 and b < 161 or b == 173 then code, next_code = next_code, next_code + 1 end
  M.char[b] = utf8_of(code)
  M.byte[M.char[b]] = string.char(b)
end

--- The bytes of a text in this alphabet; nil if the text has other characters.
---@param text string
---@return string?
function M.of(text)
  local wrong = false
  local bytes = text:gsub("[%z\1-\127\192-\255][\128-\191]*", function(c)
    local b = M.byte[c]
    if not b then wrong = true end
    return b
  end)
  return not wrong and bytes or nil
end

--- Bytes in this alphabet.
---@param bytes string
---@return string
function M.text(bytes) return (bytes:gsub(".", function(c) return M.char[c:byte()] end)) end

return M
