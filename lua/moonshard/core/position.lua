-- SPDX-License-Identifier: MIT
--- The script's position: for each running function its line, the loops and `if` statements around that line, and the
--- loops' iterations. Every rank runs the same script, so positions of ranks can be compared: an earlier iteration or
--- line comes first.
local context = require "moonshard.core.context"
local errors = require "moonshard.core.errors"
local bytecode, line_info = require "jit.util".funcbc, require "jit.util".funcinfo
local getinfo, getlocal, getupvalue = debug.getinfo, debug.getlocal, debug.getupvalue
local band, rshift = bit.band, bit.rshift

local M = {}

local counted, counting = { [ipairs {}] = true }, {}
--- Declares an iterator of the library that counts the script's steps.
---@param generator function
function M.counts(generator) counted[generator] = "steps" end
--- Declares a function of the library whose numeric loop counts the script's iterations.
---@param fn function
function M.counts_in(fn) counting[fn] = true end

local once = { [pcall] = true, [xpcall] = true, [context.block] = true }
--- Declares a function of the library that calls a function of the script once, before it returns. The lines of the
--- script's function then run in order.
---@param fn function
---@return function fn
function M.calls_once(fn)
  once[fn] = true
  return fn
end

-- ---- loops ---------------------------------------------------------------------------------------

-- Opcodes differ between versions of LuaJIT, so they are read from functions whose code is known.
local function opcode(fn, pc) return band(bytecode(fn, pc), 255) end
local numeric, generic = loadstring "local a = 1 for k = a, 2 do end", loadstring "for k in pairs(a) do end"
local MOV, FORI, JFORI = opcode(numeric, 2), opcode(numeric, 5), opcode(numeric, 5) + 1
local UGET = opcode(loadstring "local a = 1 return function() for k = a, 2 do end end" (), 1)
local JMP = opcode(loadstring "while true do end", 2)
local ISNEXT, ITERN, ITERC = opcode(generic, 4), opcode(generic, 5), opcode(generic, 5) - 1
local closes = loadstring "do local a function b() a = 1 end end c()"
local UCLO = opcode(closes, 4)
local ends = {}                                         -- opcodes that return
for _, source in ipairs { "", "return 1", "return 1, 2", "return f()", "return 1, f()" } do
  local fn, pc = loadstring(source), 1
  while bytecode(fn, pc + 1) do pc = pc + 1 end
  ends[opcode(fn, pc)] = true
end

local known = setmetatable({}, { __mode = "k" })

-- Adds an `if` whose `then` part is the instructions `first` to `last`. The instructions after `last` that run only if
-- the `then` part does not are its other part: the `else` part or, if the `then` part returns or breaks, the rest of
-- the function or of the loop. n: the function's last instruction.
local function add_branch(list, fn, first, last, n)
  local code = bytecode(fn, last)
  local op, target = band(code, 255), last + 1 + rshift(code, 16) - 0x8000
  local skipped = ends[op] and n or (op == JMP or op == UCLO) and target > last + 1 and target - 1 or nil
  if skipped then list[#list + 1] = { first = first, last = last, skipped = skipped } end
end

-- Lists the loops of a function, and its `if` statements with two parts, sorted by first instruction. Fields: slot (the
-- local, counted from 0, that holds the index or generator of a `for` loop; nil: not a `for` loop), start (the opcode
-- and operand that set the index), from and to (first and last line of the loop or `then` part), second and other
-- (first and last line of the `if`'s other part).
local function loops_of(fn)
  if known[fn] then return known[fn] end
  local list, entries, setters, lines, forward = {}, {}, {}, {}, {}
  for pc = 1, 1e6 do
    local code = bytecode(fn, pc)
    if not code then break end
    local op, slot, operand = band(code, 255), band(rshift(code, 8), 255), rshift(code, 16)
    local target = pc + 1 + operand - 0x8000
    lines[pc] = line_info(fn, pc).currentline
    if op == FORI or op == JFORI then
      list[#list + 1] = { first = pc, last = target - 1, slot = slot, start = setters[slot] or {} }
    elseif op == ITERC or op == ITERN then
      list[#list + 1] = { first = entries[pc], last = pc, slot = slot - 3 }
    elseif op == JMP and target <= pc then
      list[#list + 1] = { first = target, last = pc }
    elseif op == JMP or op == ISNEXT then
      entries[target] = pc
      if target > pc + 1 then forward[#forward + 1] = { pc + 1, target - 1 } end
    end
    setters[slot] = { op, operand + 1 }
  end
  for _, jump in ipairs(forward) do add_branch(list, fn, jump[1], jump[2], #lines) end
  for _, part in ipairs(list) do
    part.from, part.to, part.other = lines[part.first], 0, 0
    for pc = part.first, part.last do part.to = math.max(part.to, lines[pc]) end
    part.second = lines[part.last + 1] or 0
    for pc = part.last + 1, part.skipped or 0 do part.other = math.max(part.other, lines[pc]) end
  end
  table.sort(list, function(a, b) return a.first < b.first end)
  known[fn] = list
  return list
end

-- The first index of a numeric loop, read from the variable that initialized it; 0 if no variable did, or if the
-- variable has changed since an earlier call. A constant needs no subtraction: it is the same on all ranks.
local function start_of(loop, fn, level)
  local op, operand = loop.start[1], loop.start[2]
  local _, start
  if op == MOV then _, start = getlocal(level + 1, operand) end
  if op == UGET then _, start = getupvalue(fn, operand) end
  loop.seen = loop.seen or start
  if loop.seen ~= start then loop.start[1] = nil end
  return loop.start[1] and tonumber(start) or 0
end

-- Appends to path the loops and parts of `if` statements that the function at this level is in, the innermost first. Of
-- several loops on one line that use the same local, only the first is appended.
local function add_loops(path, fn, level, line)
  local names, values, found = {}, {}, {}
  for k = 0, 1e6 do
    names[k], values[k] = getlocal(level + 1, k + 1)
    if not names[k] then break end
  end
  for _, loop in ipairs(loops_of(fn)) do
    local slot, count = loop.slot, nil
    local name = slot and names[slot]
    -- The slot may belong to another loop of the function at the moment.
    if slot and (name == "(for index)") ~= (loop.start ~= nil) then name = nil end
    if name == "(for index)" then
      count = math.floor((values[slot] - start_of(loop, fn, level + 1)) / values[slot + 2])
    elseif name == "(for generator)" and counted[values[slot]] then
      count = values[slot + 2]
      if counted[values[slot]] == "steps" then path.step = count end
    end
    if loop.skipped then
      -- If both parts of an `if` share a line, the line does not tell which of them runs.
      if loop.from <= line and line <= loop.other and loop.to < loop.second then
        found[#found + 1] = { 2 * loop.from, line <= loop.to and -2 or -4 }
      end
    elseif loop.from <= line and line <= loop.to and (not slot or name and name:sub(1, 5) == "(for ") then
      if slot then names[slot] = nil end
      found[#found + 1] = count and math.abs(count) < 2^31 and { 2 * loop.from + 1, count } or { 2 * loop.from, -1 }
    end
  end
  for k = #found, 1, -1 do path[#path + 1] = found[k] end
end

-- ---- positions -----------------------------------------------------------------------------------

---@class Position
---@field text string     the whole position
---@field caught string?  the part outside the innermost pcall or xpcall, which may continue after an error; nil: none
---@field step integer?   the step of the outermost ms.steps

--- The script's position: a list of places, the outermost first. A place is { 2 * line + 1, count } for a loop that
--- counts its iterations, { 2 * line, -1 } for another loop, { 2 * line, -2 or -4 } for a part of an `if`, and
--- { 2 * line, 2 * callee + unordered } for a call. callee: the line at which the called function is defined, 0 in the
--- innermost place. unordered: 1 if the library makes the call, so that lines of the callee need not run in their
--- order.
---@return Position
function M.now()
  local path, n, callee, unordered, guarded, inside = {}, 2, 0, 0, false, nil
  while true do
    local info = getinfo(n, "fl")
    if not info then break end
    local fn = info.func
    local place = fn and errors.place_of(fn)
    if place and place ~= "C" and (place ~= "library" or counting[fn]) then
      if guarded then inside = inside or #path end
      path[#path + 1] = { 2 * math.max(info.currentline, 1), 2 * callee + (counting[fn] and 0 or unordered) }
      add_loops(path, fn, n, info.currentline)
      callee, unordered = getinfo(fn, "S").linedefined, 0
    elseif not once[fn] then
      unordered = 1
    end
    guarded = fn == pcall or fn == xpcall
    n = n + 1
  end
  local at, text = { step = path.step }, {}
  for k = #path, 1, -1 do
    at[#at + 1] = path[k]
    text[#text + 1] = path[k][1] .. ":" .. path[k][2]
  end
  at.text = table.concat(text, " ")
  at.caught = inside and table.concat(text, " ", 1, #text - inside)
  return at
end

return M
