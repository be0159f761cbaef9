-- SPDX-License-Identifier: MIT
--- nn.utils.weight_norm and spectral_norm, as parametrizations; keys of state dicts are those of PyTorch's
--- torch.nn.utils.parametrizations.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local parametrize = require "moonshard.nn.utils.parametrize"
local base = require "moonshard.nn.module"

local raise, no_grad = errors.raise, autograd.no_grad
local Module = base.Module

local M = {}

-- Checks the arguments of a function that may get its options in place of the name. Returns the name and the options.
local function arguments(who, m, name, given, spec)
  if opts.is(name) and given == nil then name, given = nil, name end
  if name == nil then name = "weight" end
  opts.expect(m, base.a_module, "%s: argument 1", who)
  opts.expect(name, opts.string, "%s: argument 2", who)
  return name, opts(who, given, spec)
end

-- Checks a dimension of t; returns it counted from 1.
local function dimension(who, t, dim)
  local at = type(dim) == "number" and dim % 1 == 0 and (dim < 0 and t.ndim + 1 + dim or dim) or 0
  if at < 1 or at > t.ndim then
    raise("%s: option 'dim' is %s, expected a dimension of a weight of shape %s", who, errors.show(dim), tostring(t.shape))
  end
  return at
end

-- ---- weight norm -----------------------------------------------------------------------------------

local WeightNorm = Module:extend "WeightNorm"

function WeightNorm:init(dim) self.dim = dim end

-- The norms over all dimensions but one; dim = false: the norm of all elements.
local function norms(v, dim)
  if not dim then return (v * v):sum():sqrt() end
  local others = {}
  for d = 1, v.ndim do
    if d ~= dim then others[#others + 1] = d end
  end
  return #others > 0 and (v * v):sum(others, { keepdim = true }):sqrt() or v:abs()
end

function WeightNorm:forward(g, v) return v * (g / norms(v, self.dim)) end
function WeightNorm:right_inverse(w) return norms(w, self.dim), w end

--- Weight normalization (Salimans & Kingma 2016): the weight is g v / |v|, with a norm for each index of one dimension;
--- g and v are trained: "parametrizations.weight.original0" and "original1".
---@param m Module  a layer
---@param name? string  name of the parameter (default: "weight")
---@param given? { dim: integer|false }  dim: the dimension with a norm for each index; false: one norm (default: 1)
---@return Module m
function M.weight_norm(m, name, given)
  local o
  name, o = arguments("weight_norm", m, name, given, { dim = opts.any })
  if o.dim == nil then o.dim = 1 end
  local weight = m[name]
  if o.dim and weight then o.dim = dimension("weight_norm", weight, o.dim) end
  return parametrize.register_parametrization(m, name, WeightNorm(o.dim))
end

--- Replaces the computed weight by the parameter v, set to the weight's current value. Optimizers already have v.
---@param m Module  a layer with weight_norm
---@param name? string  name of the parameter (default: "weight")
---@return Module m
function M.remove_weight_norm(m, name)
  return parametrize._remove_one("remove_weight_norm", m, name or "weight", WeightNorm)
end

-- ---- spectral norm ---------------------------------------------------------------------------------

local SpectralNorm = Module:extend "SpectralNorm"

local function unit(x, eps) return x / x:norm():clamp(eps) end

-- The weight as a matrix with a row for each index of dimension dim.
local function matrix_of(w, dim)
  if dim ~= 1 then w = w:transpose(1, dim) end
  return w:reshape(w:size(1), -1)
end

local function iterate(self, matrix, n)
  no_grad(function()
    for _ = 1, n do
      self._u:copy_(unit(matrix:mv(self._v), self.eps))
      self._v:copy_(unit(matrix:t():mv(self._u), self.eps))
    end
  end)
end

function SpectralNorm:init(weight, o)
  self.dim, self.eps, self.n_power_iterations = o.dim, o.eps, o.n_power_iterations
  if weight.ndim == 1 then return end
  local matrix = matrix_of(weight:detach(), o.dim)
  local like = { dtype = weight.dtype, device = weight.device }
  self:register_buffer("_u", unit(create.randn({ matrix:size(1) }, like), o.eps))
  self:register_buffer("_v", unit(create.randn({ matrix:size(2) }, like), o.eps))
  iterate(self, matrix, 15)
end

function SpectralNorm:forward(weight)
  if weight.ndim == 1 then return unit(weight, self.eps) end
  local matrix = matrix_of(weight, self.dim)
  if self.training then iterate(self, matrix:detach(), self.n_power_iterations) end
  -- Copies, because the next forward may change the buffers before this forward's backward has read them.
  local u, v = self._u:clone(), self._v:clone()
  return weight / u:dot(matrix:mv(v))
end

function SpectralNorm.right_inverse(_, value) return value end

--- Spectral normalization (Miyato et al. 2018): the weight is divided by its largest singular value, which is
--- computed by power iteration: n_power_iterations steps in each forward in training, from the vectors of the previous
--- forward, which are buffers.
---@param m Module  a layer
---@param name? string  name of the parameter (default: "weight")
---@param given? { n_power_iterations: integer, eps: number, dim: integer }
---   n_power_iterations: steps in a forward (default: 1); eps: the least norm that is divided by (default: 1e-12); dim:
---   the dimension of the outputs (default: 1; 2 for transposed convolutions)
---@return Module m
function M.spectral_norm(m, name, given)
  local o
  name, o = arguments("spectral_norm", m, name, given, { n_power_iterations = opts.option(opts.whole_from(1), 1),
    eps = opts.option(opts.positive, 1e-12), dim = opts.any })
  local weight = m[name]
  if o.dim == nil then o.dim = m:class_name():find "ConvTranspose" and 2 or 1 end
  if m._kind[name] == "parameter" or weight ~= nil then o.dim = dimension("spectral_norm", weight, o.dim) end
  if weight == nil then raise("spectral_norm: %s: %s", m:class_name(), errors.unknown("parameter", name, m._params)) end
  return parametrize.register_parametrization(m, name, SpectralNorm(weight, o))
end

--- Makes the weight an ordinary parameter again, with its current value.
---@param m Module  a layer with spectral_norm
---@param name? string  name of the parameter (default: "weight")
---@return Module m
function M.remove_spectral_norm(m, name)
  return parametrize._remove_one("remove_spectral_norm", m, name or "weight", SpectralNorm)
end

opts.fix(M, { "remove_weight_norm", "remove_spectral_norm" })

return M
