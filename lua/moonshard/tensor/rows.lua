-- SPDX-License-Identifier: MIT
--- Methods of tensors that rows of operators describe (the flag MS_OP_METHOD): what a row takes gives their arguments,
--- options and checks. Those of elementwise rows that take only tensors are in tensor/ops.lua. Each method is code of
--- its own, because closures of one prototype share their traces.
---
---   "dim=-1, keepdim?"      t:name(d, { keepdim = true })
---   "index, source | dim"   t:name(d, index, source)
---   "; value=1"             t:name { value = 2 }
---
--- M.positional makes the functions of rows that layers and nn.F call.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"

local lib, E, a_i, text_of = engine.lib, engine.ffi.C, engine.a_i, engine.ffi.string

-- activations: the methods that nn.F also offers as functions; names: those of all methods that rows describe; made:
-- whether a method is made here
local M = { activations = {}, names = {}, made = {} }

---@class RowArgument
---@field name string  in the row, the options and messages
---@field param string  the name of a positional argument: d for a dimension
---@field kind "tensor"|"dim"|"dims"|"flag"|"whole"|"number"
---@field optional boolean  not needed in a call of the method
---@field default? number  of an optional argument

local function read(text, kind)
  local list = {}
  for entry in text:gmatch "[^,%s]+" do
    local name, mark = entry:match "^([%w_]+)(.*)$"
    local dim = kind == "whole" and name:match "^dim(%d*)$"
    list[#list + 1] = { name = name, param = dim and "d" .. dim or name, default = tonumber(mark:match "^=(.*)"),
      kind = mark == "?" and "flag" or dim and (mark == "..." and "dims" or "dim") or kind, optional = mark ~= "" }
  end
  return list
end

--- What an operator takes besides its first tensor: tensors, integers and numbers in the engine's order; positional
--- arguments and options in that of the method.
---@param row ffi.cdata*  of ms_op_at
---@return { tensors: RowArgument[], integers: RowArgument[], numbers: RowArgument[], positional: RowArgument[], options: RowArgument[] }
function M.takes(row)
  local tensors, rest = text_of(row.takes):match "^(.-)|(.*)$"
  local integers, numbers = (rest or text_of(row.takes)):match "^([^;]*);?(.*)$"
  local a = { tensors = read(tensors or "", "tensor"), integers = read(integers, "whole"),
    numbers = read(numbers, "number"), positional = {}, options = {} }
  local function place(list, optional)
    for _, e in ipairs(list) do
      local named = e.kind == "flag" or e.kind == "number" and e.optional
      if e.optional == optional then table.insert(named and a.options or a.positional, e) end
    end
  end
  place(a.integers, false)
  place(a.tensors, false)
  place(a.numbers, false)
  place(a.integers, true)
  place(a.numbers, true)
  return a
end

--- Raises unless v is a whole number that fits the engine's int64.
function M.whole(v, who, what)
  opts.expect(v, opts.whole, "%s: %s", who, what)
  if v >= 2 ^ 63 then opts.wrong(v, "a whole number below 2^63", "%s: %s", who, what) end
  if v < -2 ^ 63 then opts.wrong(v, "a whole number from -2^63", "%s: %s", who, what) end
  return v
end

--- Writes dimensions d to engine.a_i, starting at index `at`; writes none if d is nil (all dimensions).
---@return integer n  the number of integers in a_i
function M.positions(d, at, who)
  if d == nil then return at end
  if type(d) == "number" then
    a_i[at] = tensor.position(d, who)
    return at + 1
  end
  if type(d) ~= "table" then opts.wrong(d, "a whole number or a list of them", "%s: dimension", who) end
  if #d > engine.MAX_DIMS then errors.raise("%s: %d dimensions; at most %d are supported", who, #d, engine.MAX_DIMS) end
  for k = 1, #d do a_i[at + k - 1] = tensor.position(d[k], who) end
  return at + #d
end

local here = debug.getinfo(1, "S").source
local head = "local op, who, opts, options, none, tensor, engine, whole, positions = ... "
  .. "local call1, call2, call3, call1_with, call = tensor.call1, tensor.call2, tensor.call3, tensor.call1_with, tensor.call "
  .. "local wrap, id_of, position, args = tensor.wrap, tensor.id_of, tensor.position, engine.args "
  .. "local a_in, a_i, a_f = engine.a_in, engine.a_i, engine.a_f return function(t"

-- The code that writes argument e to the k-th place of the engine's list of its kind; nil for dimensions.
local function store(e, k)
  local value = e.param
  if e.kind == "flag" then return ("a_i[%d] = o.%s and 1 or 0"):format(k, e.name) end
  if e.default and e.kind ~= "number" then value = ("(%s == nil and %d or %s)"):format(value, e.default, value) end
  if e.kind == "dim" then return ("a_i[%d] = position(%s, who)"):format(k, value) end
  if e.kind == "whole" then return ("a_i[%d] = whole(%s, who, '%s')"):format(k, value, e.name) end
  if e.optional then return ("a_f[%d] = o.%s"):format(k, e.name) end
  return ("a_f[%d] = opts.expect(%s, opts.number, '%%s: %s', who)"):format(k, value, e.name)
end

-- Makes the method of a row.
local function method(number, row)
  local name, a = text_of(row.name), M.takes(row)
  local in_place = bit.band(row.flags, E.MS_OP_INPLACE) ~= 0
  local lines, params, n_in = {}, "", 1 + #a.tensors
  assert(n_in == row.inputs, name)
  local function add(...) lines[#lines + 1] = (...):format(select(2, ...)) end
  local function finish(call) add(in_place and "%s return t" or "return wrap(%s)", call) end
  for _, e in ipairs(a.positional) do params = params .. ", " .. e.param end
  local options = {}
  for _, e in ipairs(a.options) do options[e.name] = e.default or false end
  if #a.options > 0 then
    for k = #a.positional, 1, -1 do
      local p = a.positional[k].optional and a.positional[k].param
      if p then add("if given == nil and opts.is(%s) then %s, given = nil, %s end", p, p, p) end
    end
  end
  local tensors = "t"
  for _, e in ipairs(a.tensors) do tensors = tensors .. ", " .. e.param end
  if #a.integers + #a.numbers == 0 then
    finish(("call%d(op, %s, who)"):format(n_in, tensors))
  else
    if n_in == 1 and row.integers + row.numbers == 0 and #a.positional == 1 then
      add("if %s == nil%s then return wrap(call1(op, t, who)) end", a.positional[1].param,
        #a.options > 0 and " and given == nil" or "")
    end
    if n_in > 1 then add "local i0 = id_of(t, who)" end
    for k, e in ipairs(a.tensors) do add("local i%d = id_of(%s, who, '%s')", k, e.param, e.name) end
    if #a.options > 0 then add "local o = given == nil and none or opts(who, given, options)" end
    local n_i = #a.integers
    for k, e in ipairs(a.integers) do
      if e.kind == "dims" then
        add("local n = positions(%s, %d, who)", e.param, k - 1)
        n_i = "n"
      else
        add("%s", store(e, k - 1))
      end
    end
    for k, e in ipairs(a.numbers) do add("%s", store(e, k - 1)) end
    if n_in == 1 then
      finish(("call1_with(op, t, who, %s, %d)"):format(n_i, #a.numbers))
    else
      add("args.n_in, args.n_i, args.n_f, a_in[0] = %d, %s, %d, i0", n_in, n_i, #a.numbers)
      for k = 1, n_in - 1 do add("a_in[%d] = i%d", k, k) end
      finish(("call(op, %s)"):format(tensors))
    end
  end
  local code = head .. params .. (#a.options > 0 and ", given)\n" or ")\n") .. table.concat(lines, "\n") .. "\nend"
  local fn = assert(loadstring(code, here))(number, name, opts, options, opts(name, nil, options), tensor, engine,
    M.whole, M.positions)
  return #a.options > 0 and fn or opts.fixed(name, fn)
end

--- A function of a row's arguments in their order: the tensors, of which those marked optional may be nil, integers
--- (flags are booleans, dimensions count from 0) and numbers. The caller has checked all but the tensors.
---@param name string
---@param who? string  what errors name (default: name)
---@param first? string  what errors name the first tensor (default: nothing)
---@param results? integer  (default: 1)
function M.positional(name, who, first, results)
  local number = engine.op(name)
  local row = lib.ms_op_at(number)
  local a, params, lines = M.takes(row), { "t" }, {}
  assert(1 + #a.tensors == row.most_inputs, name)
  local function add(...) lines[#lines + 1] = (...):format(select(2, ...)) end
  local function list(of, to, code)
    for k, e in ipairs(of) do
      params[#params + 1] = e.param
      add("%s[%d] = %s", to, k - 1, (code(e):gsub("@", e.param)))
    end
  end
  add("a_in[0] = id_of(t, who%s)", first and (", '%s'"):format(first) or "")
  for k, e in ipairs(a.tensors) do
    params[#params + 1] = e.param
    add("a_in[%d] = %sid_of(%s, who, '%s')%s", k, e.optional and e.param .. " ~= nil and " or "", e.param, e.name,
      e.optional and " or 0" or "")
  end
  local tensors = table.concat(params, ", ", 1, math.min(#params, 3))
  add("args.n_in, args.n_i, args.n_f = %d, %d, %d", #params, #a.integers, #a.numbers)
  list(a.integers, "a_i", function(e)
    return e.kind == "flag" and "@ and 1 or 0" or e.optional and ("@ == nil and %d or @"):format(e.default) or "@"
  end)
  list(a.numbers, "a_f", function(e) return e.optional and ("@ or %.17g"):format(e.default) or "@" end)
  if #a.integers + #a.numbers == 0 and not results and not first and #a.tensors == 2 and not a.tensors[1].optional then
    lines = { ("return wrap(call3(op, %s, who))"):format(tensors) }
  else
    add("%swrap(call(op, %s))", results and "local y = " or "return ", tensors)
    for k = 2, results or 0 do add("local y%d = wrap(engine.a_out[%d])", k, k - 1) end
    if results then add("return y%s", results == 3 and ", y2, y3" or ", y2") end
  end
  local code = head:gsub("t$", "") .. table.concat(params, ", ") .. ")\n" .. table.concat(lines, "\n") .. "\nend"
  return assert(loadstring(code, here))(number, who or name, opts, nil, nil, tensor, engine)
end

for number = 0, lib.ms_op_count() - 1 do
  local row = lib.ms_op_at(number)
  if bit.band(row.flags, E.MS_OP_METHOD) ~= 0 then
    local name = text_of(row.name)
    M.names[#M.names + 1] = name
    if bit.band(row.flags, E.MS_OP_EACH) == 0 or text_of(row.takes) ~= "" then
      tensor.methods[name], M.made[name] = method(number, row), true
      if bit.band(row.flags, E.MS_OP_ACTIVATION) ~= 0 then M.activations[name] = tensor.methods[name] end
    end
  end
end

return M
