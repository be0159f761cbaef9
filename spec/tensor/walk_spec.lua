-- SPDX-License-Identifier: MIT
--- A walk over functions of tensors with random shapes, layouts, dtypes and values, from fixed seeds; MOONSHARD_LONG=1
--- (scripts/test --long) goes further. spec/support/walk.lua walks; its steps are in the files beside it.
local process = require "spec.support.process"

local long = os.getenv "MOONSHARD_LONG"

-- The process ends with "walked", the only line that it prints; a fault may crash it.
local function check(steps, first, count)
  local result = process.script(([[require("spec.support.walk").run(require "spec.support.%s", %d, %d)]]):format(steps,
    first, count))
  assert.are.equal("walked\n0", result.stdout .. result.code, result.stderr)
end

describe("a walk", function()
  it("finds no function of elements that differs from a plain loop", function()
    check("walk_elements", 1, long and 1000 or 15)
  end)

  it("finds no function along a dimension or of several tensors that differs from a plain loop", function()
    check("walk_lists", 1, long and 1000 or 15)
  end)

  it("finds no row of the operator table that differs in float32, float16 or bfloat16 from float64", function()
    check("walk_rows", 1, long and 200 or 5)
  end)
end)
