-- SPDX-License-Identifier: MIT
--- Places in the script as numbers, for the memory history. A place is the script's lines from the one that runs to the
--- one that the program began with, and the module whose forward runs. Equal places have equal numbers.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local ranges = require "moonshard.core.ranges"

local lib, state = engine.lib, engine.state
local getinfo, place_of = debug.getinfo, errors.place_of

local M = {}

-- The tree of places: a module, then lines from the innermost on. A node has a child for each file and line.
local modules, places = {}, {}

local function child(node, file, line, level)
  local of_file = node.callers[file]
  if not of_file then
    of_file = {}
    node.callers[file] = of_file
  end
  local found = of_file[line]
  if not found then
    found = { line = line >= 0 and file .. ":" .. line or file, name = getinfo(level + 1, "n").name, inner = node,
      callers = {} }
    of_file[line] = found
  end
  return found
end

--- The number of the script's place.
---@return integer
function M.here()
  local name = ranges.module_now() or ""
  local node = modules[name]
  if not node then
    node = { module = name, callers = {} }
    modules[name] = node
  end
  for level = 2, 1e6 do
    local info = getinfo(level, "fl")
    if not info then break end
    local file = info.func and place_of(info.func)      -- nil for a frame that a tail call replaced
    if file and file ~= "library" and file ~= "C" then node = child(node, file, info.currentline, level) end
  end
  if not node.number then
    places[#places + 1] = node
    node.number = #places
  end
  return node.number
end

--- Attributes the allocations since the last call to the script's place. Cheap while no history is recorded.
function M.mark()
  if state.memory_waiting ~= 0 then lib.ms_memory_site(M.here()) end
end
jit.off(M.here)

--- A place's lines, the innermost first, and its module.
---@param number integer  a result of here
---@return { line: string, name: string? }[] lines
---@return string? module
function M.lines(number)
  local list, node = {}, places[number]
  while node and not node.module do
    table.insert(list, 1, node)
    node = node.inner
  end
  return list, node and node.module ~= "" and node.module or nil
end

return M
