-- SPDX-License-Identifier: MIT
--- Regular expressions with Unicode's classes, by Debian's PCRE2, compiled to machine code.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local raw = require "moonshard.data.raw"
local ffi = engine.ffi

ffi.cdef [[
void *moonshard_re_compile(const char *, size_t, uint32_t, int *, size_t *, void *) __asm__("pcre2_compile_8");
int moonshard_re_jit(void *, uint32_t) __asm__("pcre2_jit_compile_8");
void moonshard_re_free(void *) __asm__("pcre2_code_free_8");
void *moonshard_re_data(uint32_t, void *) __asm__("pcre2_match_data_create_8");
void moonshard_re_data_free(void *) __asm__("pcre2_match_data_free_8");
size_t *moonshard_re_found(void *) __asm__("pcre2_get_ovector_pointer_8");
int moonshard_re_match(const void *, const char *, size_t, size_t, uint32_t, void *, void *) __asm__("pcre2_match_8");
int moonshard_re_fast(const void *, const char *, size_t, size_t, uint32_t, void *, void *)
    __asm__("pcre2_jit_match_8");
int moonshard_re_message(int, char *, size_t) __asm__("pcre2_get_error_message_8");
]]

local UTF, UCP, INVALID = 0x00080000, 0x00020000, 0x04000000      -- invalid bytes match nothing
local JIT, NO_MATCH = 1, -1

-- Unicode's white space. PCRE2's \s also has U+180E, which Unicode 6.3 took out.
local SPACES = [[\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]]

-- Unicode's letters, marks, digits and signs of words. PCRE2's \w is without marks.
local WORDS = [[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}]]

-- Writes \s, \S and \w as Unicode's classes.
local function with_classes(pattern)
  local out, at, in_class = {}, 1, false
  while at <= #pattern do
    local c = pattern:sub(at, at)
    if c == "\\" then
      c = pattern:sub(at, at + 1)
      at = at + 1
      if c == "\\s" then
        c = in_class and SPACES or "[" .. SPACES .. "]"
      elseif c == "\\S" and not in_class then
        c = "[^" .. SPACES .. "]"
      elseif c == "\\w" then
        c = in_class and WORDS or "[" .. WORDS .. "]"
      end
    elseif in_class then
      in_class = c ~= "]"
    else
      in_class = c == "["
    end
    out[#out + 1] = c
    at = at + 1
  end
  return table.concat(out)
end

local Regex = {}
Regex.__index = Regex

local M = {}

--- The regular expression of a pattern.
---@param pattern string
---@param who string  the function that errors name
---@param bytes? boolean  true: the text is bytes, not UTF-8
---@return table? regex
---@return string? why  what is wrong with the pattern
function M.new(pattern, who, bytes)
  local pcre = raw.library({ "libpcre2-8.so.0", "pcre2-8" }, "libpcre2-8-0", who)
  local code, at = ffi.new "int[1]", ffi.new "size_t[1]"
  local source = bytes and pattern or with_classes(pattern)
  local regex = pcre.moonshard_re_compile(source, #source, bytes and 0 or UTF + UCP + INVALID, code, at, nil)
  if regex == nil then
    local text = ffi.new "char[256]"
    pcre.moonshard_re_message(code[0], text, 256)
    return nil, ("%s at byte %d"):format(ffi.string(text), tonumber(at[0]))
  end
  regex = ffi.gc(regex, pcre.moonshard_re_free)
  local fast = pcre.moonshard_re_jit(regex, JIT) == 0
  local data = ffi.gc(pcre.moonshard_re_data(1, nil), pcre.moonshard_re_data_free)
  return setmetatable({
    _regex = regex, _data = data, _pattern = pattern,
    -- The two positions, whose lower halves are all of them: a string has less than 2 GiB.
    found = ffi.cast("int32_t *", pcre.moonshard_re_found(data)),
    _match = fast and pcre.moonshard_re_fast or pcre.moonshard_re_match,
  }, Regex)
end

--- The first match in a text that begins at byte `at` or later; nil if there is none.
---@param text string
---@param at integer  from 1
---@return integer? first
---@return integer last  first - 1 if the match is empty
function Regex:find(text, at)
  local rc = self._match(self._regex, text, #text, at - 1, 0, self._data, nil)
  if rc >= 0 then return self.found[0] + 1, self.found[2] end
  if rc ~= NO_MATCH then errors.raise("the pattern '%s' is too costly for a text (PCRE2's error %d)", self._pattern, rc) end
  return nil, 0
end

--- The pattern that the regular expression was made of.
---@return string
function Regex:pattern() return self._pattern end

--- A pattern that matches a text itself.
---@param text string
---@return string
function M.literal(text) return (text:gsub("[%p%z\1-\31]", function(c) return ("\\x%02x"):format(c:byte()) end)) end

return M
