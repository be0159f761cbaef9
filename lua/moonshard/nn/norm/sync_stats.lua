-- SPDX-License-Identifier: MIT
--- Statistics of batch norm over the ranks of a group, for SyncBatchNorm. Forward and backward make one collective
--- each: of two numbers per channel, in forward also of the number of elements.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local dist = require "moonshard.dist"
local errors = require "moonshard.core.errors"
local functional = require "moonshard.nn.functional"
local functions = require "moonshard.autograd.function"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local shapes = require "moonshard.tensor.shape"

-- Computes the mean and biased variance of every channel over all ranks, and the number of elements of a channel, from
-- these three values of each rank (Chan, Golub and LeVeque 1979). A rank's share of the elements is its weight in the
-- means; with m the mean over all ranks,
--   mean = sum of share_r mean_r,  var = sum of share_r (var_r + (mean_r - m)^2)
local combine = functions.Function {
  forward = function(ctx, mean, var, count, group)
    local kind, C = { dtype = mean.dtype, device = mean.device }, mean:numel()
    local all = create.empty(dist.world_size(group), 2 * C + 1, kind)
    dist.all_gather(all, shapes.cat({ mean, var, create.full({ 1 }, count, kind) }, 1), { group = group })
    local means, counts = all:narrow(2, 1, C), all:narrow(2, 2 * C + 1, 1)
    local total = counts:sum()
    local share = counts / total
    local whole = (means * share):sum(1)
    local off = means - whole
    local me = dist.rank(group) + 1
    ctx.group = group
    ctx:save(share:select(1, me), off:select(1, me))
    return whole, ((all:narrow(2, C + 1, C) + off * off) * share):sum(1), total
  end,
  -- The loss of every rank depends on the statistics, so their gradients are summed over ranks.
  backward = function(ctx, g_mean, g_var)
    local share, off = ctx:saved()
    local C, both = g_mean:numel(), shapes.cat({ g_mean, g_var }, 1)
    dist.all_reduce(both, { group = ctx.group })
    g_mean, g_var = both:narrow(1, 1, C), both:narrow(1, C + 1, C)
    return share * (g_mean + off * g_var * 2), share * g_var, nil, nil
  end,
}

--- Normalises with the statistics of all ranks' batches, and mixes them, with the unbiased variance, into the running
--- statistics. Every rank of the group makes the call, with a batch of any size, 0 included.
---@param x Tensor  [N, C, ...]
---@param running { mean: Tensor?, var: Tensor?, factor: number }  factor: the weight of the batch
---@param layer { weight: Tensor?, bias: Tensor?, eps: number, group: Group? }
---@return Tensor
return function(x, running, layer)
  return scope.scope(function()
    local n, own_mean, own_var = x:size(2) > 0 and x:numel() / x:size(2) or 0, ops.batch_norm_stats(x)
    local mean, var, total = combine(own_mean, own_var, n, layer.group)
    -- The number of elements on all ranks is read only if this rank has at most one: a read waits for the device, and a
    -- captured step cannot read. If there is at most one element in all, every rank reads it, and raises.
    if n <= 1 and x:size(2) > 0 and total:item() <= 1 then
      errors.raise("batch_norm: Expected more than 1 value per channel when training, got input size %s, and a total of %d over all ranks",
        tostring(x.shape), total:item())
    end
    autograd.no_grad(function()
      functional.mix(running.mean, mean, running.factor, 1)
      functional.mix(running.var, var * (total / (total - 1)), running.factor, 1)
    end)
    return (ops.batch_norm(x, layer.weight, layer.bias, mean, var, false, layer.eps))
  end)
end
