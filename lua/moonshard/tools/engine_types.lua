-- SPDX-License-Identifier: MIT
--- The annotations of everything that Lua generates from the engine's tables: methods of tensors (rows with the flag
--- MS_OP_METHOD) and optimizers (kernels/formulas/optim), and those of families.lua. For the prompt's help and the
--- reference; for editors scripts/docs writes them into core/types_engine.lua.
local engine = require "moonshard.core.ffi"
local families = require "moonshard.tools.families"
local rows = require "moonshard.tensor.rows"
local tensor = require "moonshard.tensor"
local lib, E, bit_and = engine.lib, engine.ffi.C, bit.band

local M = { path = "lua/moonshard/core/types_engine.lua" }

local head = [[
-- SPDX-License-Identifier: MIT
---@meta
-- luacheck: ignore (declarations for editors)
--- Annotations of what the engine's tables define. Written by scripts/docs; never loaded.

---@class Tensor
local Tensor = {}

---@class moonshard.nn
local nn = { F = {} }
local fft = {}

---@class moonshard
local ms = {}
]]

local comment = families.comment
local type_of = { [-1] = "boolean", [0] = "boolean", "number", "number[]" }

-- The annotations of the class that a row of the table of optimizers defines.
local function optimizer(row)
  local text, name, options, meanings = engine.ffi.string, engine.ffi.string(row.name), {}, {}
  for k = 0, E.MS_OPTIM_OPTIONS - 1 do
    local o = row.options[k]
    if o.name == nil then break end
    options[k + 1] = ("%s: %s"):format(text(o.name), type_of[o.count])
    meanings[k + 1] = ("%s: %s"):format(text(o.name), text(o.doc))
  end
  return ("%s\n---@class %s: Optimizer\n---@overload fun(params: Tensor[]|table[], opts?: { %s }): %s\n%s\nlocal %s = {}\n"):format(
    comment("---", text(row.doc)), name, table.concat(options, ", "), name,
    comment("---  ", table.concat(meanings, "; ")), name)
end

-- The methods that ops.lua makes of other rows than those of methods, and one whose in-place form it writes out.
local product, written_out = { mul = true, mul_ = true }, { pow = true }

-- What arguments mean whose meaning the row's text does not give.
local usual = { keepdim = "leaves the dimensions with size 1" }

-- The annotation of a method that tensor/rows.lua makes. The row's text may end with meanings of arguments: "Sentence.
-- name: meaning; name: meaning".
local function row_method(row)
  local name, a, doc, meanings = engine.ffi.string(row.name), rows.takes(row), engine.ffi.string(row.doc), {}
  local stop = #doc
  for _, list in ipairs { a.positional, a.options } do
    for _, e in ipairs(list) do
      local at, _, text = doc:find("[.;] " .. e.name .. ": ([^;]*)")
      meanings[e.name], stop = text, math.min(stop, at or stop)
    end
  end
  local lines, params, options, texts = { comment("---", doc:sub(1, stop)) }, {}, {}, {}
  local function meaning(e)
    local default = e.default and e.kind ~= "dims" and ("(default: %g)"):format(e.default)
    return table.concat({ meanings[e.name] or usual[e.name] or "", default }, " ")
  end
  for k, e in ipairs(a.positional) do
    params[k] = e.param
    if e.kind == "dim" then
      meanings[e.name] = meanings[e.name] or "from 1; negative from the end"
    elseif e.kind == "dims" then
      meanings[e.name] = "dimensions to reduce (default: all)"
    end
    local kind = e.kind == "tensor" and "Tensor" or e.kind == "number" and "number" or "integer"
    lines[#lines + 1] = ("---@param %s%s %s  %s"):format(e.param, e.optional and "?" or "",
      e.kind == "dims" and "integer|integer[]" or kind, meaning(e))
  end
  for k, e in ipairs(a.options) do
    options[k] = ("%s: %s"):format(e.name, e.kind == "flag" and "boolean" or "number")
    texts[k] = ("%s: %s"):format(e.name, meaning(e))
  end
  if #options > 0 then
    params[#params + 1] = "given"
    lines[#lines + 1] = ("---@param given? { %s }"):format(table.concat(options, ", "))
    lines[#lines + 1] = comment("---  ", table.concat(texts, "; "))
  end
  lines[#lines + 1] = "---@return Tensor" .. (bit_and(row.flags, E.MS_OP_INPLACE) ~= 0 and " self" or "")
  local body = ("%s\nfunction Tensor:%s(%s) end\n"):format(table.concat(lines, "\n"), name, table.concat(params, ", "))
  if bit_and(row.flags, E.MS_OP_ACTIVATION) == 0 then return body end
  return ("%s\n%s"):format(body, (body:gsub("function Tensor:(%w+)%(", "---@param t Tensor\nfunction nn.F.%1(t, ")))
end

--- The declarations, as a Lua file.
---@return string
function M.text()
  local out = { head }
  local function declare(text, params, of, name, arguments, returns)
    out[#out + 1] = ("--- %s\n%s---@return %s\nfunction %s%s(%s) end\n"):format(text, params, returns, of, name, arguments)
  end
  for op = 0, lib.ms_op_count() - 1 do
    local row = lib.ms_op_at(op)
    local name, doc, flags = engine.ffi.string(row.name), engine.ffi.string(row.doc), row.flags
    if rows.made[name] then
      out[#out + 1] = row_method(row)
    elseif bit_and(flags, E.MS_OP_METHOD) ~= 0 or product[name] then
      local in_place = bit_and(flags, E.MS_OP_INPLACE) ~= 0
      local returns = in_place and "Tensor self" or "Tensor"
      if row.inputs == 2 then
        declare(doc, ("---@param u Tensor|number  broadcasts %s\n"):format(in_place and "to t's shape" or "with t"),
          "Tensor:", name, "u", returns)
        if not in_place and tensor.methods[name .. "_"] and lib.ms_op_find(name .. "_") < 0
          and not written_out[name] then
          declare(("In-place version of %s."):format(name), "---@param u Tensor|number  broadcasts to t's shape\n",
            "Tensor:", name .. "_", "u", "Tensor self")
        end
      else
        declare(doc, "", "Tensor:", name, "", returns)
        if tensor.methods[name .. "_"] then
          declare(("In-place version of %s."):format(name), "", "Tensor:", name .. "_", "", "Tensor self")
        end
      end
      if bit_and(flags, E.MS_OP_ACTIVATION) ~= 0 then
        declare(doc, "---@param t Tensor  of any shape\n", "nn.F.", name, "t", "Tensor")
      end
    end
  end
  local kind = 0
  while lib.ms_optim_at(kind) ~= nil do
    out[#out + 1] = optimizer(lib.ms_optim_at(kind))
    kind = kind + 1
  end
  out[#out + 1] = families.text()
  return table.concat(out, "\n")
end

return M
