-- SPDX-License-Identifier: MIT
--- Functions of nn.F that normalise over groups and instances. Each runs in a scope, which releases its intermediate
--- results.
local autograd = require "moonshard.autograd"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local a_tensor, raise = tensor.a_tensor, errors.raise
local M = {}

local PARTS = { batch_norm = true, layer_norm = true }

-- Runs fn in a scope. Errors of the operators name `who`.
local function run(who, fn) return errors.naming(who, PARTS, scope.scope, fn) end

local function check_weight(who, what, t, channels)
  if t == nil then return end
  opts.expect(t, a_tensor, "%s: %s", who, what)
  if t.ndim ~= 1 or t:numel() ~= channels then
    raise("%s: %s has shape %s, expected [%d], one element for each channel", who, what, tostring(t.shape), channels)
  end
end

-- y * w + b for each channel of [N, C, ...]: batch_norm with a mean of 0 and a variance of 1, whose backward reads y
-- and the gradient twice; products and sums would take a pass over both for each gradient.
local function affine(y, w, b)
  if w == nil and b == nil then return y end
  local o = { dtype = y.dtype == "float64" and "float64" or "float32", device = y.device }
  return (ops.batch_norm(y, w, b, create.zeros(y:size(2), o), create.ones(y:size(2), o), false, 0))
end

-- Normalises every `share` adjacent channels of each sample, as channels of batch_norm that share their statistics.
local function instances(x, w, b, eps, share)
  local N, C = x:size(1), x:size(2)
  if x:numel() == 0 then return affine(x, w, b) end
  local function for_each(t) return t and t:unsqueeze(1):expand(N, C):reshape(-1) end
  local y = ops.batch_norm(x:reshape(1, N * C, -1), for_each(w), for_each(b), nil, nil, true, eps, share)
  y = y:reshape(x.shape)
  return y.requires_grad and y:clone() or y              -- a view could not be changed in place under autograd
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
    raise("group_norm: the input has shape %s, expected a number of channels that num_groups, %d, divides",
      tostring(x.shape), num_groups)
  end
  check_weight("group_norm", "weight", w, C)
  check_weight("group_norm", "bias", b, C)
  local rows = N * num_groups
  local n = rows > 0 and x:numel() / rows or 0
  if N * n == 1 then
    raise("group_norm: Expected more than 1 value per channel when training, got input size %s", tostring(x.shape))
  end
  return run("group_norm", function()
    if x:numel() > N * C then return instances(x, w, b, eps, C / num_groups) end  -- else a channel is one number
    local y = x:numel() == 0 and x or ops.layer_norm(x:reshape(rows, n), nil, nil, 1, eps):reshape(x.shape)
    return affine(y, w, b)
  end)
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
    return run("instance_norm", function() return (ops.batch_norm(x, w, b, mean, var, false, o.eps)) end)
  end
  local rows = N * C
  local n = rows > 0 and x:numel() / rows or 0
  if n == 1 then
    raise("Expected more than 1 spatial element when training, got input size %s", tostring(x.shape))
  end
  return run("instance_norm", function()
    if x:numel() > 0 and (mean ~= nil or var ~= nil) then autograd.no_grad(track, x, mean, var, o.momentum) end
    return instances(x, w, b, o.eps)
  end)
end

return M
