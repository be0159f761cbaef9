-- SPDX-License-Identifier: MIT
--- Losses with all their options, compared with their formulas.
local ms = require "moonshard"
local nn = ms.nn
local F = nn.F
local message = require "spec.support.message"

local f64 = { dtype = "float64" }
local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

-- The loss of one row, (1 - s) w[y] (-log p_y) + s / C sum_c w_c (-log p_c), and its part w[y] of the divisor of a
-- mean; for an ignored class 0 and 0.
local function row(x, y, w, ignore, s)
  if y == ignore then return 0, 0 end
  local largest, sum = math.max(unpack(x)), 0
  for _, v in ipairs(x) do sum = sum + math.exp(v - largest) end
  local lse, smooth = largest + math.log(sum), 0
  for c, v in ipairs(x) do smooth = smooth + (w and w[c] or 1) * (lse - v) end
  local own = w and w[y + 1] or 1
  return (1 - s) * own * (lse - x[y + 1]) + s / #x * smooth, own
end

describe("cross_entropy", function()
  before_each(function() ms.manual_seed(2) end)

  for _, reduction in ipairs { "mean", "sum", "none" } do
    for _, ignore in ipairs { -100, 2 } do
      for _, smoothing in ipairs { 0, 0.1, 1 } do
        for _, weighted in ipairs { false, true } do
          it(("is its formula: %s, ignores %d, smoothing %g%s"):format(reduction, ignore, smoothing, weighted
            and ", weighted" or ""), function()
            local x, y = ms.randn(5, 4, f64), { 2, 0, 3, 2, 1 }
            local w = weighted and ms.tensor({ 0.5, 2, 1.5, 0.25 }, f64) or nil
            local o = { reduction = reduction, ignore_index = ignore, label_smoothing = smoothing, weight = w }
            local list, sum, total = {}, 0, 0
            for k, v in ipairs(x:tolist()) do
              local own
              list[k], own = row(v, y[k], w and w:tolist(), ignore, smoothing)
              sum, total = sum + list[k], total + own
            end
            local got = F.cross_entropy(x, ids(y), o)
            local expected = reduction == "none" and ms.tensor(list, f64)
              or ms.tensor(reduction == "sum" and sum or sum / total, f64)
            ms.testing.assert_close(got, expected, { rtol = 1e-12, atol = 1e-12 })
            ms.testing.assert_close(nn.CrossEntropyLoss(o)(x, ids(y)), expected, { rtol = 1e-12, atol = 1e-12 })
            assert.is_true(ms.testing.gradcheck(function(t) return F.cross_entropy(t, ids(y), o) end,
              { x:requires_grad_(true) }))
          end)
        end
      end
    end
  end

  it("takes one sample without a batch, and further dimensions after that of the classes", function()
    local x = ms.randn(2, 3, 4, 5, f64)
    local y = ms.randint(0, 3, { 2, 4, 5 })
    local each = F.cross_entropy(x, y, { reduction = "none" })
    assert.are.same({ 2, 4, 5 }, { unpack(each.shape) })
    local one = F.cross_entropy(x[2]:select(2, 3):select(2, 4), y[2][3][4])
    assert.are.equal("[]", tostring(one.shape))
    ms.testing.assert_close(one, each[2][3][4])
    ms.testing.assert_close(F.cross_entropy(x, y), each:mean())
  end)

  -- The expected values are PyTorch 2.1.1's.
  it("takes probabilities of the classes instead of one class", function()
    local x = ms.tensor({ { 0.5, -1, 2 }, { 0, 3, -2 } }, f64)
    local p = ms.tensor({ { 0.2, 0.3, 0.5 }, { 0, 0.9, 0.1 } }, f64)
    local more = { weight = ms.tensor({ 1, 2, 0.5 }, f64), label_smoothing = 0.1 }
    local expected = {
      mean = { 0.9981482660171521, 1.4512454271573163 }, sum = { 1.9962965320343042, 2.9024908543146326 },
      none = { { 1.441311296657157, 0.5549852353771473 }, { 2.396192159951015, 0.5062986943636174 } },
    }
    for reduction, want in pairs(expected) do
      more.reduction = reduction
      ms.testing.assert_close(F.cross_entropy(x, p, { reduction = reduction }), ms.tensor(want[1], f64),
        { rtol = 1e-12, atol = 1e-12 })
      ms.testing.assert_close(nn.CrossEntropyLoss(more)(x, p), ms.tensor(want[2], f64), { rtol = 1e-12, atol = 1e-12 })
      assert.is_true(ms.testing.gradcheck(function(t, q) return F.cross_entropy(t, q, more) end,
        { x:clone():requires_grad_(), p:clone():requires_grad_() }))
    end
    assert.near(1.441311296657157, F.cross_entropy(x[1], p[1]):item(), 1e-12)
    assert.near(1.1287524183710222, F.cross_entropy(x:reshape(1, 3, 2), p:reshape(1, 3, 2)):item(), 1e-12)
  end)

  it("of ignored classes alone is NaN as a mean, 0 as a sum", function()
    local x, y = ms.randn(2, 3), ids { 1, 1 }
    local mean = F.cross_entropy(x, y, { ignore_index = 1 }):item()
    assert.is_true(mean ~= mean)
    assert.are.equal(0, F.cross_entropy(x, y, { ignore_index = 1, reduction = "sum" }):item())
  end)

  it("names arguments that do not fit", function()
    local x = ms.randn(2, 3)
    assert.truthy(message(F.cross_entropy, x, ids { 0, 3 }):find("id 3 (row 2) is neither in 0 .. 2", 1, true))
    assert.truthy(message(F.cross_entropy, x, ids { 0, 1, 2 }):find("cross_entropy", 1, true))
    assert.truthy(message(F.cross_entropy, x, ids { 0, 1 }, { reduction = "men" }):find("did you mean 'mean'?", 1,
      true))
    assert.truthy(message(F.cross_entropy, x, ids { 0, 1 }, { weight = ms.ones(2) }):find("weight", 1, true))
    assert.truthy(message(F.cross_entropy, x, ids { 0, 1 }, { label_smoothing = 1.5 }):find("label_smoothing", 1, true))
  end)
end)

describe("mse_loss", function()
  it("is the mean, the sum, or each squared difference", function()
    local a, b = ms.tensor({ 1, 2, 4 }, f64), ms.tensor({ 0, 4, 1 }, f64)
    assert.near(14 / 3, F.mse_loss(a, b):item(), 1e-12)
    assert.are.equal(14, F.mse_loss(a, b, { reduction = "sum" }):item())
    assert.are.same({ 1, 4, 9 }, F.mse_loss(a, b, { reduction = "none" }):tolist())
    assert.are.same({ 1, 4, 9 }, nn.MSELoss({ reduction = "none" })(a, b):tolist())
  end)
end)
