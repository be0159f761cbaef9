-- SPDX-License-Identifier: MIT
--- The public names of the library with the first sentence of their documentation: `? *norm*` searches them, and `? nn`
--- and `? nn.Module` list those of a module and the methods of a class.
local annotations = require "moonshard.tools.annotations"
local class = require "moonshard.core.class"
local tensor = require "moonshard.tensor"
local sorted_pairs = require("moonshard.tensor.util").sorted_pairs

-- Copies of globals that a session may overwrite.
local table, package, type, ipairs, pcall, math = table, package, type, ipairs, pcall, math
local getmetatable, rawget = getmetatable, rawget

local M = {}

local MOST = 40             -- most names that a search lists under each heading

---@class Entry
---@field name string   as scripts write it: "ms.nn.Linear", "t:softmax"
---@field text string   its documentation, in one line

local function flat(a) return a and (a.text:gsub("%s+", " ")) or "" end

-- "name(a, b)" of a function.
local function call_of(name, a)
  if not a then return name .. "()" end
  local list = {}
  for _, argument in ipairs(a.arguments) do
    if argument ~= "self" then list[#list + 1] = argument end
  end
  return ("%s(%s)"):format(name, table.concat(list, ", "))
end

-- The result of M.entries, made once: the names do not change.
local known

-- Adds the public functions and classes of a table and, down to `depth`, of the tables in it, each once.
local function collect(list, prefix, from, depth, seen)
  for name, value in sorted_pairs(from) do
    local public = type(name) == "string" and name:sub(1, 1) ~= "_"
    if public and type(value) == "function" then
      list[#list + 1] = { name = prefix .. name, text = flat(annotations.of(value, name)) }
    elseif public and class.is_class(value) then
      list[#list + 1] = { name = prefix .. name, text = flat(annotations.of_class(value)) }
    elseif public and type(value) == "table" and depth > 0 and not seen[value] then
      seen[value] = true
      collect(list, prefix .. name .. ".", value, depth - 1, seen)
    end
  end
end

--- All public names.
---@return Entry[]
function M.entries()
  if known then return known end
  local list, ms, seen = {}, package.loaded.moonshard, {}
  for _, name in ipairs(getmetatable(ms).modules) do
    local ok, module = pcall(function() return ms[name] end)          -- loads the module
    if ok and type(module) == "table" then seen[module] = true end
  end
  collect(list, "ms.", ms, 0, seen)
  for _, name in ipairs(getmetatable(ms).modules) do
    local module = rawget(ms, name)
    if type(module) == "table" then collect(list, "ms." .. name .. ".", module, 1, seen) end
  end
  for name, a in sorted_pairs(annotations.declared()) do
    list[#list + 1] = { name = name:gsub("^Tensor:", "t:"):gsub("^nn%.", "ms.nn."):gsub("^fft%.", "ms.fft."), text = flat(a) }
  end
  for name, fn in sorted_pairs(tensor.methods) do
    if name:sub(1, 1) ~= "_" and not annotations.declared()["Tensor:" .. name] then
      list[#list + 1] = { name = "t:" .. name, text = flat(annotations.of(fn, name)) }
    end
  end
  local once = {}
  known = {}
  for _, entry in ipairs(list) do
    local before = once[entry.name]
    if not before then
      known[#known + 1], once[entry.name] = entry, entry
    elseif before.text == "" then                       -- made in a loop: only its declaration has a text
      before.text = entry.text
    end
  end
  return known
end

local function first_sentence(text)
  text = text:gsub("et al%.", "et al")
  return (text:match "^(.-)[.:] %u" or text:match "^(.-): " or text:match "^(.-)[.:]?$")
end

-- Lines "name  text". The texts begin in one column, except after names of more than 36 characters. A text is cut at
-- character 114 or so of its line, but not below 20 characters.
local function columns(entries)
  local width, lines = 0, {}
  for _, entry in ipairs(entries) do width = math.max(width, math.min(36, #entry.name)) end
  for k, entry in ipairs(entries) do
    local text = first_sentence(entry.text)
    local room = math.max(20, 110 - math.max(width, #entry.name))
    if #text > room then text = text:sub(1, room - 3):gsub("%s*%S*$", "") .. " …" end
    lines[k] = ("  %-" .. width .. "s  %s"):format(entry.name, text):gsub("%s+$", "")
  end
  return lines
end

--- The names that match a pattern with `*`, then those whose text matches it, regardless of upper and lower case.
---@param pattern string  such as "*norm*"
---@return string
function M.find(pattern)
  local middle = pattern:lower():gsub("[%^%$%(%)%%%.%[%]%+%-%?]", "%%%0"):gsub("%*+", ".*")
  local inside = middle:gsub("^%.%*", ""):gsub("%.%*$", "")
  local by_name, by_text = {}, {}
  for _, entry in ipairs(M.entries()) do
    local name = entry.name:lower()
    local short = name:match "[%w_]+$"
    if short:find("^" .. middle .. "$") or name:gsub("^ms%.", ""):find("^" .. middle .. "$") then
      by_name[#by_name + 1] = entry
    elseif inside ~= "" and entry.text:lower():find(inside) then
      by_text[#by_text + 1] = entry
    end
  end
  if #by_name + #by_text == 0 then return ("no name and no text matches '%s'"):format(pattern) end
  local lines = {}
  local function add(head, entries)
    if #entries == 0 then return end
    lines[#lines + 1] = head
    local shown = {}
    for k = 1, math.min(#entries, MOST) do shown[k] = entries[k] end
    for _, text in ipairs(columns(shown)) do lines[#lines + 1] = text end
    if #entries > MOST then lines[#lines + 1] = ("  … and %d more"):format(#entries - MOST) end
  end
  add("names:", by_name)
  add("texts:", by_text)
  return table.concat(lines, "\n")
end

local function wrapped(names)
  local lines, line = {}, " "
  for _, name in ipairs(names) do
    if #line + #name > 110 then
      lines[#lines + 1] = line
      line = " "
    end
    line = line .. " " .. name
  end
  lines[#lines + 1] = line
  return table.concat(lines, "\n")
end

--- The methods of a class: its own with their texts, and the names of those of the classes that it extends.
---@param cls table
---@return string  "" if it has none
function M.methods(cls)
  if cls == tensor.Tensor then
    local names = {}
    for name in sorted_pairs(tensor.methods) do
      if name:sub(1, 1) ~= "_" then names[#names + 1] = name end
    end
    return "methods (? name explains one):\n" .. wrapped(names)
  end
  local parts, seen, from = {}, {}, cls
  while from do
    local entries, names = {}, {}
    for name, value in sorted_pairs(from) do
      if type(name) == "string" and name:sub(1, 1) ~= "_" and type(value) == "function" and not seen[name] then
        seen[name] = true
        local a = annotations.of(value, name)
        entries[#entries + 1] = { name = call_of(name, a), text = flat(a) }
        names[#names + 1] = name
      end
    end
    if #entries > 0 then
      parts[#parts + 1] = from == cls and "methods:\n" .. table.concat(columns(entries), "\n")
        or ("methods of %s:\n%s"):format(rawget(from, "__name") or "every class", wrapped(names))
    end
    from = rawget(from, "__base")
  end
  return table.concat(parts, "\n")
end

--- The public names of a module of the library, one per line; nil if the value is no such module.
---@param value table
---@return string?
function M.module(value)
  for _, name in ipairs(getmetatable(package.loaded.moonshard).modules) do
    if rawget(package.loaded.moonshard, name) == value then
      local entries, prefix = {}, "ms." .. name .. "."
      for _, entry in ipairs(M.entries()) do
        if entry.name:sub(1, #prefix) == prefix then entries[#entries + 1] = entry end
      end
      return table.concat(columns(entries), "\n")
    end
  end
end

return M
