-- SPDX-License-Identifier: MIT
--- Code that LuaJIT compiles gives what the interpreter gives.
local ms = require "moonshard"

describe("compiled code", function()
  it("keeps a tensor's field that was read before another tensor's", function()
    local matrix, vector = ms.zeros(2, 2), ms.zeros(2)
    local wrong = 0
    for _ = 1, 2000 do
      if vector.ndim ~= matrix.ndim - 1 then wrong = wrong + 1 end
      if matrix.ndim == 0 or vector.ndim ~= matrix.ndim - 1 then wrong = wrong + 1 end
      if vector.ndim + 1 < matrix.ndim then wrong = wrong + 1 end
    end
    assert.are.equal(0, wrong)
  end)

  it("accepts the shapes of a loss in every iteration of a loop", function()
    local scores, ids = ms.zeros(2, 2), ms.zeros(2, { dtype = "int64" })
    for _ = 1, 500 do ms.scope(function() return ms.nn.F.nll_loss(scores, ids) end) end
  end)
end)
