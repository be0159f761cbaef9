-- SPDX-License-Identifier: MIT
--- Normal forms, categories and lower case of Unicode, by Debian's utf8proc.
local engine = require "moonshard.core.ffi"
local raw = require "moonshard.data.raw"
local ffi = engine.ffi

ffi.cdef [[
intptr_t moonshard_utf8_map(const char *, intptr_t, char **, int) __asm__("utf8proc_map");
int32_t moonshard_utf8_lower(int32_t) __asm__("utf8proc_tolower");
int moonshard_utf8_category(int32_t) __asm__("utf8proc_category");
void moonshard_utf8_free(void *) __asm__("free");
]]

local M = {}

local STABLE, COMPAT, COMPOSE, DECOMPOSE = 2, 4, 8, 16
local FORMS = { NFC = STABLE + COMPOSE, NFD = STABLE + DECOMPOSE, NFKC = STABLE + COMPOSE + COMPAT,
  NFKD = STABLE + DECOMPOSE + COMPAT }

local function library(who)
  return raw.library({ "libutf8proc.so.2", "libutf8proc.so.3", "utf8proc" }, "libutf8proc2", who)
end

--- A text in a normal form; invalid UTF-8 stays as it is.
---@param text string
---@param form string  "NFC", "NFD", "NFKC" or "NFKD"
---@param who string  the function that errors name
---@return string
function M.normal(text, form, who)
  local out = ffi.new "char *[1]"
  local size = tonumber(library(who).moonshard_utf8_map(text, #text, out, FORMS[form]))
  local result = size >= 0 and ffi.string(out[0], size) or text
  ffi.C.moonshard_utf8_free(out[0])
  return result
end

--- The number of a character, the bytes i to j of a text.
---@return integer
function M.code(s, i, j)
  local a, b, c, d = s:byte(i, j)
  if not b then return a end
  if not c then return (a - 0xc0) * 64 + b - 128 end
  if not d then return ((a - 0xe0) * 64 + b - 128) * 64 + c - 128 end
  return (((a - 0xf0) * 64 + b - 128) * 64 + c - 128) * 64 + d - 128
end

--- A character in UTF-8.
---@param code integer
---@return string
function M.char(code)
  local function tail(n) return 128 + math.floor(code / n) % 64 end
  if code < 0x80 then return string.char(code) end
  if code < 0x800 then return string.char(0xc0 + math.floor(code / 64), tail(1)) end
  if code < 0x10000 then return string.char(0xe0 + math.floor(code / 4096), tail(64), tail(1)) end
  return string.char(0xf0 + math.floor(code / 262144), tail(4096), tail(64), tail(1))
end

--- The lower case of a character; "İ" has two characters there.
---@param code integer
---@return string
function M.lower(code, who)
  if code == 0x130 then return "i\204\135" end
  return M.char(library(who).moonshard_utf8_lower(code))
end

local CATEGORIES = { [0] = "Cn", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
  "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Cs", "Co" }

--- The general category of a character, such as "Lu".
---@param code integer
---@return string
function M.category(code, who) return CATEGORIES[library(who).moonshard_utf8_category(code)] end

return M
