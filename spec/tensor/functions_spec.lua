-- SPDX-License-Identifier: MIT
--- Elementwise functions with options: what the generic specs and the golden numbers leave open.
local ms = require "moonshard"
local F, nn = ms.nn.F, ms.nn

local function ids(list) return ms.tensor(list, { dtype = "int64" }) end
local function list(t) return t:tolist() end
local refuses = require "spec.support.raises"

describe("scatter_reduce", function()
  it("without self finds the extremes of the largest and the lowest int64", function()
    local most = ids { -2 ^ 63, -2 ^ 63 }:bitwise_not() - ids { 0, 5 }
    local at, none = ids { 0, 1 }, { include_self = false }
    local least = ids { 1, 2, 3 }:scatter_reduce(1, at, most, "amin", none)
    assert.is_true(least:narrow(1, 1, 2):equal(most))
    assert.is_true(ids { 1, 2, 3 }:scatter_reduce(1, at, most:bitwise_not(), "amax", none):narrow(1, 1, 2)
      :equal(most:bitwise_not()))
    assert.are.equal("Tensor int64 [1] cpu\n[9223372036854775807]", tostring(most:narrow(1, 1, 1)))
  end)
end)

describe("remainder", function()
  it("has the sign of the divisor, and % is remainder", function()
    assert.are.same({ 1, 2, -2, -1 }, list(ids { 7, -7, 7, -7 } % ids { 3, 3, -3, -3 }))
    assert.are.same({ 1, 2 }, list(ids { 7, -7 } % 3))
    assert.are.same({ 2, 1 }, list(12 % ids { 5, -11 } + ids { 0, 11 }))
    assert.are.same({ 0.5, 1.5 }, list(ms.tensor { 2.5, -2.5 } % 2))
  end)
  it("of integers is 0 where the divisor is 0, and of the lowest integer and -1", function()
    local lowest = ids { -2 ^ 63 }
    for _, name in ipairs { "remainder", "fmod", "floor_divide" } do
      assert.are.same({ 0, 0 }, list(ids { 7, -7 }[name](ids { 7, -7 }, 0)))
    end
    assert.are.same({ 0 }, list(lowest % -1))
    assert.are.same({ 0 }, list(lowest:fmod(-1)))
  end)
  it("agrees with floor_divide and fmod with trunc", function()
    local a, b = ids { 7, -7, 7, -7, 0 }, ids { 2, 2, -2, -2, 5 }
    assert.are.same(list(a), list(a:floor_divide(b) * b + a % b))
    assert.are.same({ 1, -1, 1, -1, 0 }, list(a:fmod(b)))
    assert.are.same({ 3, -4, -4, 3, 0 }, list(a:floor_divide(b)))
  end)
  it("refuses bools and a fraction for integers", function()
    refuses("remainder: bool tensors are not supported, got bool [1] cpu; cast it first", function()
      return ms.tensor { true } % ms.tensor { true }
    end)
    refuses("remainder: 2.5 is not a whole number, but the tensor is int64 [1]", function() return ids { 1 } % 2.5 end)
  end)
end)

describe("div with rounding_mode", function()
  -- A plain loop: the quotient of two numbers, rounded towards 0 or down.
  local function rounded(mode, a, b)
    local q = a / b
    return mode == "floor" and math.floor(q) or q < 0 and math.ceil(q) or math.floor(q)
  end
  local tops, bottoms = { 7, -7, 7, -7, 0, 6, -1 }, { 2, 2, -2, -2, 5, 3, 4 }

  for _, mode in ipairs { "trunc", "floor" } do
    for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int8" } do
      it(("%s of %s: the plain loop's values and the operands' dtype"):format(mode, dtype), function()
        local a, b = ms.tensor(tops, { dtype = dtype }), ms.tensor(bottoms, { dtype = dtype })
        local right, by_two = {}, {}
        for k = 1, #tops do right[k], by_two[k] = rounded(mode, tops[k], bottoms[k]), rounded(mode, tops[k], 2) end
        local how = { rounding_mode = mode }
        local q = a:div(b, how)
        assert.are.equal(dtype, q.dtype)
        assert.are.same(right, list(q + 0))             -- -0 counts as 0
        assert.are.same(right, list(ms.div(a, b, how) + 0))
        assert.are.same(by_two, list(a:div(2, how) + 0))
        local c = a:clone()
        assert.is_true(rawequal(c, c:div_(b, how)))
        assert.are.same(right, list(c + 0))
      end)
    end

    it(mode .. ": the gradients are 0, also where the divisor is 0", function()
      local a = ms.tensor({ { 1, -2, 3 } }, { requires_grad = true })
      local b = ms.tensor({ { 0 }, { 2 } }, { requires_grad = true })
      a:div(b, { rounding_mode = mode }):sum():backward()
      assert.are.same({ { 0, 0, 0 } }, list(a.grad))
      assert.are.same({ { 0 }, { 0 } }, list(b.grad))
      assert.is_false(ids { 3 }:div(2, { rounding_mode = mode }).requires_grad)
    end)
  end

  it("rounds halves once, and large integers exactly", function()
    local b = { rounding_mode = "trunc" }
    local function half(x) return ms.tensor({ x }, { dtype = "bfloat16" }) end
    assert.are.equal(3, (half(772) / half(258)):item())          -- 2.992
    assert.are.equal(2, half(772):div(half(258), b):item())
    local large = ids { 2 ^ 53 } + 1
    assert.is_true(large:div(1, b):equal(large))
    assert.is_true((-large):div(-1, b):equal(large))
    assert.are.same({ 0, 0 }, list(ids { 5, -5 }:div(0, b)))
  end)

  it("takes a fraction for integers, and numbers as the first operand", function()
    assert.are.same({ 1, -1 }, list(ids { 3, -4 }:div(2.5, { rounding_mode = "trunc" })))
    assert.are.same({ 1, -2 }, list(ids { 3, -4 }:div(2.5, { rounding_mode = "floor" })))
    assert.are.same({ 3, -4 }, list(ms.div(7, ids { 2, -2 }, { rounding_mode = "floor" })))
  end)
end)

describe("norm", function()
  it("takes the dimensions and p by name, too", function()
    local x = ms.tensor { { 3, -4 }, { 5, 12 } }
    assert.are.same({ 5, 13 }, list(x:norm { dim = 2 }))
    assert.are.same({ { 5 }, { 13 } }, list(x:norm(2, { dim = 2, keepdim = true })))
    assert.are.same({ 8, 16 }, list(x:norm { p = 1, dim = 1 }))
    assert.are.equal(12, x:norm { p = math.huge, dim = { 1, 2 } }:item())
    assert.are.equal(24, x:norm { p = 1 }:item())
    refuses("norm: the dimension is given by position and by name", function() return x:norm(2, 1, { dim = 2 }) end)
    refuses("norm: p is given by position and by name", function() return x:norm(1, { p = 2 }) end)
  end)
end)

describe("rounding", function()
  it("sends halves to the even number and leaves integers alone", function()
    assert.are.same({ 0, 2, 2, -2 }, list(ms.tensor { 0.5, 1.5, 2.5, -1.5 }:round()))
    for _, name in ipairs { "round", "floor", "ceil", "trunc" } do
      local x = ids { -3, 2 ^ 53 + 2 }
      assert.are.equal("int64", x[name](x).dtype)
      assert.are.same(list(x), list(x[name](x)))
    end
  end)
  it("takes decimals of both signs", function()
    assert.are.same({ 1.25, -1.5 }, list(ms.tensor({ 1.2512, -1.4999 }, { dtype = "float64" }):round { decimals = 2 }))
    assert.are.same({ 1200, 100 }, list(ms.tensor { 1249, 51 }:round { decimals = -2 }))
  end)
end)

describe("bits", function()
  it("of integers are combined; bools as truth values", function()
    assert.are.same({ 4, 2 }, list(ids { 12, 10 }:bitwise_and(6)))
    assert.are.same({ 14, 14 }, list(ids { 12, 10 }:bitwise_or(6)))
    assert.are.same({ 10, 12 }, list(ids { 12, 10 }:bitwise_xor(6)))
    assert.are.same({ -13, 0 }, list(ids { 12, -1 }:bitwise_not()))
    assert.are.same({ 255, 254 }, list(ms.tensor({ 0, 1 }, { dtype = "uint8" }):bitwise_not()))
    assert.are.same({ false, true }, list(ms.tensor { true, false }:bitwise_not()))
    assert.are.same({ true, false }, list(ms.tensor { true, true }:bitwise_and(ms.tensor { true, false })))
  end)
  it("of floating-point numbers are refused", function()
    refuses("bitwise_and: integer or bool tensors are expected, got float32 [1] cpu; cast it first", function()
      return ms.ones(1):bitwise_and(ms.ones(1))
    end)
  end)
end)

describe("in place", function()
  it("functions of two and three tensors give the results of their plain forms, for overlapping views too", function()
    local x = ms.arange(1, 10):double():view(3, 3)
    for _, name in ipairs { "fmod", "remainder", "atan2", "hypot", "copysign", "xlogy", "floor_divide" } do
      local y, u = x:clone(), x:t() * 0.7
      local expected = y[name](y, u)
      assert.is_true(y == y[name .. "_"](y, u))
      assert.is_true(y:equal(expected))
    end
    for _, name in ipairs { "addcmul", "addcdiv" } do
      local y = x:clone()
      local expected = y[name](y, x:t(), x, { value = 0.5 })
      y[name .. "_"](y, y:t(), y:clone(), { value = 0.5 })
      assert.is_true(y:equal(expected))
    end
    local y = x:clone()
    assert.is_true(y:lerp_(y:t(), 0.25):equal(x:lerp(x:t(), 0.25)))
  end)
  it("lerp_ of a parameter keeps a moving average", function()
    local average, p = ms.zeros(2), ms.tensor { 1, 2 }
    for _ = 1, 3 do average:lerp_(p, 0.5) end
    assert.are.same({ 0.875, 1.75 }, list(average))
  end)
end)

describe("special values", function()
  it("are repaired by nan_to_num within the dtype's range", function()
    local x = ms.tensor { 0 / 0, math.huge, -math.huge, 2 }
    assert.are.same({ 7, 8, 9, 2 }, list(x:nan_to_num { nan = 7, posinf = 8, neginf = 9 }))
    assert.is_true(x:nan_to_num():isfinite():all():item())
    assert.are.equal(65504, x:half():nan_to_num()[2]:item())
    assert.are.same({ 1 }, list(ids { 1 }:nan_to_num()))
  end)
  it("are found by isinf and isclose", function()
    local inf = math.huge
    local x = ms.tensor { inf, -inf, 0 / 0, 1 }
    assert.are.same({ true, true, false, false }, list(x:isinf()))
    assert.are.same({ true, false, false, true }, list(x:isclose(ms.tensor { inf, inf, 0 / 0, 1 + 1e-7 })))
    local y = ms.tensor { inf, 1, 0 / 0, 1.1 }
    assert.are.same({ true, false, true, false }, list(x:isclose(y, { equal_nan = true })))
  end)
  it("at the borders of domains follow IEEE", function()
    local x = ms.tensor { -1, 1, 1.5, 0 }
    assert.are.same({ -math.huge, math.huge, 0 }, list(ms.tensor { -1, 1, 0 }:erfinv()))
    assert.is_true(x:erfinv()[3]:isnan():item())
    assert.are.equal(-math.huge, x:log1p()[1]:item())
    assert.are.same({ -1, math.huge }, list(ms.tensor { -200, 200 }:expm1()))
    assert.are.same({ 3, 10 }, list(ms.tensor { 8, 1024 }:log2()))
  end)

  it("erfinv in float64 is exact near 1, too: torch.erfinv's numbers", function()
    local x = ms.tensor({ 0.5, -0.74, 0.76, 1 - 1e-3, -(1 - 1e-6), 1 - 1e-9, -(1 - 1e-12), 1 - 2 ^ -52 },
      { dtype = "float64" })
    local expected = { 0.4769362762044699, -0.7964788056117074, 0.8308411284745602, 2.3267537655135246,
      -3.458910737275499, 4.320005388105362, -5.042031898572696, 5.805018683193453 }
    for _, device in ipairs { "cpu", "cuda" } do
      if device == "cpu" or ms.cuda.is_available() then
        for k, y in ipairs(x:to(device):erfinv():tolist()) do assert.near(expected[k], y, 1e-14 * math.abs(expected[k])) end
      end
    end
  end)
end)

describe("activations with parameters", function()
  it("are modules that print their parameters and train them", function()
    assert.are.equal("LeakyReLU(0.2)", tostring(nn.LeakyReLU(0.2)))
    assert.are.equal("Softplus(beta 2, threshold 20)", tostring(nn.Softplus { beta = 2 }))
    local p = nn.PReLU(3)
    local x = ms.tensor { { -1, 2, -3 } }
    p(x):sum():backward()
    assert.are.same({ -1, 0, -3 }, list(p.weight.grad))
    assert.is_true(F.softplus(x):equal(nn.Softplus()(x)))
  end)
  it("refuse what makes no sense", function()
    refuses("celu: alpha is a number (0), expected a number other than 0", F.celu, ms.ones(1), 0)
    refuses("hardtanh: upper limit is a number (0), expected a number above the lower limit 1", F.hardtanh, ms.ones(1), 1, 0)
    refuses("glu: size of dimension -1 is a number (3), expected an even size", F.glu, ms.ones(3))
  end)
end)

describe("functions of ms", function()
  it("are the methods with the tensor as first argument", function()
    local x = ms.tensor { 1, 4 }
    assert.are.same(list(x:sqrt()), list(ms.sqrt(x)))
    assert.are.equal(17, ms.dot(x, x):item())
    assert.are.same(list(x:sum(1, { keepdim = true })), list(ms.sum(x, 1, { keepdim = true })))
    refuses("sqrt: argument is a number (4), expected a tensor", ms.sqrt, 4)
  end)
end)
