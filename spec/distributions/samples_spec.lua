-- SPDX-License-Identifier: MIT
--- Samples of distributions: their moments against the formulas, shapes, gradients and scopes.
local made = require "spec.support.made_distributions"
local ms = require "moonshard"
local D = ms.distributions

local function t(list) return ms.tensor(list, { dtype = "float64" }) end

local N = 20000

describe("samples", function()
  for name, make in ms.sorted_pairs(made) do
    -- With N samples the mean of the samples is normal around the mean, with the deviation stddev / sqrt(N); five of
    -- them are exceeded once in 1.7 million. The fourth moments bound the variance's error likewise.
    it("have the mean and the variance of the formulas: " .. name, function()
      ms.manual_seed(7)
      local d = make()
      local x = d:sample(N)
      local from = (x - d.mean):square()
      local bound = d.stddev * (5 / math.sqrt(N))
      assert.is_true((x:mean(1) - d.mean):abs():le(bound + 1e-12):all():item(), tostring(x:mean(1)))
      local error_of_variance = from:std(1) * (5 / math.sqrt(N))
      assert.is_true((from:mean(1) - d.variance):abs():le(error_of_variance + 1e-12):all():item(),
        tostring(from:mean(1)))
      assert.is_true(d.support:check(x):all():item())
      assert.is_false(x.requires_grad)
    end)

    it("have sizes, batch shape and event shape: " .. name, function()
      local d = make()
      local own = table.concat(d.mean.shape, ",")
      local function shape(x) return table.concat(x.shape, ",") end
      assert.are.equal(own, shape(d:sample()))
      assert.are.equal("4,3," .. own, shape(d:sample(4, 3)))
      assert.are.equal("4,3," .. own, shape(d:sample { 4, 3 }))
      assert.are.equal("0," .. own, shape(d:sample(0)))
      assert.are.equal("4,3,2", shape(d:log_prob(d:sample(4, 3))))
      local wide = d:expand(5, 2)
      assert.are.equal("5,2", table.concat(wide.batch_shape, ","))
      assert.are.equal("5," .. own, shape(wide:sample()))
      assert.are.equal("5,2", shape(wide:log_prob(wide:sample())))
    end)

    if (" Normal LogNormal HalfNormal Uniform Laplace Gumbel Exponential "):find(" " .. name .. " ", 1, true) then
      it("of rsample have the gradient of a fixed draw: " .. name, function()
        local parameters, values = make()._parameters, {}
        for k, p in ipairs(parameters) do values[k] = make()[p[1]]:clone():requires_grad_() end
        assert.is_true(ms.testing.gradcheck(function(...)
          ms.manual_seed(3)
          return D[name](...):rsample(5)
        end, values))
      end)
    end
  end

  it("of Cauchy have its quartiles", function()
    ms.manual_seed(4)
    local x = D.Cauchy(t { -1, 2 }, t { 0.5, 2 }):sample(N)
    local share = x:lt(t { -1.5, 0 }):double():mean(1)
    assert.is_true((share - 0.25):abs():lt(5 * math.sqrt(0.25 * 0.75 / N)):all():item(), tostring(share))
  end)

  it("of Poisson have its probabilities, for small and for large rates", function()
    for _, rate in ipairs { 0, 0.3, 4, 9.9, 10, 35 } do
      ms.manual_seed(6)
      local d = D.Poisson(t { rate, 20 })
      local x = d:sample(N):select(2, 1)
      for k = math.max(0, math.floor(rate) - 3), math.floor(rate) + 3 do
        local p = d:log_prob(k):exp()[1]:item()
        local share = x:eq(k):double():mean():item()
        local bound = 5 * math.sqrt(p * (1 - p) / N) + 1e-12
        assert.is_true(math.abs(share - p) <= bound, ("%g %d %g %g"):format(rate, k, share, p))
      end
    end
  end)

  it("of gamma numbers of tiny and of large concentration are finite and have their moments", function()
    for _, a in ipairs { 1e-4, 0.01, 600, 1e5 } do
      ms.manual_seed(8)
      local d = D.Gamma(t { a, a }, 1)
      local x = d:sample(N)
      assert.is_true(x:gt(0):logical_and(x:isfinite()):all():item())
      if a > 1 then
        assert.is_true((x:mean(1) - a):abs():lt(5 * math.sqrt(a / N)):all():item(), tostring(x:mean(1)))
      end
      local b = D.Beta(t { a, a }, a):sample(N)
      assert.is_true((b:mean(1) - 0.5):abs():lt(5 * 0.5 / math.sqrt(N)):all():item(), tostring(b:mean(1)))
    end
  end)

  it("of gamma numbers have the gradient that keeps the distribution function's value", function()
    -- P(a, x), from its series; lgamma by the engine.
    local function P(a, x)
      local term = math.exp(a * math.log(x) - x - t({ a + 1 }):lgamma():item())
      local sum, n = 0, 0
      repeat
        sum, n = sum + term, n + 1
        term = term * x / (a + n)
      until term < sum * 1e-18
      return sum
    end
    for _, a in ipairs { 0.2, 1, 3.7, 60, 499, 501, 2000 } do
      ms.manual_seed(3)
      local concentration = ms.full({ 8 }, a, { dtype = "float64", requires_grad = true })
      local x = D.Gamma(concentration, 1):rsample()
      x:sum():backward()
      for k = 1, 8 do
        local at, h = x[k]:item(), 1e-4 * a
        local density = (P(a, at * (1 + 1e-6)) - P(a, at * (1 - 1e-6))) / (at * 2e-6)
        local slope = (P(a + h, at) - P(a - h, at)) / (2 * h) / density
        local got = concentration.grad[k]:item()
        assert.is_true(math.abs(got + slope) < 1e-4 * math.abs(slope), ("%g %g %g %g"):format(a, at, got, -slope))
      end
    end
  end)

  -- The gradient of the mean of a function of samples, which a sample's gradient estimates.
  it("of Gamma, Beta, Dirichlet and StudentT have gradients whose mean is that of the moments", function()
    for name, case in ms.sorted_pairs {
      Gamma = { D.Gamma, { { 0.3, 4, 700 }, { 0.5, 2, 1 } } },
      Beta = { D.Beta, { { 0.4, 3, 600 }, { 0.5, 2, 900 } } },
      StudentT = { D.StudentT, { { 12, 30, 50 }, { 0, 0, 0 }, { 1, 2, 1 } } },
      Dirichlet = { D.Dirichlet, { { { 0.3, 1, 2 } } } },
    } do
      ms.manual_seed(9)
      local draws, exact, drawn = 5000, {}, {}
      for k, list in ipairs(case[2]) do
        exact[k], drawn[k] = t(list):requires_grad_(), t(list):expand(draws, unpack(t(list).shape)):contiguous():requires_grad_()
      end
      local d = case[1](unpack(exact));                               -- mean of the squares: variance + mean^2
      (d.variance + d.mean:square()):sum():backward()
      local x = case[1](unpack(drawn)):rsample()
      x:square():sum():backward()
      for k, p in ipairs(exact) do
        local of = drawn[k].grad
        local bound = of:std(1) * (5 / math.sqrt(draws)) + 1e-9
        assert.is_true((of:mean(1) - p.grad):abs():le(bound):all():item(),
          ("%s, parameter %d: %s %s"):format(name, k, tostring(of:mean(1)), tostring(p.grad)))
      end
    end
  end)

  it("of Categorical are class ids from 0 with the given probabilities", function()
    ms.manual_seed(2)
    local d = D.Categorical(t { { 1, 2, 1 }, { 0, 3, 1 } })
    local ids = d:sample(N)
    assert.are.equal("int64", ids.dtype)
    assert.are.equal("[20000, 2]", tostring(ids.shape))
    for row, probs in ipairs { { 0.25, 0.5, 0.25 }, { 0, 0.75, 0.25 } } do
      for class, p in ipairs(probs) do
        local share = ids:select(2, row):eq(class - 1):double():mean():item()
        assert.is_true(math.abs(share - p) <= 5 * math.sqrt(p * (1 - p) / N), ("%d %d %g"):format(row, class, share))
      end
    end
  end)

  it("of a batch of Categorical belong to their rows for any number of draws", function()
    ms.manual_seed(2)
    local d = D.Categorical(ms.eye(4):reshape(2, 2, 4))
    assert.are.same({ { 0, 1 }, { 2, 3 } }, d:sample():tolist())
    assert.are.same({ { { 0, 1 }, { 2, 3 } }, { { 0, 1 }, { 2, 3 } } }, d:sample(2):tolist())
    assert.are.equal("[3, 5, 2, 2]", tostring(d:sample(3, 5).shape))
  end)

  it("repeat with the seed", function()
    for name, make in ms.sorted_pairs(made) do
      ms.manual_seed(11)
      local first = make():sample(10)
      ms.manual_seed(11)
      assert.is_true(first:equal(make():sample(10)), name)
    end
  end)

  it("of half types have the parameter's dtype", function()
    local d = D.Normal(ms.zeros(1000, { dtype = "bfloat16" }), 1)
    assert.are.equal("bfloat16", d:sample().dtype)
    assert.are.equal("bfloat16", d:log_prob(0).dtype)
  end)
end)

describe("a distribution", function()
  it("has PyTorch's undefined moments and modes", function()
    assert.are.equal("nan", tostring(math.abs(D.Uniform(0, 1).mode:item())))
    assert.are.equal("nan", tostring(math.abs(D.Categorical(ms.ones(2)).mean:item())))
    assert.are.equal("nan", tostring(math.abs(D.Bernoulli(0.5).mode:item())))
    assert.are.equal(0, D.HalfNormal(2).mode:item())
    assert.are.equal(0, D.Geometric(0.3).mode:item())
  end)

  it("has infinite logarithms outside of its support, unless it checks values", function()
    local off = { validate_args = false }
    assert.are.equal(-math.huge, D.Uniform(0, 1, off):log_prob(2):item())
    assert.are.equal(-math.huge, D.HalfNormal(1, off):log_prob(-1):item())
    assert.has_error(function() D.Uniform(0, 1):log_prob(2) end)
  end)

  it("has an infinite divergence where q excludes values of p", function()
    assert.are.equal(math.huge, D.kl_divergence(D.Uniform(0, 2), D.Uniform(0, 1)):item())
    assert.are.equal(math.huge, D.kl_divergence(D.Categorical(t { 1, 1 }), D.Categorical(t { 1, 0 })):item())
    assert.are.equal(0, D.kl_divergence(D.Bernoulli(t { 0 }), D.Bernoulli(t { 0 })):item())
    assert.are.equal(math.huge, D.kl_divergence(D.Bernoulli(t { 1 }), D.Bernoulli(t { 0 })):item())
  end)

  it("can be returned by a scope or a module, with its tensors", function()
    local d = ms.scope(function() return D.Normal(ms.zeros(2) + 1, ms.ones(2) * 2) end)
    assert.are.same({ 1, 1 }, d.mean:tolist())
    local Policy = ms.nn.Module:extend "Policy"
    function Policy:init() self.layer = ms.nn.Linear(2, 3) end
    function Policy:forward(x) return D.Categorical { logits = self.layer(x) } end
    local policy = Policy()
    local actions = policy(ms.ones(4, 2))
    actions:log_prob(actions:sample()):mean():backward()
    assert.is_true(policy.layer.weight.grad:isfinite():all():item())
  end)

  it("computes from its parameters in each step anew", function()
    local d = D.Categorical(ms.ones(2))
    for _ = 1, 3 do
      ms.scope(function() assert.are.same({ 0.5, 0.5 }, d.logits:exp():tolist()) end)
    end
  end)

  it("of a subclass uses the divergence of its base, until its own is registered", function()
    local Mine = D.Normal:extend "Mine"
    local p, q = Mine(1, 1), D.Normal(0, 1)
    assert.are.equal(0.5, D.kl_divergence(p, q):item())
    D.register_kl(Mine, D.Normal, function() return ms.tensor(7) end)
    assert.are.equal(7, D.kl_divergence(p, q):item())
    assert.are.equal(0.5, D.kl_divergence(q, p):item())
  end)

  it("lets a script test for fields of its own, and for those of other classes", function()
    local d = D.Normal(0, 1)
    for _, name in ipairs { "probs", "df", "tag", "mask", "scale_tril" } do assert.is_nil(d[name]) end
    assert.is_false(D.Poisson(1).has_rsample)
    d.tags = 3
    assert.are.equal(3, d.tags)
  end)

  it("lists its values", function()
    assert.are.same({ 0, 1, 2 }, D.Categorical(ms.ones(3)):enumerate_support():tolist())
    assert.are.same({ { 0, 0 }, { 1, 1 } }, D.Bernoulli(t { 0.5, 0.1 }):enumerate_support():tolist())
    assert.are.same({ { 0 }, { 1 } }, D.Bernoulli(t { 0.5, 0.1 }):enumerate_support { expand = false }:tolist())
    assert.are.same({ { 1, 0 }, { 0, 1 } }, D.OneHotCategorical(ms.ones(2)):enumerate_support():tolist())
  end)

  it("prints its class and its parameters", function()
    assert.are.equal("Normal(loc: 0, scale: 2)", tostring(D.Normal(0, 2)))
    assert.are.equal("Categorical(logits: [4, 3])", tostring(D.Categorical { logits = ms.zeros(4, 3) }))
  end)
end)
