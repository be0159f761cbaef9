-- SPDX-License-Identifier: MIT
--- The operators that layers and nn.F call, with positional arguments, which the engine checks. Dimensions count from
--- 0; negative ones from the end.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local tensor = require "moonshard.tensor"

local args, a_in, a_out, a_i, a_f = engine.args, engine.a_in, engine.a_out, engine.a_i, engine.a_f
local id_of, wrap = tensor.id_of, tensor.wrap
local call1, call3, call_args = tensor.call1, tensor.call3, tensor.call

local op = engine.op

local M = {}

local op_linear, op_gelu, op_dropout, op_embedding = op "linear", op "gelu", op "dropout", op "embedding"
local op_layer_norm, op_rms_norm, op_softmax, op_log_softmax = op "layer_norm", op "rms_norm", op "softmax",
  op "log_softmax"
local op_gelu_mlp, op_int8_linear = op "gelu_mlp", op "int8_linear"
local op_linear_parts, op_rotary, op_rms_norm_rotary = op "linear_parts", op "rotary", op "rms_norm_rotary"
local op_add_layer_norm, op_add_rms_norm = op "add_layer_norm", op "add_rms_norm"
local op_batch_norm, op_batch_norm_stats = op "batch_norm", op "batch_norm_stats"
local op_cross_entropy, op_mse_loss, op_attention = op "cross_entropy", op "mse_loss", op "attention"
local op_linear_cross_entropy = op "linear_cross_entropy"
local op_view, op_reshape, op_transpose, op_split = op "view", op "reshape", op "transpose", op "split"
local state, drop_id = engine.state, engine.lib.ms_drop

for name, fn in pairs(require "moonshard.tensor.ops".activations) do M[name] = fn end

function M.linear(x, w, b) return wrap(call3(op_linear, x, w, b, "linear")) end

-- The results of up to 4 linear layers side by side, in one call. layers: their slots.
function M.linear_parts(x, layers)
  local n = #layers
  a_in[0] = id_of(x, "linear")
  for k = 1, n do
    local slots = layers[k]
    a_in[k], a_in[n + k] = id_of(slots.weight, "linear", "weight"), slots.bias and id_of(slots.bias, "linear", "bias") or 0
  end
  args.n_in, args.n_i, args.n_f, a_i[0] = 2 * n + 1, 1, 0, n
  return wrap(call_args(op_linear_parts, x))
end

-- Turns pairs of features. w, eps: of an RMSNorm that goes before; nil without.
function M.rotary(x, cos, sin, w, eps)
  a_in[0], a_in[1], a_in[2] = id_of(x, "rotary"), id_of(cos, "rotary", "cosines"), id_of(sin, "rotary", "sines")
  args.n_in, args.n_i, args.n_f, a_i[0] = 3, 1, 0, 0
  if w == nil then return wrap(call_args(op_rotary, x, cos, sin)) end
  a_in[3], args.n_in, args.n_f, a_f[0] = id_of(w, "rotary", "weight"), 4, 1, eps
  return wrap(call_args(op_rms_norm_rotary, x, cos, sin, w))
end

function M.int8_linear(x, w, scale, b)
  a_in[0], a_in[1] = id_of(x, "int8_linear"), id_of(w, "int8_linear", "weight")
  a_in[2], a_in[3] = b ~= nil and id_of(b, "int8_linear", "bias") or 0, id_of(scale, "int8_linear", "scale")
  args.n_in, args.n_i, args.n_f = 4, 0, 0
  return wrap(call_args(op_int8_linear, x, w, b, scale))
end

function M.gelu(x) return wrap(call1(op_gelu, x, "gelu")) end
function M.dropout(x, p) return wrap(tensor.call1f(op_dropout, x, p, "dropout")) end

-- gelu(x w1^T + b1) w2^T + b2, with GELU approximated by tanh. again: backward computes the activations again.
function M.gelu_mlp(x, w1, b1, w2, b2, again)
  a_in[0], a_in[1] = id_of(x, "gelu_mlp"), id_of(w1, "gelu_mlp", "first weight")
  a_in[2] = id_of(w2, "gelu_mlp", "second weight")
  a_in[3] = b1 ~= nil and id_of(b1, "gelu_mlp", "first bias") or 0
  a_in[4] = b2 ~= nil and id_of(b2, "gelu_mlp", "second bias") or 0
  args.n_in, args.n_i, args.n_f, a_i[0] = 5, 1, 0, again and 1 or 0
  return wrap(call_args(op_gelu_mlp, x, w1, b1, w2, b2))
end

function M.gelu_tanh(x)
  a_i[0] = 1
  return wrap(tensor.call1_with(op_gelu, x, "gelu", 1))
end

-- Activations with one or two parameters, the numbers s and t.
for _, name in ipairs { "leaky_relu", "elu", "celu", "softplus", "hardtanh", "threshold", "hardshrink",
  "softshrink" } do
  local number = op(name)
  M[name] = function(x, s, t)
    a_f[0], a_f[1] = s, t or 0
    return wrap(tensor.call1_with(number, x, name, 0, t and 2 or 1))
  end
end

-- Functions of two tensors that broadcast.
for _, name in ipairs { "prelu", "binary_cross_entropy" } do
  local number = op(name)
  M[name] = function(a, b) return wrap(tensor.call2(number, a, b, name)) end
end

-- Makes the operators that use t compute it again in their backward, instead of keeping it.
function M.recompute(t)
  if t.id > 0 then errors.check(engine.lib.ms_recompute(t.id)) end
  return t
end

local function along(number, x, d, who)
  a_i[0] = d
  return wrap(tensor.call1_with(number, x, who, 1))
end
function M.softmax(x, d) return along(op_softmax, x, d, "softmax") end
function M.log_softmax(x, d) return along(op_log_softmax, x, d, "log_softmax") end

function M.embedding(ids, w, padding_idx)
  a_in[0], a_in[1] = id_of(w, "embedding", "weight"), id_of(ids, "embedding", "ids")
  args.n_in, args.n_i, args.n_f, a_i[0] = 2, 1, 0, padding_idx or -1
  return wrap(call_args(op_embedding, w, ids))
end

-- Normalises over the last n dimensions.
function M.layer_norm(x, n, w, b, eps)
  local ids = 1
  a_in[0] = id_of(x, "layer_norm")
  if w ~= nil then a_in[1], ids = id_of(w, "layer_norm", "weight"), 2 end
  if b ~= nil then
    if w == nil then a_in[1] = 0 end
    a_in[2], ids = id_of(b, "layer_norm", "bias"), 3
  end
  args.n_in, args.n_i, args.n_f, a_i[0], a_f[0] = ids, 1, 1, n, eps
  return wrap(call_args(op_layer_norm, x, w, b))
end

-- Normalises x + r as layer_norm does. Returns the result and x + r.
function M.add_layer_norm(x, r, n, w, b, eps)
  a_in[0], a_in[1] = id_of(x, "layer_norm"), id_of(r, "layer_norm", "residual")
  a_in[2] = w ~= nil and id_of(w, "layer_norm", "weight") or 0
  a_in[3] = b ~= nil and id_of(b, "layer_norm", "bias") or 0
  args.n_in, args.n_i, args.n_f, a_i[0], a_f[0] = 4, 1, 1, n, eps
  call_args(op_add_layer_norm, x, r, w, b)
  return wrap(a_out[0]), wrap(a_out[1])
end

-- The default eps by dtype: the machine epsilon, as in PyTorch.
local epsilon = { float32 = 2 ^ -23, float64 = 2 ^ -52, float16 = 2 ^ -10, bfloat16 = 2 ^ -7 }

-- Normalises over the last n dimensions.
function M.rms_norm(x, n, w, eps)
  local id = id_of(x, "rms_norm")
  eps = eps or epsilon[x.dtype] or 0
  a_in[0] = id
  local ids = 1
  if w ~= nil then a_in[1], ids = id_of(w, "rms_norm", "weight"), 2 end
  args.n_in, args.n_i, args.n_f, a_i[0], a_f[0] = ids, 1, 1, n, eps
  return wrap(call_args(op_rms_norm, x, w))
end

-- Normalises x + r as rms_norm does. Returns the result and x + r.
function M.add_rms_norm(x, r, n, w, eps)
  a_in[0], a_in[1] = id_of(x, "rms_norm"), id_of(r, "rms_norm", "residual")
  a_in[2] = w ~= nil and id_of(w, "rms_norm", "weight") or 0
  args.n_in, args.n_i, args.n_f, a_i[0], a_f[0] = 3, 1, 1, n, eps or epsilon[x.dtype] or 0
  call_args(op_add_rms_norm, x, r, w)
  return wrap(a_out[0]), wrap(a_out[1])
end

-- Returns the normalised x; in training also the batch's mean and biased variance of each channel.
function M.batch_norm(x, w, b, mean, var, training, eps)
  a_in[0] = id_of(x, "batch_norm")
  a_in[1] = w ~= nil and id_of(w, "batch_norm", "weight") or 0
  a_in[2] = b ~= nil and id_of(b, "batch_norm", "bias") or 0
  a_in[3] = mean ~= nil and id_of(mean, "batch_norm", "running mean") or 0
  a_in[4] = var ~= nil and id_of(var, "batch_norm", "running variance") or 0
  args.n_in, args.n_i, args.n_f, a_i[0], a_f[0] = 5, 1, 1, training and 1 or 0, eps
  call_args(op_batch_norm, x, w, b)
  if not training then return wrap(a_out[0]) end
  return wrap(a_out[0]), wrap(a_out[1]), wrap(a_out[2])
end

-- The mean and biased variance of every channel.
function M.batch_norm_stats(x)
  a_in[0] = id_of(x, "batch_norm_stats")
  args.n_in, args.n_i, args.n_f = 1, 0, 0
  call_args(op_batch_norm_stats, x)
  return wrap(a_out[0]), wrap(a_out[1])
end

-- Convolutions, by their names in the table of operators. M.conv gets in `how` the integer groups and the lists stride,
-- before, after and dilation; before and after are paddings, or a transposed convolution's padding and output padding.
local convolutions = {}
for d = 1, 3 do
  for _, name in ipairs { "conv" .. d .. "d", "conv_transpose" .. d .. "d" } do
    convolutions[name] = { number = op(name), d = d }
  end
end

function M.conv(who, x, w, b, how)
  local c, n = convolutions[who], 2
  local d = c.d
  a_in[0], a_in[1] = id_of(x, who), id_of(w, who, "weight")
  if b ~= nil then a_in[2], n = id_of(b, who, "bias"), 3 end
  args.n_in, args.n_i, args.n_f = n, 4 * d + 1, 0
  for k = 1, d do
    a_i[k - 1], a_i[d + k - 1], a_i[2 * d + k - 1], a_i[3 * d + k - 1] =
      how.stride[k], how.before[k], how.after[k], how.dilation[k]
  end
  a_i[4 * d] = how.groups
  return wrap(call_args(c.number, x, w, b))
end

local reductions = { none = 0, mean = 1, sum = 2 }

function M.cross_entropy(logits, ids, weight, reduction, ignore_index, label_smoothing)
  a_in[0], a_in[1] = id_of(logits, "cross_entropy", "input"), id_of(ids, "cross_entropy", "target")
  local n = 2
  if weight ~= nil then a_in[2], n = id_of(weight, "cross_entropy", "weight"), 3 end
  args.n_in, args.n_i, args.n_f = n, 2, 1
  a_i[0], a_i[1], a_f[0] = reductions[reduction], ignore_index, label_smoothing
  local loss = call_args(op_cross_entropy, logits, ids, weight)
  -- The second output is for backward only. Outside of scopes nothing else would release its id.
  if loss > 0 then engine.lib.ms_release(a_out[1]) end
  return wrap(loss)
end

-- F.linear_cross_entropy for matrices. o: its options; rows: the number of rows of a chunk.
function M.linear_cross_entropy(x, w, ids, o, rows)
  local who = "linear_cross_entropy"
  a_in[0], a_in[1], a_in[2] = id_of(x, who, "input"), id_of(w, who, "linear_weight"), id_of(ids, who, "ids")
  a_in[3] = o.linear_bias ~= nil and id_of(o.linear_bias, who, "linear_bias") or 0
  a_in[4] = o.weight ~= nil and id_of(o.weight, who, "weight") or 0
  args.n_in, args.n_i, args.n_f = 5, 3, 1
  a_i[0], a_i[1], a_i[2], a_f[0] = reductions[o.reduction], o.ignore_index, rows, o.label_smoothing
  return wrap(call_args(op_linear_cross_entropy, x, w, ids))
end

function M.mse_loss(a, b, reduction)
  a_in[0], a_in[1] = id_of(a, "mse_loss"), id_of(b, "mse_loss")
  args.n_in, args.n_i, args.n_f, a_i[0] = 2, 1, 0, reductions[reduction]
  return wrap(call_args(op_mse_loss, a, b))
end

-- Scaled dot product attention. scale: nil for 1 / sqrt(head size); o: options of F.scaled_dot_product_attention.
function M.attention(q, k, v, scale, o)
  a_in[0], a_in[1], a_in[2] = id_of(q, "attention", "q"), id_of(k, "attention", "k"), id_of(v, "attention", "v")
  local n, mask = 3, o.attn_mask
  if mask ~= nil then a_in[3], n = id_of(mask, "attention", "attn_mask"), 4 end
  args.n_in, args.n_i, args.n_f = n, 3, 3
  a_i[0], a_i[1], a_i[2] = o.is_causal and 1 or 0, o.causal_offset or 0, o.window or 0
  a_f[0], a_f[1], a_f[2] = o.dropout_p or 0, scale or 0, o.softcap or 0
  return wrap(call_args(op_attention, q, k, v))
end

local recurrent = { rnn = op "rnn", lstm = op "lstm", gru = op "gru" }

-- Runs all steps of a recurrent layer in one direction. kind: "rnn", "lstm" or "gru"; x: the product of the input with
-- its weight, [T, N, gates * H], or packed; w: the weight of the state. o: optional inputs (bias, h, c, project,
-- batch_sizes) and flags (reversed, relu). Returns y, h and, for "lstm", c.
function M.recurrent(kind, x, w, o)
  a_in[0], a_in[1] = id_of(x, kind), id_of(w, kind, "weight_hh")
  a_in[2] = o.bias ~= nil and id_of(o.bias, kind, "bias_hh") or 0
  a_in[3] = o.h ~= nil and id_of(o.h, kind, "h") or 0
  a_in[4] = o.c ~= nil and id_of(o.c, kind, "c") or 0
  a_in[5] = o.project ~= nil and id_of(o.project, kind, "weight_hr") or 0
  a_in[6] = o.batch_sizes ~= nil and id_of(o.batch_sizes, kind, "batch_sizes") or 0
  args.n_in, args.n_i, args.n_f = 7, kind == "rnn" and 2 or 1, 0
  a_i[0], a_i[1] = o.reversed and 1 or 0, o.relu and 1 or 0
  call_args(recurrent[kind], x, w)
  local y, h, c = wrap(a_out[0]), a_out[1], kind == "lstm" and a_out[2]
  return y, wrap(h), c and wrap(c) or nil
end

-- Runs an operator on an id and returns the id of its first output, so that intermediate results need no Lua objects.
-- `of`: the tensor that an error names. To be called only inside scopes, which release the intermediate results if an
-- operator fails.
local function by_id(number, id, of, n_i)
  a_in[0], args.n_in, args.n_i, args.n_f = id, 1, n_i, 0
  return call_args(number, of)
end

--- Splits [B, T, 3 n D] into three tensors [B, n, T, D]. A single split has one gradient; three selects would have
--- three gradients, each padded with zeros, which backward would have to add up.
function M.split_heads(qkv, B, T, n, D)
  local id = id_of(qkv, "view")
  if id < 0 or state.scope == 0 then
    local parts = qkv:view(B, T, 3 * n, D):transpose(2, 3):split(n, 2)
    return parts[1], parts[2], parts[3]
  end
  a_i[0], a_i[1], a_i[2], a_i[3] = B, T, 3 * n, D
  local seen = by_id(op_view, id, qkv, 4)
  a_i[0], a_i[1] = 1, 2
  local turned = by_id(op_transpose, seen, qkv, 2)
  drop_id(seen)
  a_i[0], a_i[1], a_i[2], a_i[3] = 1, n, n, n
  local q = by_id(op_split, turned, qkv, 4)
  local k, v = a_out[1], a_out[2]
  drop_id(turned)
  return wrap(q), wrap(k), wrap(v)
end

--- Concatenates heads: [B, n, T, D] -> [B, T, n D].
function M.join_heads(y, B, T, C)
  local id = id_of(y, "transpose")
  if id < 0 or state.scope == 0 then return y:transpose(2, 3):reshape(B, T, C) end
  a_i[0], a_i[1] = 1, 2
  local turned = by_id(op_transpose, id, y, 2)
  a_i[0], a_i[1], a_i[2] = B, T, C
  local out = by_id(op_reshape, turned, y, 3)
  drop_id(turned)
  return wrap(out)
end

-- Releases a tensor early if it belongs to the innermost scope; otherwise does nothing.
function M.drop(t) drop_id(t.id) end

return M
