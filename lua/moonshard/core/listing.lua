-- SPDX-License-Identifier: MIT
--- Lists that a `for` loop visits as PyTorch's generators: `for p in model:parameters() do`. For `#`, `ipairs`, `pairs`
--- and `unpack` they are plain tables.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"

local SHOWN = 20                      -- the largest number of elements that tostring shows

-- A field of M, because data/packing.lua sends metatables to the workers of a DataLoader by their names in modules.
local M = { Listing = opts.printing {} }

-- list -> the position of the element that a loop got last.
local at = setmetatable({}, { __mode = "k" })

-- Lua calls the list as an iterator, with the previous element. Its position is stored, as elements may be equal; if
-- another loop over the same list has changed the position, the first element equal to `last` is looked for.
function M.Listing.__call(list, _, last)
  local k = last == nil and 0 or at[list]
  if last ~= nil and not rawequal(list[k], last) then
    k = 1
    while k < #list and not rawequal(list[k], last) do k = k + 1 end
  end
  at[list] = k + 1
  return list[k + 1]
end
M.Listing.__no_function = M.Listing.__call

--- Advice for scripts that put several modules' lists of parameters into one list, or add them.
M.SEVERAL = "for several modules write nn.ModuleList({ a, b }):parameters()"

function M.Listing.__add() errors.raise("a list has no +; %s", M.SEVERAL) end

function M.Listing.__tostring(list)
  local lines = {}
  for k = 1, math.min(#list, SHOWN) do
    local text = tostring(list[k])
    local first = text:match "^[^\n]*"
    lines[k] = ("(%d): %s%s"):format(k, first, first:sub(-1) == "(" and "…)" or "")   -- a module with children
  end
  if #list > SHOWN then lines[#lines + 1] = ("… (%d elements)"):format(#list) end
  return #list == 0 and "{}" or table.concat(lines, "\n")
end

--- A copy of a list without its metatable. `{ unpack(list) }` would fail for more than about 8,000 elements.
---@generic T
---@param list T[]
---@return T[]
function M.copy(list)
  local out = {}
  for k = 1, #list do out[k] = list[k] end
  return out
end

--- Makes a list iterable by `for x in list`. Returns it.
---@generic T: table
---@param list T
---@return T
function M.new(list) return setmetatable(list, M.Listing) end

return M
