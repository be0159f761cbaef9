-- SPDX-License-Identifier: MIT
--- Functions of nn.F that are made of other operators: normalisation over groups and instances, variants of
--- dropout, pixel shuffling, bilinear forms. Each runs in a scope, which releases its intermediate results.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local a_tensor, raise, run = tensor.a_tensor, errors.raise, scope.scope
local M = {}

-- ---- normalisation --------------------------------------------------------------------------------

local function check_weight(who, what, t, channels)
  if t == nil then return end
  opts.expect(t, a_tensor, "%s: %s", who, what)
  if t.ndim ~= 1 or t:numel() ~= channels then
    raise("%s: %s has shape %s, expected [%d], one element for each channel", who, what, tostring(t.shape), channels)
  end
end

-- y * w + b for each channel of [N, C, ...].
local function affine(y, w, b)
  local sizes = { 1, y:size(2) }
  for d = 3, y.ndim do sizes[d] = 1 end
  w, b = w ~= nil and w:reshape(sizes), b ~= nil and b:reshape(sizes)
  if w and b then return b:addcmul(y, w) end
  return w and y * w or b and y + b or y
end

-- Normalises rows of n elements each, with the operator of layer_norm.
local function normalised(x, rows, n, eps)
  if rows * n == 0 then return x end
  return ops.layer_norm(x:reshape(rows, n), 1, nil, nil, eps):reshape(x.shape)
end

--- Normalises each sample over groups of channels: (x - mean) / sqrt(var + eps) * w + b (Wu & He 2018). Errors: groups
--- that do not divide the channels; a group of one element in a batch of one.
---@param x Tensor  [N, C, ...]
---@param num_groups integer  divides C
---@param w? Tensor  [C]
---@param b? Tensor  [C]
---@param given? { eps: number }  eps: added to the variance
---@return Tensor  of x's shape
function M.group_norm(x, num_groups, w, b, given)
  w, given = opts.shift("group_norm", w, given)
  b, given = opts.shift("group_norm", b, given)
  local eps = opts("group_norm", given, { eps = 1e-5 }).eps
  opts.expect(x, a_tensor, "group_norm: argument 1")
  opts.expect(num_groups, opts.whole_from(1), "group_norm: argument 2, the number of groups,")
  if x.ndim < 2 then raise("group_norm: the input has shape %s, expected [N, C, ...]", tostring(x.shape)) end
  local N, C = x:size(1), x:size(2)
  if C == 0 then raise("group_norm: the input has shape %s, expected at least one channel", tostring(x.shape)) end
  if C % num_groups ~= 0 then
    raise("Expected number of channels in input to be divisible by num_groups, but got input of shape %s and num_groups=%d",
      tostring(x.shape), num_groups)
  end
  check_weight("group_norm", "weight", w, C)
  check_weight("group_norm", "bias", b, C)
  local rows = N * num_groups
  local n = rows > 0 and x:numel() / rows or 0
  if N * n == 1 then
    raise("Expected more than 1 value per channel when training, got input size %s", tostring(x.shape))
  end
  return run(function() return affine(normalised(x, rows, n, eps), w, b) end)
end

-- Mixes the mean and the unbiased variance of each channel, averaged over the batch, into the running statistics.
local function track(x, mean, var, momentum)
  local rows = x:detach():reshape(x:size(1), x:size(2), -1)
  if mean ~= nil then mean:mul_(1 - momentum):add_(rows:mean(3):mean(1):to(mean.dtype), { alpha = momentum }) end
  if var ~= nil then var:mul_(1 - momentum):add_(rows:var(3):mean(1):to(var.dtype), { alpha = momentum }) end
end

--- Normalises each channel of each sample (Ulyanov et al. 2016): with use_input_stats by its own mean and variance,
--- which are also mixed into the running statistics, in place; otherwise by the running statistics. Errors: a single
--- element per channel with use_input_stats.
---@param x Tensor  [N, C, ...], with at least one further dimension
---@param mean? Tensor  running mean, [C]
---@param var? Tensor  running variance, [C]
---@param w? Tensor  [C]
---@param b? Tensor  [C]
---@param given? { use_input_stats: boolean, momentum: number, eps: number }
---   use_input_stats: false: normalises by the running statistics (default: true); momentum: weight of x in the running
---   statistics (default: 0.1); eps: added to the variance
---@return Tensor  of x's shape
function M.instance_norm(x, mean, var, w, b, given)
  mean, given = opts.shift("instance_norm", mean, given)
  var, given = opts.shift("instance_norm", var, given)
  w, given = opts.shift("instance_norm", w, given)
  b, given = opts.shift("instance_norm", b, given)
  local o = opts("instance_norm", given, { use_input_stats = true, momentum = 0.1, eps = 1e-5 })
  opts.expect(x, a_tensor, "instance_norm: argument 1")
  if x.ndim < 3 then raise("instance_norm: the input has shape %s, expected [N, C, L] or more", tostring(x.shape)) end
  local N, C = x:size(1), x:size(2)
  for _, entry in ipairs { { "running mean", mean }, { "running variance", var }, { "weight", w }, { "bias", b } } do
    check_weight("instance_norm", entry[1], entry[2], C)
  end
  if not o.use_input_stats then
    if mean == nil or var == nil then
      raise "Expected running_mean and running_var to be defined when use_input_stats is false"
    end
    return (ops.batch_norm(x, w, b, mean, var, false, o.eps))
  end
  local rows = N * C
  local n = rows > 0 and x:numel() / rows or 0
  if n == 1 then
    raise("Expected more than 1 spatial element when training, got input size %s", tostring(x.shape))
  end
  return run(function()
    if x:numel() > 0 and (mean ~= nil or var ~= nil) then autograd.no_grad(track, x, mean, var, o.momentum) end
    return affine(normalised(x, rows, n, o.eps), w, b)
  end)
end

-- ---- dropout --------------------------------------------------------------------------------------

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

-- ---- pixel shuffling -------------------------------------------------------------------------------

--- Moves channels into space: groups of r * r channels become blocks of r x r pixels (Shi et al. 2016). Errors: the
--- channels are not divisible by r * r.
---@param x Tensor  [..., C * r * r, H, W]
---@param r integer  the factor by which height and width grow
---@return Tensor  [..., C, H * r, W * r]
function M.pixel_shuffle(x, r)
  opts.expect(x, a_tensor, "pixel_shuffle: argument 1")
  opts.expect(r, opts.whole_from(1), "pixel_shuffle: argument 2, the factor,")
  local n = x.ndim
  if n < 3 then
    raise("pixel_shuffle expects input to have at least 3 dimensions, but got input with %d dimension(s)", n)
  end
  local C, H, W = x:size(-3), x:size(-2), x:size(-1)
  if C % (r * r) ~= 0 then
    raise("pixel_shuffle expects its input's 'channel' dimension to be divisible by the square of upscale_factor, but input.size(-3)=%d is not divisible by %d", C, r * r)
  end
  local sizes, order, out = {}, {}, {}
  for d = 1, n - 3 do sizes[d], order[d], out[d] = x:size(d), d, x:size(d) end
  for k, size in ipairs { C / (r * r), r, r, H, W } do sizes[n - 3 + k] = size end
  for k, d in ipairs { 1, 4, 2, 5, 3 } do order[n - 3 + k] = n - 3 + d end
  for k, size in ipairs { C / (r * r), H * r, W * r } do out[n - 3 + k] = size end
  return run(function() return x:reshape(sizes):permute(order):reshape(out) end)
end

-- ---- bilinear -------------------------------------------------------------------------------------

--- x1^T W x2 + b for each output o, with W = w[o].
---@param x1 Tensor  [..., in1]
---@param x2 Tensor  [..., in2], of x1's shape except for the last dimension
---@param w Tensor  [out, in1, in2]
---@param b? Tensor  [out]
---@return Tensor  [..., out]
function M.bilinear(x1, x2, w, b)
  opts.expect(x1, a_tensor, "bilinear: argument 1")
  opts.expect(x2, a_tensor, "bilinear: argument 2")
  opts.expect(w, a_tensor, "bilinear: weight")
  if w.ndim ~= 3 then raise("bilinear: weight has shape %s, expected [out, in1, in2]", tostring(w.shape)) end
  local out, in1, in2 = w:size(1), w:size(2), w:size(3)
  local fits = x1.ndim == x2.ndim and x1.ndim > 0 and x1:size(-1) == in1 and x2:size(-1) == in2
  local sizes = { unpack(x1.shape) }
  for d = 1, x1.ndim - 1 do fits = fits and x2:size(d) == sizes[d] end
  if not fits then
    raise("bilinear: inputs of shapes %s and %s, weight %s: expected [..., %d] and [..., %d] of the same leading sizes",
      tostring(x1.shape), tostring(x2.shape), tostring(w.shape), in1, in2)
  end
  sizes[#sizes] = out
  return run(function()
    local rows = ops.linear(x1:reshape(-1, in1), w:permute(1, 3, 2):reshape(out * in2, in1))
    local y = rows:reshape(-1, out, in2):matmul(x2:reshape(-1, in2, 1)):squeeze(3)
    if b ~= nil then y = y + b end
    return y:reshape(sizes)
  end)
end

opts.fix(M, { "pixel_shuffle", "bilinear" })

return M
