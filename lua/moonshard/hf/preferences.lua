-- SPDX-License-Identifier: MIT
--- Pairs of a chosen and a rejected text for direct preference optimization (Rafailov et al. 2023, "DPO").
---
--- The reference's log-probabilities are computed once, before the first step, by the model itself: no second model is
--- held, and a step costs no further forward.
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local F = require("moonshard.nn").F
local no_grad = require("moonshard.autograd").no_grad
local pack = require("moonshard.text.packing").pack
local scores = require "moonshard.hf.scores"
local scope = require("moonshard.tensor.scope").scope

local M = {}

---@class TextPairs
---@field count integer  number of pairs
---@field cut integer  texts that were longer than a row, and lost their end
local TextPairs = { __name = "TextPairs" }
TextPairs.__index = TextPairs

--- Makes pairs of examples; the options are those of ms.text.pack.
---@param examples { chosen: table, rejected: table }[]
---@param given table
---@return TextPairs
function M.new(examples, given)
  local o, chosen, rejected = { separate = true }, {}, {}
  for name, value in pairs(given) do o[name] = value end
  for k, pair in ipairs(examples) do chosen[k], rejected[k] = pair.chosen, pair.rejected end
  local self = setmetatable({ chosen = pack(chosen, o), rejected = pack(rejected, o), _reference = {} }, TextPairs)
  self.count, self.cut, self.lost = self.chosen.count, self.chosen.cut + self.rejected.cut, {}
  local lost = {}
  for _, rows in ipairs { self.chosen, self.rejected } do
    for _, k in ipairs(rows.lost) do lost[k] = true end
  end
  for k = 1, #examples do self.lost[#self.lost + 1] = lost[k] and k or nil end
  -- The rows of a pair have the same number, so the two orders are the same.
  for k, row in ipairs(self.chosen._rows) do row.number, row.other = k, self.rejected._rows[k] end
  return self
end

-- Tensors of pairs: the chosen texts, then the rejected ones.
local function batch(self, rows)
  local others, reference = {}, {}
  for k, row in ipairs(rows) do others[k], reference[k] = row.other, self._reference[row.number] end
  local both = {}
  for _, list in ipairs { rows, others } do
    for _, row in ipairs(list) do both[#both + 1] = row end
  end
  local ids, given = self.chosen:_tensors(both)
  return ids, { targets = given.targets, reference = reference[1] and create.tensor(reference, { dtype = "float64" }) }
end

--- Part `part` of `parts` of this rank's share of a step: token ids, what loss reads, the part's pairs, and the step's.
function TextPairs:step(step, part, parts)
  local rows = self.chosen:_share(step, part, parts)
  local ids, given = batch(self, rows)
  return ids, given, #rows, self.chosen._o.batch
end

--- Iterates over all pairs once, this rank's share of them: ids, what loss reads, number of pairs, 0 for a batch that
--- only makes the ranks' numbers of batches equal.
function TextPairs:each(size)
  local lists = self.chosen:_lists(size or 4)
  return function()
    local rows, counts = lists()
    if not rows then return nil end
    local ids, given = batch(self, rows)
    return ids, given, counts and #rows or 0
  end
end

function TextPairs:__tostring() return ("TextPairs(%d pairs of at most %d tokens)"):format(self.count, self.chosen.length) end

--- Computes the log-probability ratios of all pairs with a model, which is the reference from then on. Collective.
---@param model Module
function TextPairs:remember(model)
  local training, sums = model.training, {}
  for k = 1, self.count do sums[k] = 0 end
  model:eval()
  no_grad(function()
    for rows, counts in self.chosen:_lists(4) do
      scope(function()
        local ids, given = batch(self, rows)
        local values = scores.log_probabilities(model, ids, given.targets):tolist()
        for k, row in ipairs(counts and rows or {}) do sums[row.number] = values[k] - values[#rows + k] end
      end)
    end
  end)
  model:train(training)
  local all = create.tensor(sums, { dtype = "float64" })
  if self.chosen._o.world > 1 then dist.all_reduce(all) end
  self._reference = all:tolist()
end

--- The mean over pairs of -log sigmoid(beta ((log p(chosen) - log p(rejected)) - the reference's difference)).
---@param model Module
---@param ids Tensor  of step or each
---@param given { targets: Tensor, reference: Tensor }
---@param beta number
---@return Tensor loss
---@return integer better  pairs whose chosen text the model prefers more than the reference does
function M.loss(model, ids, given, beta)
  local n = ids:size(1) / 2
  local sums = scores.log_probabilities(model, ids, given.targets)
  local margin = (sums:narrow(1, 1, n) - sums:narrow(1, n + 1, n) - given.reference:to(sums.dtype)) * beta
  return -F.logsigmoid(margin):mean(), margin:detach():gt(0):sum():item()
end

return M
