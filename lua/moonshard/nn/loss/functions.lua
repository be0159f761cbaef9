-- SPDX-License-Identifier: MIT
--- The losses of nn.F that are made of other operators; one_hot, normalize and distances. Each runs in a scope, which
--- releases its intermediate results.
local capture = require "moonshard.autograd.capture"
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
local where = require "moonshard.tensor.ops".where
local broadcast_tensors = require "moonshard.tensor.diagonals".broadcast_tensors

local a_tensor, is_tensor, raise = tensor.a_tensor, tensor.is_tensor, errors.raise
local function is_float(dtype) return dtypes.is_float(dtypes.numbers[dtype]) end
local M = {}

local REDUCTIONS = { "mean", "sum", "none" }
local reduction = opts.one_of(REDUCTIONS, "mean")

local function reduced(loss, how)
  if how == "none" then return loss end
  return how == "sum" and loss:sum() or loss:mean()
end

-- Raises unless both are tensors of one shape. Broadcasting a target is nearly always a mistake: [N] and [N, 1] give
-- [N, N].
local function check_pair(who, a, b, what)
  opts.expect(a, a_tensor, "%s: input", who)
  opts.expect(b, a_tensor, "%s: %s", who, what)
  if a.shape ~= b.shape then
    raise("%s: the input has shape %s and the %s %s; expected the same shape", who, tostring(a.shape), what,
      tostring(b.shape))
  end
end

-- Makes a loss function of an input and a target with the same shape. fn(input, target, options) gives the loss of each
-- element.
local function elementwise(who, spec, fn)
  spec.reduction = spec.reduction or reduction
  return function(input, target, given)
    local o = opts(who, given, spec)
    check_pair(who, input, target, "target")
    return scope.scope(function() return reduced(fn(input, target, o), o.reduction) end)
  end
end

local function weighted(loss, weight) return weight == nil and loss or loss * weight end
local optional_tensor = opts.kind("a tensor", is_tensor)

-- Makes a loss function with a weight of each element. With `by_sum` the mean is the sum of the weighted losses divided
-- by the sum of the weights, otherwise by the number of elements. plain: computes the loss if no weight is given.
local function weighted_elementwise(who, spec, fn, by_sum, plain)
  spec.weight, spec.reduction = optional_tensor, reduction
  return function(input, target, given)
    local o = opts(who, given, spec)
    if not o.weight then return plain(input, target, o) end
    check_pair(who, input, target, "target")
    check_pair(who, input, o.weight, "weight")
    return scope.scope(function()
      local loss = fn(input, target, o) * o.weight
      if by_sum and o.reduction == "mean" then return loss:sum() / o.weight:sum() end
      return reduced(loss, o.reduction)
    end)
  end
end

local function squared(a, b)
  local d = a - b
  return d * d
end
local mse_promoted = elementwise("mse_loss", {}, squared)

-- The operator takes two tensors of one dtype. If the dtypes differ and one is floating point, mse_promoted subtracts
-- the tensors, which promotes them.
local function mse_plain(a, b, how)
  if is_tensor(a) and is_tensor(b) and a.dtype ~= b.dtype and (is_float(a.dtype) or is_float(b.dtype)) then
    return mse_promoted(a, b, { reduction = how })
  end
  return ops.mse_loss(a, b, how)
end

local mse = weighted_elementwise("mse_loss", {}, squared, true, function(a, b, o) return mse_plain(a, b, o.reduction) end)
--- (a - b)^2: the mean, the sum, or each element. Dtypes promote, as in a - b; gradients have the dtypes of a and b.
---@param a Tensor  of any shape; a or b is floating point
---@param b Tensor  of a's shape
---@param given? { reduction: "mean"|"sum"|"none", weight: Tensor }
---   weight: factor of each element, of a's shape; "mean" divides by the sum of the factors
---@return Tensor  [], or a's shape with "none"
function M.mse_loss(a, b, given)
  if given == nil then return mse_plain(a, b, "mean") end
  return mse(a, b, given)
end

local function l1_of(a, b) return (a - b):abs() end
local l1 = weighted_elementwise("l1_loss", {}, l1_of, true, elementwise("l1_loss", {}, l1_of))
--- |input - target|.
---@param input Tensor  of any shape
---@param target Tensor  of the input's shape
---@param given? { reduction: "mean"|"sum"|"none", weight: Tensor }
---   weight: factor of each element, of the input's shape; "mean" divides by the sum of the factors
---@return Tensor  [], or the input's shape with "none"
function M.l1_loss(input, target, given) return l1(input, target, given) end

local smooth_l1 = elementwise("smooth_l1_loss", { beta = opts.option(opts.number_from(0), 1) }, function(a, b, o)
  local d = (a - b):abs()
  if o.beta == 0 then return d end
  return where(d:lt(o.beta), d * d * (0.5 / o.beta), d - 0.5 * o.beta)
end)
--- difference^2 / (2 beta) where |difference| is below beta, |difference| - beta / 2 elsewhere.
---@param input Tensor  of any shape
---@param target Tensor  of the input's shape
---@param given? { reduction: "mean"|"sum"|"none", beta: number }  beta: difference below which the loss is quadratic (default: 1)
---@return Tensor  [], or the input's shape with "none"
function M.smooth_l1_loss(input, target, given) return smooth_l1(input, target, given) end

local huber = elementwise("huber_loss", { delta = opts.option(opts.positive, 1), weight = optional_tensor },
  function(a, b, o)
    local d = (a - b):abs()
    if o.weight then check_pair("huber_loss", a, o.weight, "weight") end
    return weighted(where(d:le(o.delta), d * d * 0.5, (d - 0.5 * o.delta) * o.delta), o.weight)
  end)
--- difference^2 / 2 where |difference| is at most delta, delta * (|difference| - delta / 2) elsewhere (Huber 1964).
---@param input Tensor  of any shape
---@param target Tensor  of the input's shape
---@param given? { reduction: "mean"|"sum"|"none", delta: number, weight: Tensor }
---   delta: difference up to which the loss is quadratic (default: 1); weight: factor of each element, of the input's
---   shape; "mean" divides by the number of elements
---@return Tensor  [], or the input's shape with "none"
function M.huber_loss(input, target, given) return huber(input, target, given) end

-- Raises if an element is not a number from 0 to 1. Unchecked: tensors on a GPU, whose values the host would wait for;
-- sharded ones and instances of tensor classes; and all while a step is captured, which must not read values.
local function check_probabilities(t, what)
  if t.device ~= "cpu" or t.dtype == "bool" or t.placements or t.id < 0 or t:numel() == 0 or capture.active() then return end
  local plain = t:detach()
  local low, high = plain:min():item(), plain:max():item()
  if low >= 0 and high <= 1 then return end
  raise("binary_cross_entropy: the %s has the element %g, expected numbers from 0 to 1; for logits write "
    .. "binary_cross_entropy_with_logits", what, low >= 0 and high or low)
end

local bce = elementwise("binary_cross_entropy", { weight = optional_tensor }, function(p, y, o)
  check_probabilities(p, "input")
  check_probabilities(y, "target")
  return weighted(ops.binary_cross_entropy(p, y), o.weight)
end)
--- -(target * log(input) + (1 - target) * log(1 - input)); logarithms are at least -100. The gradient is
--- (input - target) / max(input * (1 - input), 1e-12). Errors: on the CPU, an element
--- that is not from 0 to 1. Elements are not checked on a GPU, where the host would wait for them, in captured steps,
--- which must not read them, and in sharded tensors; an unchecked input outside of 0 to 1 gives nan.
---@param input Tensor  probabilities of any shape
---@param target Tensor  from 0 to 1, of any dtype, of the input's shape
---@param given? { reduction: "mean"|"sum"|"none", weight: Tensor }  weight: factor of each element; broadcasts
---@return Tensor  [], or the input's shape with "none"
function M.binary_cross_entropy(input, target, given) return bce(input, target, given) end

local bce_logits = elementwise("binary_cross_entropy_with_logits", { weight = optional_tensor,
  pos_weight = optional_tensor }, function(x, y, o)
  local positive = o.pos_weight == nil and y or y * o.pos_weight
  return weighted(-(positive * ops.logsigmoid(x) + (1 - y) * ops.logsigmoid(-x)), o.weight)
end)
--- binary_cross_entropy of sigmoid(input), without overflow. The target is not checked.
---@param input Tensor  logits of any shape
---@param target Tensor  from 0 to 1, of any dtype, of the input's shape
---@param given? { reduction: "mean"|"sum"|"none", weight: Tensor, pos_weight: Tensor }
---   weight: factor of each element; pos_weight: factor of the positive class; both broadcast
---@return Tensor  [], or the input's shape with "none"
function M.binary_cross_entropy_with_logits(input, target, given) return bce_logits(input, target, given) end

local KL = { log_target = false, reduction = opts.one_of({ "mean", "batchmean", "sum", "none" }, "mean") }
--- target * (log(target) - input), the divergence of the target from the distribution whose logarithm is the input.
---@param input Tensor  logarithms of probabilities, of any shape
---@param target Tensor  probabilities, or their logarithms with log_target; of the input's shape
---@param given? { reduction: "mean"|"batchmean"|"sum"|"none", log_target: boolean }
---   reduction: "batchmean": the divergence, averaged over dimension 1; "mean": divides by the number of elements;
---   log_target: the target is a logarithm (default: false)
---@return Tensor  [], or the input's shape with "none"
function M.kl_div(input, target, given)
  local o = opts("kl_div", given, KL)
  check_pair("kl_div", input, target, "target")
  return scope.scope(function()
    local loss = o.log_target and target:exp() * (target - input) or target:xlogy(target) - target * input
    if o.reduction == "batchmean" then return loss:sum() / (input.ndim > 0 and input:size(1) or 1) end
    return reduced(loss, o.reduction)
  end)
end

local poisson = elementwise("poisson_nll_loss", { log_input = true, full = false,
  eps = opts.option(opts.number_from(0), 1e-8) }, function(x, y, o)
  local loss = o.log_input and x:exp() - y * x or x - y * (x + o.eps):log()
  if not o.full then return loss end
  local stirling = y * y:log() - y + (y * (2 * math.pi)):log() * 0.5
  return loss + where(y:gt(1), stirling, create.zeros_like(y))
end)
--- Negative log likelihood of counts: e^input - target * input.
---@param input Tensor  logarithm of the expected counts; the counts themselves with log_input = false
---@param target Tensor  counts, of the input's shape
---@param given? { reduction: "mean"|"sum"|"none", log_input: boolean, full: boolean, eps: number }
---   log_input: the input is a logarithm (default: true); full: adds Stirling's approximation of log(target!) where the
---   target is above 1 (default: false); eps: added to the input before its logarithm is taken (default: 1e-8)
---@return Tensor  [], or the input's shape with "none"
function M.poisson_nll_loss(input, target, given) return poisson(input, target, given) end

local GAUSSIAN = { full = false, eps = opts.option(opts.positive, 1e-6), reduction = reduction }
--- Negative log likelihood under normal distributions: (log(var) + (input - target)^2 / var) / 2.
---@param input Tensor  means, of any shape
---@param target Tensor  of the input's shape
---@param var Tensor|number  variances, not negative; broadcasts
---@param given? { reduction: "mean"|"sum"|"none", full: boolean, eps: number }
---   full: adds log(2 pi) / 2 (default: false); eps: lower limit of var (default: 1e-6)
---@return Tensor  [], or the input's shape with "none"
function M.gaussian_nll_loss(input, target, var, given)
  local o = opts("gaussian_nll_loss", given, GAUSSIAN)
  check_pair("gaussian_nll_loss", input, target, "target")
  if type(var) == "number" then var = create.full_like(input, var) end
  opts.expect(var, a_tensor, "gaussian_nll_loss: variance")
  return scope.scope(function()
    if var:lt(0):any():item() then raise "gaussian_nll_loss: the variance has negative elements" end
    local limited = var + (var:detach():clamp_min(o.eps) - var:detach())     -- the limit does not stop the gradient
    local difference = input - target
    local loss = (limited:log() + difference * difference / limited) * 0.5
    return reduced(o.full and loss + 0.5 * math.log(2 * math.pi) or loss, o.reduction)
  end)
end

-- ---- classes ------------------------------------------------------------------------------------------

-- Returns log-probabilities [C], [N, C] or [N, C, ...] as rows [M, C], and classes [], [N] or [N, ...] as ids [M].
-- Raises unless the shapes match and weight is nil or has C elements.
local function rows_of(who, input, ids, weight)
  opts.expect(input, a_tensor, "%s: input", who)
  opts.expect(ids, a_tensor, "%s: target", who)
  local fits = input.ndim > 0 and ids.ndim == input.ndim - 1
  for d = 1, fits and ids.ndim or 0 do fits = fits and ids:size(d) == input:size(d > 1 and d + 1 or 1) end
  if not fits then
    raise("%s: input has shape %s and target %s; expected [C] and [], [N, C] and [N], or [N, C, ...] and [N, ...]",
      who, tostring(input.shape), tostring(ids.shape))
  end
  if ids.dtype ~= "int64" and ids.dtype ~= "int32" then
    raise('%s: target must be int64 or int32, got %s %s; write target:long(), or make it with ms.tensor(..., { dtype = "int64" })',
      who, ids.dtype, tostring(ids.shape))
  end
  local classes = input:size(input.ndim > 1 and 2 or 1)
  if weight and (weight.ndim ~= 1 or weight:size(1) ~= classes) then
    raise("%s: the weight has shape %s, expected [%d]: the input has %d classes", who, tostring(weight.shape), classes,
      classes)
  end
  if input.ndim <= 2 then return input:reshape(-1, input:size(-1)), ids:reshape(-1) end
  local order = { 1 }
  for d = 3, input.ndim do order[#order + 1] = d end
  order[#order + 1] = 2
  return input:permute(order):reshape(-1, input:size(2)), ids:reshape(-1)
end

local NLL = { weight = optional_tensor, ignore_index = opts.option(opts.whole, -100), reduction = reduction }
--- Minus the log-probability of each row's class. "mean" divides by the sum of the weights of these classes. Errors: an
--- id that is not a class of the input.
---@param input Tensor  log-probabilities [N, C], [C] or [N, C, ...]
---@param ids Tensor  classes from 0: int64 [N], [] or [N, ...]
---@param given? { reduction: "mean"|"sum"|"none", weight: Tensor, ignore_index: integer }
---   weight: [C], factor of each class; ignore_index: class that does not count (default: -100)
---@return Tensor  [], or the shape of ids with "none"
function M.nll_loss(input, ids, given)
  local o = opts("nll_loss", given, NLL)
  return scope.scope(function()
    local rows, flat = rows_of("nll_loss", input, ids, o.weight)
    local counts = flat:ne(o.ignore_index)
    local used = where(counts, flat, create.zeros_like(flat))
    local ignored = counts:logical_not()
    local picked = rows:gather(2, used:unsqueeze(2)):squeeze(2):masked_fill(ignored, 0)    -- it may be nan
    local weights = o.weight and o.weight:index_select(1, used) or create.ones_like(picked)
    weights = weights:masked_fill(ignored, 0)
    local loss = -(picked * weights)
    if o.reduction == "none" then return loss:reshape(ids.shape) end
    return o.reduction == "sum" and loss:sum() or loss:sum() / weights:sum()
  end)
end

local MULTI = { p = opts.option(opts.kind("1 or 2", function(v) return v == 1 or v == 2 end), 1), margin = 1,
  weight = optional_tensor, reduction = reduction }
--- Hinge loss over classes: the sum over classes i other than the target y of max(0, margin - x[y] + x[i]) ^ p, divided
--- by C.
---@param input Tensor  scores [N, C] or [C]; [] is one class
---@param ids Tensor  classes from 0: int64 [N]; [] or [1] for one row of scores
---@param given? { reduction: "mean"|"sum"|"none", p: integer, margin: number, weight: Tensor }
---   p: exponent, 1 or 2 (default: 1); margin: least difference of two scores without a loss (default: 1); weight: [C],
---   factor of each class
---@return Tensor  [], or the shape of ids with "none"
function M.multi_margin_loss(input, ids, given)
  local o = opts("multi_margin_loss", given, MULTI)
  opts.expect(input, a_tensor, "multi_margin_loss: input")
  opts.expect(ids, a_tensor, "multi_margin_loss: target")
  return scope.scope(function()
    if input.ndim == 0 then input = input:reshape(1) end
    local one = input.ndim == 1 and ids:numel() == 1            -- its target may have shape [1]
    local rows, flat = rows_of("multi_margin_loss", input, one and ids:reshape {} or ids, o.weight)
    local index = flat:unsqueeze(2)
    local excess = ops.relu(rows - rows:gather(2, index) + o.margin)
    if o.p ~= 1 then excess = excess:pow(o.p) end
    local own = M.one_hot(flat, rows:size(2)):bool()
    local loss = excess:masked_fill(own, 0)
    if o.weight then loss = loss * o.weight:index_select(1, flat):unsqueeze(2) end
    loss = (loss:sum(2) / rows:size(2)):reshape(ids.shape)
    return o.reduction == "mean" and loss:sum() / math.max(loss:numel(), 1) or reduced(loss, o.reduction)
  end)
end

--- 1 at the position of each id, 0 elsewhere. Errors: a negative id; an id that is not below `classes`.
---@param ids Tensor  int64, of any shape; from 0
---@param classes? integer  number of classes (default: the largest id + 1)
---@return Tensor  int64, of the shape of ids and one more dimension
function M.one_hot(ids, classes)
  opts.expect(ids, a_tensor, "one_hot: ids")
  if ids.dtype ~= "int64" then raise("one_hot: ids are %s, expected int64", ids.dtype) end
  local low, high = 0, -1
  if ids:numel() > 0 then low, high = (ids:min()):item(), (ids:max()):item() end
  if low < 0 then raise("one_hot: the lowest id is %d, expected ids from 0", low) end
  if classes == nil then
    if ids:numel() == 0 then raise "one_hot: there are no ids; pass the number of classes" end
    classes = high + 1
  end
  opts.expect(classes, opts.whole_from(1), "one_hot: number of classes")
  if high >= classes then raise("one_hot: the largest id is %d, expected less than %d", high, classes) end
  return scope.scope(function()
    return ids:unsqueeze(-1):eq(create.arange(classes, { dtype = "int64", device = ids.device })):long()
  end)
end

-- ---- distances ----------------------------------------------------------------------------------------

local NORMALIZE = { p = 2, dim = opts.option(opts.whole, 2), eps = 1e-12 }
--- x divided by its norm along a dimension.
---@param x Tensor  of any shape
---@param given? { p: number, dim: integer, eps: number }
---   p: exponent of the norm (default: 2); dim: from 1; negative from the end (default: 2); eps: lower limit of the
---   norm (default: 1e-12)
---@return Tensor
function M.normalize(x, given)
  local o = opts("normalize", given, NORMALIZE)
  opts.expect(x, a_tensor, "normalize: input")
  return scope.scope(function() return x / x:norm(o.p, o.dim, { keepdim = true }):clamp_min(o.eps) end)
end

local COSINE = { dim = opts.option(opts.whole, 2), eps = 1e-8 }
--- The cosine of the angle between vectors along a dimension.
---@param a Tensor  of any shape
---@param b Tensor  broadcasts with a
---@param given? { dim: integer, eps: number }
---   dim: from 1; negative from the end (default: 2); eps: lower limit of each norm (default: 1e-8)
---@return Tensor  of the common shape without the dimension
function M.cosine_similarity(a, b, given)
  local o = opts("cosine_similarity", given, COSINE)
  opts.expect(a, a_tensor, "cosine_similarity: first input")
  opts.expect(b, a_tensor, "cosine_similarity: second input")
  return scope.scope(function()
    a, b = unpack(broadcast_tensors { a, b })
    local function unit(x)
      local norm = x:norm(2, o.dim, { keepdim = true })
      return x / (norm + (norm:detach():clamp_min(o.eps) - norm:detach()))   -- the limit does not stop the gradient
    end
    return (unit(a) * unit(b)):sum(o.dim)
  end)
end

local DISTANCE = { p = 2, eps = 1e-6, keepdim = false }
--- The p-norm of a - b + eps along the last dimension.
---@param a Tensor  [..., D]
---@param b Tensor  broadcasts with a
---@param given? { p: number, eps: number, keepdim: boolean }
---   p: exponent of the norm (default: 2); eps: added to each difference (default: 1e-6); keepdim: keeps the last
---   dimension with size 1 (default: false)
---@return Tensor  [...]
function M.pairwise_distance(a, b, given)
  local o = opts("pairwise_distance", given, DISTANCE)
  opts.expect(a, a_tensor, "pairwise_distance: first input")
  opts.expect(b, a_tensor, "pairwise_distance: second input")
  return scope.scope(function() return (a - b + o.eps):norm(o.p, -1, { keepdim = o.keepdim }) end)
end

local EMBEDDING = { margin = 0, reduction = reduction }
--- 1 - cosine of similar pairs (target 1), max(0, cosine - margin) of different ones (target -1).
---@param a Tensor  [N, D] or [D]
---@param b Tensor  of a's shape
---@param target Tensor  1 or -1: [N] or []
---@param given? { reduction: "mean"|"sum"|"none", margin: number }
---   margin: cosine above which pairs with target -1 have a loss, from -1 to 1 (default: 0)
---@return Tensor  [], or the target's shape with "none"
function M.cosine_embedding_loss(a, b, target, given)
  local o = opts("cosine_embedding_loss", given, EMBEDDING)
  check_pair("cosine_embedding_loss", a, b, "second input")
  opts.expect(target, a_tensor, "cosine_embedding_loss: target")
  return scope.scope(function()
    local tiny = 1e-12                                  -- added to the squared norms, as in PyTorch
    local cosine = (a * b):sum(-1) / (((a * a):sum(-1) + tiny) * ((b * b):sum(-1) + tiny)):sqrt()
    local loss = where(target:eq(1), 1 - cosine, ops.relu(cosine - o.margin))
    return reduced(loss:masked_fill(target:ne(1):logical_and(target:ne(-1)), 0), o.reduction)
  end)
end

--- max(0, -target * (a - b) + margin): a should be ranked higher where the target is 1, lower where it is -1.
---@param a Tensor  of any shape
---@param b Tensor  of a's shape
---@param target Tensor  1 or -1; broadcasts
---@param given? { reduction: "mean"|"sum"|"none", margin: number }  margin: least difference of the inputs without a loss (default: 0)
---@return Tensor  [], or the common shape with "none"
function M.margin_ranking_loss(a, b, target, given)
  local o = opts("margin_ranking_loss", given, EMBEDDING)
  check_pair("margin_ranking_loss", a, b, "second input")
  opts.expect(target, a_tensor, "margin_ranking_loss: target")
  return scope.scope(function() return reduced(ops.relu((b - a) * target + o.margin), o.reduction) end)
end

local hinge = elementwise("hinge_embedding_loss", { margin = 1 }, function(x, y, o)
  local zero = create.zeros_like(x)
  return where(y:eq(1), x, zero) + where(y:eq(-1), ops.relu(o.margin - x), zero)
end)
--- The input where the target is 1, max(0, margin - input) where it is -1.
---@param input Tensor  distances, of any shape
---@param target Tensor  1 or -1, of the input's shape
---@param given? { reduction: "mean"|"sum"|"none", margin: number }  margin: least distance without a loss where the target is -1 (default: 1)
---@return Tensor  [], or the input's shape with "none"
function M.hinge_embedding_loss(input, target, given) return hinge(input, target, given) end

local soft_margin = elementwise("soft_margin_loss", {}, function(x, y) return -ops.logsigmoid(x * y) end)
--- log(1 + e^(-target * input)).
---@param input Tensor  of any shape
---@param target Tensor  1 or -1, of the input's shape
---@param given? { reduction: "mean"|"sum"|"none" }
---@return Tensor  [], or the input's shape with "none"
function M.soft_margin_loss(input, target, given) return soft_margin(input, target, given) end

local TRIPLET = { margin = opts.option(opts.positive, 1), p = 2, eps = 1e-6, swap = false, reduction = reduction }
--- max(0, distance(anchor, positive) - distance(anchor, negative) + margin).
---@param anchor Tensor  [N, D] or [D]
---@param positive Tensor  of the anchor's shape
---@param negative Tensor  of the anchor's shape
---@param given? { reduction: "mean"|"sum"|"none", margin: number, p: number, eps: number, swap: boolean }
---   margin: least difference of the distances without a loss, above 0 (default: 1); p: exponent of the norm (default:
---   2); eps: added to each difference (default: 1e-6); swap: takes the negative's distance from the positive if that is smaller
---   (default: false)
---@return Tensor  [], or [N] with "none"
function M.triplet_margin_loss(anchor, positive, negative, given)
  local o = opts("triplet_margin_loss", given, TRIPLET)
  check_pair("triplet_margin_loss", anchor, positive, "positive")
  check_pair("triplet_margin_loss", anchor, negative, "negative")
  local by = { p = o.p, eps = o.eps }
  return scope.scope(function()
    local far = M.pairwise_distance(anchor, negative, by)
    if o.swap then far = far:minimum(M.pairwise_distance(positive, negative, by)) end
    return reduced(ops.relu(M.pairwise_distance(anchor, positive, by) - far + o.margin), o.reduction)
  end)
end

return M
