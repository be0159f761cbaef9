-- SPDX-License-Identifier: MIT
--- lua/moonshard/core/types_elementwise.lua: annotations of the methods that are made of the engine's table of
--- operators (kernels/rows/elementwise.def), from that table.
local ms = require "moonshard"
local engine = require "moonshard.core.ffi"
local lib, E, bit_and = engine.lib, engine.ffi.C, bit.band

local M = { path = "lua/moonshard/core/types_elementwise.lua" }

local head = [[
-- SPDX-License-Identifier: MIT
---@meta
-- luacheck: ignore (declarations for editors)
--- Annotations of methods that are made of kernels/rows/elementwise.def. Written by scripts/docs; never loaded.

---@class Tensor
local Tensor = {}

---@class moonshard.nn
local nn = { F = {} }
]]

--- The file as it should be.
---@return string
function M.text()
  local out = { head }
  local function declare(text, params, of, name, arguments, returns)
    out[#out + 1] = ("--- %s\n%s---@return %s\nfunction %s%s(%s) end\n"):format(text, params, returns, of, name, arguments)
  end
  for op = 0, lib.ms_op_count() - 1 do
    local name, doc, flags = engine.ffi.string(lib.ms_op_name(op)), engine.ffi.string(lib.ms_op_doc(op)),
      lib.ms_op_flags(op)
    if doc ~= "" then
      local in_place = bit_and(flags, E.MS_OP_INPLACE) ~= 0
      local returns = in_place and "Tensor self" or "Tensor"
      if lib.ms_op_inputs(op) == 2 then
        local with_number = lib.ms_op_find(in_place and name:sub(1, -2) .. "_scalar_" or name .. "_scalar") >= 0
        declare(doc, ("---@param u %s  broadcasts %s\n"):format(with_number and "Tensor|number" or "Tensor",
          in_place and "to t's shape" or "with t"), "Tensor:", name, "u", returns)
      else
        declare(doc, "", "Tensor:", name, "", returns)
        if ms.Tensor.methods[name .. "_"] then
          declare(name .. " in place.", "", "Tensor:", name .. "_", "", "Tensor self")
        end
      end
      if bit_and(flags, E.MS_OP_ACTIVATION) ~= 0 then
        declare(doc, "---@param t Tensor  of any shape\n", "nn.F.", name, "t", "Tensor")
      end
    end
  end
  return table.concat(out, "\n")
end

return M
