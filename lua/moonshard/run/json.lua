-- SPDX-License-Identifier: MIT
--- Writes JSON objects: numbers with a given number of digits (cjson writes 14), NaN and infinity as null (cjson
--- refuses them), keys in a fixed order.
local escapes = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\t"] = "\\t", ["\r"] = "\\r" }

local function escaped(c) return escapes[c] or ("\\u%04x"):format(c:byte()) end

local formats = {}                                      -- indexed by number of digits
local function text_of(value, digits)
  local kind = type(value)
  if kind == "number" then
    if value ~= value or value == math.huge or value == -math.huge then return "null" end
    if value % 1 == 0 and math.abs(value) < 2 ^ 53 then return ("%.0f"):format(value) end
    if digits >= 15 then                                -- the shortest text that reads back as this number
      for n = 15, 16 do
        local short = ("%." .. n .. "g"):format(value)
        if tonumber(short) == value then return short end
      end
    end
    formats[digits] = formats[digits] or ("%%.%dg"):format(digits)
    return formats[digits]:format(value)
  elseif kind == "string" then
    return '"' .. value:gsub('[%c"\\]', escaped) .. '"'
  elseif kind == "boolean" then
    return tostring(value)
  elseif kind == "table" and (value[1] ~= nil or next(value) == nil) then
    local parts = {}
    for k, v in ipairs(value) do parts[k] = text_of(v, digits) end
    return "[" .. table.concat(parts, ", ") .. "]"
  elseif kind == "table" then
    local parts = {}
    for k in pairs(value) do parts[#parts + 1] = tostring(k) end
    table.sort(parts)
    for k, name in ipairs(parts) do parts[k] = text_of(name) .. ": " .. text_of(value[name], digits) end
    return "{" .. table.concat(parts, ", ") .. "}"
  end
  error(("cannot write a %s as JSON, expected a number, string, boolean or table"):format(kind), 0)
end

-- One line is written per step. To reduce garbage, quoted names are cached and one table is reused for the pieces of a
-- line.
local quoted = setmetatable({}, { __index = function(t, name)
  local text = text_of(name)
  t[name] = text
  return text
end })
local pieces = {}

--- A table as one JSON object, in the order of `names` or of the sorted keys. Whole numbers below 2^53 have all their
--- digits, others `digits` (default: 9, which distinguish float32 values); NaN and infinity become null.
---@param object table  values by name: numbers, strings, booleans, lists and tables of these
---@param names? string[]  the names to write, in order (default: all, sorted)
---@param given? {digits: integer, separator: string}
---@return string
return function(object, names, given)
  if not names then
    names = {}
    for name in pairs(object) do names[#names + 1] = name end
    table.sort(names)
  end
  local digits, separator = given and given.digits or 9, given and given.separator or ", "
  local n = 1
  pieces[1] = "{"
  for k = 1, #names do
    local name, value = names[k], object[names[k]]
    if value ~= nil then
      if n > 1 then pieces[n + 1], n = separator, n + 1 end
      pieces[n + 1], pieces[n + 2], pieces[n + 3] = quoted[name], ": ", text_of(value, digits)
      n = n + 3
    end
  end
  pieces[n + 1] = "}"
  return table.concat(pieces, "", 1, n + 1)
end
