-- SPDX-License-Identifier: MIT
--- Embeddings of texts: from a model's hidden states to one vector a text, and the loss by which they are learned over
--- ranks.
require "moonshard.autograd.methods"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local F = require("moonshard.nn").F
local functions = require "moonshard.autograd.function"
local opts = require "moonshard.core.opts"
local a_tensor = require("moonshard.tensor").a_tensor

local M = {}

--- The mean of each text's hidden states over its tokens, as of sentence encoders.
---@param x Tensor  [B, T, C]
---@param attention_mask? Tensor  [B, T], 0 or false where a text is padded
---@return Tensor  [B, C]
function M.mean_pool(x, attention_mask)
  opts.expect(x, a_tensor, "hf.mean_pool: argument 1")
  opts.need(x.ndim == 3, x, "hidden states [B, T, C]", "hf.mean_pool: argument 1")
  if attention_mask == nil then return x:mean(2) end
  opts.expect(attention_mask, a_tensor, "hf.mean_pool: argument 2")
  if attention_mask.ndim ~= 2 or attention_mask:size(1) ~= x:size(1) or attention_mask:size(2) ~= x:size(2) then
    errors.raise("hf.mean_pool: the mask has shape %s, expected [%d, %d]", tostring(attention_mask.shape), x:size(1),
      x:size(2))
  end
  local weights = attention_mask:ne(0):to(x.dtype):unsqueeze(3)
  return (x * weights):sum(2) / weights:sum(2):clamp(1)
end

-- The rows of all ranks, in rank order. Every rank's loss depends on them, so their gradients are summed over ranks.
local all_rows = functions.Function {
  forward = function(ctx, x, group)
    ctx.group = group
    local shape = x.shape
    shape[1] = shape[1] * dist.world_size(group)
    local all = create.empty(shape, { dtype = x.dtype, device = x.device })
    dist.all_gather(all, x:contiguous(), { group = group })
    return all
  end,
  backward = function(ctx, g)
    local shape = g.shape
    shape[1] = shape[1] / dist.world_size(ctx.group)
    local own = create.empty(shape, { dtype = g.dtype, device = g.device })
    dist.reduce_scatter(own, g:contiguous(), { group = ctx.group })
    return own, nil
  end,
}

--- The contrastive loss of pairs (van den Oord et al. 2018, "InfoNCE"): of the rows of b on all ranks, row k of a has to
--- find row k of its own rank, by the cosine over the temperature. Gradients pass through all ranks' rows; with the
--- mean over ranks, which DDP and fully_shard take, they are those of one process with the whole batch. Collective.
---@param a Tensor  [B, C]: queries; the same B on every rank
---@param b Tensor  [B, C], or [n B, C] with further rows that belong to no query: hard negatives
---@param given? { temperature: number, group: Group, symmetric: boolean }  temperature: default 0.05; symmetric: rows of
---   b also have to find those of a, and the loss is the mean of both (default false)
---@return Tensor  the mean over this rank's queries []
function M.contrastive_loss(a, b, given)
  local who = "hf.contrastive_loss"
  opts.expect(a, a_tensor, "%s: argument 1", who)
  opts.expect(b, a_tensor, "%s: argument 2", who)
  local o = opts(who, given, { temperature = opts.option(opts.positive, 0.05), group = opts.any, symmetric = false })
  if a.ndim ~= 2 or b.ndim ~= 2 or a:size(2) ~= b:size(2) or b:size(1) < a:size(1) then
    errors.raise("%s: the rows have shapes %s and %s, expected [B, C] and at least as many rows of C numbers", who,
      tostring(a.shape), tostring(b.shape))
  end
  if o.symmetric and a:size(1) ~= b:size(1) then
    errors.raise("%s: option 'symmetric' needs as many rows of both, got %d and %d", who, a:size(1), b:size(1))
  end
  local n, rank = a:size(1), dist.rank(o.group)
  a, b = F.normalize(a, { dim = 2 }), F.normalize(b, { dim = 2 })
  local function loss(of, others)
    local first = rank * others:size(1)
    local logits = of:matmul(all_rows(others, o.group):t()) / o.temperature
    return F.cross_entropy(logits, create.arange(first, first + n, { dtype = "int64", device = a.device }))
  end
  if not o.symmetric then return loss(a, b) end
  return (loss(a, b) + loss(b, a)) / 2
end

return M
