-- SPDX-License-Identifier: MIT
--- amp.autocast: the dtype in which each operation runs.
local ms = require "moonshard"
local nn, amp = ms.nn, ms.amp

local failure = require "spec.support.message"

local device = "cpu"
local function f32(...) return ms.randn(...):to(device) end
local function half(...) return f32(...):to "bfloat16" end
local function classes() return ms.tensor({ 0, 2 }, { dtype = "int64", device = device }) end
local function zeros(n) return ms.zeros(n, { device = device }) end

-- Operation and its dtype under autocast in bfloat16, called with arguments in float32 and in bfloat16.
local rows = {
  { "linear", "bfloat16", function(x) return nn.F.linear(x(2, 4), f32(3, 4), f32(3)) end },
  { "matmul", "bfloat16", function(x) return x(2, 4):matmul(f32(4, 3)) end },
  { "batched matmul", "bfloat16", function(x) return x(2, 2, 4):matmul(f32(4, 3)) end },
  { "attention", "bfloat16", function(x) return nn.F.scaled_dot_product_attention(x(2, 5, 4), f32(2, 5, 4),
  f32(2, 5, 4), { attn_mask = f32(5, 5) }) end },
  { "conv2d", "bfloat16", function(x) return nn.F.conv2d(x(1, 2, 5, 5), f32(3, 2, 3, 3), f32(3)) end },
  { "softmax", "float32", function(x) return x(2, 4):softmax(2) end },
  { "log_softmax", "float32", function(x) return nn.F.log_softmax(x(2, 4), 2) end },
  { "logsumexp", "float32", function(x) return x(2, 4):logsumexp(2) end },
  { "layer_norm", "float32", function(x) return nn.F.layer_norm(x(2, 4), 4, f32(4), f32(4)) end },
  { "rms_norm", "float32", function(x) return nn.F.rms_norm(x(2, 4), f32(4)) end },
  { "batch_norm", "float32", function(x) return nn.F.batch_norm(x(3, 4), zeros(4), zeros(4), f32(4), f32(4),
  { training = true }) end },
  { "cross_entropy", "float32", function(x) return nn.F.cross_entropy(x(2, 4), classes()) end },
  { "mse_loss", "float32", function(x) return nn.F.mse_loss(x(2, 4), f32(2, 4)) end },
  { "norm", "float32", function(x) return x(2, 4):norm() end },
  { "norm along a dimension", "float32", function(x) return x(2, 4):norm(1, 2) end },
  { "sum", "float32", function(x) return x(2, 4):sum() end },
  { "sum along a dimension", "float32", function(x) return x(2, 4):sum(1, { keepdim = true }) end },
  { "prod", "float32", function(x) return x(2, 4):prod() end },
  { "cumsum", "float32", function(x) return x(2, 4):cumsum(2) end },
  { "exp", "float32", function(x) return x(2, 4):exp() end },
  { "log", "float32", function(x) return x(2, 4):log() end },
  { "pow", "float32", function(x) return x(2, 4):pow(2) end },
  { "pow of two tensors", "float32", function(x) return x(2, 4):pow(x(2, 4)) end },
  { "pow of a number", "float32", function(x) return 2 ^ x(2, 4) end },
  { "reciprocal", "float32", function(x) return x(2, 4):reciprocal() end },
  { "a number over a tensor", "float32", function(x) return 2 / x(2, 4) end },
  { "rsqrt", "float32", function(x) return x(2, 4):rsqrt() end },
  { "cross_entropy with probabilities", "float32", function(x) return nn.F.cross_entropy(x(2, 4), x(2, 4)) end },
  { "mean", "input", function(x) return x(2, 4):mean() end },
  { "sqrt", "input", function(x) return x(2, 4):sqrt() end },
  { "sigmoid", "input", function(x) return x(2, 4):sigmoid() end },
  { "max", "input", function(x) return x(2, 4):max() end },
  { "add of both", "float32", function(x) return x(2, 4) + f32(2, 4) end },
  { "cat of both", "float32", function(x) return ms.cat { x(2, 4), f32(2, 4) } end },
  { "relu", "input", function(x) return x(2, 4):relu() end },
  { "gelu", "input", function(x) return x(2, 4):gelu() end },
  { "embedding", "float32", function() return nn.F.embedding(classes(), f32(4, 4)) end },
}

describe("autocast", function()
  for where, title in ms.sorted_pairs { cpu = "%s on the CPU", ["cuda:0"] = "%s on a GPU #cuda" } do
    for _, row in ipairs(rows) do
      it(title:format("chooses the dtype of " .. row[1]), function()
        finally(function() device = "cpu" end)
        device = where
        for name, make in ms.sorted_pairs { float32 = f32, bfloat16 = half } do
          local out = amp.autocast("bfloat16", function() return (row[3](make)) end)
          assert.are.equal(row[2] == "input" and name or row[2], out.dtype)
          assert.are.equal(where, out.device)
        end
      end)
    end

    it(title:format "rounds no result of the float32 list to the half dtype", function()
      local x = ms.ones(1001, { dtype = "bfloat16", device = where, requires_grad = true })
      local sum, running, power = amp.autocast("bfloat16", function() return x:sum(), x:cumsum(), (x * 3):pow(7) end)
      assert.are.equal(1001, sum:item())
      assert.are.equal(1001, running[1001]:item())
      assert.are.equal(2187, power[1]:item())
      sum:backward()
      assert.are.equal("bfloat16", x.grad.dtype)
      assert.is_true(x.grad:eq(1):all():item())
    end)
  end

  it("uses both dtypes in one block, and gives gradients in the parameters' dtype", function()
    ms.manual_seed(1)
    local block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    local x, y = f32(6, 8), ms.randint(0, 4, { 6 })
    local loss = amp.autocast("bfloat16", function() return nn.F.cross_entropy(block(x), y) end)
    loss:backward()
    local reference = ms.deepcopy(block)
    reference:zero_grad()
    nn.F.cross_entropy(reference(x), y):backward()
    for name, p in block:named_parameters() do
      assert.are.equal("float32", p.grad.dtype)
      local error = (p.grad - reference:get_parameter(name).grad):norm():item()
      assert.is_true(error > 0 and error < 0.03 * (reference:get_parameter(name).grad:norm():item() + 0.1), name .. " "
        .. error)
    end
  end)

  it("ends with its function, also by an error, and nests", function()
    local a, b = f32(2, 2), f32(2, 2)
    local function dtype() return a:matmul(b).dtype end
    assert.are.equal("float32", dtype())
    amp.autocast("bfloat16", function()
      assert.are.equal("bfloat16", dtype())
      assert.are.equal("float16", amp.autocast("float16", dtype))
      assert.are.equal("float32", amp.autocast(nil, dtype))
      assert.are.equal("bfloat16", dtype())
    end)
    assert.are.equal("float32", dtype())
    assert.matches("no!", failure(amp.autocast, "bfloat16", function() error "no!" end))
    assert.are.equal("float32", dtype())
    local x, y, z = amp.autocast("bfloat16", function(...) return ... end, 1, nil, 3)
    assert.are.same({ 1, 3 }, { x, z })
    assert.is_nil(y)
  end)

  it("does not cast float64, integers or operands changed in place", function()
    amp.autocast("bfloat16", function()
      local d = ms.randn(2, 2, { dtype = "float64" })
      assert.are.equal("float64", d:matmul(d).dtype)
      assert.are.equal("float64", d:softmax(1).dtype)
      local k = ms.ones(2, 2, { dtype = "int64" })
      assert.are.equal("int64", k:matmul(k).dtype)
      assert.are.equal("int64", k:sum().dtype)
      assert.are.equal("float64", d:exp():sum().dtype)
      assert.are.equal("float32", ms.zeros(2):add_(half(2)).dtype)
      assert.are.equal("bfloat16", half(2):pow_(2).dtype)
    end)
  end)

  it("recomputes a checkpoint in the dtypes of its forward", function()
    ms.manual_seed(1)
    local w = nn.Parameter(f32(4, 4))
    local x = f32(2, 4)
    local dtypes = {}
    local function region(t)
      local out = t:matmul(w)
      dtypes[#dtypes + 1] = out.dtype
      return out:float()
    end
    amp.autocast("bfloat16", function() return ms.checkpoint(region, x) end):sum():backward()
    assert.are.same({ "bfloat16", "bfloat16" }, dtypes)
    local grad = w.grad
    w.grad = nil
    amp.autocast("bfloat16", function() return region(x) end):sum():backward()
    assert.is_true(grad:equal(w.grad))
  end)

  it("says whether it is on, with its dtype", function()
    assert.are.same({ false }, { amp.is_autocast_enabled() })
    amp.autocast("float16", function()
      assert.are.same({ true, "float16" }, { amp.is_autocast_enabled() })
      amp.autocast(nil, function() assert.are.same({ false }, { amp.is_autocast_enabled() }) end)
    end)
  end)

  it("of forward holds in the backward of a function that custom_fwd and custom_bwd wrap", function()
    local seen = {}
    local function note(_, x)
      seen[#seen + 1] = ("%s %s"):format(select(2, amp.is_autocast_enabled()) or "off", x.dtype)
      return x * 1
    end
    local kept = ms.Function { forward = amp.custom_fwd(note), backward = amp.custom_bwd(note) }
    local cast = ms.Function {
      forward = amp.custom_fwd(note, { cast_inputs = "float32" }), backward = amp.custom_bwd(note),
    }
    local x = half(2):requires_grad_()
    amp.autocast("bfloat16", kept, x):sum():backward()
    amp.autocast("bfloat16", cast, x):sum():backward()
    kept(x):sum():backward()
    cast(x):sum():backward()                            -- without autocast, inputs stay as they are
    assert.are.same({ "bfloat16 bfloat16", "bfloat16 bfloat16", "off float32", "off float32",
      "off bfloat16", "off bfloat16", "off bfloat16", "off bfloat16" }, seen)
    assert.are.equal("bfloat16", x.grad.dtype)
    local ids = ms.ones(2, { dtype = "int64" })
    local both = ms.Function {
      forward = amp.custom_fwd(function(_, i, d) return i.dtype .. " " .. d.dtype end, { cast_inputs = "float16" }),
      backward = function() end,
    }
    assert.are.equal("int64 float64", amp.autocast("bfloat16", both, ids, ms.ones(1, { dtype = "float64" })))
    assert.matches("no!", failure(amp.autocast, "bfloat16", ms.Function {
      forward = amp.custom_fwd(function() error "no!" end, { cast_inputs = "float32" }), backward = function() end }))
    assert.are.same({ false }, { amp.is_autocast_enabled() })
    assert.matches("custom_fwd: argument 1 is nil, expected a function", failure(amp.custom_fwd))
    assert.matches("custom_bwd: argument 1 is a number %(1%), expected a function", failure(amp.custom_bwd, 1))
    assert.matches("option 'cast_inputs' is .*int64.*, expected a floating point dtype",
      failure(amp.custom_fwd, print, { cast_inputs = "int64" }))
  end)

  it("accepts only half dtypes", function()
    assert.matches("dtype is 'float32', expected one of 'bfloat16', 'float16'",
      failure(amp.autocast, "float32", function() end))
    assert.matches("argument 2 is nil, expected a function", failure(amp.autocast, "float16"))
  end)
end)
