-- SPDX-License-Identifier: MIT
--- Distributions whose parameters are on a GPU.
local made = require "spec.support.made_distributions"
local ms = require "moonshard"

describe("a distribution on a GPU #cuda", function()
  for name, make in ms.sorted_pairs(made) do
    it("draws and computes as on the CPU: " .. name, function()
      local d = make()
      ms.manual_seed(5)
      local x = d:sample(50)
      local function copy(of)                       -- on the GPU, with the distributions that it is made of
        local new = setmetatable({}, getmetatable(of))
        for key, value in pairs(of) do
          new[key] = ms.is_tensor(value) and value:to "cuda"
            or type(value) == "table" and rawget(value, "batch_shape") and copy(value) or value
        end
        return new
      end
      local moved = copy(d)
      ms.manual_seed(5)
      local there = moved:sample(50)
      assert.are.equal("cuda:0", there.device)
      ms.testing.assert_close(there:cpu(), x, { rtol = 1e-12, atol = 1e-12 })
      ms.testing.assert_close(moved:log_prob(there):cpu(), d:log_prob(x), { rtol = 1e-9, atol = 1e-9 })
    end)
  end
end)
