-- SPDX-License-Identifier: MIT
--- Dtypes: type promotion, the dtypes that operations accept, and refused in-place results. The tables are PyTorch's,
--- as data.
local ms = require "moonshard"

local names = { "float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "int8", "int16" }
local short = { f4 = "float32", f8 = "float64", f2 = "float16", b2 = "bfloat16", i8 = "int64", i4 = "int32",
  i2 = "int16", i1 = "int8", u1 = "uint8", b1 = "bool" }

-- torch.promote_types, rows and columns in the order of `names`.
local promotion = [[
  f4 f8 f4 f4 f4 f4 f4 f4 f4 f4
  f8 f8 f8 f8 f8 f8 f8 f8 f8 f8
  f4 f8 f2 f4 f2 f2 f2 f2 f2 f2
  f4 f8 f4 b2 b2 b2 b2 b2 b2 b2
  f4 f8 f2 b2 i8 i8 i8 i8 i8 i8
  f4 f8 f2 b2 i8 i4 i4 i4 i4 i4
  f4 f8 f2 b2 i8 i4 u1 u1 i2 i2
  f4 f8 f2 b2 i8 i4 u1 b1 i1 i2
  f4 f8 f2 b2 i8 i4 i2 i1 i1 i2
  f4 f8 f2 b2 i8 i4 i2 i2 i2 i2 ]]

local pairs_of = {}
do
  local at = 0
  for word in promotion:gmatch "%S+" do
    local a, b = names[math.floor(at / #names) + 1], names[at % #names + 1]
    pairs_of[#pairs_of + 1] = { a = a, b = b, want = short[word] }
    at = at + 1
  end
end

local kind_of = { float32 = 2, float64 = 2, float16 = 2, bfloat16 = 2, int64 = 1, int32 = 1, int16 = 1, int8 = 1,
  uint8 = 1, bool = 0 }
local function is_float(name) return kind_of[name] == 2 end

local failure = require "spec.support.message"

local function ones(dtype) return ms.ones(2, { dtype = dtype }) end
local function dot(dtype) return ms.tensor(dtype == "bool" and true or 1, { dtype = dtype }) end

describe("two tensors", function()
  for _, row in ipairs(pairs_of) do
    local a, b, want = row.a, row.b, row.want
    it(("%s and %s promote"):format(a, b), function()
      local x, y = ones(a), ones(b)
      assert.are.equal(want, (x + y).dtype)
      assert.are.equal(want, (x * y).dtype)
      assert.are.equal(want, (x:maximum(y)).dtype)
      assert.are.equal(want, ms.where(x:bool(), x, y).dtype)
      assert.are.equal(want, ms.cat({ x, y }).dtype)
      assert.are.equal(want, ms.stack({ x, y }).dtype)
      assert.are.equal(is_float(want) and want or "float32", (x / y).dtype)
      for _, compare in ipairs { "eq", "ne", "lt", "le", "gt", "ge" } do
        local truth = x[compare](x, y)
        assert.are.equal("bool", truth.dtype)
        assert.are.equal(compare == "eq" or compare == "le" or compare == "ge", truth:all():item())
      end
      if want == "bool" then
        assert.matches("bool", failure(function() return x - y end))
      else
        assert.are.equal(want, (x - y).dtype)
        assert.are.same({ 0, 0 }, (x - y):tolist())
      end
    end)

    it(("%s decides the dtype beside a 0-dim %s that is of no higher kind"):format(a, b), function()
      local expected = kind_of[b] > kind_of[a] and want or a
      assert.are.equal(expected, (ones(a) + dot(b)).dtype)
      assert.are.equal(expected, (dot(b) * ones(a)).dtype)
      assert.are.equal(expected, ms.where(ones "bool", ones(a), dot(b)).dtype)
      assert.are.equal(want, (dot(a) + dot(b)).dtype)
    end)

    it(("%s changed in place by %s keeps its dtype, or refuses"):format(a, b), function()
      local fits = kind_of[want] <= kind_of[a]
      local x = ones(a)
      if fits then
        x:add_(ones(b))
        assert.are.equal(a, x.dtype)
        assert.are.equal(a == "bool" and true or 2, x[1]:item())
        assert.are.equal(a, x:mul_(ones(b)).dtype)
      else
        local message = ("result type %s can't be cast to the %s tensor that is changed in place: %s [2] cpu"):format(
          want, a, a)
        assert.are.equal("add_: " .. message, failure(x.add_, x, ones(b)))
        assert.are.equal("mul_: " .. message, failure(x.mul_, x, ones(b)))
      end
      if is_float(a) then
        assert.are.equal(a, x:div_(ones(b)).dtype)
      else
        assert.matches("^div_: result type float%d+ can't be cast",
          (failure(x.div_, x, ones(is_float(b) and "float32" or b))))
      end
      assert.are.equal(a, x:copy_(ones(b)).dtype)
    end)
  end

  it("compare in their promoted dtype", function()
    local x = ms.tensor({ 0.1 })
    assert.is_false(x:eq(ms.tensor({ 0.1 }, { dtype = "float64" })):item())     -- two tensors: compared in float64
    -- A 0-dim tensor does not promote: compared in float32.
    assert.is_true(x:eq(ms.tensor(0.1, { dtype = "float64" })):item())
    local big = ms.full({ 1 }, 2 ^ 53, { dtype = "int64" })
    assert.is_false((big + 1):eq(big):item())
    assert.are.equal(1, ((big + 1) - big):item())
  end)
end)

describe("a number beside a tensor", function()
  for _, dtype in ipairs(names) do
    it("takes its dtype: " .. dtype, function()
      local t = ones(dtype)
      local want = dtype == "bool" and "int64" or dtype
      assert.are.equal(want, (t + 1).dtype)
      assert.are.equal(want, (2 * t).dtype)
      assert.are.equal(want, (1 - t).dtype)
      assert.are.equal(want, (t ^ 2).dtype)
      assert.are.equal(is_float(dtype) and dtype or "float32", (t / 2).dtype)
      assert.are.same({ 0.5, 0.5 }, (t / 2):tolist())
      assert.are.equal(dtype, ms.where(t:bool(), t, 0).dtype)
      assert.are.equal(dtype, t:masked_fill(t:bool(), 0).dtype)
      if is_float(dtype) then
        assert.are.equal(dtype, (t + 0.5).dtype)
        assert.are.equal(1.5, (t + 0.5)[1]:item())
        -- The number is rounded to the dtype before it is compared.
        assert.is_true(ms.full({ 1 }, 0.1, { dtype = dtype }):eq(0.1):item())
      else
        for _, fn in ipairs { function() return t + 0.5 end, function() return 0.5 * t end,
          function() return t - 1.5 end,
          function() return t ^ 0.5 end } do
          assert.matches("0?%.?5? ?is not a whole number, but the tensor is " .. dtype, failure(fn))
        end
        assert.is_true(t:lt(1.5):all():item())
        assert.is_false(t:eq(1.5):any():item())
      end
    end)
  end

  it("is refused if the tensor's dtype cannot hold it", function()
    assert.matches("300 is out of range for uint8", failure(function() return ones "uint8" + 300 end))
    assert.matches("inf is not a whole number", failure(function() return ones "int64" * math.huge end))
    for _, name in ipairs { "maximum", "atan2", "hypot", "copysign", "xlogy", "bitwise_or" } do
      assert.matches(name .. ": 2 is out of range for bool", failure(function() return ones "bool"[name](ones "bool", 2) end))
    end
  end)

  it("may be an infinite bound of clamp for integers", function()
    local x = ms.tensor({ -5, 7 }, { dtype = "int64" })
    assert.are.same({ 0, 7 }, x:clamp(0):tolist())
    assert.are.same({ -5, 0 }, x:clamp(nil, 0):tolist())
    assert.are.same({ -5, 7 }, x:clamp(-math.huge, math.huge):tolist())
    assert.matches("bounds are a string", failure(x.clamp, x, "0"))
  end)
end)

describe("the default dtype", function()
  for _, dtype in ipairs { "float64", "bfloat16", "float16" } do
    it("is what real functions of integers give: " .. dtype, function()
      ms.set_default_dtype(dtype)
      finally(function() ms.set_default_dtype "float32" end)
      local t = ones "int64"
      for _, name in ipairs { "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "reciprocal" } do
        assert.are.equal(dtype, t[name](t).dtype, name)
      end
      assert.are.equal(dtype, (t / 2).dtype)
      assert.are.equal(dtype, (1 / t).dtype)
      assert.are.equal(dtype, (t / t).dtype)
      assert.are.equal(dtype, ms.zeros(2).dtype)
      assert.are.equal(dtype, ms.tensor({ 1, 2 }).dtype)
      assert.are.equal(dtype, ms.arange(0, 1, 0.5).dtype)
      assert.are.equal("int64", ms.arange(3).dtype)
      assert.are.equal("bool", ms.tensor({ true }).dtype)
      assert.are.equal("float32", (ones "float32" / 2).dtype)
    end)
  end
  it("is a floating point one", function()
    assert.matches("'int64' is not floating point", failure(ms.set_default_dtype, "int64"))
    assert.matches("did you mean 'float16'", failure(ms.set_default_dtype, "flaot16"))
  end)
end)

-- Operation -> its result's dtype for each of `names` ("same"; "real": integers give the default dtype; "none":
-- refused).
local same, real, whole, bool, none = "same", "real", "whole", "bool", "none"
local unary = {
  neg = { same, same, none }, abs = { same, same, none }, sign = { same, same, same }, relu = { same, same, none },
  exp = { same, real, real }, log = { same, real, real }, sqrt = { same, real, real }, rsqrt = { same, real, real },
  sin = { same, real, real }, cos = { same, real, real }, tanh = { same, real, real }, sigmoid = { same, real, real },
  silu = { same, real, real }, gelu = { same, real, real }, reciprocal = { same, real, real },
  isfinite = { bool, bool, bool }, isnan = { bool, bool, bool }, logical_not = { bool, bool, bool },
  sum = { same, whole, whole }, prod = { same, whole, whole }, cumsum = { same, whole, whole },
  mean = { same, none, none }, std = { same, none, none }, var = { same, none, none }, norm = { same, none, none },
  softmax = { same, none, none }, log_softmax = { same, none, none }, logsumexp = { same, none, none },
  all = { bool, bool, bool }, any = { bool, bool, bool },
  max = { same, same, same }, min = { same, same, same }, argmax = { whole, whole, whole },
  argmin = { whole, whole, whole },
  clone = { same, same, same }, tril = { same, same, same }, triu = { same, same, same }, t = { same, same, same },
  contiguous = { same, same, same }, flatten = { same, same, same },
}

describe("operations of one tensor", function()
  for name, row in ms.sorted_pairs(unary) do
    it("take and give dtypes: " .. name, function()
      for _, dtype in ipairs(names) do
        local t = ms.ones(2, 2, { dtype = dtype })
        local want = row[3 - kind_of[dtype]]
        if want == none then
          assert.matches(dtype, failure(t[name], t))
        else
          local out = t[name](t)
          local expected = want == same and dtype or want == bool and "bool" or want == whole and "int64" or "float32"
          assert.are.equal(expected, out.dtype, dtype)
        end
      end
    end)
  end

  local others = {
    { "products", "matmul", function(t) return t:matmul(t) end, none },
    { "products with vectors", "matmul", function(t) return t:matmul(t[1]) end, none },
    { "batched products", "matmul", function(t) return ms.stack({ t, t }):matmul(t) end, none },
    { "gather", "gather", function(t) return t:gather(1, ms.zeros(1, 2, { dtype = "int64" })) end },
    { "scatter_", "scatter_", function(t) return t:scatter_(1, ms.zeros(1, 2, { dtype = "int64" }),
    t:narrow(1, 1, 1):clone()) end },
    { "scatter_ of a number", "scatter_", function(t) return t:scatter_(1, ms.zeros(1, 2, { dtype = "int64" }),
    1) end },
    { "index_select by int32", "index_select", function(t) return t:index_select(1,
    ms.zeros(3, { dtype = "int32" })) end },
    { "tile", "tile", function(t) return t:tile(2, 2) end },
    { "expand", "expand", function(t) return t:unsqueeze(1):expand(3, 2, 2):contiguous() end },
    { "eye", "eye", function(t) return ms.eye(2, { dtype = t.dtype }) end },
    { "arange", "arange", function(t) return ms.arange(0, 2, { dtype = t.dtype }) end },
    { "randint", "randint", function(t) return ms.randint(0, 2, { 2 }, { dtype = t.dtype }) end },
    { "full", "full", function(t) return ms.full({ 2 }, 1, { dtype = t.dtype }) end },
    { "ones_like", "ones_like", function(t) return ms.ones_like(t) end },
  }
  for _, row in ipairs(others) do
    it("keep the dtype: " .. row[1], function()
      for _, dtype in ipairs(names) do
        local t = ms.ones(2, 2, { dtype = dtype })
        if row[4] == none and dtype == "bool" then
          assert.matches("products of bool", failure(row[3], t))
        else
          local out = row[3](t)
          assert.are.equal(dtype, out.dtype)
          if row[2] == "matmul" then assert.are.equal(2, out:flatten()[1]:item()) end
        end
      end
    end)
  end

  it("multiply integers exactly, wrapping around", function()
    ms.manual_seed(1)
    for _, dtype in ipairs { "int64", "int32", "uint8" } do
      local a, b = ms.randint(0, 9, { 5, 7 }, { dtype = dtype }), ms.randint(0, 9, { 7, 3 }, { dtype = dtype })
      local want = a:double():matmul(b:double())
      if dtype == "uint8" then want = want - (want / 256):long():double() * 256 end
      assert.is_true(a:matmul(b):double():equal(want))
      assert.is_true(b:t():matmul(a:t()):double():equal(want:t()))
    end
    assert.matches("same dtype", failure(ms.Tensor.matmul, ms.ones(2, 2), ones "int64"))
    local big = ms.full({ 1, 1 }, 2 ^ 53, { dtype = "int64" }) + 1
    assert.are.equal(1, (big:matmul(ms.ones(1, 1, { dtype = "int64" })) - (big - 1)):item())
  end)
end)

describe("gradients of mixed dtypes", function()
  local floats = { "float32", "float64", "float16", "bfloat16" }
  local binary = {
    { "+", function(x, y) return x + y end }, { "-", function(x, y) return x - y end },
    { "*", function(x, y) return x * y end },
    { "/", function(x, y) return x / y end }, { "^", function(x, y) return x ^ y end },
    { "maximum", function(x, y) return x:maximum(y) end }, { "minimum", function(x, y) return x:minimum(y) end },
    { "where", function(x, y) return ms.where(ms.tensor { true, false, true }, x, y) end },
    { "cat", function(x, y) return ms.cat { x, y } * 2 end },
    { "stack", function(x, y) return ms.stack { x, y, x } end },
    { "add with alpha", function(x, y) return x:add(y, { alpha = 2 }) end },
    { "add_", function(x, y) return (x * 1):add_(y) end }, { "mul_", function(x, y) return (x * 1):mul_(y) end },
    { "div_", function(x, y) return (x * 1):div_(y) end }, { "copy_", function(x, y) return (x * 1):copy_(y) end },
  }
  for _, row in ipairs(binary) do
    it(("come back in the dtype of each operand: %s"):format(row[1]), function()
      local function grads(a, b, values)
        local x = ms.tensor({ 1.5, 2, 4 }, { dtype = a, requires_grad = true })
        local y = ms.tensor(values, { dtype = b, requires_grad = true })
        row[2](x, y):sum():backward()
        return x.grad, y.grad
      end
      for _, values in ipairs { { 2, 0.5, 1.25 }, 2 } do
        if not (type(values) == "number" and (row[1] == "cat" or row[1] == "stack")) then
          local wx, wy = grads("float64", "float64", values)
          for _, a in ipairs(floats) do
            for _, b in ipairs(floats) do
              local gx, gy = grads(a, b, values)
              assert.are.equal(a, gx.dtype)
              assert.are.equal(b, gy.dtype)
              assert.are.equal(tostring(wy.shape), tostring(gy.shape))
              ms.testing.assert_close(gx:double(), wx, { rtol = 2e-2, atol = 1e-2 })
              ms.testing.assert_close(gy:double(), wy, { rtol = 2e-2, atol = 1e-2 })
            end
          end
        end
      end
    end)
  end
end)
