-- SPDX-License-Identifier: MIT
--- Names that complete the input of the prompt.
local tensor = require "moonshard.tensor"

-- Copies of globals that a session may overwrite.
local table, package, type, pairs, ipairs, next = table, package, type, pairs, ipairs, next
local pcall, tonumber, getmetatable, rawget = pcall, tonumber, getmetatable, rawget

local M = {}

-- The keys of a value that may follow a dot or colon.
local function keys_of(v, into)
  if tensor.is_tensor(v) then
    for k in pairs(getmetatable(v).methods) do into[k] = true end
    for k in pairs(tensor.methods) do into[k] = true end
    for k in pairs(tensor.getters) do into[k] = true end
    return
  end
  local seen = 0
  while type(v) == "table" and seen < 20 do
    for k in next, v do
      if type(k) == "string" and k:sub(1, 1) ~= "_" then into[k] = true end
    end
    for _, inner in ipairs { "_parameters", "_buffers", "_modules", "_children" } do
      local listed = rawget(v, inner)
      for k in pairs(type(listed) == "table" and listed or {}) do
        if type(k) == "string" then into[k] = true end
      end
    end
    local mt = getmetatable(v)
    local index = mt and rawget(mt, "__index")
    v = type(index) == "table" and index or mt and rawget(mt, "__isa") and mt ~= v and mt or rawget(v, "__base") or nil
    seen = seen + 1
  end
  if type(v) == "string" then
    for k in pairs(string) do into[k] = true end
  end
end

--- The names that complete a text: `ms.te`, `t:re`, `x`.
---@param text string  the end of the input line
---@return string[]
function M.complete(text)
  local path, part = text:match "^(.*[.:])([%w_]*)$"
  local into, out = {}, {}
  if path then
    local value = _G
    for name in path:gmatch "([^.:]+)" do
      if name:match "^%d+$" then name = tonumber(name) end
      local ok, inner = pcall(function() return value[name] end)
      if not ok or inner == nil then return {} end
      value = inner
    end
    keys_of(value, into)
    local ms = package.loaded.moonshard
    if value == ms then
      for _, name in ipairs(getmetatable(ms).modules) do into[name] = true end
    end
  else
    part = text
    for k in pairs(_G) do
      if type(k) == "string" then into[k] = true end
    end
    local words = "and break do else elseif end false for function if in local nil not or repeat return then true until while"
    for word in words:gmatch "%a+" do into[word] = true end
  end
  for name in pairs(into) do
    if name:sub(1, #part) == part and (part ~= "" or name:sub(1, 2) ~= "__") then
      out[#out + 1] = (path or "") .. name
    end
  end
  table.sort(out)
  return out
end

return M
