-- SPDX-License-Identifier: MIT
--- The divergences that the library registers, by pairs of classes.
local ops = require "moonshard.tensor.ops"

--- Registers them.
---@param D moonshard.distributions
return function(D)
  local register = D.register_kl

  register(D.Normal, D.Normal, function(p, q)
    local ratio = (p.scale / q.scale):square()
    return (ratio + ((p.loc - q.loc) / q.scale):square() - 1 - ratio:log()) * 0.5
  end)
  register(D.LogNormal, D.LogNormal, function(p, q)
    return D.kl_divergence(D.Normal(p.loc, p.scale, { validate_args = false }),
      D.Normal(q.loc, q.scale, { validate_args = false }))
  end)
  register(D.HalfNormal, D.HalfNormal, function(p, q)
    local ratio = (p.scale / q.scale):square()
    return (ratio - 1 - ratio:log()) * 0.5
  end)
  register(D.Uniform, D.Uniform, function(p, q)
    local inside = q.low:le(p.low):logical_and(q.high:ge(p.high))
    return ops.where(inside, ((q.high - q.low) / (p.high - p.low)):log(), math.huge)
  end)
  -- Probabilities of 0 contribute 0, and infinity where q's is 0 and p's is not; as PyTorch, from probs and logits.
  register(D.Bernoulli, D.Bernoulli, function(p, q)
    local P, Q, zp, zq = p.probs, q.probs, p.logits, q.logits
    local one = P * ((-zq):softplus() - (-zp):softplus())
    one = ops.where(P:eq(0), 0, ops.where(Q:eq(0), math.huge, one))
    local zero = (1 - P) * (zq:softplus() - zp:softplus())
    zero = ops.where(P:eq(1), 0, ops.where(Q:eq(1), math.huge, zero))
    return one + zero
  end)
  local function categorical(p, q)
    local P, Q = p.probs, q.probs
    local t = P * (p.logits - q.logits)
    t = ops.where(Q:eq(0), math.huge, t)
    return ops.where(P:eq(0), 0, t):sum(-1)
  end
  register(D.Categorical, D.Categorical, categorical)
  register(D.OneHotCategorical, D.OneHotCategorical, categorical)
  register(D.Geometric, D.Geometric, function(p, q) return -p:entropy() - (-q.probs):log1p() / p.probs - q.logits end)
end
