-- SPDX-License-Identifier: MIT
--- Options of functions: their check is not compiled, because compiled code sometimes gave defaults instead of given
--- options, in bursts of up to seven in a million mixed calls.
local opts = require "moonshard.core.opts"

describe("options", function()
  it("are those given, and otherwise the defaults, in code that is not compiled", function()
    local compiled = false
    local function seen(what, _, fn) compiled = compiled or what == "start" and fn == opts.check end
    local reduction = opts.one_of({ "sum", "avg", "max", "min", "prod" }, "sum")
    local specs = {
      { group = opts.any, async = opts.boolean, op = reduction },
      { lr = 0.1, momentum = 0, name = opts.any, op = reduction },
    }
    jit.flush()
    jit.attach(seen, "trace")
    for k = 1, 20000 do
      local a = opts("f", { async = true, op = k % 3 == 0 and "avg" or nil }, specs[1])
      local b = opts("f", { lr = 0.5 }, specs[2])
      assert(a.op == (k % 3 == 0 and "avg" or "sum") and a.async and b.lr == 0.5 and b.op == "sum" and b.momentum == 0)
    end
    jit.attach(seen)
    assert.is_false(compiled)
  end)
end)
