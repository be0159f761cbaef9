-- SPDX-License-Identifier: MIT
--- Distributions at the limits of their parameters and of number types: infinities, nan, masked classes, half types.
local ms = require "moonshard"
local D = ms.distributions

local inf, nan = math.huge, 0 / 0
local off = { validate_args = false }

local function all(t) return t:all():item() end
local function shown(t)
  local out = {}
  for k, x in ipairs(t:tolist()) do out[k] = x ~= x and "nan" or x == inf and "inf" or "finite" end
  return table.concat(out, " ")
end

describe("values and parameters", function()
  it("may be bools, which count as 0 and 1", function()
    local ids = ms.tensor { true, false }
    local d = D.Categorical { logits = ms.tensor { 0, 1 } }
    assert.is_true(d:log_prob(ids):equal(d:log_prob(ids:long())))
    assert.are.same({ true, true }, d.support:check(ids):tolist())
    assert.are.same({ true, true }, D.Poisson(1).support:check(ids):tolist())
    assert.is_true(D.Bernoulli(0.25):log_prob(ids):equal(D.Bernoulli(0.25):log_prob(ids:float())))
  end)

  it("have at least one class", function()
    for _, o in ipairs { {}, { validate_args = false } } do
      local ok, message = pcall(D.Dirichlet, ms.ones(3, 0), o)
      assert.is_false(ok)
      assert.matches("Dirichlet: concentration has shape [3, 0], expected at least one number in its last dimension", message,
        1, true)
    end
    assert.is_false(pcall(D.Categorical, ms.ones(3, 0)))
  end)
end)

describe("samples of distributions of gamma numbers", function()
  it("need finite concentrations and rates", function()
    for name, make in ms.sorted_pairs {
      ["Gamma: concentration is inf, expected a finite number > 0"] = function() D.Gamma(1e300, 1) end,  -- in float32
      ["df is inf"] = function() D.Chi2(inf) end,
      ["StudentT: df is inf"] = function() D.StudentT(inf) end,
      ["concentration0 is inf"] = function() D.Beta(1, inf) end,
      ["concentration is [inf, 1], expected finite numbers"] = function() D.Dirichlet(ms.tensor { inf, 1 }) end,
      ["rate is inf, expected a finite number from 0"] = function() D.Poisson(inf) end,
    } do
      local ok, message = pcall(make)
      assert.is_false(ok)
      assert.is_truthy(message:find(name, 1, true), message)
    end
  end)

  it("end at once for parameters without numbers", function()
    local a = ms.tensor { nan, -1, inf, 2 }
    assert.are.equal("nan nan inf finite", shown(D.Gamma(a, 1, off):sample()))
    assert.are.equal("nan nan inf finite", shown(D.Poisson(a, off):sample()))
    assert.are.equal("nan nan", shown(D.Dirichlet(ms.tensor { inf, 1 }, off):sample()))
    assert.are.equal("nan nan", shown(D.StudentT(ms.tensor { inf, nan }, off):sample()))
    local c = ms.tensor({ nan, 2 }, { requires_grad = true })
    D.Gamma(c, 1, off):rsample():sum():backward()
    assert.is_true(c.grad[2]:isfinite():item())
  end)

  it("of the largest concentrations and rates are finite", function()
    local large = ms.tensor({ 1e300 }, { dtype = "float64" })
    assert.is_true(all(D.Gamma(large, 1):sample(3):isfinite()))
    assert.is_true(all(D.Poisson(large):sample(3):isfinite()))
  end)

  it("of small concentrations stay inside of the density's limits", function()
    for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
      ms.manual_seed(1)
      local beta = D.Beta(ms.full({ 1 }, 0.1, { dtype = dtype }), 0.1)
      local x = beta:sample(20000)
      assert.is_true(all(x:gt(0)) and all(x:lt(1)), dtype)
      assert.is_true(all(beta:log_prob(x):isfinite()), dtype)
      local dirichlet = D.Dirichlet(ms.full({ 3 }, 0.01, { dtype = dtype }))
      x = dirichlet:sample(20000)
      assert.is_true(all(x:gt(0)) and all(x:lt(1)), dtype)
      assert.is_true(all(dirichlet:log_prob(x):isfinite()), dtype)
    end
  end)
end)

describe("samples of half types", function()
  it("are finite, and those of Uniform are below the upper limit", function()
    for _, dtype in ipairs { "bfloat16", "float16" } do
      ms.manual_seed(1)
      local zero = ms.zeros(1, { dtype = dtype })
      assert.is_true(all(D.Uniform(zero, 1):sample(100000):lt(1)), dtype)
      assert.is_true(all(D.Gumbel(zero, 1):sample(100000):isfinite()), dtype)
    end
  end)
end)

describe("Categorical", function()
  it("with a masked class has a finite entropy with a gradient, and does not draw it", function()
    local z = ms.tensor({ 1, -inf, 2 }, { requires_grad = true })
    local d = D.Categorical { logits = z }
    local entropy = d:entropy()
    assert.is_true(math.abs(entropy:item() - 0.582203) < 1e-5)
    entropy:backward()
    assert.is_true(all(z.grad:isfinite()))
    assert.is_true(all(d:sample(1000):ne(1)))
    assert.are.equal(-inf, d:log_prob(1):item())
  end)

  it("of one mask has a finite divergence, with a gradient", function()
    local z = ms.tensor({ 0, 1, -inf }, { requires_grad = true })
    local kl = D.kl_divergence(D.Categorical { logits = z }, D.Categorical { logits = ms.tensor { 1, 1, -inf } })
    assert.is_true(math.abs(kl:item() - 0.110944) < 1e-5)
    kl:backward()
    assert.is_true(all(z.grad:isfinite()))
    assert.is_true(z.grad[2]:item() > 0.1 and z.grad[1]:item() < -0.1)
  end)

  it("refuses a row in which all classes are masked, and infinite logits", function()
    for text, rows in pairs {
      ["logits is [-inf, -inf] at [2], expected"] = { { 0, 1 }, { -inf, -inf } },
      ["logits is [1, inf] at [1], expected"] = { { 1, inf } },
    } do
      for _, name in ipairs { "Categorical", "OneHotCategorical" } do
        local ok, message = pcall(D[name], { logits = ms.tensor(rows) })
        assert.is_false(ok)
        assert.is_truthy(message:find(name .. ": " .. text, 1, true), message)
      end
    end
  end)
end)

describe("a distribution at a limit", function()
  it("Geometric of certain success has PyTorch's gradient", function()
    local p = ms.tensor({ 1, 0.5 }, { requires_grad = true })
    local log = D.Geometric(p):log_prob(0)
    assert.are.equal(0, log[1]:item())
    log:sum():backward()
    assert.are.same({ 1, 2 }, p.grad:tolist())
  end)

  it("MixtureSameFamily has no mode: nan", function()
    local parts = D.Normal(ms.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } }, 1)
    local mode = D.MixtureSameFamily(D.Categorical(ms.ones(2)), parts).mode
    assert.are.equal("[3]", tostring(mode.shape))
    assert.is_true(all(mode:isnan()))
  end)

  it("has a support that checks numbers and tensors", function()
    assert.is_true(D.Normal(0, 1).support:check(3):item())
    assert.is_false(D.Gamma(1, 1).support:check(-3):item())
    assert.are.same({ true, false }, D.Uniform(ms.tensor { 0, 3 }, 4).support:check(2):tolist())
    for text, value in pairs { ["value has shape [], expected at least 1 dimension"] = 2, ["value is a string"] = "x" } do
      local ok, message = pcall(function() return D.Dirichlet(ms.ones(2)).support:check(value) end)
      assert.is_false(ok)
      assert.is_truthy(message:find(text, 1, true), message)
    end
  end)
end)
