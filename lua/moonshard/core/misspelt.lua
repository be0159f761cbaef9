-- SPDX-License-Identifier: MIT
--- Errors for misspelt methods of tensors, and for positions written as in Python. Reading an unknown field gives nil,
--- because scripts test their own fields (`if t.mark then`). But if the script calls it, as in `t:sofmax(1)`, an error
--- that suggests the most similar method is more helpful than "attempt to call a nil value". The bytecode of the
--- function that reads the field distinguishes calls from reads: a method call copies t to the place of the first
--- argument in one instruction and looks up the name in the next.
local errors = require "moonshard.core.errors"
local hints = require "moonshard.core.hints"

local M = {}

local has_util, util = pcall(require, "jit.util")
-- The opcodes of the two instructions of a method call: the copy and the lookup. Read from a sample function.
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

-- Whether fn calls a method of this name on this line. False if the line also reads the name as a field, perhaps to
-- test for it.
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

--- Whether the function `level` frames up calls a method of this name on its current line. False if that is not known.
---@param name string  the method's name
---@param level integer  1: the caller
---@return boolean
function M.is_call(name, level)
  if not op_look then return false end
  local info = debug.getinfo(level + 1, "fl")
  return info ~= nil and info.func ~= nil and info.currentline >= 0 and calls(info.func, info.currentline, name)
end

-- Opcodes: op_at reads s[0]. For s[-1], op_number loads the number and op_read reads s at it.
local op_at, op_number, op_read
if has_util then
  local zero, negative = loadstring "local s = ... return s[0]", loadstring "local s = ... return s[-1]"
  op_at = parts(util.funcbc(zero, util.funcinfo(zero).bytecodes - 2))
  local last = util.funcinfo(negative).bytecodes - 2
  op_number, op_read = parts(util.funcbc(negative, last - 1)), (parts(util.funcbc(negative, last)))
end

-- Whether fn reads a table at this whole number, written as a literal, on this line.
local function reads_at(fn, line, number)
  for pc = 1, util.funcinfo(fn).bytecodes - 1 do
    if util.funcinfo(fn, pc).currentline == line then
      local op, a, c = parts(util.funcbc(fn, pc))
      if number == 0 and op == op_at and c == 0 then return true end
      local then_op, _, key = parts(util.funcbc(fn, pc + 1) or 0)
      local value = bit.arshift(util.funcbc(fn, pc), 16)
      if op == op_number and value == number and then_op == op_read and key == a then return true end
    end
  end
  return false
end

--- Whether the function `level` frames up reads a table at this whole number, written as a literal, on its current line,
--- as in t[0] or t[-1]. False if that is not known.
---@param number integer
---@param level integer  1: the caller
---@return boolean
function M.is_literal(number, level)
  if not op_at then return false end
  local info = debug.getinfo(level + 1, "fl")
  return info ~= nil and info.func ~= nil and info.currentline >= 0 and reads_at(info.func, info.currentline, number)
end

local FIELDS = { "shape", "dtype", "device", "ndim", "is_leaf", "is_sparse" }

-- Whether in `name` a letter of `field` is missing, one is added, or two neighbours are swapped. A replaced letter does
-- not count: `share` is more likely a script's own field than a misspelt `shape`.
local function is_slip(name, field)
  if not errors.alike(name, field, 1) then return false end
  if #name ~= #field then return true end
  local at = 1
  while name:byte(at) == field:byte(at) do at = at + 1 end
  return name:byte(at) == field:byte(at + 1) and name:byte(at + 1) == field:byte(at)
end

local function hint_for(name, reads)
  local hint = hints.field(name) or reads and hints.result(name)
  if hint then return hint end
  if errors.alike(name, "requires_grad", 3) then return "did you mean 'requires_grad'?" end
  for _, field in ipairs(reads and FIELDS or {}) do
    if is_slip(name, field) then return ("did you mean '%s'?"):format(field) end
  end
end

local read, assigned = {}, {}                           -- field -> the message about it, or false

--- Called when a script reads or assigns a field that a tensor does not have: raises if it is a field of PyTorch's
--- tensors, or a misspelt requires_grad; for a read, also if it is a field of PyTorch's results, or misspells one of
--- FIELDS. Such fields have no effect, and scripts seldom mean fields of their own by these names.
---@param name string  the field
---@param reads boolean  false: it is assigned
function M.field(name, reads)
  local refusals = reads and read or assigned
  local text = refusals[name]
  if text == nil then
    local hint = hint_for(name, reads)
    text = hint and ("a tensor has no field '%s'; %s"):format(name, hint) or false
    refusals[name] = text
  end
  if text then errors.raise_text(text) end
end

local nearest = {}                                      -- class -> name -> the most similar method, or false

--- Called when the function `level` frames up has read an unknown field: raises if that was a method call and a method
--- has a similar name.
---@param cls table  the tensor's class
---@param name string  the field that was read
---@param methods table  the known methods, by name
---@param level integer  stack level of the function that read the field
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
  if of[name] and M.is_call(name, level + 1) then
    errors.raise("unknown method '%s' of a tensor; did you mean '%s'?", name, of[name])
  end
end

return M
