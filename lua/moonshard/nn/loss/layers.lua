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

local M = { CrossEntropyLoss = CrossEntropyLoss, MSELoss = MSELoss }

-- The annotations are those of the functions (tools/families.lua).
---@like L1Loss nn.F.l1_loss(given)
---@like SmoothL1Loss nn.F.smooth_l1_loss(given)
---@like HuberLoss nn.F.huber_loss(given)
---@like BCELoss nn.F.binary_cross_entropy(given)
---@like BCEWithLogitsLoss nn.F.binary_cross_entropy_with_logits(given)
---@like NLLLoss nn.F.nll_loss(given)
---@like KLDivLoss nn.F.kl_div(given)
---@like PoissonNLLLoss nn.F.poisson_nll_loss(given)
---@like GaussianNLLLoss nn.F.gaussian_nll_loss(given)
---@like MultiMarginLoss nn.F.multi_margin_loss(given)
---@like CosineEmbeddingLoss nn.F.cosine_embedding_loss(given)
---@like MarginRankingLoss nn.F.margin_ranking_loss(given)
---@like HingeEmbeddingLoss nn.F.hinge_embedding_loss(given)
---@like SoftMarginLoss nn.F.soft_margin_loss(given)
---@like TripletMarginLoss nn.F.triplet_margin_loss(given)
---@like CosineSimilarity nn.F.cosine_similarity(given)
---@like PairwiseDistance nn.F.pairwise_distance(given)
---@like CTCLoss nn.F.ctc_loss(given)
for name, fn in pairs { L1Loss = "l1_loss", SmoothL1Loss = "smooth_l1_loss", HuberLoss = "huber_loss",
  BCELoss = "binary_cross_entropy", BCEWithLogitsLoss = "binary_cross_entropy_with_logits", NLLLoss = "nll_loss",
  KLDivLoss = "kl_div", PoissonNLLLoss = "poisson_nll_loss", GaussianNLLLoss = "gaussian_nll_loss",
  MultiMarginLoss = "multi_margin_loss", CosineEmbeddingLoss = "cosine_embedding_loss",
  MarginRankingLoss = "margin_ranking_loss", HingeEmbeddingLoss = "hinge_embedding_loss",
  SoftMarginLoss = "soft_margin_loss", TripletMarginLoss = "triplet_margin_loss",
  CosineSimilarity = "cosine_similarity", PairwiseDistance = "pairwise_distance" } do
  M[name] = of_function(name, functions[fn])
end
M.CTCLoss = of_function("CTCLoss", require "moonshard.nn.loss.ctc".ctc_loss)

local init_triplet = M.TripletMarginLoss.init
function M.TripletMarginLoss:init(given)
  init_triplet(self, given)
  opts.expect(self.options.margin or 1, opts.positive, "TripletMarginLoss: option 'margin'")
end

return M
