-- SPDX-License-Identifier: MIT
--- Single operators, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
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
golden_cases("ops", cases, { attention_masked = "attention_causal" })
