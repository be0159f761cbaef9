-- SPDX-License-Identifier: MIT
--- Numbers the places in a script, for the memory history. A place is the call stack's lines of the script, from the
--- running line out to the program's outermost one. Equal places have equal numbers. Modules are numbered as well, for the
--- memory history and for the profile of a run.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"

local lib, state = engine.lib, engine.state
local getinfo, place_of = debug.getinfo, errors.place_of

local M = {}

-- The tree of places. The children of the root are innermost lines; a node's children are the lines that called it.
local root, places = { callers = {} }, {}

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

--- The number of the script's current place.
---@return integer
function M.here()
  local node = root
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

--- Attributes the allocations made since the last call of `mark` to the script's current place. Cheap while no history
--- is recorded.
function M.mark()
  if state.memory_waiting ~= 0 then lib.ms_memory_site(M.here()) end
end
jit.off(M.here)

--- A place's lines, the innermost first.
---@param number integer  a result of here
---@return { line: string, name: string? }[]
function M.lines(number)
  local list, node = {}, places[number]
  while node and node ~= root do
    table.insert(list, 1, node)
    node = node.inner
  end
  return list
end

local modules, number_of = {}, {}

--- To be called where a module's forward begins. Until the returned function is called, allocations are attributed to
--- the module. Those that backward makes for the operators recorded meanwhile are attributed to the module, too.
---@param name string  the module's path and class
---@return fun()
function M.enter(name)
  M.mark()
  if not number_of[name] then
    modules[#modules + 1] = name
    number_of[name] = #modules
  end
  local outer = state.memory_module
  state.memory_module = number_of[name]
  return function()
    M.mark()
    state.memory_module = outer
  end
end

--- The name of a module.
---@param number integer?  as in the engine's records; 0, nil: none
---@return string?
function M.module(number) return number and modules[number] end

return M
