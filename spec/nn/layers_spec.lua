-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn
local collected = require "spec.support.collected"
local message = require "spec.support.message"

local function bounds(t) return t:min():item(), t:max():item() end

describe("initialisation", function()
  before_each(function() ms.manual_seed(7) end)

  it("of Linear is uniform in +-1/sqrt(in)", function()
    local m = nn.Linear(100, 200)
    for _, p in ipairs { m.weight, m.bias } do
      local low, high = bounds(p:detach())
      assert.is_true(low >= -0.1 and low < -0.09 and high <= 0.1 and high > 0.09)
      assert.is_true(math.abs(p:detach():mean():item()) < 0.02)
    end
    assert.are.same({ 200, 100 }, { unpack(m.weight.shape) })
  end)

  it("of Embedding is normal, with zeros at padding_idx", function()
    local m = nn.Embedding(100, 50, { padding_idx = 3 })
    assert.is_true(math.abs(m.weight:detach():std():item() - 1) < 0.05)
    assert.are.equal(0, m.weight:detach():select(1, 4):norm():item())
    assert.are_not.equal(0, m.weight:detach():select(1, 3):norm():item())
  end)

  it("of norms is ones and zeros", function()
    local m = nn.LayerNorm(4)
    assert.are.same({ 1, 1, 1, 1 }, m.weight:tolist())
    assert.are.same({ 0, 0, 0, 0 }, m.bias:tolist())
    assert.is_nil(nn.LayerNorm(4, { bias = false }).bias)
    assert.is_nil(nn.LayerNorm(4, { elementwise_affine = false }).weight)
    assert.are.same({ 1, 1 }, nn.RMSNorm(2).weight:tolist())
  end)

  it("repeats with the seed", function()
    local a = nn.Linear(5, 5).weight:tolist()
    ms.manual_seed(7)
    assert.are.same(a, nn.Linear(5, 5).weight:tolist())
  end)

  it("of meta modules draws the same numbers as of others", function()
    local a = nn.Linear(5, 5).weight:tolist()
    ms.manual_seed(7)
    local m = nn.Linear(5, 5, { device = "meta" })
    m:to_empty("cpu")
    ms.manual_seed(7)
    m:reset_parameters()
    assert.are.same(a, m.weight:tolist())
  end)
end)

describe("nn.init", function()
  it("fills in place and returns the tensor", function()
    local p = nn.Parameter(ms.empty(300, 400))
    for _, case in ipairs {
      { nn.init.uniform_, { -2, 3 }, 0.5, 5 / math.sqrt(12) },
      { nn.init.uniform_, { { a = -2, b = 3 } }, 0.5, 5 / math.sqrt(12) },
      { nn.init.normal_, { 1, 2 }, 1, 2 },
      { nn.init.normal_, { { mean = 1, std = 2 } }, 1, 2 },
      { nn.init.normal_, { { std = 2 } }, 0, 2 },
      { nn.init.constant_, { 4 }, 4, 0 },
      { nn.init.zeros_, {}, 0, 0 },
      { nn.init.ones_, {}, 1, 0 },
      { nn.init.xavier_uniform_, { { gain = 2 } }, 0, 2 * math.sqrt(2 / 700) },
      { nn.init.kaiming_uniform_, { { nonlinearity = "relu" } }, 0, math.sqrt(2 / 400) },
      { nn.init.kaiming_uniform_, { { mode = "fan_out", nonlinearity = "relu" } }, 0, math.sqrt(2 / 300) },
      { nn.init.trunc_normal_, { 0, 1, -2, 2 }, 0, 0.8796 },
      { nn.init.trunc_normal_, { { a = -2, b = 2 } }, 0, 0.8796 },
    } do
      assert.are.equal(p, case[1](p, unpack(case[2])))
      local t = p:detach()
      assert.is_true(math.abs(t:mean():item() - case[3]) < 0.02 * (1 + case[4]))
      assert.is_true(math.abs(t:std():item() - case[4]) < 0.02 * (1 + case[4]))
    end
    local low, high = bounds(p:detach())
    assert.is_true(low >= -2 and high <= 2)
    assert.is_true(p.requires_grad)
    assert.is_nil(p.grad)
  end)

  it("refuses what has no fans", function()
    assert.truthy(message(nn.init.kaiming_uniform_, ms.zeros(3)):find("at least 2 dimensions", 1, true))
    assert.truthy(message(nn.init.calculate_gain, "rleu"):find("did you mean 'relu'?", 1, true))
  end)
end)

describe("layers", function()
  it("compute what nn.F computes", function()
    local x = ms.randn(4, 6)
    local linear = nn.Linear(6, 3)
    assert.is_true(linear(x):allclose(nn.F.linear(x, linear.weight, linear.bias)))
    local norm = nn.LayerNorm(6)
    assert.is_true(norm(x):allclose(nn.F.layer_norm(x, 6, norm.weight, norm.bias)))
    assert.is_true(nn.LayerNorm(6, { elementwise_affine = false })(x):allclose(norm(x)))
    assert.is_true(nn.RMSNorm(6)(x):allclose(x * (x * x):mean(-1, { keepdim = true }):add(2 ^ -23):rsqrt(),
      { rtol = 1e-4, atol = 1e-5 }))
    local tiny = ms.full({ 6 }, 1e-7, { dtype = "float64" })
    assert.is_true(math.abs(nn.RMSNorm(6, { dtype = "float64" })(tiny)[1]:item() - 1e-7 / math.sqrt(
      1e-14 + 2 ^ -52)) < 1e-9)
    assert.is_true(math.abs(nn.RMSNorm(6, { eps = 1e-14,
      dtype = "float64" })(tiny)[1]:item() - 1 / math.sqrt(2)) < 1e-9)
    assert.is_true(nn.GELU { approximate = "tanh" }(x):equal(nn.F.gelu(x, { approximate = "tanh" })))
    for _, pair in ipairs { { "ReLU", "relu" }, { "SiLU", "silu" }, { "Tanh", "tanh" }, { "Sigmoid", "sigmoid" },
      { "GELU", "gelu" } } do
      assert.is_true(nn[pair[1]]()(x):equal(nn.F[pair[2]](x)))
    end
    local ids = ms.tensor({ 1, 0, 2 }, { dtype = "int64" })
    local e = nn.Embedding(4, 5)
    assert.is_true(e(ids):equal(nn.F.embedding(ids, e.weight)))
    assert.are.same({ 3, 5 }, { unpack(e(ids).shape) })
    local target = ms.tensor({ 1, 0, 2, 5 }, { dtype = "int64" })
    assert.is_true(nn.CrossEntropyLoss { reduction = "sum" }(x, target):equal(nn.F.cross_entropy(x, target,
      { reduction = "sum" })))
    assert.is_true(nn.MSELoss()(x, x + 1):allclose(ms.ones {}))
  end)

  it("check the sizes they normalise over", function()
    assert.truthy(message(nn.LayerNorm(5, { elementwise_affine = false }), ms.ones(2, 6)):find("[5]", 1, true))
    assert.truthy(message(nn.RMSNorm({ 5, 6 }, { elementwise_affine = false }), ms.ones(2, 6, 6)):find("[5, 6]", 1,
      true))
  end)

  it("normalise the mean square over several trailing dimensions, as one dimension of all their elements", function()
    local x = ms.randn(2, 3, 4):requires_grad_()
    local y, r = ms.randn(2, 3, 4), ms.randn(2, 3, 4)
    local weight = ms.rand(3, 4)
    for _, affine in ipairs { true, false } do
      local norm, flat = nn.RMSNorm({ 3, 4 }, { elementwise_affine = affine }),
        nn.RMSNorm(12, { elementwise_affine = affine })
      if affine then
        ms.no_grad(function()
          norm.weight:copy_(weight)
          flat.weight:copy_(weight:reshape(-1))
        end)
      end
      local got = norm(x)
      x.grad = nil
      got:backward(y)
      local grad = x.grad:clone()
      x.grad = nil
      local want = flat(x:reshape(2, 12))
      want:backward(y:reshape(2, 12))
      assert.is_true(got:reshape(2, 12):equal(want))
      assert.is_true(grad:equal(x.grad))
      if affine then assert.is_true(norm.weight.grad:reshape(-1):equal(flat.weight.grad)) end
      assert.is_true(norm(x, r):equal(norm(x + r)))
      assert.is_true(nn.F.rms_norm(x, { 3, 4 }, norm.weight):equal(got))
      if affine then assert.is_true(nn.F.rms_norm(x, norm.weight):equal(got)) end
    end
    assert.are.equal("RMSNorm([3, 4], weight)", tostring(nn.RMSNorm { 3, 4 }))
  end)

  it("leave the padding row without gradient", function()
    local e = nn.Embedding(3, 2, { padding_idx = 1 })
    e(ms.tensor({ 0, 1, 1, 2 }, { dtype = "int64" })):sum():backward()
    assert.are.same({ { 1, 1 }, { 0, 0 }, { 1, 1 } }, e.weight.grad:tolist())
  end)

  for _, dtype in ipairs { "float64", "float32", "bfloat16", "float16" } do
    it("add a table's rows to the gradient of a tied weight from the last product, bit for bit, " .. dtype, function()
      ms.manual_seed(3)
      local ids, wide = ms.tensor({ 4, 1, 4, 2, 4 }, { dtype = "int64" }), 1030
      local w, h = ms.randn(6, wide):to(dtype), ms.randn(5, wide):to(dtype)
      local function gradient(table, weight)
        local y = nn.F.linear(nn.F.embedding(ids, table, { padding_idx = 2 }) * h, weight)
        return (y * y):sum():backward()
      end
      local tied = w:clone():requires_grad_()
      gradient(tied, tied)
      local table, weight = w:clone():requires_grad_(), w:clone():requires_grad_()
      gradient(table, weight)
      assert.is_true(tied.grad:equal(weight.grad + table.grad))
      -- the padding row gets only the gradient of the product
      assert.are.same(weight.grad[3]:tolist(), tied.grad[3]:tolist())
    end)
  end

  it("allocate no table of zeros for the gradient of a tied weight", function()
    local w = ms.randn(4096, 64, { requires_grad = true })
    local ids = ms.tensor({ 1, 2, 3 }, { dtype = "int64" })
    local function peak(head)
      local loss = nn.F.linear(nn.F.embedding(ids, w), head):sum()
      collected()                               -- leftovers of earlier tests are not counted
      ms.reset_peak_memory_stats("cpu")
      local before = ms.memory_stats("cpu").allocated
      loss:backward()
      return ms.memory_stats("cpu").peak_allocated - before
    end
    local table = 4096 * 64 * 4
    assert.is_true(peak(w) < 1.5 * table)
    -- a gradient exists already, so it is added
    assert.is_true(peak(w) < 1.5 * table)
  end)

  it("drop only in training", function()
    local d = nn.Dropout(0.5)
    local x = ms.ones(1000)
    local y = d(x)
    local kept = y:sum():item() / 2
    assert.is_true(kept > 400 and kept < 600)
    d:eval()
    assert.are.equal(x, d(x))
    assert.truthy(message(nn.Dropout, 1.5):find("between 0 and 1", 1, true))
  end)

  it("take classes in dimension 2", function()
    local logits = ms.randn(2, 5, 3, { dtype = "float64" })
    local ids = ms.tensor({ { 0, 1, 4 }, { 2, 2, 3 } }, { dtype = "int64" })
    local rows, flat = logits:permute(1, 3, 2):reshape(-1, 5), ids:reshape(-1)
    assert.is_true(nn.F.cross_entropy(logits, ids):allclose(nn.F.cross_entropy(rows, flat)))
    assert.are.same({ 2, 3 }, { unpack(nn.F.cross_entropy(logits, ids, { reduction = "none" }).shape) })
  end)

  it("are made in the dtype asked for", function()
    assert.are.equal("bfloat16", nn.Linear(2, 2, { dtype = "bfloat16" }).weight.dtype)
    assert.are.equal("float64", nn.LayerNorm(2, { dtype = "float64" }).bias.dtype)
  end)
end)

describe("the GPT", function()
  local GPT = require "moonshard.models.gpt"
  local function small(o)
    o = o or {}
    return GPT { vocab = 11, context = 8, layers = 2, heads = 2, dim = 8, dropout = o.dropout, tie = o.tie }
  end
  local function some_ids(rows, length)
    return ms.randint(0, 11, { rows, length })
  end

  it("gives logits, or the loss of targets", function()
    local gpt = small()
    local ids = some_ids(2, 5)
    assert.are.same({ 2, 5, 11 }, { unpack(gpt(ids).shape) })
    local loss = gpt(ids, ids)
    assert.are.same({}, { unpack(loss.shape) })
    assert.is_true(math.abs(loss:item() - math.log(11)) < 0.3)
    assert.are.equal(gpt.token.weight, gpt.head.weight)
    assert.are_not.equal(gpt.token.weight, small({ tie = false }).head.weight)
  end)

  it("does not look ahead", function()
    local gpt = small():eval()
    local a = ms.tensor({ { 1, 2, 3, 4, 5 } }, { dtype = "int64" })
    local b = ms.tensor({ { 1, 2, 3, 9, 10 } }, { dtype = "int64" })
    assert.is_true(gpt(a):narrow(2, 1, 3):allclose(gpt(b):narrow(2, 1, 3)))
    assert.is_false(gpt(a):narrow(2, 4, 1):allclose(gpt(b):narrow(2, 4, 1)))
  end)

  it("gives every parameter a gradient", function()
    local gpt = small { dropout = 0.1 }
    gpt(some_ids(2, 8), some_ids(2, 8)):backward()
    for name, p in gpt:named_parameters() do assert.is_not_nil(p.grad, name) end
  end)

  it("has the same initial weights if it was made on meta", function()
    ms.manual_seed(3)
    local a = small()
    local b = GPT { vocab = 11, context = 8, layers = 2, heads = 2, dim = 8, device = "meta" }
    b:to_empty "cpu"
    ms.manual_seed(5)
    a:reset_parameters()
    ms.manual_seed(5)
    b:reset_parameters()
    for name, p in a:named_parameters() do assert.is_true(p:equal(b:get_parameter(name)), name) end
  end)

  it("distinguishes distances by ALiBi, also if it was made on meta", function()
    local o = { vocab = 11, context = 8, layers = 2, heads = 2, dim = 8, position = "alibi" }
    ms.manual_seed(9)
    local a = GPT(o)
    assert.is_nil(a.position)
    assert.are.equal(-0.0625 * 3, a.blocks[1].attn.distance[1][4][1]:item())
    o.device = "meta"
    local b = GPT(o)
    b:to_empty "cpu"
    ms.manual_seed(9)
    a:reset_parameters()
    ms.manual_seed(9)
    b:reset_parameters()
    local ids = some_ids(2, 6)
    assert.is_true(a(ids):equal(b(ids)))
    local first, swapped = ms.tensor({ { 1, 2, 3 } }, { dtype = "int64" }),
      ms.tensor({ { 2, 1, 3 } }, { dtype = "int64" })
    assert.is_false(a(first):narrow(2, 3, 1):allclose(a(swapped):narrow(2, 3, 1)))
  end)

  it("takes the memory of one block without gradients, however many blocks", function()
    local function extra(layers)
      local m = GPT { vocab = 16, context = 64, layers = layers, heads = 2, dim = 32 }
      local ids = ms.zeros(4, 64, { dtype = "int64" })
      -- What earlier tests left must not be collected between the two readings.
      collected()
      ms.reset_peak_memory_stats()
      local before = ms.memory_stats().allocated
      ms.no_grad(function() ms.scope(function() m(ids, ids) end) end)
      return ms.memory_stats().peak_allocated - before
    end
    local two = extra(2)
    assert.are.equal(two, extra(6))
    assert.is_true(two <= 14 * 4 * 64 * 32 * 4, two .. " bytes")      -- 14 tensors [B, T, C]
  end)

  it("names arguments that do not fit", function()
    assert.truthy(message(small(), some_ids(1, 9)):find("9 positions are more than the context of 8", 1, true))
    assert.truthy(message(GPT, { dim = 10, heads = 4 })
      :find("dim is 10, expected a multiple of the number of heads, 4", 1, true))
  end)
end)
