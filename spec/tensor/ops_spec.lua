-- SPDX-License-Identifier: MIT
--- Values of operations, in their ways to be written (walk_spec compares functions with loops; spec/kernels/ops_spec
--- tests gradients, from the operator table).
local ms = require "moonshard"

local failure = require "spec.support.message"

local T = ms.tensor
local function ints(list) return T(list, { dtype = "int64" }) end

--- name, expression, values
local a, b = { 1, 4, 9 }, { 2, 2, 3 }
local table_of_values = {
  { "t ^ u", function(t, u) return t ^ u end, { 1, 16, 729 } },
  { "t - 1", function(t) return t - 1 end, { 0, 3, 8 } },
  { "1 - t", function(t) return 1 - t end, { 0, -3, -8 } },
  { "36 / t", function(t) return 36 / t end, { 36, 9, 4 } },
  { "2 ^ u", function(_, u) return 2 ^ u end, { 4, 4, 8 } },
  { "add with alpha", function(t, u) return t:add(u, { alpha = 10 }) end, { 21, 24, 39 } },
  { "sub with alpha", function(t, u) return t:sub(u, { alpha = 2 }) end, { -3, 0, 3 } },
  { "add a number with alpha", function(t) return t:add(3, { alpha = 2 }) end, { 7, 10, 15 } },
  { "clamp both", function(t) return t:clamp(2, 5) end, { 2, 4, 5 } },
  { "clamp below", function(t) return t:clamp(2) end, { 2, 4, 9 } },
  { "clamp {max}", function(t) return t:clamp { max = 3 } end, { 1, 3, 3 } },
  { "where with numbers", function(t) return ms.where(t:gt(3), t, 0) end, { 0, 4, 9 } },
  { "add_", function(t, u) return t:add_(u) end, { 3, 6, 12 } },
  { "add_ with alpha", function(t, u) return t:add_(u, { alpha = -1 }) end, { -1, 2, 6 } },
  { "sub_", function(t) return t:sub_(1) end, { 0, 3, 8 } },
  { "mul_", function(t) return t:mul_(2) end, { 2, 8, 18 } },
  { "div_", function(t, u) return t:div_(u) end, { 0.5, 2, 3 } },
  { "pow_", function(t) return t:pow_(2) end, { 1, 16, 81 } },
  { "clamp_", function(t) return t:clamp_(2, 5) end, { 2, 4, 5 } },
  { "masked_fill_", function(t) return t:masked_fill_(t:gt(3), 0) end, { 1, 0, 0 } },
  { "relu_", function(t) return t:sub_(5):relu_() end, { 0, 0, 4 } },
  { "fill_", function(t) return t:fill_(7) end, { 7, 7, 7 } },
  { "zero_", function(t) return t:zero_() end, { 0, 0, 0 } },
  { "copy_", function(t, u) return t:copy_(u) end, { 2, 2, 3 } },
}

describe("elementwise operations", function()
  for _, row in ipairs(table_of_values) do
    it("give " .. row[1], function()
      for _, dtype in ipairs { "float32", "float64" } do
        local t, u = T(a, { dtype = dtype }), T(b, { dtype = dtype })
        local out = row[2](t, u)
        local list = out:tolist()
        if row[1]:sub(-1) == "_" then assert.is_true(rawequal(out, t)) end
        for k, v in ipairs(row[3]) do
          if type(v) == "number" then assert.is_true(math.abs(list[k] - v) < 1e-5 * math.max(1,
            math.abs(v))) else assert.are.equal(v, list[k]) end
        end
      end
    end)
  end

  it("broadcast and promote", function()
    assert.are.same({ { 11, 21 }, { 12, 22 } }, (T { { 1 }, { 2 } } + T { 10, 20 }):tolist())
    assert.are.equal("float64", (T { 1 } + T({ 1 }, { dtype = "float64" })).dtype)
    assert.are.equal("float32", (T { 1 } + ints { 1 }).dtype)
    assert.are.equal("bfloat16", (T({ 1 }, { dtype = "bfloat16" }) + 1).dtype)
    assert.are.equal("int64", (ints { 1 } + 1).dtype)
    assert.are.equal("float32", (ints { 1 } / 2).dtype)
    assert.are.same({ 0.5, 1 }, (ints { 1, 2 } / 2):tolist())
    ms.set_default_dtype "float64"
    for _, q in ipairs { ints { 1 } / 2, ints { 1 } / ints { 2 }, 1 / ints { 2 }, ints({ 1 }):div(2) } do
      assert.are.equal("float64", q.dtype)
      assert.are.equal(0.5, q:item())
    end
    ms.set_default_dtype "float32"
    assert.are.equal("bool", T({ 1 }):eq(1).dtype)
  end)

  it("refuse what does not fit", function()
    assert.matches("%[2%].*%[3%]", failure(function() return T { 1, 2 } + T { 1, 2, 3 } end))
    assert.matches("add: .* a string %('x'%)", failure(function() return T { 1 } + "x" end))
    assert.matches("expected a tensor", failure(function() return T { 1 } * {} end))
    failure(function() return ints { 1 } + 0.5 end)
    assert.matches("unknown option 'alhpa'; did you mean 'alpha'",
      failure(function() return T { 1 }:add(1, { alhpa = 2 }) end))
    assert.matches("neither a minimum nor a maximum", failure(function() return T { 1 }:clamp() end))
  end)
end)

describe("comparing whole tensors", function()
  it("gives Lua booleans", function()
    assert.is_true(T({ 1, 2 }):equal(T { 1, 2 }))
    assert.is_false(T({ 1, 2 }):equal(T { 1, 3 }))
    assert.is_false(T({ 1, 2 }):equal(T { 1, 2, 3 }))
    assert.is_true(T({ 1 }):allclose(T { 1 + 1e-6 }))
    assert.is_false(T({ 1 }):allclose(T { 1.1 }))
    assert.is_true(T({ 1 }):allclose(T { 1.1 }, { rtol = 0.2 }))
  end)
end)

describe("casts", function()
  it("give the requested dtype, and the tensor itself if it has that dtype", function()
    local t = T { 1.5, -2.5, 0 }
    for name, dtype in pairs { double = "float64", half = "float16", bfloat16 = "bfloat16", long = "int64",
      float = "float32" } do
      assert.are.equal(dtype, t[name](t).dtype)
    end
    assert.are.same({ 1, -2, 0 }, t:long():tolist())
    assert.are.same({ true, true, false }, t:bool():tolist())
    assert.is_true(rawequal(t, t:float()))
    assert.is_true(rawequal(t, t:to "cpu"))
    assert.are.equal("float64", t:to("float64").dtype)
    assert.are.equal("float64", t:to("cpu", "float64").dtype)
    assert.are.equal("int64", t:to(ints { 1 }).dtype)
    assert.are.equal("meta", t:to("meta").device)
    assert.matches("did you mean 'float64'", failure(t.to, t, "flaot64"))
  end)
end)

describe("products", function()
  it("follow the rules of matmul", function()
    local m, n = T { { 1, 2 }, { 3, 4 } }, T { { 1, 0 }, { 0, 2 } }
    assert.are.same({ { 1, 4 }, { 3, 8 } }, m:matmul(n):tolist())
    assert.are.same({ 5, 11 }, m:matmul(T { 1, 2 }):tolist())
    assert.are.equal(5, T({ 1, 2 }):matmul(T { 1, 2 }):item())
    assert.are.equal("[5, 2, 2]", tostring(ms.ones(5, 2, 2):matmul(m).shape))
    assert.matches("matmul", failure(m.matmul, m, ms.ones(3, 2)))
  end)
end)

describe("reductions", function()
  local t = T { { 1, 2, 3 }, { 4, 5, 6 } }
  local rows = {
    { "sum", { 21 }, { 6, 15 }, { 5, 7, 9 } }, { "mean", { 3.5 }, { 2, 5 }, { 2.5, 3.5, 4.5 } },
    { "prod", { 720 }, { 6, 120 }, { 4, 10, 18 } },
    { "max", { 6 }, { 3, 6 }, { 4, 5, 6 } }, { "min", { 1 }, { 1, 4 }, { 1, 2, 3 } },
    { "var", { 3.5 }, { 1, 1 }, { 4.5, 4.5, 4.5 } }, { "std", { 3.5 ^ 0.5 }, { 1, 1 },
    { 4.5 ^ 0.5, 4.5 ^ 0.5, 4.5 ^ 0.5 } },
  }
  for _, row in ipairs(rows) do
    it("give the " .. row[1] .. " of all, and along a dimension", function()
      local fn = t[row[1]]
      ms.testing.assert_close(fn(t), row[2][1], { rtol = 1e-5 })
      ms.testing.assert_close((fn(t, 2)), T(row[3]))
      ms.testing.assert_close((fn(t, 1)), T(row[4]))
      ms.testing.assert_close((fn(t, -1)), T(row[3]))
      assert.are.equal("[2, 1]", tostring(fn(t, 2, { keepdim = true }).shape))
      assert.matches("out of range", failure(fn, t, 3))
      assert.matches("did you mean 'keepdim'", failure(fn, t, 1, { keepdims = true }))
    end)
  end
  it("go over lists of dimensions", function()
    local u = ms.ones(2, 3, 4)
    assert.are.same({ 8, 8, 8 }, u:sum({ 1, 3 }):tolist())
    assert.are.equal("[1, 3, 1]", tostring(u:mean({ 1, -1 }, { keepdim = true }).shape))
    assert.are.equal("[1, 1, 1]", tostring(u:sum({ keepdim = true }).shape))
  end)
  it("take corrections", function()
    ms.testing.assert_close(t:var { correction = 0 }, 35 / 12, { rtol = 1e-6 })
    ms.testing.assert_close(t:var(2, { correction = 0 }), T { 2 / 3, 2 / 3 })
  end)
  it("products of half types and a sum are rounded once", function()
    ms.manual_seed(5)
    for dtype, half in pairs { bfloat16 = 2 ^ -8, float16 = 2 ^ -11 } do
      local x, y, z = ms.randn(9, 40):to(dtype), ms.randn(40, 7):to(dtype), (ms.randn(9, 7) * 10):to(dtype)
      local product, within = x:double():mm(y:double()), { rtol = half * 1.01, atol = 1e-5 }
      ms.testing.assert_close(z:addmm(x, y):double(), z:double() + product, within)
      ms.testing.assert_close(z:addmm(x, y, { beta = 0.3, alpha = 2 }):double(), z:double() * 0.3 + product * 2, within)
      local batch = z:unsqueeze(1):baddbmm(x:unsqueeze(1), y:unsqueeze(1))
      assert.is_true(batch[1]:equal(z:addmm(x, y)))
    end
  end)
  it("products of integers keep their dtype and wrap around", function()
    for _, dtype in ipairs { "int8", "uint8", "int16", "int32", "int64" } do
      local u, v = T({ 1, 2 }):to(dtype), T({ 3, 4 }):to(dtype)
      local square, row, column = ms.stack({ u, v }, 1), u:unsqueeze(1), v:unsqueeze(1)
      for name, case in pairs {
        dot = { u:dot(v), 11 }, vecdot = { ms.linalg.vecdot(u, v), 11 }, mv = { square:mv(u), { 5, 11 } },
        mm = { square:mm(square), { { 7, 10 }, { 15, 22 } } }, einsum = { ms.einsum("i,i->", u, v), 11 },
        bilinear = { ms.nn.F.bilinear(row, column, ms.ones({ 1, 2, 2 }, { dtype = dtype })), { { 21 } } },
        linear = { ms.nn.F.linear(row, column), { { 11 } } },
        addmm = { square:addmm(square, square), { { 8, 12 }, { 18, 26 } } } } do
        assert.are.equal(dtype, case[1].dtype, name)
        assert.are.same(case[2], type(case[2]) == "table" and case[1]:tolist() or case[1]:item(), name)
      end
    end
    assert.are.equal(-112, T({ 100, 100 }):to("int8"):dot(T({ 2, 2 }):to("int8")):item())
  end)
  it("give positions from 0", function()
    local values, places = t:max(1)
    assert.are.same({ 4, 5, 6 }, values:tolist())
    assert.are.same({ 1, 1, 1 }, places:tolist())
    assert.are.equal("int64", places.dtype)
    assert.are.same({ 2, 2 }, t:argmax():tolist())
    assert.are.same({ 0, 0 }, t:argmin(2):tolist())
  end)
  it("reduce booleans", function()
    assert.is_true(t:gt(0):all():item())
    assert.is_false(t:gt(5):all():item())
    assert.is_true(t:gt(5):any():item())
    assert.are.same({ false, true }, t:gt(5):any(2):tolist())
  end)
  it("give norms", function()
    local v = T { 3, -4 }
    assert.are.equal(5, v:norm():item())
    assert.are.equal(7, v:norm(1):item())
    assert.are.equal(4, v:norm(math.huge):item())
    ms.testing.assert_close(t:norm(2, 1), T { 17 ^ 0.5, 29 ^ 0.5, 45 ^ 0.5 })
    assert.are.equal("[1, 3]", tostring(t:norm(2, 1, { keepdim = true }).shape))
  end)
  it("give logsumexp and log_softmax", function()
    ms.testing.assert_close(t:logsumexp(2), t:exp():sum(2):log())
    ms.testing.assert_close(t:log_softmax(2), t:softmax(2):log())
    ms.testing.assert_close(t:softmax(1):sum(1), ms.ones(3))
  end)
end)

describe("large tensors whose rows lie across another's memory", function()
  -- As `view`, but in the order of its rows.
  local function whole(view) return ms.empty(view.shape, { dtype = view.dtype }):copy_(view) end
  -- Two tensors of one shape; the second one's dimensions are in another order in memory.
  local function pair(dtype, order)
    ms.manual_seed(3)
    local shape = order == 2 and { 250, 170 } or { 7, 90, 80 }
    local y
    if order == 2 then y = ms.randint(0, 9, { 170, 250 }, { dtype = dtype }):t()
    else y = ms.randint(0, 9, { 80, 7, 90 }, { dtype = dtype }):permute(2, 3, 1) end
    return ms.randint(0, 9, shape, { dtype = dtype }), y
  end
  for _, dtype in ipairs { "float32", "float64", "bfloat16", "int64", "int32", "uint8" } do
    for order = 2, 3 do
      it(("are combined with it, %s of %d dimensions"):format(dtype, order), function()
        local x, y = pair(dtype, order)
        local dense = whole(y)
        assert.is_true((x + y):equal(x + dense))
        assert.is_true((y * x):equal(dense * x))
        assert.is_true(x:lt(y):equal(x:lt(dense)))
        assert.is_true(ms.where(y:gt(4), x, y):equal(ms.where(dense:gt(4), x, dense)))
        assert.is_true(y:to("float64"):equal(dense:to "float64"))
        assert.is_true((y + y:mul(2)):equal(dense * 3))
      end)
      it(("are changed in place, %s of %d dimensions"):format(dtype, order), function()
        local x, y = pair(dtype, order)
        local dense = whole(y)
        y:add_(x):mul_(y)
        dense:add_(x):mul_(dense)
        assert.is_true(whole(y):equal(dense))
        x:add_(y)
        assert.is_true(x:equal(pair(dtype, order) + dense))
      end)
    end
  end
end)
