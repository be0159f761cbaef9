-- SPDX-License-Identifier: MIT
--- Muon: steps of matrices with orthogonalized momentum.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local composed = require "moonshard.optim.composed"
local shards = require "moonshard.nn.module.shards"

local raise = errors.raise
local one_of, option = opts.one_of, opts.option

--- Muon (Jordan et al. 2024) for the matrices of hidden layers: the step is the momentum, made orthogonal by a quintic
--- Newton-Schulz iteration. Embeddings, heads, biases and gains are for another optimizer. A sharded matrix is gathered
--- for the iteration, which every rank computes.
---@class Muon: Optimizer
---@overload fun(params: Tensor[]|table[], opts: { lr: number, weight_decay: number, momentum: number, nesterov: boolean, ns_coefficients: number[], eps: number, ns_steps: integer, adjust_lr_fn: string, ns_dtype: string }): Muon
---   params: matrices [rows, columns]; lr: learning rate (default: 1e-3); weight_decay: lr times this times p is
---   subtracted from p (default: 0.1); momentum: share of the average gradient that is kept (default: 0.95); nesterov:
---   looks ahead by one step of momentum (default: true); ns_coefficients: three coefficients of the iteration
---   (default: { 3.4445, -4.775, 2.0315 }); eps: least norm that the momentum is divided by (default: 1e-7); ns_steps:
---   iterations (default: 5); adjust_lr_fn: lr is multiplied, for "original", by sqrt(max(1, rows / columns)), for
---   "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), for "spectral_unclamped" by sqrt(rows / columns) (default:
---   "original"); ns_dtype: dtype of the iteration (default: "bfloat16", as in PyTorch)
local Muon = composed.define("Muon", { "momentum_buffer" }, {
  lr = option(opts.number_from(0), 1e-3), weight_decay = option(opts.number_from(0), 0.1),
  momentum = option(opts.number_from(0), 0.95), nesterov = true, ns_coefficients = { 3.4445, -4.775, 2.0315 },
  eps = option(opts.number_from(0), 1e-7), ns_steps = option(opts.whole_from(0), 5),
  adjust_lr_fn = one_of({ "original", "match_rms_adamw", "spectral_unclamped" }, "original"),
  ns_dtype = one_of({ "bfloat16", "float16", "float32", "float64" }, "bfloat16"),
})

function Muon:_check_group(group)
  local c = group.ns_coefficients
  for k = 1, 3 do opts.expect(c[k], opts.number, "%s: ns_coefficients[%d]", self:class_name(), k) end
  if c[4] ~= nil then raise("%s: ns_coefficients has %d numbers, expected 3", self:class_name(), #c) end
end

local function shape_of(p) return rawget(p, "_whole_shape") or p.shape end

function Muon:_accept(p, k)
  local shape = shape_of(p)
  if #shape ~= 2 then
    raise("%s: parameter %d has shape %s, expected a matrix; give parameters that are not matrices to another optimizer%s", self:class_name(),
      k, tostring(shape), rawget(p, "_flat") and " (fsdp.FSDP needs use_orig_params = true)" or "")
  end
end

-- Makes the rows or the columns of a matrix about orthonormal: x = a x + (b x x^T + c (x x^T)^2) x, repeated.
local function orthogonal(group, matrix)
  local a, b, c = unpack(group.ns_coefficients)
  local x = matrix:to(group.ns_dtype)
  local tall = x:size(1) > x:size(2)
  if tall then x = x:t() end
  x = x / x:norm():clamp(group.eps)
  for _ = 1, group.ns_steps do
    local gram = x:matmul(x:t())
    x = x * a + (gram * b + gram:matmul(gram) * c):matmul(x)
  end
  return tall and x:t() or x
end

local FACTORS = {
  original = function(rows, columns) return math.sqrt(math.max(1, rows / columns)) end,
  match_rms_adamw = function(rows, columns) return 0.2 * math.sqrt(math.max(rows, columns)) end,
  spectral_unclamped = function(rows, columns) return math.sqrt(rows / columns) end,
}

function Muon._update(_, group, p, part, g, entry)
  local rest = 1 - group.momentum
  local buffer = entry.momentum_buffer or g:float() * 0
  if part.dtype == "float64" and not entry.momentum_buffer then buffer = buffer:double() end
  buffer:mul_(group.momentum):add_(g, { alpha = rest })
  entry.momentum_buffer = buffer
  local step = group.nesterov and g * rest + buffer * group.momentum or buffer
  local shape = shape_of(p)
  local whole = shards.whole(p, step:contiguous()):reshape(shape)
  local lr = group.lr * FACTORS[group.adjust_lr_fn](shape[1], shape[2])
  local own = shards.own(p, orthogonal(group, whole)):reshape(part.shape)
  part:mul_(1 - group.lr * group.weight_decay):add_(own:to(part.dtype), { alpha = -lr })
end

return { Muon = Muon }
