-- SPDX-License-Identifier: MIT
--- Softmax along another dimension than the last, which reads strips of adjacent rows, beside the rows of the
--- transposed tensor.
local ms = require "moonshard"

describe("softmax along another dimension than the last", function()
  for _, case in ipairs {
    { { 1, 16 }, 1 }, { { 5, 15 }, 1 }, { { 64, 17 }, 1 }, { { 65, 64 }, 1 }, { { 130, 200 }, 1 }, { { 3, 67, 70 }, 2 },
    { { 2, 3, 4, 33 }, 2 }, { { 700, 16 }, 1 }, { { 0, 40 }, 1 }, { { 4, 0 }, 1 },
  } do
    for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
      it(("%d of [%s] in %s"):format(case[2], table.concat(case[1], ", "), dtype), function()
        ms.manual_seed(1)
        local d, last = case[2], #case[1]
        local x = ms.randn(case[1]):mul(3)
        if x:numel() > 20 then x:select(d, 1):fill_(-math.huge) end
        x = x:to(dtype)
        local g = ms.randn(case[1]):to(dtype)
        for _, name in ipairs { "softmax", "log_softmax" } do
          local results = {}
          for k, way in ipairs { function(t) return t[name](t, d) end, function(t)
            return t:transpose(d, last):contiguous()[name](t:transpose(d, last):contiguous(), last):transpose(d, last)
          end } do
            local leaf = x:clone():requires_grad_()
            local y = way(leaf)
            y:backward(g:masked_fill(x:eq(-math.huge), 0))
            results[k] = { y:detach(), leaf.grad }
          end
          local near = (dtype == "float32" or dtype == "float64") and { rtol = 1e-5, atol = 1e-6, equal_nan = true }
            or { rtol = 2e-2, atol = 2e-2, equal_nan = true }
          assert.is_true(results[1][1]:allclose(results[2][1], near))
          assert.is_true(results[1][2]:allclose(results[2][2], near))
        end
      end)
    end
  end
end)
