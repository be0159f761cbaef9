-- SPDX-License-Identifier: MIT
--- The divergences that the library registers, by pairs of classes.
local errors = require "moonshard.core.errors"
local ops = require "moonshard.tensor.ops"

local EULER = 0.57721566490153286061

local function dirichlet(a, b)
  local sum_a, sum_b = a:sum(-1), b:sum(-1)
  return sum_a:lgamma() - sum_b:lgamma() - (a:lgamma() - b:lgamma()):sum(-1)
    + ((a - b) * (a:digamma() - sum_a:digamma():unsqueeze(-1))):sum(-1)
end

--- Registers the divergences of the library's pairs of classes.
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
  -- A value of probability 0 in p adds 0; one of probability 0 in q alone, infinity. As PyTorch, from probs and logits.
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
    local n, m = P.shape[P.ndim], Q.shape[Q.ndim]
    if n ~= m then errors.raise("kl_divergence: p has %d classes and q has %d, expected the same number", n, m) end
    -- Classes that p excludes are replaced before the product: -inf minus -inf and its gradient are nan even times 0.
    local excluded = P:eq(0)
    local t = P * ops.where(excluded, 0, p.logits - q.logits)
    return ops.where(excluded, 0, ops.where(Q:eq(0), math.huge, t)):sum(-1)
  end
  register(D.Categorical, D.Categorical, categorical)
  register(D.OneHotCategorical, D.OneHotCategorical, categorical)
  register(D.Geometric, D.Geometric, function(p, q) return -p:entropy() - (-q.probs):log1p() / p.probs - q.logits end)
  register(D.Laplace, D.Laplace, function(p, q)
    local ratio, distance = p.scale / q.scale, (p.loc - q.loc):abs()
    return distance / q.scale + ratio * (-distance / p.scale):exp() - ratio:log() - 1
  end)
  register(D.Cauchy, D.Cauchy, function(p, q)
    return ((p.scale + q.scale):square() + (p.loc - q.loc):square()):log() - (p.scale * q.scale * 4):log()
  end)
  register(D.Gumbel, D.Gumbel, function(p, q)
    local ratio, from = p.scale / q.scale, (p.loc - q.loc) / q.scale
    return from - ratio:log() + ratio * EULER + ((ratio + 1):lgamma() - from):exp() - (1 + EULER)
  end)
  register(D.Exponential, D.Exponential, function(p, q)
    local ratio = q.rate / p.rate
    return ratio - ratio:log() - 1
  end)
  register(D.Poisson, D.Poisson, function(p, q) return p.rate * (p.rate:log() - q.rate:log()) - (p.rate - q.rate) end)
  register(D.Gamma, D.Gamma, function(p, q)
    local a, b = p.concentration, q.concentration
    return b * (p.rate / q.rate):log() + b:lgamma() - a:lgamma() + (a - b) * a:digamma()
      + (q.rate - p.rate) * (a / p.rate)
  end)
  register(D.Dirichlet, D.Dirichlet, function(p, q) return dirichlet(p.concentration, q.concentration) end)
  register(D.Beta, D.Beta, function(p, q) return dirichlet(p:_both(), q:_both()) end)
  register(D.MultivariateNormal, D.MultivariateNormal, require "moonshard.distributions.multivariate"._divergence)
  register(D.Independent, D.Independent, function(p, q)
    local n = p.reinterpreted_batch_ndims
    if n ~= q.reinterpreted_batch_ndims then
      errors.raise("kl_divergence: %s has %d reinterpreted batch dimensions and %s has %d, expected equal numbers",
        tostring(p), n, tostring(q), q.reinterpreted_batch_ndims)
    end
    local sum = D.kl_divergence(p.base_dist, q.base_dist)
    for _ = 1, n do sum = sum:sum(-1) end
    return sum
  end)

  -- Pairs of different classes.
  -- The mean of a normal log-density depends only on the mean and the variance of p.
  local function to_normal(p, q)
    local square = p.variance + (p.mean - q.loc):square()
    return square / (q.scale:square() * 2) + q.scale:log() + 0.5 * math.log(2 * math.pi) - p:entropy()
  end
  for _, P in ipairs { D.Beta, D.Exponential, D.Gamma, D.Gumbel, D.Laplace, D.Uniform } do
    register(P, D.Normal, to_normal)
  end
  register(D.Normal, D.Laplace, function(p, q)
    local from = p.loc - q.loc
    local z = from / p.scale
    local distance = (z:square() * -0.5):exp() * p.scale * math.sqrt(2 / math.pi) + from * (z * math.sqrt(0.5)):erf()
    return (q.scale / p.scale):log() + distance / q.scale - 0.5 * (1 + math.log(0.5 * math.pi))
  end)
  register(D.Exponential, D.Gamma, function(p, q)
    local ratio, a = q.rate / p.rate, q.concentration
    return ratio - a * ratio:log() + a:lgamma() + a * EULER - (1 + EULER)
  end)
  register(D.Gamma, D.Exponential, function(p, q)
    return q.rate * p.concentration / p.rate - p:entropy() - q.rate:log()
  end)
end
