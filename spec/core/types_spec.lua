-- SPDX-License-Identifier: MIT
--- Annotations that are made of the engine's table of operators.
local engine = require "moonshard.core.ffi"
require "moonshard"
local repl = require "moonshard.tools.repl"
local types = require "moonshard.tools.engine_types"
local made = require "moonshard.tensor.rows".made

describe("annotations of elementwise methods", function()
  it("are Lua, and name every optimizer of the engine's table (scripts/docs writes them for editors)", function()
    local text, kind = types.text(), 0
    assert.is_function(loadstring(text))
    while engine.lib.ms_optim_at(kind) ~= nil do
      local name = engine.ffi.string(engine.lib.ms_optim_at(kind).name)
      assert.matches("\n---@class " .. name .. ": Optimizer\n", text, 1, true)
      kind = kind + 1
    end
    assert.is_true(kind > 5)
  end)

  it("describe every method that the table makes", function()
    local lib, methods, silent = engine.lib, 0, {}
    for op = 0, lib.ms_op_count() - 1 do
      local row = lib.ms_op_at(op)
      if bit.band(row.flags, engine.ffi.C.MS_OP_METHOD) ~= 0 and not made[engine.ffi.string(row.name)] then
        methods = methods + 1
        local doc, inputs = engine.ffi.string(row.doc), row.inputs
        if doc == "" or inputs < 1 or inputs > 2 then silent[#silent + 1] = engine.ffi.string(row.name) end
      end
    end
    assert.is_true(methods > 20)
    assert.are.same({}, silent)
  end)

  it("are what the prompt shows", function()
    for name, expected in pairs {
      silu = "function Tensor:silu()\n  t * sigmoid(t), element by element.\n  @return Tensor",
      silu_ = "function Tensor:silu_()\n  In-place version of silu.\n  @return Tensor self",
      ["ms.nn.F.silu"] = "function Tensor:silu()\n  t * sigmoid(t), element by element.\n  @return Tensor",
      logsumexp = "function Tensor:logsumexp(d, given)\n  `log(sum(exp(t)))` along a dimension, computed without overflow.\n  @param d? integer  from 1; negative from the end (default: -1)\n  @param given? { keepdim: boolean }\n    keepdim: leaves the dimensions with size 1\n  @return Tensor",
      addcdiv_ = "function Tensor:addcdiv_(a, b, given)\n  addcdiv in place.\n  @param a Tensor  broadcasts to t's shape\n  @param b Tensor  broadcasts to t's shape\n  @param given? { value: number }\n    value: the factor (default: 1)\n  @return Tensor self",
      maximum = "function Tensor:maximum(u)\n  The larger of both, element by element; nan where one is nan.\n  @param u Tensor|number  broadcasts with t\n  @return Tensor",
      eq = "function Tensor:eq(u)\n  t == u, element by element: a bool tensor.\n  @param u Tensor|number  broadcasts with t\n  @return Tensor",
    } do
      assert.are.equal(expected, repl.help(name))
    end
  end)
end)
