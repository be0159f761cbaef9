-- SPDX-License-Identifier: MIT
--- The operators that layers and nn.F call, with positional arguments, which the engine checks. Dimensions count from
--- 0; negative ones from the end.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local rows = require "moonshard.tensor.rows"
local tensor = require "moonshard.tensor"

local args, a_in, a_out, a_i, a_f = engine.args, engine.a_in, engine.a_out, engine.a_i, engine.a_f
local id_of, wrap = tensor.id_of, tensor.wrap
local call1, call_args, positional = tensor.call1, tensor.call, rows.positional

local op = engine.op

local M = {}

local op_gelu, op_linear_parts = op "gelu", op "linear_parts"
local op_view, op_reshape, op_transpose, op_split = op "view", op "reshape", op "transpose", op "split"
local state, drop_id = engine.state, engine.lib.ms_drop

for name, fn in pairs(rows.activations) do M[name] = fn end

for _, name in ipairs { "linear", "int8_linear", "gelu_mlp", "layer_norm", "softmax", "log_softmax" } do
  M[name] = positional(name, nil, "input")
end
M.embedding = positional("embedding", nil, "weight")

-- The results of up to 4 linear layers side by side, in one call. layers: their slots.
function M.linear_parts(x, layers)
  local n = #layers
  a_in[0] = id_of(x, "linear", "input")
  for k = 1, n do
    local slots = layers[k]
    a_in[k], a_in[n + k] = id_of(slots.weight, "linear", "weight"), slots.bias and id_of(slots.bias, "linear", "bias") or 0
  end
  args.n_in, args.n_i, args.n_f, a_i[0] = 2 * n + 1, 1, 0, n
  return wrap(call_args(op_linear_parts, x))
end

local rotary, normed_rotary = positional "rotary", positional("rms_norm_rotary", "rotary")

-- Turns pairs of features. w, eps: of an RMSNorm that goes before; nil without.
function M.rotary(x, cos, sin, w, eps)
  if w == nil then return rotary(x, cos, sin) end
  return normed_rotary(x, cos, sin, w, false, eps)
end

function M.gelu(x) return wrap(call1(op_gelu, x, "gelu")) end
local op_dropout = op "dropout"
function M.dropout(x, p) return wrap(tensor.call1f(op_dropout, x, p, "dropout")) end

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

-- Returns the result and x + residual.
M.add_layer_norm = positional("add_layer_norm", "layer_norm", nil, 2)

-- The default eps by dtype: the machine epsilon, as in PyTorch.
local epsilon = { float32 = 2 ^ -23, float64 = 2 ^ -52, float16 = 2 ^ -10, bfloat16 = 2 ^ -7 }
local rms_norm, add_rms_norm = positional "rms_norm", positional("add_rms_norm", "rms_norm", nil, 2)

function M.rms_norm(x, w, n, eps) return rms_norm(x, w, n, eps or epsilon[x.dtype] or 0) end
-- Returns the result and x + residual.
function M.add_rms_norm(x, residual, w, n, eps) return add_rms_norm(x, residual, w, n, eps or epsilon[x.dtype] or 0) end

local batch_norm = positional "batch_norm"

-- Returns the normalised x; in training also the batch's mean and biased variance of each channel, or of every `share`
-- adjacent channels (default: 1).
function M.batch_norm(x, w, b, mean, var, training, eps, share)
  local y = batch_norm(x, w, b, mean, var, training, share, eps)
  if training then return y, wrap(a_out[1]), wrap(a_out[2]) end
  return y
end

-- The mean and biased variance of every channel.
M.batch_norm_stats = positional("batch_norm_stats", nil, nil, 2)

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

local cross_entropy = positional("cross_entropy", nil, "input")

function M.cross_entropy(logits, ids, weight, reduction, ignore_index, label_smoothing, wide)
  local loss = cross_entropy(logits, ids, weight, reductions[reduction], ignore_index, wide, label_smoothing)
  -- The second output is for backward only. Outside of scopes nothing else would release its id.
  if loss.id > 0 then engine.lib.ms_release(a_out[1]) end
  return loss
end

local linear_cross_entropy = positional("linear_cross_entropy", nil, "input")

-- F.linear_cross_entropy for matrices. o: its options; rows: the number of rows of a chunk.
function M.linear_cross_entropy(x, w, ids, o, n_rows)
  return linear_cross_entropy(x, w, ids, o.linear_bias, o.weight, reductions[o.reduction], o.ignore_index, n_rows,
    o.wide, o.label_smoothing)
end

local mse_loss = positional "mse_loss"
function M.mse_loss(a, b, reduction) return mse_loss(a, b, reductions[reduction]) end

local attention = positional("attention", nil, "q")

-- Scaled dot product attention. scale: nil for 1 / sqrt(head size); o: options of F.scaled_dot_product_attention.
function M.attention(q, k, v, scale, o)
  return attention(q, k, v, o.attn_mask, o.is_causal, o.causal_offset, o.window, o.dropout_p, scale, o.softcap)
end

local recurrent = { rnn = positional("rnn", nil, nil, 2), lstm = positional("lstm", nil, nil, 3),
  gru = positional("gru", nil, nil, 2) }

-- Runs all steps of a recurrent layer in one direction. kind: "rnn", "lstm" or "gru"; x: the product of the input with
-- its weight, [T, N, gates * H], or packed; w: the weight of the state. o: optional inputs (bias, h, c, project,
-- batch_sizes) and flags (reversed, relu). Returns y, h and, for "lstm", c.
function M.recurrent(kind, x, w, o)
  return recurrent[kind](x, w, o.bias, o.h, o.c, o.project, o.batch_sizes, o.reversed, o.relu)
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
