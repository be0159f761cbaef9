-- SPDX-License-Identifier: MIT
--- Gamma functions at special arguments, and as_strided beyond PyTorch's numbers.
local ms = require "moonshard"

local F64 = { dtype = "float64" }
local function near(got, expected) assert(math.abs(got - expected) <= 1e-12 * math.max(1, math.abs(expected)), ("%.17g, expected %.17g"):format(got, expected)) end
local function at(x) return ms.tensor({ x }, F64) end

describe("gamma functions", function()
  it("give factorials, the constants of Euler and Apery, and roots of pi", function()
    near(at(11):lgamma():item(), math.log(3628800))
    near(at(0.5):lgamma():item(), math.log(math.pi) / 2)
    near(at(-0.5):lgamma():item(), math.log(2 * math.sqrt(math.pi)))
    near(at(1):digamma():item(), -0.57721566490153286)
    near(at(0.5):digamma():item(), -0.57721566490153286 - 2 * math.log(2))
    near(at(1):polygamma(1):item(), math.pi ^ 2 / 6)
    near(at(1):polygamma(2):item(), -2 * 1.2020569031595943)
    near(at(0.5):polygamma(3):item(), math.pi ^ 4)
    near(at(4):mvlgamma(2):item(), math.log(math.pi) / 2 + math.log(6) + at(3.5):lgamma():item())
  end)

  it("are exact next to their poles", function()
    local euler = 0.57721566490153286
    for _, x in ipairs { 1e-7, 1e-10, 1e-17 } do                -- series at 0, whose next terms are below the limit
      near(at(-x):lgamma():item(), -math.log(x) + euler * x)
      near(at(-x):digamma():item(), 1 / x - euler)
    end
    near(at(-1 - 2 ^ -30):lgamma():item(), 30 * math.log(2) + (1 - euler) * -2 ^ -30)
  end)

  it("have the limits of poles and infinity", function()
    local x = ms.tensor({ 0, -2, math.huge, 0 / 0 }, F64)
    assert.are.same({ math.huge, math.huge, math.huge }, x:lgamma():narrow(1, 1, 3):tolist())
    assert.are.equal(-math.huge, x:digamma()[1]:item())
    assert.are.equal(math.huge, x:polygamma(1)[2]:item())
    for _, name in ipairs { "lgamma", "digamma" } do assert.is_true(x[name](x)[4]:isnan():item() ~= 0) end
    assert.is_true(x:digamma()[2]:isnan():item() ~= 0)
  end)

  it("take integers, and refuse orders that are none", function()
    assert.are.equal("float32", ms.tensor({ 3 }, { dtype = "int64" }):polygamma(1).dtype)
    assert.has.error(function() ms.ones(1):polygamma(0.5) end)
    assert.has.error(function() ms.ones(1):mvlgamma(0) end)
  end)
end)

describe("as_strided", function()
  it("makes windows that share elements, whose gradients are added", function()
    local x = ms.arange(0, 6, 1, F64):requires_grad_(true)
    local y = x:as_strided({ 4, 3 }, { 1, 1 })
    assert.are.same(x:unfold(1, 3, 1):tolist(), y:tolist())
    y:sum():backward()
    assert.are.same({ 1, 2, 3, 3, 2, 1 }, x.grad:tolist())
    assert.are.equal(4, x:as_strided({}, {}, 4):item())
    assert.are.equal(0, x:as_strided({ 0, 9 }, { 7, 7 }, 5):numel())
  end)

  it("is a view, and stays inside of its tensor", function()
    local x = ms.zeros(2, 3)
    x:as_strided({ 2 }, { 3 }, 1):fill_(7)
    assert.are.same({ { 0, 7, 0 }, { 0, 7, 0 } }, x:tolist())
    local wrong = {
      { function() x:as_strided({ 2, 3 }, { 3, 1 }, 1) end, "as_strided: sizes [2, 3] with strides [3, 1] from element 1 are not inside float32 [2, 3] cpu" },
      { function() x:as_strided({ 2 ^ 40 }, { 2 ^ 40 }) end, "are not inside float32 [2, 3] cpu" },
      { function() x:t():as_strided({ 2 }, { 1 }) end, "as_strided: float32 [3, 2] cpu is not contiguous" },
      { function() x:as_strided({ 2 }, { -1 }) end, "as_strided: stride 1 is a number (-1), expected a whole number from 0" },
      { function() x:as_strided({ 2 }, {}) end, "as_strided: the number of sizes is 1 and that of strides 0, expected equal numbers" },
    }
    for _, case in ipairs(wrong) do
      local ok, text = pcall(case[1])
      assert.is_false(ok)
      assert(text:find(case[2], 1, true), text)
      assert(text:find("gamma_spec.lua:", 1, true), text)
    end
  end)
end)
