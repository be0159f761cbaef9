-- SPDX-License-Identifier: MIT
--- Losses and distances as modules: functions of nn.F whose options are fixed in the constructor.
local tensor = require "moonshard.tensor"
local opts = require "moonshard.core.opts"
local functional = require "moonshard.nn.functional"
local functions = require "moonshard.nn.loss.functions"
local Module = require "moonshard.nn.module".Module

--- F.cross_entropy as a module: logits [N, C], [C] or [N, C, …], and class ids from 0 or probabilities of the logits'
--- shape.
---@class CrossEntropyLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", ignore_index: integer, label_smoothing: number, weight: Tensor }): CrossEntropyLoss
local CrossEntropyLoss = Module:extend("CrossEntropyLoss")

function CrossEntropyLoss:init(given)
  local o = opts("CrossEntropyLoss", given, functional.ce_options)
  if o.weight then self:register_buffer("weight", o.weight) end
  self.reduction, self.ignore_index, self.label_smoothing = o.reduction, o.ignore_index, o.label_smoothing
end

function CrossEntropyLoss:forward(logits, ids)
  local slots = self._slots
  return functional.cross_entropy(logits, ids, slots.weight, slots.reduction, slots.ignore_index, slots.label_smoothing)
end

function CrossEntropyLoss:extra_repr() return self.reduction end

--- F.mse_loss as a module: the squared differences of two tensors of one shape.
---@class MSELoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none" }): MSELoss
local MSELoss = Module:extend("MSELoss")

function MSELoss:init(given)
  self.reduction = opts("MSELoss", given, { reduction = functional.reduction }).reduction
end

function MSELoss:forward(a, b)
  local how = self._slots.reduction
  return functions.mse_loss(a, b, how ~= "mean" and { reduction = how } or nil)
end

function MSELoss:extra_repr() return self.reduction end

-- The class of modules that call a function of nn.F with fixed options as the last argument. Tensors among the options
-- become buffers. The function itself checks the options, whenever the module is called.
local function of_function(name, fn)
  local cls = Module:extend(name)
  function cls:init(given)
    if given ~= nil then opts.need(opts.is_plain(given), given, "a table", "%s: options", name) end
    local rest = {}
    for key, value in pairs(given or {}) do
      if tensor.is_tensor(value) then self:register_buffer(key, value) else rest[key] = value end
    end
    self.options = rest
  end
  function cls:forward(...)
    local slots, n = self._slots, select("#", ...)
    local options = {}
    for key, value in pairs(slots.options) do options[key] = value end
    for key, value in self:named_buffers() do options[key] = value end
    local arguments = { ... }
    arguments[n + 1] = options
    return fn(unpack(arguments, 1, n + 1))
  end
  function cls:extra_repr() return self.options.reduction or "" end
  return cls
end

--- F.l1_loss as a module: the absolute differences of two tensors of one shape.
---@class L1Loss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none" }): L1Loss
local L1Loss = of_function("L1Loss", functions.l1_loss)

--- F.smooth_l1_loss as a module.
---@class SmoothL1Loss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", beta: number }): SmoothL1Loss
---   beta: difference below which the loss is quadratic (default: 1)
local SmoothL1Loss = of_function("SmoothL1Loss", functions.smooth_l1_loss)

--- F.huber_loss as a module.
---@class HuberLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", delta: number }): HuberLoss
---   delta: difference up to which the loss is quadratic (default: 1)
local HuberLoss = of_function("HuberLoss", functions.huber_loss)

--- F.binary_cross_entropy as a module.
---@class BCELoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", weight: Tensor }): BCELoss
---   weight: factor of each element; broadcasts
local BCELoss = of_function("BCELoss", functions.binary_cross_entropy)

--- F.binary_cross_entropy_with_logits as a module.
---@class BCEWithLogitsLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", weight: Tensor, pos_weight: Tensor }): BCEWithLogitsLoss
---   weight: factor of each element; pos_weight: factor of the positive class; both broadcast
local BCEWithLogitsLoss = of_function("BCEWithLogitsLoss", functions.binary_cross_entropy_with_logits)

--- F.nll_loss as a module.
---@class NLLLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", weight: Tensor, ignore_index: integer }): NLLLoss
---   weight: [C], factor of each class; ignore_index: class that does not count (default: -100)
local NLLLoss = of_function("NLLLoss", functions.nll_loss)

--- F.ctc_loss as a module: called with log_probs, targets, input_lengths and target_lengths.
---@class CTCLoss: Module
---@overload fun(opts?: { blank: integer, reduction: "mean"|"sum"|"none", zero_infinity: boolean }): CTCLoss
---   blank: the class of the blank (default: 0); zero_infinity: infinite losses count as 0 (default: false)
local CTCLoss = of_function("CTCLoss", require "moonshard.nn.loss.ctc".ctc_loss)

--- F.kl_div as a module.
---@class KLDivLoss: Module
---@overload fun(opts?: { reduction: "mean"|"batchmean"|"sum"|"none", log_target: boolean }): KLDivLoss
---   log_target: the target is a logarithm (default: false)
local KLDivLoss = of_function("KLDivLoss", functions.kl_div)

--- F.poisson_nll_loss as a module.
---@class PoissonNLLLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", log_input: boolean, full: boolean, eps: number }): PoissonNLLLoss
---   log_input: the input is a logarithm (default: true); full: adds Stirling's approximation (default: false);
---   eps: added to the input before its logarithm is taken (default: 1e-8)
local PoissonNLLLoss = of_function("PoissonNLLLoss", functions.poisson_nll_loss)

--- F.gaussian_nll_loss as a module: called with input, target and variance.
---@class GaussianNLLLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", full: boolean, eps: number }): GaussianNLLLoss
---   full: adds log(2 pi) / 2 (default: false); eps: lower limit of the variance (default: 1e-6)
local GaussianNLLLoss = of_function("GaussianNLLLoss", functions.gaussian_nll_loss)

--- F.multi_margin_loss as a module.
---@class MultiMarginLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", p: integer, margin: number, weight: Tensor }): MultiMarginLoss
---   p: exponent, 1 or 2 (default: 1); margin: least difference of two scores without a loss (default: 1); weight: [C],
---   factor of each class
local MultiMarginLoss = of_function("MultiMarginLoss", functions.multi_margin_loss)

--- F.cosine_embedding_loss as a module: called with both inputs and the target.
---@class CosineEmbeddingLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", margin: number }): CosineEmbeddingLoss
---   margin: cosine above which pairs with target -1 have a loss, from -1 to 1 (default: 0)
local CosineEmbeddingLoss = of_function("CosineEmbeddingLoss", functions.cosine_embedding_loss)

--- F.margin_ranking_loss as a module: called with both inputs and the target.
---@class MarginRankingLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", margin: number }): MarginRankingLoss
---   margin: least difference of the inputs without a loss (default: 0)
local MarginRankingLoss = of_function("MarginRankingLoss", functions.margin_ranking_loss)

--- F.hinge_embedding_loss as a module.
---@class HingeEmbeddingLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", margin: number }): HingeEmbeddingLoss
---   margin: least distance without a loss where the target is -1 (default: 1)
local HingeEmbeddingLoss = of_function("HingeEmbeddingLoss", functions.hinge_embedding_loss)

--- F.soft_margin_loss as a module.
---@class SoftMarginLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none" }): SoftMarginLoss
local SoftMarginLoss = of_function("SoftMarginLoss", functions.soft_margin_loss)

--- F.triplet_margin_loss as a module: called with anchor, positive and negative.
---@class TripletMarginLoss: Module
---@overload fun(opts?: { reduction: "mean"|"sum"|"none", margin: number, p: number, eps: number, swap: boolean }): TripletMarginLoss
---   margin: least difference of the distances without a loss (default: 1); p: exponent of the norm (default: 2); eps:
---   added to each difference (default: 1e-6); swap: takes the negative's distance from the positive if smaller
---   (default: false)
local TripletMarginLoss = of_function("TripletMarginLoss", functions.triplet_margin_loss)
local init_triplet = TripletMarginLoss.init

function TripletMarginLoss:init(given)
  init_triplet(self, given)
  opts.expect(self.options.margin or 1, opts.positive, "TripletMarginLoss: option 'margin'")
end

--- F.cosine_similarity as a module.
---@class CosineSimilarity: Module
---@overload fun(opts?: { dim: integer, eps: number }): CosineSimilarity
---   dim: from 1; negative from the end (default: 2); eps: lower limit of each norm (default: 1e-8)
local CosineSimilarity = of_function("CosineSimilarity", functions.cosine_similarity)

--- F.pairwise_distance as a module.
---@class PairwiseDistance: Module
---@overload fun(opts?: { p: number, eps: number, keepdim: boolean }): PairwiseDistance
---   p: exponent of the norm (default: 2); eps: added to each difference (default: 1e-6); keepdim: keeps the last
---   dimension with size 1 (default: false)
local PairwiseDistance = of_function("PairwiseDistance", functions.pairwise_distance)

return { CrossEntropyLoss = CrossEntropyLoss, MSELoss = MSELoss, L1Loss = L1Loss, SmoothL1Loss = SmoothL1Loss,
  HuberLoss = HuberLoss, BCELoss = BCELoss, BCEWithLogitsLoss = BCEWithLogitsLoss, NLLLoss = NLLLoss, KLDivLoss =
  KLDivLoss, PoissonNLLLoss = PoissonNLLLoss, GaussianNLLLoss = GaussianNLLLoss, MultiMarginLoss = MultiMarginLoss,
  CosineEmbeddingLoss = CosineEmbeddingLoss, MarginRankingLoss = MarginRankingLoss, HingeEmbeddingLoss =
  HingeEmbeddingLoss, SoftMarginLoss = SoftMarginLoss, TripletMarginLoss = TripletMarginLoss, CosineSimilarity =
  CosineSimilarity, PairwiseDistance = PairwiseDistance, CTCLoss = CTCLoss }
