-- SPDX-License-Identifier: MIT
--- Losses and distances, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local F = ms.nn.F

local function ids(list) return ms.tensor(list, { dtype = "int64" }) end
-- A constant in the dtype of the inputs.
local function like(x, list) return ms.tensor(list, { dtype = x.dtype }) end
local function with(fn, options) return function(x, y, z) return z and fn(x, y, z, options) or fn(x, y, options) end end

local CLASSES, WEIGHT = { 1, 0, 4, 2 }, { 0.5, 1, 2, 0.7, 1.5 }
local SIGN, SIGNS = { 1, -1, -1, 1 }, { { 1, -1, 1 }, { -1, 1, 1 }, { 1, 1, -1 }, { -1, -1, 1 } }
local COUNTS = { { 0, 1, 2 }, { 5, 3, 0 }, { 1, 1, 4 }, { 2, 7, 0 } }
local IMAGE = { { { 0, 2 }, { 1, 1 } }, { { 2, 2 }, { 0, -100 } } }

local FACTORS = { { 1, 2, 0 }, { 0.5, 1, 3 }, { 2, 2, 1 }, { 0, 1, 0.25 } }
local function weighted(fn, options)
  return function(x, y)
    local given = { weight = like(x, FACTORS) }
    for name, value in pairs(options or {}) do given[name] = value end
    return fn(x, y, given)
  end
end

local cases = {
  l1 = F.l1_loss, l1_sum = with(F.l1_loss, { reduction = "sum" }), l1_none = with(F.l1_loss, { reduction = "none" }),
  smooth_l1 = F.smooth_l1_loss, smooth_l1_beta = with(F.smooth_l1_loss, { beta = 0.4 }),
  smooth_l1_zero = with(F.smooth_l1_loss, { beta = 0 }),
  mse_weight = weighted(F.mse_loss), l1_weight = weighted(F.l1_loss),
  mse_weight_none = weighted(F.mse_loss, { reduction = "none" }), l1_weight_sum = weighted(F.l1_loss, { reduction = "sum" }),
  huber_weight = weighted(F.huber_loss, { delta = 0.4 }),
  huber = F.huber_loss, huber_delta = with(F.huber_loss, { delta = 0.4 }),
  bce = F.binary_cross_entropy,
  bce_weight = function(x, y) return F.binary_cross_entropy(x, y, { weight = like(x, { 0.5, 1, 2 }) }) end,
  bce_logits = F.binary_cross_entropy_with_logits,
  bce_logits_weights = function(x, y)
    return F.binary_cross_entropy_with_logits(x, y, { weight = like(x, { 0.5, 1, 2 }),
      pos_weight = like(x, { 3, 1, 0.5 }) })
  end,
  nll = function(x) return F.nll_loss(x, ids(CLASSES)) end,
  nll_weight = function(x) return F.nll_loss(x, ids(CLASSES), { weight = like(x, WEIGHT) }) end,
  nll_none = function(x) return F.nll_loss(x, ids(CLASSES), { weight = like(x, WEIGHT), reduction = "none" }) end,
  nll_ignore = function(x) return F.nll_loss(x, ids(CLASSES), { weight = like(x, WEIGHT), ignore_index = 4 }) end,
  nll_image = function(x) return F.nll_loss(x, ids(IMAGE)) end,
  cross_entropy = function(x) return F.cross_entropy(x, ids(CLASSES)) end,
  cross_entropy_smoothing = function(x)
    return F.cross_entropy(x, ids(CLASSES), { weight = like(x, WEIGHT), label_smoothing = 0.1 })
  end,
  cross_entropy_ignore = function(x)
    return F.cross_entropy(x, ids(CLASSES), { weight = like(x, WEIGHT), ignore_index = 4, label_smoothing = 0.2,
      reduction = "none" })
  end,
  cross_entropy_image = function(x)
    return F.cross_entropy(x, ids(IMAGE), { label_smoothing = 0.1, reduction = "sum" })
  end,
  cross_entropy_shares = function(x, y)
    return F.cross_entropy(x, y:softmax(2), { weight = like(x, WEIGHT), label_smoothing = 0.1 })
  end,
  kl = with(F.kl_div, { reduction = "batchmean" }), kl_mean = F.kl_div,
  kl_log = with(F.kl_div, { reduction = "sum", log_target = true }),
  poisson = function(x) return F.poisson_nll_loss(x, like(x, COUNTS)) end,
  poisson_full = function(x) return F.poisson_nll_loss(x, like(x, COUNTS), { log_input = false, full = true }) end,
  gaussian = F.gaussian_nll_loss,
  gaussian_full = with(F.gaussian_nll_loss, { full = true, eps = 0.5, reduction = "sum" }),
  multi_margin = function(x) return F.multi_margin_loss(x, ids(CLASSES)) end,
  multi_margin_square = function(x)
    return F.multi_margin_loss(x, ids(CLASSES), { p = 2, margin = 0.5, weight = like(x, WEIGHT) })
  end,
  cosine_embedding = function(x, y) return F.cosine_embedding_loss(x, y, like(x, SIGN)) end,
  cosine_embedding_margin = function(x, y)
    return F.cosine_embedding_loss(x, y, like(x, SIGN), { margin = 0.3, reduction = "none" })
  end,
  margin_ranking = function(x, y) return F.margin_ranking_loss(x, y, like(x, SIGNS), { margin = 0.5 }) end,
  hinge_embedding = function(x) return F.hinge_embedding_loss(x, like(x, SIGNS)) end,
  soft_margin = function(x) return F.soft_margin_loss(x, like(x, SIGNS)) end,
  triplet = F.triplet_margin_loss,
  triplet_swap = with(F.triplet_margin_loss, { margin = 2, p = 1, swap = true, reduction = "none" }),
  normalize = F.normalize, normalize_first = function(x) return F.normalize(x, { p = 1, dim = 1 }) end,
  cosine_similarity = F.cosine_similarity,
  pairwise_distance = F.pairwise_distance, pairwise_distance_p = with(F.pairwise_distance, { p = 1, keepdim = true }),
}

golden_cases("losses", cases)
