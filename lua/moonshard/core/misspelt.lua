-- SPDX-License-Identifier: MIT
--- Misspelt methods of tensors. A field that a tensor has not reads as nil, for fields may be a script's own
--- (`if t.mark then`); but where the script calls it, `t:sofmax(1)`, "attempt to call a nil value" says less than the
--- nearest name does. Whether a read is the beginning of a call is in the code of the function that reads: there,
--- `t:name` is the instruction that copies t to where arguments go, and then the one that looks the name up.
local errors = require "moonshard.core.errors"

local M = {}

local has_util, util = pcall(require, "jit.util")
-- numbers of the two instructions, from a function that has them
local op_copy, op_look

local function parts(instruction)
  return bit.band(instruction, 0xff), bit.band(bit.rshift(instruction, 8), 0xff),
    bit.band(bit.rshift(instruction, 16), 0xff)
end

if has_util then
  local sample = loadstring "local x, y = ... ; y = x; return x:name()"
  for pc = 1, util.funcinfo(sample).bytecodes - 1 do
    local op, _, c = parts(util.funcbc(sample, pc))
    if pcall(util.funck, sample, -c - 1) and util.funck(sample, -c - 1) == "name" then
      op_look, op_copy = op, (parts(util.funcbc(sample, pc - 1)))
    end
  end
end

-- Does fn call the method on this line? A line that reads the name as a field too may be asking first whether it is
-- there.
local function calls(fn, line, name)
  local called = false
  for pc = 1, util.funcinfo(fn).bytecodes - 1 do
    local op, a, c = parts(util.funcbc(fn, pc))
    if op == op_look and util.funck(fn, -c - 1) == name and util.funcinfo(fn, pc).currentline == line then
      local before, to = parts(util.funcbc(fn, pc - 1))
      if before ~= op_copy or to ~= a + 1 and to ~= a + 2 then return false end
      called = true
    end
  end
  return called
end

local nearest = {}                                      -- by class and name: false, or the name that it is near to

--- Looks at a field that is not there, read by the function `level` frames up: an error when that is a call, and a
--- method has a name like it.
---@param cls table
---@param name string
---@param methods table
---@param level integer
function M.look(cls, name, methods, level)
  if not op_look then return end
  local of = nearest[cls] or {}
  nearest[cls] = of
  if of[name] == nil then
    local names = {}
    local from = methods
    while from do
      for known in pairs(from) do names[#names + 1] = known end
      local mt = getmetatable(from)
      from = mt and rawget(mt, "__index")
    end
    table.sort(names)
    of[name] = errors.nearest(name, names) or false
  end
  local near = of[name]
  if not near then return end
  local info = debug.getinfo(level + 1, "fl")
  if info and info.func and info.currentline >= 0 and calls(info.func, info.currentline, name) then
    errors.raise("unknown method '%s' of a tensor; did you mean '%s'?", name, near)
  end
end

return M
