-- SPDX-License-Identifier: MIT
--- Bags of embeddings and rotary positions, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local F = ms.nn.F

local ids = ms.tensor({ { 0, 3, 3, 1 }, { 2, 2, 4, 0 }, { 3, 3, 3, 3 } }, { dtype = "int64" })
local cases = {
  weighted = function(w, f) return F.embedding_bag(ids, w, { mode = "sum", per_sample_weights = f }) end,
  rotary = function(x) return F.rotary_embedding(x) end,
  rotary_interleaved = function(x)
    return F.rotary_embedding(x, { base = 500, offset = 3, interleaved = true })
  end,
}
for _, mode in ipairs { "sum", "mean", "max" } do
  cases[mode] = function(w) return F.embedding_bag(ids, w, { mode = mode }) end
  cases[mode .. "_padding"] = function(w) return F.embedding_bag(ids, w, { mode = mode, padding_idx = -3 }) end
end

golden_cases("embeddings", cases)
