-- SPDX-License-Identifier: MIT
--- nn.utils.quantize_rows, nn.Int8Linear, and adapters on it.
local ms = require "moonshard"
local message = require "spec.support.message"
local names = require "spec.support.names"
local ranks = require "spec.support.ranks"
local nn = ms.nn
local quantize_rows = nn.utils.quantize_rows

describe("quantize_rows", function()
  before_each(function() ms.manual_seed(2) end)

  for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
    it(("rounds each row of %s to at most half of its scale; the largest number becomes 127"):format(dtype), function()
      for _, std in ipairs { 1e-3, 0.02, 30 } do
        local w = (ms.randn(50, 33) * std):to(dtype)
        w[{ 1, 1 }], w[{ 2, 33 }] = 5 * std, -5 * std
        local q, scale = quantize_rows(w)
        assert.are.equal("int8", q.dtype)
        assert.are.equal(dtype, scale.dtype)
        assert.are.equal(127, q[{ 1, 1 }]:item())
        assert.are.equal(-127, q[{ 2, 33 }]:item())
        local s = scale:double():unsqueeze(2)
        local away = (w:double() - q:double() * s):abs() / s
        -- A scale that was rounded down leaves the largest numbers a little beyond 127.5.
        local most = 0.5 + 128 * (dtype == "float16" and 2 ^ -10 or dtype == "bfloat16" and 2 ^ -8 or 2 ^ -22)
        assert.is_true(away:max():item() <= most, tostring(away:max():item()))
      end
    end)
  end

  it("gives rows of zeros the scale 1, and takes empty matrices and views", function()
    local w = ms.randn(4, 6):t()
    w:select(1, 3):zero_()
    local q, scale = quantize_rows(w)
    assert.are.same({ 0, 0, 0, 0 }, q:select(1, 3):tolist())
    assert.are.equal(1, scale[3]:item())
    assert.is_true(q:equal((quantize_rows(w:contiguous()))))
    for _, shape in ipairs { { 0, 3 }, { 3, 0 } } do
      q, scale = quantize_rows(ms.ones(shape))
      assert.are.same(shape, { unpack(q.shape) })
      assert.are.same({ shape[1] }, { unpack(scale.shape) })
    end
  end)

  it("refuses what is no finite floating-point matrix", function()
    local w = ms.ones(3, 2)
    w[{ 2, 1 }] = 0 / 0
    for _, case in ipairs {
      { w, "row 2 of 3 has a number that is not finite" },
      { ms.tensor { { 1, math.huge } }, "row 1 of 1 has a number that is not finite" },
      { ms.ones(3), "argument 1 is float32 [3], expected a floating-point matrix" },
      { ms.ones(3, 2):to "int8", "argument 1 is int8 [3, 2], expected a floating-point matrix" },
      { 3, "argument 1 is a number (3), expected a tensor" },
    } do
      assert.are.equal("quantize_rows: " .. case[2], message(quantize_rows, case[1]))
    end
  end)
end)

local function model(dtype)
  ms.manual_seed(4)
  return nn.Sequential(nn.Linear(24, 30, { dtype = dtype }), nn.Tanh(),
    nn.Linear(30, 8, { dtype = dtype, bias = false }))
end

describe("nn.Int8Linear", function()
  for _, dtype in ipairs { "float32", "bfloat16", "float16" } do
    it(("from_linear computes what the %s layer does, up to the rounding of its weight"):format(dtype), function()
      local layer = model(dtype)[1]
      local q = nn.Int8Linear.from_linear(layer)
      assert.are.equal("Int8Linear(24 -> 30, bias)", tostring(q))
      assert.are.equal(layer.bias, q.bias)
      assert.are.equal(dtype, q.scale.dtype)
      assert.is_false(q.weight.requires_grad)
      local x = ms.randn(5, 24):to(dtype)
      local y = q(x)
      assert.are.equal(dtype, y.dtype)
      local wide = q.weight:double() * q.scale:double():unsqueeze(2)
      local want = x:double():matmul(wide:t()) + q.bias:double()
      assert.is_true(y:double():allclose(want, { rtol = 0.01, atol = dtype == "float32" and 1e-6 or 0.01 }))
      assert.is_true(((layer(x) - y):abs():max() / y:abs():max()):item() < 0.02)
    end)
  end

  it("begins with zeros, also where it was made on meta, and loads what another one saves", function()
    local from = nn.Int8Linear.from_linear(model()[1])
    local to = nn.Int8Linear(24, 30, { device = "meta" })
    to:to_empty "cpu"
    to:reset_parameters()
    local x = ms.randn(2, 24)
    assert.is_true(to(x):eq(0):all():item())
    local file = os.tmpname()
    ms.save(file, from:state_dict())
    to:load_state_dict(ms.load(file))
    os.remove(file)
    assert.is_true(to(x):equal(from(x)))
    assert.are.equal("weight bias", names(to:named_parameters()))
    assert.are.equal("scale", names(to:named_buffers()))
    assert.are.equal("Int8Linear(3 -> 4)", tostring(nn.Int8Linear(3, 4, { bias = false, dtype = "bfloat16" })))
  end)

  it("converts a model's layers in place: shared ones once, subclasses and those that target excludes not", function()
    local own, box = nn.Linear:extend "Own", nn.Module:extend "Box"
    local m = box()
    m.body, m.head, m.own = model(), nn.Linear(8, 8), own(8, 8)
    m.again = m.body[1]
    local x = ms.randn(3, 24)
    local before = m.body(x)
    assert.are.equal(m, nn.Int8Linear.convert_linear(m, { target = function(path) return path ~= "head" end }))
    assert.is_true(m.body[1]:isa(nn.Int8Linear))
    assert.are.equal(m.body[1], m.again)
    assert.are.equal(nn.Linear, getmetatable(m.head))
    assert.are.equal(own, getmetatable(m.own))
    assert.is_true(((m.body(x) - before):abs():max() / before:abs():max()):item() < 0.03)
    assert.is_true(nn.Int8Linear.convert_linear(nn.Linear(2, 3)):isa(nn.Int8Linear))
  end)

  it("refuses other layers, and wrong options", function()
    for _, case in ipairs {
      { nn.Int8Linear.from_linear, nn.ReLU(), "from_linear: argument 1 is ReLU, expected a Linear" },
      { nn.Int8Linear.from_linear, 3, "from_linear: argument 1 is a number (3), expected a module" },
      { nn.Int8Linear.convert_linear, nil, "convert_linear: argument 1 is nil, expected a module" },
      { nn.Int8Linear, -1, "Int8Linear: argument 1, the size of its input, is a number (-1), expected a whole number from 0" },
    } do
      assert.are.equal(case[3], message(case[1], case[2], 4))
    end
  end)

  it("can have adapters, which are trained while the weight stays", function()
    for _, dtype in ipairs { "float32", "bfloat16" } do
      local m = nn.Int8Linear.convert_linear(model(dtype))
      local lora = nn.lora(m, { target = "%d", rank = 3, alpha = 6 })
      assert.are.equal("LoRAInt8Linear(24 -> 30, bias, adapters of rank 3)", tostring(m[1]))
      assert.are.equal(dtype, m[3].lora_A.dtype)
      local x, target = ms.randn(20, 24):to(dtype), ms.randn(20, 8):to(dtype)
      local weight, optimizer = m[1].weight:clone(), ms.optim.AdamW(lora:parameters(), { lr = 0.02 })
      local first, last
      for step in ms.steps(40) do
        local loss = nn.F.mse_loss(m(x), target)
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
        if step == 1 then first = loss:item() end
        last = loss:item()
      end
      assert.is_true(last < 0.7 * first, ("%g, %g"):format(first, last))
      assert.is_true(m[1].weight:equal(weight))
      assert.are.equal("merge: the weight of '1' is int8, which cannot take its adapters", message(lora.merge, lora))
      local other = nn.Int8Linear.convert_linear(model(dtype))
      nn.lora(other, { state = lora:state_dict() })
      assert.is_true(other(x):equal(m(x)))
      lora:remove()
      assert.are.equal("Int8Linear(24 -> 30, bias)", tostring(m[1]))
    end
  end)
end)

ranks.describe(2, "nn.Int8Linear over ranks", function()
  it("trains adapters under fully_shard and DDP as alone", function(rank, world)
    local function train(wrap, first, n)
      local m = nn.Int8Linear.convert_linear(model())
      local lora = nn.lora(m, { target = "%d", rank = 3 })
      local wrapped = wrap(m)
      local optimizer = ms.optim.SGD(lora:parameters(), { lr = 0.5 })
      ms.manual_seed(9)
      local x, target = ms.randn(world * 4, 24), ms.randn(world * 4, 8)
      for _ in ms.steps(5) do
        nn.F.mse_loss(wrapped(x:narrow(1, first, n)), target:narrow(1, first, n)):backward()
        optimizer:step()
        optimizer:zero_grad()
      end
      return lora:state_dict()
    end
    local alone = train(function(m) return m end, 1, 4 * world)
    for _, wrap in ipairs { ms.fsdp.fully_shard, nn.DDP } do
      local got = train(wrap, 4 * rank + 1, 4)
      for name, t in pairs(alone) do assert.is_true(got[name]:allclose(t, { rtol = 1e-5, atol = 1e-6 }), name) end
    end
  end)
end)
