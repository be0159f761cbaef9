-- SPDX-License-Identifier: MIT
--- Elementwise functions and activations, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local F = ms.nn.F

local cases = {
  round_decimals = function(x) return x:round { decimals = 1 } end,
  elu_alpha = function(x) return F.elu(x, 1.7) end,
  celu_alpha = function(x) return F.celu(x, 1.7) end,
  softplus_beta = function(x) return F.softplus(x, { beta = 3, threshold = 5 }) end,
  leaky_relu_slope = function(x) return F.leaky_relu(x, 0.2) end,
  hardtanh_limits = function(x) return F.hardtanh(x, -0.5, 1.5) end,
  threshold = function(x) return F.threshold(x, 0.1, -3) end,
  prelu_one = F.prelu,
  glu_first = function(x) return F.glu(x, 1) end,
  softshrink_lambda = function(x) return F.softshrink(x, 1.2) end,
  hardshrink_lambda = function(x) return F.hardshrink(x, 1.2) end,
  lerp = function(a, b) return a:lerp(b, 0.3) end,
  lerp_high = function(a, b) return a:lerp(b, 0.8) end,
  lerp_tensor = function(a, b, w) return a:lerp(b, w) end,
  addcmul = function(a, b, c) return a:addcmul(b, c, { value = 0.7 }) end,
  addcdiv = function(a, b, c) return a:addcdiv(b, c, { value = 0.7 }) end,
  logit_eps = function(x) return x:logit { eps = 0.1 } end,
}
for name in ([[floor ceil trunc round frac square expm1 exp2 erf erfc tan atan sinh cosh asinh asin acos atanh erfinv
  log1p log2 log10 acosh fmod remainder atan2 hypot copysign maximum minimum logaddexp pow floor_divide xlogy
  logit]]):gmatch "%S+" do
  cases[name] = ms.Tensor.methods[name]
end
for name in ([[mish hardswish hardsigmoid softsign logsigmoid relu6 selu elu celu softplus leaky_relu hardtanh softmin
  prelu glu swiglu softshrink hardshrink tanhshrink]]):gmatch "%S+" do
  cases[name] = F[name]
end

golden_cases("functions", cases)
