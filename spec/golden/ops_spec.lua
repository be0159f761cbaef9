-- SPDX-License-Identifier: MIT
--- Single operators, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local F = ms.nn.F

local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

local function sdpa(q, k, v, o) return F.scaled_dot_product_attention(q, k, v, o) end

local cases = {
  relu = F.relu, gelu = F.gelu, silu = F.silu, sigmoid = F.sigmoid, tanh = F.tanh,
  gelu_tanh = function(x) return F.gelu(x, { approximate = "tanh" }) end,
  softmax = function(x) return F.softmax(x, -1) end,
  log_softmax = function(x) return F.log_softmax(x, -1) end,
  linear = F.linear,
  layer_norm = function(x, g, b) return F.layer_norm(x, 7, g, b, { eps = 1e-5 }) end,
  rms_norm = function(x, g) return F.rms_norm(x, g, { eps = 1e-6 }) end,
  cross_entropy_mean = function(x) return F.cross_entropy(x, ids { 2, 0, 6 }) end,
  cross_entropy_sum = function(x) return F.cross_entropy(x, ids { 2, 0, 6 }, { reduction = "sum" }) end,
  cross_entropy_ignore = function(x) return F.cross_entropy(x, ids { 2, -100, 6 }) end,
  cross_entropy_smooth = function(x) return F.cross_entropy(x, ids { 2, 0, 6 }, { label_smoothing = 0.1 }) end,
  mse = F.mse_loss,
  attention = sdpa,
  attention_causal = function(q, k, v) return sdpa(q, k, v, { is_causal = true }) end,
  attention_masked = function(q, k, v)
    return sdpa(q, k, v, { attn_mask = ms.ones(5, 5, { dtype = "bool" }):tril() })
  end,
  batch_norm_train = function(x, g, b)
    return F.batch_norm(x, ms.zeros(7, { dtype = x.dtype }), ms.ones(7, { dtype = x.dtype }), g, b, { training = true })
  end,
  conv2d = function(x, w) return F.conv2d(x, w, { stride = 2, padding = 1 }) end,
  norm2 = function(x) return x:norm(2) end,
  cumsum = function(x) return x:cumsum(-1) end,
  logsumexp = function(x) return x:logsumexp(-1) end,
  std = function(x) return x:std(-1) end,
  prod_broadcast = function(a, b) return a * b:narrow(1, 1, 1) + a / (b + 2) end,
}
local same_as = { attention_masked = "attention_causal" }

describe("golden operators", function()
  if not golden.folder then
    pending("needs reference data, which is missing (MOONSHARD_GOLDEN names its folder)")
    return
  end
  local reference = golden.load "ops"

  it("are all known here", function()
    local unknown = {}
    for name in ms.sorted_pairs(reference.cases) do
      if not cases[name] then unknown[#unknown + 1] = name end
    end
    assert.are.equal("", table.concat(unknown, " "))
  end)

  for name, fn in ms.sorted_pairs(cases) do
    local case = reference.cases[same_as[name] or name]
    for _, kind in ipairs { { "float64", 1e-10, 1e-12 }, { "float32", 2e-5, 2e-6 } } do
      local dtype, rtol, atol = kind[1], kind[2], kind[3]
      it(("give PyTorch's output and gradients: %s in %s"):format(name, dtype), function()
        local inputs = {}
        for i, list in ipairs(case.inputs) do
          inputs[i] = ms.tensor(list, { dtype = dtype }):reshape(case.input_shapes[i]):requires_grad_(true)
        end
        local out = fn(unpack(inputs))
        assert.are.equal(table.concat(case.output_shape, ","), table.concat(out.shape, ","))
        golden.close_list("output", case.output, out, rtol, atol)
        out:backward(ms.tensor(case.grad_output, { dtype = dtype }):reshape(case.output_shape))
        for i, list in ipairs(case.input_grads) do
          golden.close_list("gradient " .. i, list, inputs[i].grad, rtol, atol * 10)
        end
      end)
    end
  end
end)
