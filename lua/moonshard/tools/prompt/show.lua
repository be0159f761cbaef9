-- SPDX-License-Identifier: MIT
--- How the prompt prints a value.
-- Copies of globals that a session may overwrite.
local table, tostring, type, getmetatable, require = table, tostring, type, getmetatable, require

local M = {}

local function show_key(k)
  if type(k) == "string" and k:match "^[%a_][%w_]*$" then return k end
  return "[" .. (type(k) == "string" and ("%q"):format(k) or tostring(k)) .. "]"
end

--- A value as the prompt prints it: plain tables are shown two levels deep, with up to 20 entries, inner ones with up
--- to 6.
function M.show(v, depth)
  depth = depth or 0
  if type(v) == "string" then return depth == 0 and v or ("%q"):format(v) end
  local mt = type(v) == "table" and getmetatable(v)
  if type(v) ~= "table" or (mt and mt.__tostring) then
    local text = type(v) == "function" and depth > 0 and "function" or tostring(v)
    if depth > 0 and text:find "\n" then text = text:match "^[^\n]*" .. " …" end
    return text
  end
  if depth >= 2 then return "{…}" end
  local parts, count = {}, 0
  for k, w in require("moonshard.tensor.util").sorted_pairs(v) do
    count = count + 1
    if count > (depth == 0 and 20 or 6) then
      parts[#parts + 1] = "…"
      break
    end
    local text = M.show(w, depth + 1)
    parts[#parts + 1] = k == count and text or show_key(k) .. " = " .. text
  end
  local line = "{" .. (#parts > 0 and " " .. table.concat(parts, ", ") .. " " or "") .. "}"
  if #line <= 100 then return line end
  local inner = ("  "):rep(depth + 1)
  return "{\n" .. inner .. table.concat(parts, ",\n" .. inner) .. "\n" .. ("  "):rep(depth) .. "}"
end

return M
