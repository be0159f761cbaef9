-- SPDX-License-Identifier: MIT
--- Reads JSON as its grammar has it. cjson alone also takes numbers such as NaN, 0x10, 01 and "5.", and rounds whole
--- numbers beyond 2^53.
local cjson = require "cjson"
local errors = require "moonshard.core.errors"

local M = {}

local decoder = cjson.new()
decoder.decode_invalid_numbers(false)

-- What is wrong with the first number in a text that JSON lacks or, with `exact`, that a Lua number cannot hold; nil if
-- there is none.
local function wrong_number(text, exact)
  local at = text:find '["%-%d]'
  while at do
    if text:byte(at) == 34 then                          -- a string: skips to its end
      local c
      repeat
        at = text:find('["\\]', at + 1)
        c = at and text:byte(at)
        if c == 92 then at = at + 1 end
      until c ~= 92
      if not at then return nil end                      -- the string does not end, as the decoder reports
    else
      local whole = text:match("^%-?0()", at) or text:match("^%-?[1-9]%d*()", at)
      local stop = whole and (text:match("^%.%d+()", whole) or whole)
      stop = stop and (text:match("^[eE][+-]?%d+()", stop) or stop)
      if not stop or text:find("^[%w.+-]", stop) then
        return ("'%s' at character %d is not a number of JSON"):format(text:match("^[%w.+-]+", at), at)
      end
      local digits = text:sub(at, stop - 1)
      if exact and stop == whole and #digits > 15 and ("%.0f"):format(tonumber(digits)) ~= digits then
        return ("%s at character %d is not exact as a number, whose whole numbers are exact to 2^53"):format(digits, at)
      end
      at = stop - 1
    end
    at = text:find('["%-%d]', at + 1)
  end
end

--- A decoded value, for messages: null, a list and an object by these words.
---@param value any
---@param other? fun(value: any): string  describes other values (default: errors.show)
---@return string
function M.show(value, other)
  if value == cjson.null then return "null" end
  if type(value) ~= "table" then return (other or errors.show)(value) end
  return next(value) == nil and "an empty list or object" or value[1] ~= nil and "a list" or "an object"
end

-- cjson's names of what it expected or found.
local NAMES = { T_OBJ_BEGIN = "'{'", T_OBJ_END = "'}'", T_ARR_BEGIN = "'['", T_ARR_END = "']'", T_STRING = "a string",
  T_NUMBER = "a number", T_BOOLEAN = "true or false", T_NULL = "null", T_COLON = "':'", T_COMMA = "','",
  T_END = "the end", T_WHITESPACE = "a space" }

-- An error of the decoder in words of JSON, with the line if the text has several.
local function in_words(why, text)
  local at = tonumber(why:match "at character (%d+)$")
  local lines = select(2, text:sub(1, (at or 1) - 1):gsub("\n", ""))
  why = why:gsub("T_[%u_]+", NAMES):gsub("object key string", "a key in quotes"):gsub("^Expected", "expected")
  return lines > 0 and ("line %d: %s"):format(lines + 1, why) or why
end

--- The value of a JSON text, which may begin with the byte order mark of UTF-8. Raises what is wrong with the text.
---@param text string
---@param exact? boolean  true: whole numbers that a Lua number cannot hold are errors, too
---@return any  JSON's null is cjson.null
function M.decode(text, exact)
  if text:sub(1, 3) == "\239\187\191" then text = text:sub(4) end
  -- The decoder refuses other numbers than these itself.
  if text:find "%d%.%D" or text:find "%d%.$" or text:find("-.", 1, true)
    or exact and text:find(("%d"):rep(16)) then
    local why = wrong_number(text, exact)
    if why then error(why, 0) end
  end
  local ok, value = pcall(decoder.decode, text)
  if not ok then error(in_words(value, text), 0) end
  return value
end

return M
