-- SPDX-License-Identifier: MIT
--- Kullback-Leibler divergences of pairs of classes, by closed formulas.
local class = require "moonshard.core.class"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local Distribution = require "moonshard.distributions.distribution"

local M = {}

local formulas = {}                     -- class of p -> class of q -> function

local a_class = opts.kind("a class of distributions", function(x)
  return class.is_class(x) and (x == Distribution or rawget(x, "__isa")[Distribution] == true)
end)

--- Registers the divergence of two classes, for kl_divergence. It also serves their subclasses that have none of their
--- own.
---@param P table  the class of the first distribution
---@param Q table  the class of the second distribution
---@param fn fun(p: Distribution, q: Distribution): Tensor  [batch_shape]
function M.register_kl(P, Q, fn)
  opts.expect(P, a_class, "register_kl: argument 1")
  opts.expect(Q, a_class, "register_kl: argument 2")
  opts.expect(fn, opts.fn, "register_kl: argument 3")
  formulas[P] = formulas[P] or {}
  formulas[P][Q] = fn
end

-- The formula for p and q: for p's class, then each class that it extends, tries q's class and those that it extends.
local function formula_of(p, q)
  local P = getmetatable(p)
  while P do
    local Q = formulas[P] and getmetatable(q)
    while Q do
      if formulas[P][Q] then return formulas[P][Q] end
      Q = rawget(Q, "__base")
    end
    P = rawget(P, "__base")
  end
end

local a_distribution = opts.kind("a distribution", function(x) return class.isa(x, Distribution) end)

--- The Kullback-Leibler divergence of p from q: the mean over p of log(p / q). There are formulas for these pairs:
---
--- | p | q |
--- |---|---|
--- | any class but `StudentT` and `MixtureSameFamily` | the same class; for `Independent`, the base distributions need a formula |
--- | `Beta`, `Exponential`, `Gamma`, `Gumbel`, `Laplace`, `Uniform` | `Normal` |
--- | `Normal` | `Laplace` |
--- | `Exponential` | `Gamma` |
--- | `Gamma` | `Exponential` |
---
--- A subclass, such as `Chi2` of `Gamma`, has those of its base; `register_kl` adds others. Errors: a pair of classes
--- without a formula; batch shapes that do not broadcast, or different event shapes.
---@param p Distribution  over which the mean is taken
---@param q Distribution  its batch shape broadcasts with p's
---@return Tensor  [batch_shape]
function M.kl_divergence(p, q)
  opts.expect(p, a_distribution, "kl_divergence: argument 1")
  opts.expect(q, a_distribution, "kl_divergence: argument 2")
  local formula = formula_of(p, q)
  if not formula then
    errors.raise("kl_divergence: no formula for %s and %s; distributions.register_kl adds one", class.name(p),
      class.name(q))
  end
  if not Distribution._joint(p.batch_shape, q.batch_shape) or p.event_shape ~= q.event_shape then
    errors.raise("kl_divergence: %s of batch_shape %s and event_shape %s, %s of batch_shape %s and event_shape %s, expected "
      .. "batch shapes that broadcast and one event_shape", class.name(p), tostring(p.batch_shape),
      tostring(p.event_shape), class.name(q), tostring(q.batch_shape), tostring(q.event_shape))
  end
  return scope.run("kl_divergence", formula, p, q)
end

return M
