-- SPDX-License-Identifier: MIT
--- What `? name` and help(name) print at the prompt.
local annotations = require "moonshard.tools.annotations"
local class = require "moonshard.core.class"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local tensor = require "moonshard.tensor"
local search = require "moonshard.tools.prompt.search"
local show = require("moonshard.tools.prompt.show").show

-- Copies of globals that a session may overwrite.
local table, package, type, pairs, ipairs, pcall = table, package, type, pairs, ipairs, pcall
local getmetatable, loadstring, require = getmetatable, loadstring, require

local M = {}

-- The page of a function that is made in a loop, or of a field of tensors, from core/types*.lua. If there is none,
-- appends the names that have one to `names`.
local function described(name, names)
  for known, a in require("moonshard.tensor.util").sorted_pairs(annotations.declared()) do
    local short = known:match "[%w_]+$"
    if short == name then return annotations.page(a) end
    names[#names + 1] = short
  end
  for _, field in ipairs(annotations.declared_class "Tensor".fields) do
    if field.name == name then return ("t.%s: %s  %s"):format(name, field.type, field.text) end
    names[#names + 1] = field.name
  end
end

local function lookup(name)
  local chunk = loadstring("return " .. name, "=prompt")
  local ok, value = false, nil
  if chunk then ok, value = pcall(chunk) end
  if ok and value ~= nil then return value end
  ok, value = pcall(function()                            -- a name without `ms.`, such as nn.Linear
    local found = package.loaded.moonshard
    for part in name:gmatch "[^.]+" do found = found[part] end
    return found
  end)
  if ok and value ~= nil then return value end
  if tensor.methods[name] then return tensor.methods[name] end
  -- a name without its module, such as fully_shard
  for _, inner in ipairs(getmetatable(package.loaded.moonshard).modules) do
    ok, value = pcall(function() return package.loaded.moonshard[inner][name] end)
    if ok and value ~= nil then return value end
  end
  return nil
end

--- Returns what `? name` prints.
---@param name string  such as "nn.Linear"
function M.help(name)
  name = name:match "^%s*(.-)%s*$":gsub("%(.*%)$", "")
  if name == "" then
    return "ms is the library: ms.randn(2, 3), ms.nn.Linear(3, 4). An expression prints its value; Ctrl-C interrupts; Ctrl-D or exit leaves.\n"
      .. "? name, or help(name), explains a function (? ms.cat, ? softmax); Tab completes names, fields and, inside quotes, file names.\n"
      .. "? *norm* searches names and texts; ? nn lists a module, ? nn.Module a class's methods; ? t describes a tensor and its values."
      .. (engine.state.dist_failures >= 0 and "\nEvery line runs on all ranks; @2 line runs it on rank 2 alone, without collectives." or "")
  end
  if name:find("*", 1, true) then return search.find(name) end
  local value = lookup((name:gsub(":", ".")))
  local long
  if type(value) == "function" then
    local short = name:match "[%w_]*$"
    local a = value == tensor.methods[short] and annotations.declared()["Tensor:" .. short] or annotations.of(value)
    long = a and annotations.page(a)
    if a and a.source ~= "" then return long end
  elseif class.is_class(value) then
    local a, methods = annotations.of_class(value), search.methods(value)
    if a then return annotations.page(a) .. (methods ~= "" and "\n" .. methods or "") end
  elseif tensor.is_tensor(value) then
    return require("moonshard.tools.prompt.describe").tensor(value)   -- required here: it loads the code of sharded tensors
  elseif type(value) == "table" then
    local list = search.module(value)
    if list then return list end
  end
  local names = {}
  local text = described(name:match "[^.:]*$", names) or long
  if text then return text end
  if value ~= nil then return show(value) end
  for known in pairs(tensor.methods) do names[#names + 1] = known end
  for known in pairs(package.loaded.moonshard) do names[#names + 1] = "ms." .. known end
  table.sort(names)
  return errors.unknown("name", name, names)
end

return M
