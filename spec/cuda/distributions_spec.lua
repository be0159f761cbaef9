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

  it("gives the gradients of draws by their concentration, from the smallest to infinity", function()
    local off = { validate_args = false }
    local given = ms.tensor({ 1e-3, 0.3, 2, 40, 499, 501, 1e6, math.huge }, { dtype = "float64" })
    local gradients = {}
    for k, device in ipairs { "cpu", "cuda" } do
      ms.manual_seed(5)
      local a = given:to(device):detach():requires_grad_()
      ms.distributions.Gamma(a, 1, off):rsample(50):sum():backward()
      gradients[k] = a.grad:cpu()
    end
    ms.testing.assert_close(gradients[2], gradients[1], { rtol = 1e-9, atol = 1e-12, equal_nan = true })
  end)
end)
