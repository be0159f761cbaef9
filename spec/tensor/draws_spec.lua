-- SPDX-License-Identifier: MIT
--- Random fills, draws and permutations: their distributions, and that a seed determines them.
local ms = require "moonshard"

local function near(expected, t, tolerance)
  local value = t:double():mean():item()
  assert(math.abs(value - expected) < tolerance, ("%g is not near %g"):format(value, expected))
end

describe("random draws", function()
  before_each(function() ms.manual_seed(7) end)

  it("are the same for the same seed, and differ from draw to draw", function()
    local function draw()
      local p = ms.ones(50)
      return ms.cat { ms.empty(9):uniform_(), ms.empty(9):normal_(), ms.empty(9):exponential_(),
        ms.empty(9):bernoulli_(), p:multinomial(20):float(), p:multinomial(20, { replacement = true }):float(),
        ms.randperm(50):float() }
    end
    local first, second = draw(), draw()
    ms.manual_seed(7)
    assert.is_true(first:equal(draw()))
    assert.is_false(first:equal(second))
  end)
  it("have the means of their distributions", function()
    for _, dtype in ipairs { "float32", "float64", "bfloat16" } do
      local x = ms.empty(40000, { dtype = dtype })
      near(1, x:uniform_(-1, 3), 0.03)
      near(2, x:normal_(2, 0.5), 0.02)
      near(0.25, x:exponential_(4), 0.01)
      near(0.3, x:bernoulli_(0.3), 0.02)
      near(0.3, ms.full({ 40000 }, 0.3, { dtype = dtype }):bernoulli(), 0.02)
      assert.are.equal(dtype, x.dtype)
    end
    near(0, ms.normal(nil, ms.full({ 40000 }, 2)), 0.04)
  end)
  it("follow the weights, with replacement and without", function()
    local p = ms.tensor { { 1, 0, 3 }, { 2, 2, 0 } }
    for _, n in ipairs { 2, 30000 } do          -- fewer and more draws than elements
      local ids = p:multinomial(n, { replacement = true })
      assert.are.same({ 2, n }, { unpack(ids.shape) })
      if n > 3 then
        near(1.5, ids[1], 0.03)
        near(0.5, ids[2], 0.03)
        assert.are.equal(0, ids[1]:eq(1):sum():item())
      end
    end
    local both = p:multinomial(2)
    assert.are.same({ 2, 1 }, { both[1]:sum():item(), both[2]:sum():item() })
    near(0.75, ms.tensor { { 1, 3 } }:tile(20000, 1):multinomial(1), 0.02)
  end)
  it("of a permutation contain each number once, and each order equally often", function()
    local list = ms.randperm(1000):tolist()
    table.sort(list)
    for k = 1, 1000 do assert.are.equal(k - 1, list[k]) end
    local count = 0
    for _ = 1, 3000 do count = count + (table.concat(ms.randperm(3):tolist()) == "201" and 1 or 0) end
    assert(math.abs(count - 500) < 100, count)
    assert.are.equal(0, ms.randperm(0):numel())
  end)
end)
