-- SPDX-License-Identifier: MIT
--- MultivariateNormal: normally distributed vectors.
local Distribution = require "moonshard.distributions.distribution"
local draw = require "moonshard.distributions.draw"
local errors = require "moonshard.core.errors"
local linalg = require "moonshard.tensor.special.linalg"
local support = require "moonshard.distributions.support"
local tensor = require "moonshard.tensor"

local M = {}

local lower = support.new("a lower triangle with a diagonal above 0", 2, function(x)
  return x:tril():eq(x):flatten(-2, -1):all(-1):logical_and(x:diagonal(0, -2, -1):gt(0):all(-1))
end)
local symmetric = support.new("a symmetric matrix", 2, function(x)
  return (x - x.mT):abs():le(x:abs():flatten(-2, -1):max(-1):unsqueeze(-1):unsqueeze(-1) * 1e-5):flatten(-2, -1):all(-1)
end)

local NAMES = { "covariance_matrix", "precision_matrix", "scale_tril" }

-- The Cholesky factor of a covariance, or of the inverse of a precision; the errors of linalg name the parameter.
local function factor(name, matrix)
  local ok, result = pcall(function()
    return linalg.cholesky(name == "precision_matrix" and linalg.inv(matrix) or matrix)
  end)
  if ok then return result end
  error((tostring(result):gsub("linalg%.%w+: ", "MultivariateNormal: " .. name .. ": ", 1)), 0)
end

--- Normally distributed vectors of K elements. One of three matrices is given; the fields covariance_matrix,
--- precision_matrix and scale_tril can all be read. Needs LAPACK, as ms.linalg does.
---@class MultivariateNormal: Distribution
---@field loc Tensor  [batch_shape, K]
---@field covariance_matrix Tensor  [batch_shape, K, K]
---@field precision_matrix Tensor  [batch_shape, K, K]: the inverse of the covariance
---@field scale_tril Tensor  [batch_shape, K, K]: the covariance's Cholesky factor, a lower triangle
---@overload fun(loc: Tensor, covariance_matrix?: Tensor, opts?: { covariance_matrix: Tensor, precision_matrix: Tensor, scale_tril: Tensor, validate_args: boolean }): MultivariateNormal
---   loc: [..., K], the mean; covariance_matrix: [..., K, K], symmetric and positive-definite; precision_matrix: in place
---   of it, its inverse; scale_tril: in place of it, its Cholesky factor; validate_args: checks parameters and values
---   (default: true)
local MultivariateNormal = Distribution:extend "MultivariateNormal"

function MultivariateNormal:init(loc, covariance_matrix, given)
  local name, matrix, options = self._either("MultivariateNormal", covariance_matrix, given, NAMES)
  if not tensor.is_tensor(loc) or loc.ndim < 1 then
    errors.raise("MultivariateNormal: loc is %s, expected a tensor [..., K]",
      tensor.is_tensor(loc) and "of shape []" or errors.kind(loc))
  end
  local k = loc.shape[loc.ndim]
  local n = tensor.is_tensor(matrix) and matrix.ndim or 0
  if n < 2 or matrix.shape[n] ~= k or matrix.shape[n - 1] ~= k then
    errors.raise("MultivariateNormal: %s is %s, expected a tensor [..., %d, %d], as loc has shape %s", name,
      n > 0 and "of shape " .. tostring(matrix.shape) or errors.kind(matrix), k, k, tostring(loc.shape))
  end
  if name ~= "scale_tril" then
    if options.validate_args then support.verify("MultivariateNormal: " .. name, matrix, symmetric) end
    matrix = factor(name, matrix)
  end
  self:_setup(options, { { "loc", loc, support.reals }, { "scale_tril", matrix, lower } })
  self.event_shape = self._part({ k }, 1, 1)
end

-- The squared length of L^-1 x.
local function squared(L, x)
  return linalg.solve_triangular(L, x:unsqueeze(-1), { upper = false }):squeeze(-1):square():sum(-1)
end
local function half_log_det(L) return L:diagonal(0, -2, -1):log():sum(-1) end

function MultivariateNormal._support() return support.reals end
function MultivariateNormal:_mean() return self.loc end
function MultivariateNormal:_mode() return self.loc end
function MultivariateNormal:_variance() return self.scale_tril:square():sum(-1) end
function MultivariateNormal:_covariance_matrix() return self.scale_tril:matmul(self.scale_tril.mT) end
function MultivariateNormal:_precision_matrix() return linalg.inv(self:_covariance_matrix()) end
function MultivariateNormal:_rsample(sizes)
  return self.loc + self.scale_tril:matmul(draw.normal(sizes, self.loc):unsqueeze(-1)):squeeze(-1)
end
function MultivariateNormal:_log_prob(x)
  local L = self.scale_tril
  return (squared(L, x - self.loc) + self.event_shape[1] * math.log(2 * math.pi)) * -0.5 - half_log_det(L)
end
function MultivariateNormal:_entropy()
  return half_log_det(self.scale_tril) + 0.5 * self.event_shape[1] * (1 + math.log(2 * math.pi))
end
M.MultivariateNormal = MultivariateNormal

--- The Kullback-Leibler divergence of two MultivariateNormal distributions.
function M._divergence(p, q)
  local P, Q = p.scale_tril, q.scale_tril
  local trace = linalg.solve_triangular(Q, P, { upper = false }):square():flatten(-2, -1):sum(-1)
  return half_log_det(Q) - half_log_det(P) + (trace + squared(Q, q.loc - p.loc) - p.event_shape[1]) * 0.5
end

return M
