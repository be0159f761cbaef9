-- SPDX-License-Identifier: MIT
--- Variants of dropout, functions of nn.F. Each runs in a scope, which releases its intermediate results.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local a_tensor, raise, run = tensor.a_tensor, errors.raise, scope.scope
local M = {}

-- Returns p and whether anything is dropped.
local function dropout_arguments(who, x, p, given)
  p, given = opts.shift(who, p, given)
  local o = opts(who, given, { training = true })
  opts.expect(x, a_tensor, "%s: argument 1", who)
  p = p or 0.5
  if type(p) ~= "number" or not (p >= 0 and p <= 1) then
    raise("%s: dropout probability has to be between 0 and 1, but got %s", who, errors.show(p))
  end
  return p, o.training and p > 0
end

-- Sets whole channels of [N, C, ...] to 0 with probability p and multiplies the others by 1 / (1 - p).
local function drop_channels(x, p)
  local sizes = { x:size(1), x:size(2) }
  for d = 3, x.ndim do sizes[d] = 1 end
  return x * ops.dropout(create.ones(sizes, { dtype = x.dtype, device = x.device }), p)
end

-- Drops whole channels of x. dims: number of dimensions of a batch; a single sample has one dimension less.
local function drop(who, dims, x, p, given)
  local active
  p, active = dropout_arguments(who, x, p, given)
  local n = x.ndim
  if n ~= dims and n ~= dims - 1 then
    raise("%s: Expected %dD or %dD input, but received a %dD input", who, dims - 1, dims, n)
  end
  if not active then return x end
  return run(function()
    if n == dims then return drop_channels(x, p) end
    return drop_channels(x:unsqueeze(1), p):squeeze(1)
  end)
end

--- Sets whole channels to 0 with probability p and multiplies the others by 1 / (1 - p); returns x if not training.
---@param x Tensor  [N, C, L] or [C, L]
---@param p? number  probability of setting a channel to 0 (default: 0.5)
---@param given? { training: boolean }  training: false: returns x
---@return Tensor  of x's shape
function M.dropout1d(x, p, given) return drop("dropout1d", 3, x, p, given) end

--- Sets whole channels to 0 with probability p and multiplies the others by 1 / (1 - p); returns x if not training.
---@param x Tensor  [N, C, D, H, W] or [C, D, H, W]
---@param p? number  probability of setting a channel to 0 (default: 0.5)
---@param given? { training: boolean }  training: false: returns x
---@return Tensor  of x's shape
function M.dropout3d(x, p, given) return drop("dropout3d", 5, x, p, given) end

--- Sets whole channels to 0 with probability p and multiplies the others by 1 / (1 - p) (Tompson et al. 2015); returns
--- x if not training.
---@param x Tensor  [N, C, H, W] or [N, C, L]
---@param p? number  probability of setting a channel to 0 (default: 0.5)
---@param given? { training: boolean }  training: false: returns x
---@return Tensor  of x's shape
function M.dropout2d(x, p, given)
  local active
  p, active = dropout_arguments("dropout2d", x, p, given)
  if x.ndim ~= 3 and x.ndim ~= 4 then
    raise("dropout2d: Expected 3D or 4D input, but received a %dD input", x.ndim)
  end
  if not active then return x end
  return run(drop_channels, x, p)
end

-- The limit of SELU at -infinity, negated.
local SELU_LIMIT = 1.7580993408473766

--- Dropout that keeps mean 0 and variance 1, for networks with SELU (Klambauer et al. 2017): dropped elements become
--- SELU's limit at -infinity, then all are scaled and shifted (p = 1: all become 0); returns x if not training.
---@param x Tensor  floating point, of any shape
---@param p? number  probability of dropping an element (default: 0.5)
---@param given? { training: boolean }  training: false: returns x
---@return Tensor  of x's shape
function M.alpha_dropout(x, p, given)
  local active
  p, active = dropout_arguments("alpha_dropout", x, p, given)
  if not active then return x end
  if p == 1 then return x * 0 end
  local a = 1 / math.sqrt((SELU_LIMIT ^ 2 * p + 1) * (1 - p))
  return run(function()
    local kept = create.rand(x.shape, { device = x.device }):ge(p):to(x.dtype)
    return x * (kept * a) + ((kept - 1) * (SELU_LIMIT * a) + SELU_LIMIT * a * p)
  end)
end

return M
