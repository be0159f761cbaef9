-- SPDX-License-Identifier: MIT
--- nn.F: layers as functions.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local shapes = require "moonshard.tensor.shape"
local tensor = require "moonshard.tensor"

local autograd = require "moonshard.autograd"
local a_tensor = tensor.a_tensor
local no_grad = autograd.no_grad
local info_of, is_tensor, position = tensor.info_of, tensor.is_tensor, tensor.position
local raise = errors.raise

local F = {}

--- x w^T + b over the last dimension.
---@param x Tensor  [..., in]
---@param w Tensor  [out, in]
---@param b? Tensor  [out]
---@return Tensor  [..., out]
function F.linear(x, w, b) return ops.linear(x, w, b) end

--- As linear, with a weight of int8, each row of which is multiplied by its scale: x (scale w)^T + b. Sums are float32,
--- or float64 for x in float64. x and b get gradients, w and scale none. Errors: a scale that requires a gradient.
---@param x Tensor  [..., in], floating point
---@param w Tensor  [out, in], int8
---@param scale Tensor  [out], floating point; nn.utils.quantize_rows gives w and scale
---@param b? Tensor  [out], of x's dtype
---@return Tensor  [..., out], of x's dtype
function F.int8_linear(x, w, scale, b) return ops.int8_linear(x, w, b, scale) end

-- Adds the activations, which are relu, silu and the other rows of kernels/rows/elementwise.def with the flag
-- ACTIVATION, and the functions of other files.
for name, fn in pairs(require "moonshard.tensor.ops".activations) do F[name] = fn end
for _, file in ipairs { "activation.functions", "norm.functions", "dropout.functions", "linear.functions",
  "embedding.functions", "pooling.functions", "images.functions", "images.sampling", "loss.functions" } do
  for name, fn in pairs(require("moonshard.nn." .. file)) do F[name] = fn end
end
for name, fn in pairs(require("moonshard.nn.conv.functions").F) do F[name] = fn end
F.ctc_loss = require "moonshard.nn.loss.ctc".ctc_loss

local approximate = opts.one_of({ "none", "tanh" }, "none")

local gelu_options = { approximate = approximate, recompute = false }

--- GELU (Hendrycks & Gimpel 2016): x * Phi(x), where Phi is the distribution function of the standard normal
--- distribution; approximate = "tanh": GPT-2's approximation by tanh.
---@param x Tensor  of any shape
---@param given? { approximate: "none"|"tanh", recompute: boolean }
---   recompute: operators that use the result compute it again from x in backward, bit for bit, instead of keeping it
---@return Tensor
function F.gelu(x, given)
  if given == nil then return ops.gelu(x) end
  local o = opts("gelu", given, gelu_options)
  local y = o.approximate == "tanh" and ops.gelu_tanh(x) or ops.gelu(x)
  return o.recompute and ops.recompute(y) or y
end

--- Exponentials that add up to 1 along d: `e^x / sum(e^x)`.
---@param x Tensor  of any shape
---@param d? integer  from 1; negative from the end (default: -1)
---@return Tensor
function F.softmax(x, d) return ops.softmax(x, position(d or -1, "softmax")) end
--- The logarithm of softmax along d, computed without overflow.
---@param x Tensor  of any shape
---@param d? integer  from 1; negative from the end (default: -1)
---@return Tensor
function F.log_softmax(x, d) return ops.log_softmax(x, position(d or -1, "log_softmax")) end

--- Sets elements to 0 with probability p and multiplies the others by 1 / (1 - p); returns x if not training.
---@param x Tensor  of any shape
---@param p? number  probability of setting an element to 0 (default: 0.5)
---@param given? { training: boolean }  training: false: returns x
---@return Tensor
function F.dropout(x, p, given)
  p, given = opts.shift("dropout", p, given)
  local o = opts("dropout", given, { training = true })
  p = p or 0.5
  if type(p) ~= "number" or not (p >= 0 and p <= 1) then
    raise("dropout: dropout probability has to be between 0 and 1, but got %s", errors.show(p))
  end
  if not o.training or p == 0 then return x end
  return ops.dropout(x, p)
end

--- Looks up rows of w by id. Errors: an id that is not the number of a row.
---@param ids Tensor  int64 […], from 0
---@param w Tensor  [n, d]
---@param given? { padding_idx: integer }
---   padding_idx: row that gets no gradient, from 0; negative from the end
---@return Tensor  […, d]
function F.embedding(ids, w, given)
  local pad = given and opts("embedding", given, { padding_idx = opts.number }).padding_idx
  if pad and pad < 0 then pad = w:size(1) + pad end
  return ops.embedding(w, ids, pad)
end

-- The trailing sizes, as a list. shape: argument 2 of the function `who`, one size or a list.
local function sizes_of(who, shape)
  local sizes = type(shape) == "number" and { shape } or shape
  opts.need(type(sizes) == "table" and type(rawget(sizes, 1)) == "number", shape, "a size or a list of sizes",
    "%s: argument 2", who)
  return sizes
end

-- Raises if the last dimensions of x do not have these sizes.
local function check_sizes(who, x, sizes)
  opts.expect(x, a_tensor, "%s: argument 1", who)
  local shape = x.shape
  local n = #sizes
  for k = 1, n do
    if shape[#shape - n + k] ~= sizes[k] then
      raise("%s: input %s does not end in the normalised sizes [%s]", who, tostring(shape), table.concat(sizes, ", "))
    end
  end
end

local mlp_options = { recompute = false }

--- gelu(x w1^T + b1) w2^T + b2, with GELU approximated by tanh: the results of linear, gelu and linear. On a GPU the
--- matrix products also compute GELU and its gradient, except where cuBLASLt does not support that.
---@param x Tensor  […, in]
---@param w1 Tensor  [hidden, in]
---@param b1? Tensor  [hidden]
---@param w2 Tensor  [out, hidden]
---@param b2? Tensor  [out]
---@param given? { recompute: boolean }
---   recompute: backward computes the results of GELU again instead of keeping them (default: false)
---@return Tensor  […, out]
function F.gelu_mlp(x, w1, b1, w2, b2, given)
  b2, given = opts.shift("gelu_mlp", b2, given)
  return ops.gelu_mlp(x, w1, w2, b1, b2, opts("gelu_mlp", given, mlp_options).recompute)
end

--- (x - mean) / sqrt(var + eps) * w + b over the trailing dimensions (Ba et al. 2016). Errors: the trailing dimensions
--- of x do not have the given sizes.
---@param x Tensor  […, sizes]
---@param shape integer|integer[]  the trailing sizes to normalise over
---@param w? Tensor  of these sizes
---@param b? Tensor  of these sizes
---@param given? { eps: number, residual: Tensor }
---   eps: added to the variance (default: 1e-5); residual: of x's shape, is added to x first, in the same pass
---@return Tensor  of x's shape
---@return Tensor?  x + residual, if there is a residual
function F.layer_norm(x, shape, w, b, given)
  w, given = opts.shift("layer_norm", w, given)
  b, given = opts.shift("layer_norm", b, given)
  local o = opts("layer_norm", given, { eps = 1e-5, residual = opts.any })
  local sizes = sizes_of("layer_norm", shape)
  check_sizes("layer_norm", x, sizes)
  if o.residual then return ops.add_layer_norm(x, o.residual, w, b, #sizes, o.eps) end
  return ops.layer_norm(x, w, b, #sizes, o.eps)
end

--- x / sqrt(mean(x^2) + eps) * w over the trailing dimensions (Zhang & Sennrich 2019). If eps is not given, it is the
--- machine epsilon of x's dtype. F.rms_norm(x, w), without sizes, normalises over the sizes of w. Errors: the trailing
--- dimensions of x do not have the given sizes.
---@param x Tensor  […, sizes]
---@param shape? integer|integer[]  the trailing sizes to normalise over (default: the last one)
---@param w? Tensor  of these sizes
---@param given? { eps: number, residual: Tensor }
---   eps: added to the mean square; residual: of x's shape, is added to x first, in the same pass
---@return Tensor  of x's shape
---@return Tensor?  x + residual, if there is a residual
function F.rms_norm(x, shape, w, given)
  if is_tensor(shape) then
    w, given = opts.shift("rms_norm", w, given)
    opts.need(w == nil, w, "options, as argument 2 is the weight", "rms_norm: argument 3")
    shape, w = nil, shape
  end
  shape, given = opts.shift("rms_norm", shape, given)
  w, given = opts.shift("rms_norm", w, given)
  local o = opts("rms_norm", given, { eps = opts.number, residual = opts.any })
  local n = is_tensor(w) and w.ndim or 1
  if shape ~= nil then
    local sizes = sizes_of("rms_norm", shape)
    check_sizes("rms_norm", x, sizes)
    n = #sizes
  end
  if o.residual then return ops.add_rms_norm(x, o.residual, w, n, o.eps) end
  return ops.rms_norm(x, w, n, o.eps)
end

-- running = (1 - factor) * running + factor * scale * batch.
local function mix(running, batch, factor, scale)
  if running == nil then return end
  running:mul_(1 - factor):add_(batch:to(running.dtype), { alpha = factor * scale })
end

local HALF = { float16 = true, bfloat16 = true }

-- A channel whose elements are equal has variance 0.
local function check_eps(eps, training)
  if training and not (eps > 0) then opts.wrong(eps, "a number > 0 in training", "batch_norm: eps") end
  if not (eps >= 0) then opts.wrong(eps, "a number from 0", "batch_norm: eps") end
end

-- In training, normalises with the batch's statistics and mixes them, with the unbiased variance, into the running
-- statistics mean and var. Otherwise normalises with mean and var.
local function batch_norm(x, mean, var, w, b, training, factor, eps)
  opts.expect(x, a_tensor, "batch_norm: argument 1")
  check_eps(eps, training)
  if not training then return (ops.batch_norm(x, w, b, mean, var, false, eps)) end
  if x.ndim < 2 then
    raise("batch_norm: the input needs at least 2 dimensions, batch and channels, got %s", tostring(x.shape))
  end
  local n = x:numel() / math.max(x:size(2), 1)
  if n == 1 and x:size(2) > 0 then
    raise("batch_norm: Expected more than 1 value per channel when training, got input size %s", tostring(x.shape))
  end
  -- PyTorch's backward refuses weights in low precision with statistics of another dtype, unless x is [N, C].
  if mean ~= nil and w ~= nil and HALF[w.dtype] and mean.dtype ~= w.dtype and x.ndim > 2 and autograd.is_grad_enabled()
    and (x.requires_grad or w.requires_grad) then
    raise("Expected running_mean to have type %s but got %s; cast the buffers running_mean and running_var too, or leave the batch norm out of the low "
      .. "precision (under fully_shard: a MixedPrecisionPolicy of its own with only output_dtype)", w.dtype, mean.dtype)
  end
  local y, batch_mean, batch_var = ops.batch_norm(x, w, b, nil, nil, true, eps)
  if (mean or var) and factor ~= 0 and n > 0 then         -- an empty batch has no statistics
    no_grad(function()
      mix(mean, batch_mean, factor, 1)
      mix(var, batch_var, factor, n / (n - 1))
    end)
  end
  batch_mean:release()
  batch_var:release()
  return y
end

--- Normalises over all dimensions except the second (Ioffe & Szegedy 2015). In training it uses the batch's mean and
--- variance, and then sets running = (1 - momentum) running + momentum batch, in place, with the unbiased variance.
--- Otherwise it uses the running mean and variance. A batch without elements leaves the running statistics as they are.
--- Errors: a single value per channel in training; eps below 0, or 0 in training.
---@param x Tensor  [N, C, …]
---@param mean? Tensor  running mean, [C]
---@param var? Tensor   running variance, [C]
---@param w? Tensor  [C]
---@param b? Tensor  [C]
---@param given? { training: boolean, momentum: number, eps: number }
---   training: true: normalises by the batch's statistics; momentum: weight of the batch in the running statistics;
---   eps: added to the variance
---@return Tensor  of x's shape
function F.batch_norm(x, mean, var, w, b, given)
  mean, given = opts.shift("batch_norm", mean, given)
  var, given = opts.shift("batch_norm", var, given)
  w, given = opts.shift("batch_norm", w, given)
  b, given = opts.shift("batch_norm", b, given)
  local o = opts("batch_norm", given, { training = false, momentum = 0.1, eps = 1e-5 })
  return batch_norm(x, mean, var, w, b, o.training, o.momentum, o.eps)
end

local reduction = opts.one_of({ "mean", "sum", "none" }, "mean")
local ce_options = { reduction = reduction, ignore_index = opts.option(opts.whole, -100), label_smoothing = 0,
  weight = opts.any }

-- Cross-entropy with probabilities as targets, which have the shape of the logits.
local function soft_cross_entropy(logits, target, weight, how, ignore_index, label_smoothing)
  if ignore_index ~= -100 then raise("cross_entropy: ignore_index is not supported for a target of probabilities") end
  if logits.shape ~= target.shape then
    raise("cross_entropy: a target of probabilities must have the logits' shape %s, got %s", tostring(logits.shape),
      tostring(target.shape))
  end
  if not (label_smoothing >= 0 and label_smoothing <= 1) then
    raise("cross_entropy: label_smoothing must be from 0 to 1, got %g", label_smoothing)
  end
  local d = logits.ndim == 1 and 1 or 2
  local classes = logits:size(d)
  if label_smoothing > 0 then target = target * (1 - label_smoothing) + label_smoothing / classes end
  local terms = ops.log_softmax(logits, d - 1) * target
  if weight ~= nil then
    opts.expect(weight, a_tensor, "cross_entropy: weight")
    if weight.ndim ~= 1 or weight:numel() ~= classes then
      raise("cross_entropy: weight must have shape [%d], one element per class; its shape is %s", classes, tostring(weight.shape))
    end
    local sizes = {}
    for k = 1, logits.ndim do sizes[k] = k == d and classes or 1 end
    terms = terms * weight:reshape(sizes)
  end
  if how == "none" then return -terms:sum(d) end
  local loss = -terms:sum()
  return how == "mean" and loss / (logits:numel() / classes) or loss
end

-- Cross-entropy of logits [C] or [N, C, ...], as in PyTorch. The operator takes matrices, with a row of logits for each
-- id.
local function cross_entropy(logits, ids, weight, how, ignore_index, label_smoothing, wide)
  opts.expect(logits, a_tensor, "cross_entropy: input")
  opts.expect(ids, a_tensor, "cross_entropy: target")
  local ndim = logits.ndim
  if ids.ndim == ndim and ndim > 0 and dtypes.is_float(info_of(ids).dtype) then
    if wide and logits.dtype ~= "float64" then logits = logits:float() end
    return soft_cross_entropy(logits, ids, weight, how, ignore_index, label_smoothing)
  end
  if ndim == 2 then return ops.cross_entropy(logits, ids, weight, how, ignore_index, label_smoothing, wide) end
  if ndim == 0 then raise("cross_entropy: an input of shape [] has no classes") end
  if ndim == 1 and ids:numel() ~= 1 or ndim > 1 and logits:numel() ~= ids:numel() * logits:size(2) then
    raise("cross_entropy: input has shape %s and target %s, expected %s", tostring(logits.shape), tostring(ids.shape),
      ndim == 1 and "[C] and []" or "[N, C, ...] and [N, ...]")
  end
  if ndim == 1 then
    local loss = ops.cross_entropy(logits:unsqueeze(1), ids:reshape(1), weight, how, ignore_index, label_smoothing)
    return how == "none" and loss:reshape {} or loss
  end
  local shape, classes = ids.shape, logits:size(2)
  local order = { 1 }
  for d = 3, ndim do order[#order + 1] = d end
  order[#order + 1] = 2
  local rows = logits:permute(order):reshape(-1, classes)
  local loss = ops.cross_entropy(rows, ids:reshape(-1), weight, how, ignore_index, label_smoothing)
  return how == "none" and loss:reshape(shape) or loss
end

--- Softmax and negative log likelihood in one function. Errors: an id that is not a class of the logits; ignore_index
--- with probabilities as targets.
---@param logits Tensor  [N, C], [C] or [N, C, …]
---@param ids Tensor  classes from 0: int64 [N], [] or [N, …]; or the probability of every class, floating point of the logits' shape
---@param given? { reduction: "mean"|"sum"|"none", ignore_index: integer, label_smoothing: number, weight: Tensor }
---   reduction: how the losses of the rows are combined; ignore_index: id of rows that do not count; label_smoothing:
---   share of the target that is spread evenly over all classes; weight: [C], factor of each class
---@return Tensor  [], or the logits' shape without C with "none"
function F.cross_entropy(logits, ids, given)
  if given == nil then return cross_entropy(logits, ids, nil, "mean", -100, 0) end
  local o = opts("cross_entropy", given, ce_options)
  return cross_entropy(logits, ids, o.weight, o.reduction, o.ignore_index, o.label_smoothing)
end

local lce_options = { linear_bias = opts.any, batch_chunk_size = opts.whole_from(1), wide = false }
for name, value in pairs(ce_options) do lce_options[name] = value end
local LCE_PARTS = { linear = true, cross_entropy = true }
local lce_defaults = opts("linear_cross_entropy", nil, lce_options)

-- The sizes of all dimensions of x except the last.
local function first_sizes(x)
  local sizes = {}
  for d = 1, x.ndim - 1 do sizes[d] = x:size(d) end
  return sizes
end

-- The number of rows of a chunk. Chunks have nearly equal sizes and at most about 512 MiB of logits. The number is a
-- multiple of 64, which fills the tiles of matrix products.
local function chunk_rows(x, rows, classes)
  local chunks = math.ceil(rows * classes * x:element_size() / 2 ^ 29)
  return math.ceil(rows / math.max(chunks, 1) / 64) * 64
end

--- cross_entropy of linear(x, w), with less memory: the logits are computed in chunks of rows, and the gradients of x,
--- w and the bias in the same pass. Memory: the logits of one chunk, on the CPU also their gradient; with several
--- chunks also w's gradient in float32 if w is float16 or bfloat16, and on the CPU a buffer of w's size. The bits
--- of the result depend on the size of the chunks, not on the number of threads; if one chunk has all rows, linear and
--- cross_entropy compute the result. Backward computes the logits again if the reduction is "none", or if the dtype is
--- float16, whose gradients need the loss's scale. With probabilities as targets there are no chunks. Errors: a class
--- outside of w's rows.
---@param x Tensor  […, in]
---@param w Tensor  [C, in]: a row for each class
---@param ids Tensor  classes from 0: int64 […]; or the probability of every class, floating point […, C]
---@param given? { linear_bias: Tensor, reduction: "mean"|"sum"|"none", ignore_index: integer, label_smoothing: number, weight: Tensor, batch_chunk_size: integer, wide: boolean }
---   linear_bias: [C], added to the logits; weight: [C], factor of each class; batch_chunk_size: rows of a chunk
---   (default: equal chunks of up to about 512 MiB of logits); wide: the loss of half-precision logits is float32, not
---   rounded to their dtype (default: false)
---@return Tensor  [], or the shape of x without its last dimension with "none"
function F.linear_cross_entropy(x, w, ids, given)
  local o = given == nil and lce_defaults or opts("linear_cross_entropy", given, lce_options)
  opts.expect(x, a_tensor, "linear_cross_entropy: input")
  opts.expect(w, a_tensor, "linear_cross_entropy: linear_weight")
  opts.expect(ids, a_tensor, "linear_cross_entropy: ids")
  local ndim, soft = x.ndim, dtypes.is_float(info_of(ids).dtype)
  if w.ndim ~= 2 or ndim == 0 or x:size(ndim) ~= w:size(2) then
    raise("linear_cross_entropy: the input must be [..., in] and linear_weight [classes, in], got %s and %s",
      tostring(x.shape), tostring(w.shape))
  end
  local classes, rows, whole = w:size(1), 1, x
  for d = 1, ndim - 1 do rows = rows * x:size(d) end
  local fits = ids.ndim == (soft and ndim or ndim - 1) and ids:numel() == (soft and rows * classes or rows)
  for d = 1, ndim - 1 do fits = fits and ids:size(d) == x:size(d) end
  if not fits then
    raise("linear_cross_entropy: %s for input %s and %d classes must have shape [%s], got %s",
      soft and "probabilities" or "target", tostring(x.shape), classes,
      table.concat(first_sizes(x), ", ") .. (soft and (ndim > 1 and ", " or "") .. classes or ""), tostring(ids.shape))
  end
  if ndim ~= 2 then
    x, ids = x:reshape(rows, w:size(2)), soft and ids:reshape(rows, classes) or ids:reshape(rows)
  end
  local chunk, loss = o.batch_chunk_size or chunk_rows(x, rows, classes)
  if soft or chunk >= rows then
    local logits = errors.naming("linear_cross_entropy", LCE_PARTS, ops.linear, x, w, o.linear_bias)
    loss = errors.naming("linear_cross_entropy", LCE_PARTS, cross_entropy, logits, ids, o.weight, o.reduction,
      o.ignore_index, o.label_smoothing, o.wide)
  else
    loss = ops.linear_cross_entropy(x, w, ids, o, chunk)
  end
  return o.reduction == "none" and ndim ~= 2 and loss:reshape(first_sizes(whole)) or loss
end

-- Appends n zeros to every row of t.
local function widen(t, n)
  local sizes = { unpack(t.shape) }
  sizes[#sizes] = n
  return shapes.cat({ t, create.zeros(sizes, { dtype = t.dtype, device = t.device }) }, -1)
end

-- Whether the values' last dimension has another size than that of queries and keys. The operator refuses all other
-- differences.
local function is_uneven(q, k, v)
  if not (is_tensor(q) and is_tensor(k) and is_tensor(v)) then return false end
  local n = q.ndim
  if n < 2 or k.ndim ~= n or v.ndim ~= n then return false end
  local width = q:size(-1)
  if v:size(-1) == width or width == 0 or k:size(-1) ~= width then return false end
  for d = 1, n - 1 do
    if k:size(d) ~= v:size(d) or d < n - 2 and q:size(d) ~= k:size(d) then return false end
  end
  return true
end

-- Attention whose values are wider or narrower than queries and keys. Appends zeros to the narrower ones: to queries
-- and keys, which does not change the scores, or to values, and then removes the zeros from the result.
local function uneven_attention(q, k, v, scale, o)
  local d, width = q:size(-1), v:size(-1)
  scale = scale or 1 / math.sqrt(d)
  if width < d then return ops.attention(q, k, widen(v, d - width), scale, o):narrow(-1, 1, width) end
  return ops.attention(widen(q, width - d), widen(k, width - d), v, scale, o)
end

local sdpa_options = { attn_mask = opts.any, is_causal = false, causal_offset = opts.whole, window = opts.whole_from(1),
  dropout_p = 0, scale = opts.number, softcap = opts.number, enable_gqa = false }
local no_options = {}

--- softmax(q k^T scale + mask) v (Vaswani et al. 2017). A mask and is_causal may be given together. Keys and values may
--- be views, such as the first S positions of a longer cache, `k_cache:narrow(3, 1, S)`; they are not copied. T new
--- tokens, whose keys are the last of these, attend to them with `{ is_causal = true, causal_offset = S - T }`.
---@param q Tensor  [..., T, D]
---@param k Tensor  [..., S, D]
---@param v Tensor  [..., S, E]
---@param given? { attn_mask: Tensor, is_causal: boolean, causal_offset: integer, window: integer, dropout_p: number, scale: number, softcap: number, enable_gqa: boolean }
---   attn_mask: broadcasts to [..., T, S]; a bool mask is true where attention is allowed, a floating point mask is
---   added to the scores; is_causal: query t attends to keys up to t + causal_offset; causal_offset: default 0; window:
---   with is_causal, a query attends only to the last `window` of these keys (default: all); dropout_p: probability that
---   a softmax weight is dropped; scale: factor of the scores (default: 1/sqrt(D)); softcap: scaled scores s become
---   softcap tanh(s / softcap), before the mask (default: none); enable_gqa: k and v [..., heads, S, D] may have fewer
---   heads than q, each for several heads of q in a row (Ainslie et al. 2023)
---@return Tensor  [..., T, E]
function F.scaled_dot_product_attention(q, k, v, given)
  if given ~= nil then opts.verify("scaled_dot_product_attention", given, sdpa_options) end
  local o = given or no_options
  local scale, cap = o.scale, o.softcap
  if cap and not (cap > 0) then raise("scaled_dot_product_attention: softcap must be greater than 0, got %g", cap) end
  if not o.enable_gqa and is_tensor(q) and is_tensor(k) and q.ndim > 2 and k.ndim == q.ndim and
    q:size(-3) ~= k:size(-3) then
    raise("scaled_dot_product_attention: enable_gqa lets keys and values have fewer heads than queries: got %s, %s",
      tostring(q.shape), tostring(k.shape))
  end
  if scale == 0 and is_tensor(q) then q, scale = q * 0, 1 end    -- the operator uses 1/sqrt(D) if the scale is 0
  if is_uneven(q, k, v) then return uneven_attention(q, k, v, scale, o) end
  return ops.attention(q, k, v, scale, o)
end

--- Splits the result of one projection into queries, keys and values: [B, T, 3 C] -> three tensors [B, heads, T, C /
--- heads].
---@param qkv Tensor  [B, T, 3 C]
---@param heads integer  divides C
---@return Tensor q
---@return Tensor k
---@return Tensor v
function F.split_heads(qkv, heads)
  opts.expect(qkv, a_tensor, "split_heads: argument 1")
  opts.expect(heads, opts.whole_from(1), "split_heads: argument 2")
  if qkv.ndim ~= 3 or qkv:size(3) % (3 * heads) ~= 0 then
    raise("split_heads: argument 1 has shape %s, expected [B, T, 3 C] where C is a multiple of %d, the number of heads",
      tostring(qkv.shape), heads)
  end
  return ops.split_heads(qkv, qkv:size(1), qkv:size(2), heads, qkv:size(3) / (3 * heads))
end

--- Concatenates the heads of attention's result: [B, heads, T, D] -> [B, T, heads * D].
---@param y Tensor  [B, heads, T, D]
---@return Tensor
function F.merge_heads(y)
  opts.expect(y, a_tensor, "merge_heads: argument 1")
  if y.ndim ~= 4 then raise("merge_heads: argument 1 has shape %s, expected [B, heads, T, D]", tostring(y.shape)) end
  return ops.join_heads(y, y:size(1), y:size(3), y:size(2) * y:size(4))
end

opts.fix(F, { "linear", "int8_linear", "softmax", "log_softmax" })

return {
  F = F, check_sizes = check_sizes, batch_norm = batch_norm, mix = mix,
  check_eps = check_eps, cross_entropy = cross_entropy, ce_options = ce_options, reduction = reduction,
}
