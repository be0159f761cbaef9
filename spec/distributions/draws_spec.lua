-- SPDX-License-Identifier: MIT
--- Gamma and Poisson numbers (kernels/formulas/gamma_draws.h): their distributions against independent formulas, and
--- that an element's number depends on nothing but seed, call and position.
local ms = require "moonshard"
local engine = require "moonshard.core.ffi"
local D = ms.distributions

local F64 = { dtype = "float64" }
local off = { validate_args = false }
local N = 100000

-- The largest deviation of a sum of squares of `n` normal numbers from n, in units of its standard deviation, that
-- chance exceeds less than once in a million times.
local MOST = 5.5

describe("gamma numbers", function()
  -- The logarithm of a gamma number has the mean digamma(a) and the variance polygamma(1, a).
  for _, a in ipairs { 0.02, 0.5, 0.999, 1, 2.5, 40, 1e6 } do
    it(("of concentration %g have the moments of their logarithm"):format(a), function()
      ms.manual_seed(5)
      local one = ms.tensor({ a }, F64)
      local mean, deviation = one:digamma():item(), one:polygamma(1):sqrt():item()
      local draw = require "moonshard.distributions.draw"
      local logs = draw.gamma({ N, 1 }, one, true)
      local z = (logs - mean) / deviation
      assert.is_true(math.abs(z:mean():item()) < MOST / math.sqrt(N))
      local square = z:square()
      assert.is_true(math.abs(square:mean():item() - 1) < MOST * square:std():item() / math.sqrt(N))
      ms.manual_seed(5)
      ms.testing.assert_close(draw.gamma({ N, 1 }, one), logs:exp(), { rtol = 1e-12, atol = 1e-300 })
    end)
  end

  it("of concentration 1 are exponential in all parts of the distribution", function()
    ms.manual_seed(6)
    local u = (-D.Gamma(ms.ones(1, F64), 1):sample(N)):exp():reshape(-1)               -- uniform
    local counts, chi2 = u:histc(50, 0, 1):tolist(), 0
    for k = 1, 50 do chi2 = chi2 + (counts[k] - N / 50) ^ 2 / (N / 50) end
    assert.is_true(math.abs(chi2 - 49) < MOST * math.sqrt(98), chi2)
    for _, tail in ipairs { 1e-3, 1 - 1e-3 } do                                         -- both tails
      local share = u:lt(tail):double():mean():item()
      assert.is_true(math.abs(share - tail) < MOST * math.sqrt(tail * (1 - tail) / N), share)
    end
  end)

  -- torch._standard_gamma_grad(a, x), PyTorch 2.15.
  it("have PyTorch's gradients", function()
    local backward = engine.op "gamma_draw_backward"
    for _, row in ipairs { { 0.05, 1e-8, 3.584567186e-06 }, { 0.3, 0.02, 0.2541943021 }, { 1, 0.5, 0.806978492 },
      { 2, 2.5, 1.212264895 }, { 7.5, 6, 0.9125477498 }, { 40, 45, 1.064476456 }, { 300, 290, 0.9836942453 },
      { 1000, 1010, 1.005150859 } } do
      local tensor, one = require "moonshard.tensor", ms.ones({ 1 }, F64)
      local function grad(x, logarithm)
        local a = ms.tensor({ row[1] }, F64)
        engine.args.n_in, engine.args.n_i, engine.args.n_f = 3, 2, 0
        engine.a_in[0], engine.a_in[1], engine.a_in[2] = one.id, a.id, x.id
        engine.a_i[0], engine.a_i[1] = 0, logarithm
        return tensor.wrap(tensor.call(backward, one, a, x)):item()
      end
      local x = ms.tensor({ row[2] }, F64)
      assert.near(1, grad(x, 0) / row[3], 2e-4)
      assert.near(1, grad(x:log(), 1) * row[2] / row[3], 2e-4)
    end
  end)
end)

describe("Poisson numbers", function()
  for _, rate in ipairs { 0.3, 4, 9.99, 10, 17, 300 } do
    it(("of rate %g have the probabilities of the formula"):format(rate), function()
      ms.manual_seed(7)
      local x = D.Poisson(ms.tensor({ rate }, F64)):sample(N):reshape(-1):long()
      local counts, chi2, cells, rest = x:bincount():tolist(), 0, 0, N
      for k = 0, #counts - 1 do
        local expected = N * math.exp(k * math.log(rate) - rate - ms.tensor({ k + 1 }, F64):lgamma():item())
        if expected >= 10 then
          chi2, cells, rest = chi2 + (counts[k + 1] - expected) ^ 2 / expected, cells + 1, rest - counts[k + 1]
        end
      end
      assert.is_true(cells >= 3 and rest < N / 50)
      assert.is_true(math.abs(chi2 - cells) < MOST * math.sqrt(2 * cells), ("%g of %d cells"):format(chi2, cells))
    end)
  end

  it("of huge rates have the rate's mean and variance", function()
    for _, rate in ipairs { 1e6, 1e12 } do
      ms.manual_seed(8)
      local z = (D.Poisson(ms.tensor({ rate }, F64)):sample(N) - rate) / math.sqrt(rate)
      assert.is_true(math.abs(z:mean():item()) < MOST / math.sqrt(N))
      assert.near(1, z:square():mean():item(), MOST * math.sqrt(2 / N))
    end
  end)
end)

describe("a gamma or Poisson number", function()
  local makes = {
    Gamma = function(a) return D.Gamma(a, 1) end, Poisson = function(a) return D.Poisson(a) end,
    Beta = function(a) return D.Beta(a, 2) end, StudentT = function(a) return D.StudentT(a) end,
    Dirichlet = function(a) return D.Dirichlet(ms.stack({ a, a }, -1)) end,
  }
  local parameters = ms.tensor({ 0.2, 1, 3, 9.5, 11, 200, 40 }, F64)

  for name, make in ms.sorted_pairs(makes) do
    it("does not depend on the number of threads: " .. name, function()
      local before, first = ms.num_threads(), nil
      finally(function() ms.set_num_threads(before) end)
      for _, threads in ipairs { 1, 2, 3 } do
        ms.set_num_threads(threads)
        ms.manual_seed(9)
        local x = make(parameters):sample(5000)
        first = first or x
        assert.is_true(x:equal(first), threads)
      end
    end)

    it("does not depend on how parameters are repeated, or on gradients: " .. name, function()
      ms.manual_seed(9)
      local x = make(parameters):sample(100)
      ms.manual_seed(9)
      assert.is_true(make(parameters:expand(100, 7):contiguous()):sample():equal(x))
      if name ~= "Poisson" then
        ms.manual_seed(9)
        local leaf = parameters:clone():requires_grad_()
        local y = make(leaf):rsample(100)
        assert.is_true(y:detach():equal(x))
        y:sum():backward()
        assert.is_true(leaf.grad:isfinite():all():item())
        ms.manual_seed(9)
        local wide = parameters:expand(100, 7):contiguous():requires_grad_()
        make(wide):rsample():sum():backward()
        ms.testing.assert_close(leaf.grad, wide.grad:sum(1))
      end
    end)
  end

  it("of float32 parameters is that of float64 ones, rounded", function()
    local p = ms.tensor { 0.25, 1, 3.5, 12 }
    for _, make in pairs { D.Poisson, function(a) return D.Gamma(a, 1) end } do
      ms.manual_seed(2)
      local x = make(p):sample(50)
      ms.manual_seed(2)
      assert.are.equal("float32", x.dtype)
      assert.is_true(make(p:double()):sample(50):float():equal(x))
    end
  end)

  it("is drawn anew in each repetition of a captured step", function()
    local a = ms.full({ 4 }, 3, { requires_grad = true })
    local function fn()
      a.grad = nil
      local x = D.Gamma(a, 1, off):rsample()
      local loss = (x + D.Poisson(a:detach(), off):sample()):sum()
      loss:backward()
      return loss, a.grad
    end
    local function losses(step)
      local list = {}
      ms.manual_seed(4)
      for k = 1, 4 do
        local loss, grad = step()
        list[k] = ("%.9g %.9g"):format(loss:item(), grad:sum():item())
      end
      return list
    end
    local plain = losses(fn)
    assert.are.same(plain, losses(ms.capture(fn)))
    assert.are_not.equal(plain[3], plain[4])
  end)
end)
