-- SPDX-License-Identifier: MIT
--- Methods of tensors that are functions of ms, too, with the tensor as first argument: `ms.exp(x)` is `x:exp()`.
--- Those that rows of operators describe, and those in a list; activations that are not in the list are functions of
--- nn.F, but not of ms.
local opts = require "moonshard.core.opts"
local rows = require "moonshard.tensor.rows"
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
for _, name in ipairs(rows.names) do
  if not rows.activations[name] and not name:find "_$" then M[name] = tensor.methods[name] end
end
for name in ([[
  add addmm allclose aminmax argmax argmin argsort argwhere baddbmm bernoulli bincount bmm broadcast_to
  bucketize cdist chunk clamp count_nonzero cross cummax cummin diag diag_embed diagonal diff div dot equal
  flatten flip histc index_add index_copy index_fill index_put index_select isclose kron kthvalue lerp logit
  masked_fill masked_scatter masked_select matmul max median min mm mode moveaxis movedim msort mul multinomial mv
  nan_to_num nanmean nanmedian nanquantile nansum narrow nonzero norm outer permute put quantile relu renorm
  repeat_interleave reshape roll rot90 round scatter scatter_add scatter_reduce searchsorted select sigmoid
  sort split square squeeze sub swapaxes swapdims take take_along_dim tanh tensor_split tensordot tile topk
  trace transpose true_divide unbind unflatten unique unique_consecutive unsqueeze cholesky cholesky_inverse
  cholesky_solve det inverse logdet matrix_exp matrix_power pinverse qr slogdet svd as_strided mvlgamma
  polygamma]]):gmatch "%S+" do
  M[name] = assert(tensor.methods[name], name)
end

M.linalg = linalg
M.fft = require "moonshard.tensor.special.fft"

return M
