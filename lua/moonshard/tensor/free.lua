-- SPDX-License-Identifier: MIT
--- Methods of tensors that are functions of ms, too, with the tensor as first argument: `ms.exp(x)` is `x:exp()`.
--- Activations that are not in the list are functions of nn.F, but not of ms.
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
require "moonshard.tensor.functions"
require "moonshard.tensor.products"
require "moonshard.tensor.summaries"
require "moonshard.tensor.draws"
require "moonshard.tensor.index"
require "moonshard.tensor.order"
require "moonshard.tensor.diagonals"
local linalg = require "moonshard.tensor.special.linalg"

opts.seal(tensor.methods)
opts.seal(linalg)

local M = {}
for name in ([[
  abs acos acosh add addcdiv addcmul addmm all allclose amax amin aminmax any argmax argmin argsort
  argwhere asin asinh atan atan2 atanh baddbmm bernoulli bincount bitwise_and bitwise_not bitwise_or
  bitwise_xor bmm broadcast_to bucketize cdist ceil chunk clamp clone copysign cos cosh count_nonzero
  cross cummax cummin cumprod cumsum diag diag_embed diagonal diff div dot eq equal erf erfc erfinv
  exp exp2 expm1 flatten flip floor floor_divide fmod frac gather ge gt histc hypot index_add index_copy
  index_fill index_put index_select isclose isfinite isinf isnan kron kthvalue le lerp log log10 log1p
  log2 log_softmax logaddexp logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp
  lt masked_fill masked_scatter masked_select matmul max maximum mean median min minimum mm mode moveaxis
  movedim msort mul multinomial mv nan_to_num nanmean nanmedian nanquantile nansum narrow ne neg nonzero
  norm outer permute pow prod put quantile reciprocal relu remainder renorm repeat_interleave reshape roll
  rot90 round rsqrt scatter scatter_add scatter_reduce searchsorted select sigmoid sign sin sinh softmax
  sort split sqrt square squeeze std sub sum swapaxes swapdims take take_along_dim tan tanh tensor_split
  tensordot tile topk trace transpose tril triu true_divide trunc unbind unflatten unique
  unique_consecutive unsqueeze var xlogy
  cholesky cholesky_inverse cholesky_solve det inverse logdet matrix_exp matrix_power pinverse qr slogdet
  svd as_strided digamma lgamma mvlgamma polygamma]]):gmatch "%S+" do
  M[name] = assert(tensor.methods[name], name)
end

M.linalg = linalg
M.fft = require "moonshard.tensor.special.fft"

return M
