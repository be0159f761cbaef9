-- SPDX-License-Identifier: MIT
--- The activations of nn.F that have arguments or are made of others.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local M = {}

-- The value of a positional argument, which must be a number; the default if it is nil.
local function number(who, what, value, default)
  if value == nil then return default end
  return opts.expect(value, opts.number, "%s: %s", who, what)
end

--- x where x > 0, negative_slope * x elsewhere.
---@param x Tensor  of any shape
---@param negative_slope? number  factor for negative elements (default: 0.01)
---@return Tensor
function M.leaky_relu(x, negative_slope)
  return ops.leaky_relu(x, number("leaky_relu", "negative slope", negative_slope, 0.01))
end

--- x where x > 0, alpha * (e^x - 1) elsewhere (Clevert et al. 2016).
---@param x Tensor  of any shape
---@param alpha? number  minus the limit of the result at -infinity (default: 1)
---@return Tensor
function M.elu(x, alpha) return ops.elu(x, number("elu", "alpha", alpha, 1), 1) end

--- 1.0507 times elu with alpha = 1.6733: layers of it keep mean 0 and variance 1 (Klambauer et al. 2017).
---@param x Tensor  of any shape
---@return Tensor
function M.selu(x) return ops.elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946) end

--- x where x > 0, alpha * (e^(x / alpha) - 1) elsewhere: elu with a continuous derivative (Barron 2017).
---@param x Tensor  of any shape
---@param alpha? number  minus the limit of the result at -infinity, not 0 (default: 1)
---@return Tensor
function M.celu(x, alpha)
  alpha = number("celu", "alpha", alpha, 1)
  if alpha == 0 then opts.wrong(alpha, "a number other than 0", "celu: alpha") end
  return ops.celu(x, alpha)
end

--- log(1 + e^(beta x)) / beta, a smooth relu; x itself where beta x > threshold.
---@param x Tensor  of any shape
---@param given? { beta: number, threshold: number }
---   beta: sharpness, not 0 (default: 1); threshold: where beta x exceeds it, the result is x (default: 20)
---@return Tensor
function M.softplus(x, given)
  local o = opts("softplus", given, { beta = 1, threshold = 20 })
  if o.beta == 0 then opts.wrong(o.beta, "a number other than 0", "softplus: option 'beta'") end
  return ops.softplus(x, o.beta, o.threshold)
end

--- x limited to [low, high]; the gradient is 0 at the limits and beyond.
---@param x Tensor  of any shape
---@param low? number  lower limit (default: -1)
---@param high? number  upper limit, above low (default: 1)
---@return Tensor
function M.hardtanh(x, low, high)
  low, high = number("hardtanh", "lower limit", low, -1), number("hardtanh", "upper limit", high, 1)
  if low >= high then opts.wrong(high, ("a number above the lower limit %g"):format(low), "hardtanh: upper limit") end
  return ops.hardtanh(x, low, high)
end

--- x limited to [0, 6].
---@param x Tensor  of any shape
---@return Tensor
function M.relu6(x) return ops.hardtanh(x, 0, 6) end

--- x where x > limit, value elsewhere.
---@param x Tensor  of any shape
---@param limit number  the threshold
---@param value number  the result at and below it
---@return Tensor
function M.threshold(x, limit, value)
  return ops.threshold(x, opts.expect(limit, opts.number, "threshold: limit"),
    opts.expect(value, opts.number, "threshold: value"))
end

--- x where x > 0, weight * x elsewhere (He et al. 2015).
---@param x Tensor  [N, C, ...]; of any shape for a single weight
---@param weight Tensor  [1] or [], or [C]: one for each channel of dimension 2
---@return Tensor
function M.prelu(x, weight)
  opts.expect(x, tensor.a_tensor, "prelu: input")
  opts.expect(weight, tensor.a_tensor, "prelu: weight")
  if weight:numel() == 1 then
    weight = weight:reshape {}
  else
    if weight.ndim ~= 1 or x.ndim < 2 or x.shape[2] ~= weight:numel() then
      errors.raise("prelu: weight has shape %s, expected [1]%s", tostring(weight.shape),
        x.ndim < 2 and "" or (" or [%d], a weight for each channel"):format(x.shape[2]))
    end
    local shape = { weight:numel() }
    for d = 2, x.ndim - 1 do shape[d] = 1 end
    weight = weight:view(shape)
  end
  return ops.prelu(x, weight)
end

local function halves(x, d, who)
  opts.expect(x, tensor.a_tensor, "%s: input", who)
  d = d or -1
  local size = x:size(d)
  if size % 2 ~= 0 then opts.wrong(size, "an even size", "%s: size of dimension %d", who, d) end
  return unpack(x:split(size / 2, d))
end

--- The first half of x along d times the sigmoid of the second (Dauphin et al. 2017). Errors: an odd size.
---@param x Tensor  of any shape
---@param d? integer  from 1; negative from the end (default: -1)
---@return Tensor  half of x's size along d
function M.glu(x, d)
  local first, second = halves(x, d, "glu")
  return first * ops.sigmoid(second)
end

--- The second half of x along d times the silu of the first (Shazeer 2020), for one projection that makes both.
--- Errors: an odd size.
---@param x Tensor  of any shape
---@param d? integer  from 1; negative from the end (default: -1)
---@return Tensor  half of x's size along d
function M.swiglu(x, d)
  local gate, values = halves(x, d, "swiglu")
  return ops.silu(gate) * values
end

-- lambda, checked to be a number from 0; 0.5 if it is nil.
local function margin(value, who)
  if value == nil then return 0.5 end
  return opts.expect(value, opts.number_from(0), "%s: lambda", who)
end

--- x moved toward 0 by lambda; 0 where |x| <= lambda.
---@param x Tensor  of any shape
---@param lambda? number  from 0 (default: 0.5)
---@return Tensor
function M.softshrink(x, lambda)
  return ops.softshrink(x, margin(lambda, "softshrink"))
end

--- x where |x| > lambda, 0 elsewhere.
---@param x Tensor  of any shape
---@param lambda? number  from 0 (default: 0.5)
---@return Tensor
function M.hardshrink(x, lambda)
  return ops.hardshrink(x, margin(lambda, "hardshrink"))
end

--- x - tanh(x), element by element.
---@param x Tensor  of any shape
---@return Tensor
function M.tanhshrink(x) return x - ops.tanh(x) end

--- Softmax of -x along d.
---@param x Tensor  of any shape
---@param d? integer  from 1; negative from the end (default: -1)
---@return Tensor
function M.softmin(x, d) return ops.softmax(-x, tensor.position(d or -1, "softmin")) end

--- Draws from the distribution softmax(logits), so that the gradient reaches the logits (Jang et al. 2017): softmax of
--- (logits + noise) / tau, where the noise has Gumbel's distribution.
---@param logits Tensor  of any shape, floating point
---@param given? { tau: number, hard: boolean, dim: integer }
---   tau: temperature; near 0 a draw is nearly 1 in one place (default: 1); hard: the result is exactly 0 and 1, with
---   the gradient of the soft one; dim: dimension of the distribution, from 1; negative from the end (default: -1)
---@return Tensor  of logits' shape
function M.gumbel_softmax(logits, given)
  local o = opts("gumbel_softmax", given, { tau = opts.option(opts.positive, 1), hard = false, dim = -1 })
  opts.expect(logits, tensor.a_tensor, "gumbel_softmax: argument 1")
  local d = tensor.position(o.dim, "gumbel_softmax")
  return scope.scope(function()
    local noise = -create.empty_like(logits):exponential_():log()
    local soft = ops.softmax((logits + noise) / o.tau, d)
    if not o.hard then return soft end
    local index = soft:detach():argmax(o.dim, { keepdim = true })
    local hard = create.zeros_like(soft):scatter(o.dim, index, create.ones_like(soft:detach():narrow(o.dim, 1, 1)))
    return hard - soft:detach() + soft
  end)
end

return M
