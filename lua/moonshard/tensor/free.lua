-- SPDX-License-Identifier: MIT
--- Methods of tensors that are functions of ms, too, with the tensor as first argument: `ms.exp(x)` is `x:exp()`.
--- Activations are functions of nn.F.
local tensor = require "moonshard.tensor"
require "moonshard.tensor.functions"
require "moonshard.tensor.products"
require "moonshard.tensor.summaries"
require "moonshard.tensor.draws"

local M = {}
for name in ([[
  abs acos acosh add addcdiv addcmul addmm all allclose amax amin aminmax any argmax argmin asin asinh atan
  atan2 atanh baddbmm bernoulli bincount bitwise_and bitwise_or bitwise_xor bmm broadcast_to cdist ceil chunk
  clamp clone copysign cos cosh count_nonzero cross cumsum diag diagonal diff div dot eq equal erf erfc erfinv
  exp exp2 expm1 flatten flip floor floor_divide fmod frac gather ge gt histc hypot index_select isclose
  isfinite isinf isnan kron le lerp log log10 log1p log2 logaddexp logical_and logical_not logical_or
  logical_xor logit logsumexp lt masked_fill matmul max maximum mean min minimum mm movedim moveaxis mul
  multinomial mv nan_to_num nanmean nansum narrow ne neg norm outer permute pow prod reciprocal remainder
  repeat_interleave reshape roll rot90 round rsqrt scatter select sign sin sinh split sqrt square squeeze std
  sub sum swapaxes swapdims take_along_dim tan tensor_split tensordot tile transpose tril triu trunc unbind
  unflatten unsqueeze var xlogy]]):gmatch "%S+" do
  M[name] = assert(tensor.methods[name], name)
end

return M
