-- SPDX-License-Identifier: MIT
--- EmbeddingBag and RotaryEmbedding.
local errors = require "moonshard.core.errors"
local functions = require "moonshard.nn.embedding.functions"
local opts = require "moonshard.core.opts"
local Embedding = require "moonshard.nn.embedding.embedding".Embedding
local Module = require "moonshard.nn.module".Module
local a_tensor = require "moonshard.tensor".a_tensor

--- F.embedding_bag as a module: looks up the rows of each bag of ids, [B, L], and reduces them to one, [B, d]. Called
--- with ids and, with mode "sum", the option per_sample_weights. The row of padding_idx starts as zeros, is left out of
--- the reduction and gets no gradient.
---@class EmbeddingBag: Embedding
---@field mode "sum"|"mean"|"max"  how the rows of a bag become one
---@overload fun(n: integer, d: integer, opts?: { mode: "sum"|"mean"|"max", padding_idx: integer, dtype: string, device: string }): EmbeddingBag
---   n: number of rows; ids are 0 to n - 1; d: size of a row; mode: how the rows of a bag become one (default: "mean");
---   padding_idx: row that is left out, from 0; negative from the end
local EmbeddingBag = Embedding:extend "EmbeddingBag"

---@param n integer  number of rows; ids are 0 to n - 1
---@param d integer  size of a row
function EmbeddingBag:init(n, d, given)
  local o = opts("EmbeddingBag", given, { mode = opts.one_of({ "sum", "mean", "max" }, "mean"),
    padding_idx = opts.whole, dtype = opts.string, device = opts.any })
  Embedding.init(self, n, d, { padding_idx = o.padding_idx, dtype = o.dtype, device = o.device })
  self.mode = o.mode
end

local PRETRAINED = { freeze = true, padding_idx = opts.whole, mode = opts.one_of({ "sum", "mean", "max" }, "mean") }

--- An EmbeddingBag whose weight shares the memory of a tensor. By default it is frozen: it gets no gradient.
---@param weights Tensor  [n, d], floating point
---@param given? { freeze: boolean, padding_idx: integer, mode: "sum"|"mean"|"max" }
---   freeze: the weight does not require a gradient (default: true); padding_idx: row that is left out, from 0;
---   negative from the end; mode: how the rows of a bag become one (default: "mean")
---@return EmbeddingBag
function EmbeddingBag.from_pretrained(weights, given, more)
  return Embedding._from_pretrained(EmbeddingBag, PRETRAINED, weights, given, more)
end

---@param ids Tensor  int64 [B, L]
---@param given? { per_sample_weights: Tensor }  per_sample_weights: [B, L], factors of the rows, only with "sum"
---@return Tensor  [B, d]
function EmbeddingBag:forward(ids, given)
  local slots = self._slots
  local o = opts("EmbeddingBag", given, { per_sample_weights = opts.any })
  return functions.embedding_bag(ids, slots.weight, { mode = slots.mode, padding_idx = slots.padding_idx,
    per_sample_weights = o.per_sample_weights })
end

function EmbeddingBag:extra_repr() return Embedding.extra_repr(self) .. ", " .. self.mode end

--- F.rotary_embedding as a module: rotates pairs of the features of queries or keys, [..., T, d], by their position.
--- Called with x and the option offset, the position of the first time step (default: 0). It has no parameters.
---@class RotaryEmbedding: Module
---@field d integer  features of x
---@field base number  base of the powers in the angles
---@field interleaved boolean  pairs adjacent features
---@overload fun(d: integer, opts?: { base: number, interleaved: boolean }): RotaryEmbedding
---   d: features of x, even; base: base of the powers in the angles (default: 10000); interleaved: pairs adjacent
---   features, not i and i + d / 2 (default: false)
local RotaryEmbedding = Module:extend "RotaryEmbedding"

---@param d integer  features of x, even
function RotaryEmbedding:init(d, given)
  local o = opts("RotaryEmbedding", given, { base = opts.option(opts.positive, 10000), interleaved = false })
  opts.need(opts.whole_from(2).test(d) and d % 2 == 0, d, "an even number from 2",
    "RotaryEmbedding: argument 1, the number of features,")
  self.d, self.base, self.interleaved = d, o.base, o.interleaved
end

---@param x Tensor  [..., T, d]
---@param given? { offset: integer }  offset: position of the first time step (default: 0)
---@return Tensor  of x's shape
function RotaryEmbedding:forward(x, given)
  local o = opts("RotaryEmbedding", given, { offset = 0 })
  opts.expect(x, a_tensor, "RotaryEmbedding: argument")
  if x.ndim < 2 or x:size(-1) ~= self.d then
    errors.raise("RotaryEmbedding: the input has shape %s, expected [..., T, %d]", tostring(x.shape), self.d)
  end
  return functions.rotary_embedding(x, { base = self.base, offset = o.offset, interleaved = self.interleaved })
end

function RotaryEmbedding:extra_repr()
  return ("%d, base %g%s"):format(self.d, self.base, self.interleaved and ", interleaved" or "")
end

return { EmbeddingBag = EmbeddingBag, RotaryEmbedding = RotaryEmbedding }
