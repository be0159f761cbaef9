-- SPDX-License-Identifier: MIT
--- int8 and int16, limits of dtypes, and dtypes of results. Numbers are PyTorch's.
local ms = require "moonshard"
local raises = require "spec.support.raises"

local function of(dtype, list) return ms.tensor(list, { dtype = dtype }) end

describe("int8 and int16", function()
  it("wrap around, round towards zero and sum to int64", function()
    assert.are.same({ -56, -56 }, (of("int8", { 100, 100 }) + 100):tolist())
    assert.are.same({ -32768 }, (of("int16", { 32767 }) + 1):tolist())
    assert.are.same({ -56, 126, 3 }, ms.tensor { 200, -130, 3.7 }:char():tolist())
    assert.are.same({ 200, -130, -3 }, ms.tensor { 200, -130, -3.7 }:short():tolist())
    assert.are.equal("int64", of("int8", { 100, 100 }):sum().dtype)
    assert.are.equal(200, of("int8", { 100, 100 }):sum():item())
    assert.are.same({ -4, 3 }, of("int16", { -7, 7 }):floor_divide(2):tolist())
    assert.are.same({ -1, 1 }, of("int8", { -128, 127 }):sign():tolist())
    assert.are.same({ 300, -300 }, (of("int8", { 100, -100 }):short() * 3):tolist())
  end)

  it("are copied between layouts, devices and dtypes", function()
    for _, dtype in ipairs { "int8", "int16" } do
      local x = ms.arange(-60, 60):to(dtype):reshape(3, 4, 10)
      for _, other in ipairs { "float32", "float64", "float16", "int64", "int32", "uint8", "bool" } do
        local want = x:double()
        if other == "bool" then want = x:ne(0):double() elseif other == "uint8" then want = want:remainder(256) end
        assert.is_true(x:to(other):double():equal(want))
        assert.is_true(x:permute(3, 1, 2):to(other):double():equal(want:permute(3, 1, 2)))
        if other ~= "bool" and other ~= "uint8" then assert.is_true(x:to(other):to(dtype):equal(x)) end
      end
      if ms.cuda.is_available() then
        local there = x:cuda()
        assert.is_true(there:cpu():equal(x))
        assert.is_true((there:permute(2, 3, 1) * 2 - 1):cpu():equal(x:permute(2, 3, 1) * 2 - 1))
        assert.is_true(there:transpose(1, 3):contiguous():cpu():equal(x:transpose(1, 3):contiguous()))
        assert.is_true(there:float():to(dtype):cpu():equal(x))
        assert.are.equal(x:max():item(), there:max():item())
        assert.is_true(there:index_select(1, ms.tensor({ 2, 0 }, { dtype = "int64", device = "cuda" })):cpu()
          :equal(x:index_select(1, ms.tensor({ 2, 0 }, { dtype = "int64" }))))
      end
      local path = os.tmpname()
      ms.save(path, { x = x })
      local back = ms.load(path)
      os.remove(path)
      assert.are.equal(dtype, back.x.dtype)
      assert.is_true(back.x:equal(x))
    end
  end)

  it("refuse numbers that they cannot hold", function()
    assert.is_false(pcall(of, "int8", { 128 }))
    assert.is_false(pcall(of, "int16", { -32769 }))
    assert.are.same({ -128, 127 }, of("int8", { -128, 127 }):tolist())
    assert.matches("out of range for int8", select(2, pcall(ms.Tensor.fill_, ms.zeros(1, { dtype = "int8" }), 200)))
  end)
end)

describe("facts about dtypes", function()
  it("are PyTorch's limits of floating point", function()
    for _, row in ipairs {
      { "float32", 1.1920928955078125e-07, 3.4028234663852886e+38, 1.1754943508222875e-38, 1e-06, 32 },
      { "float64", 2.220446049250313e-16, 1.7976931348623157e+308, 2.2250738585072014e-308, 1e-15, 64 },
      { "float16", 0.0009765625, 65504.0, 6.103515625e-05, 0.001, 16 },
      { "bfloat16", 0.0078125, 3.3895313892515355e+38, 1.1754943508222875e-38, 0.01, 16 },
    } do
      local f = ms.finfo(row[1])
      assert.are.same({ row[2], row[3], row[4], row[6] }, { f.eps, f.max, f.tiny, f.bits })
      assert.is_true(math.abs(f.resolution / row[5] - 1) < 1e-12 and f.min == -f.max)
    end
    assert.are.equal("float32", ms.finfo().dtype)
    assert.matches("^finfo%(float16: eps", tostring(ms.finfo "float16"))
  end)

  it("are the limits of integers", function()
    for dtype, limits in pairs { int8 = { -128, 127 }, int16 = { -32768, 32767 }, int32 = { -2 ^ 31, 2 ^ 31 - 1 },
      uint8 = { 0, 255 } } do
      assert.are.same(limits, { ms.iinfo(dtype).min, ms.iinfo(of(dtype, { 1 })).max })
    end
    local wide = ms.iinfo "int64"
    assert.is_true(wide.min == -2 ^ 63 and wide.max == 0x7fffffffffffffffLL)
    assert.are.equal("iinfo(int64: min -9223372036854775808, max 9223372036854775807)", tostring(wide))
    raises("iinfo: the dtype is bool, expected an integer; finfo has the limits of floating point", ms.iinfo, "bool")
    raises("finfo: the dtype is int8, expected floating point; iinfo has the limits of integers", ms.finfo, "int8")
  end)

  it("say what converts to what", function()
    assert.is_true(ms.can_cast("bool", "int8") and ms.can_cast("int64", "int8") and ms.can_cast("float64", "float16"))
    assert.is_false(ms.can_cast("int8", "bool") or ms.can_cast("float32", "int64"))
    assert.are.equal("int16", ms.promote_types("int8", "uint8"))
    assert.are.equal("float16", ms.result_type(of("float16", { 1 }), ms.tensor(1.5)))
    assert.are.equal("float32", ms.result_type(of("int8", { 1 }), 1.5))
    assert.are.equal("int8", ms.result_type(of("int8", { 1 }), 1000))
  end)
end)

describe("retain_grad", function()
  it("keeps the gradient of a result, added up over backwards", function()
    local x = ms.tensor({ 1, 2 }, { requires_grad = true })
    local y = x * 3
    y:retain_grad()
    local loss = (y * y):sum()
    loss:backward(nil, { retain_graph = true })
    assert.are.same({ 6, 12 }, y.grad:tolist())
    loss:backward()
    assert.are.same({ 12, 24 }, y.grad:tolist())
    assert.are.same({ 36, 72 }, x.grad:tolist())
    assert.is_nil((x * 2).grad)
    raises("retain_grad: the tensor does not require a gradient", ms.ones(1).retain_grad, ms.ones(1))
  end)

  it("keeps what the tensor's hooks made of the gradient, before and after it", function()
    local x = ms.ones(1):requires_grad_()
    local y = x * 2
    local first = y:register_hook(function(g) return g * 5 end)
    y:retain_grad()
    y:register_hook(function(g) return g + 1 end)
    y:sum():backward { retain_graph = true }
    assert.are.equal(6, y.grad:item())
    assert.are.equal(12, x.grad:item())
    first:remove()
    y:retain_grad()
    y:sum():backward()
    assert.are.equal(6 + 2, y.grad:item())
  end)
end)
