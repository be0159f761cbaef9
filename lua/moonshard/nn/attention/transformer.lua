-- SPDX-License-Identifier: MIT
--- Transformer (Vaswani et al. 2017): encoder and decoder layers, stacks of them, and the complete model, with
--- PyTorch's names, initialisation and order of parameters. Masks are used as in MultiheadAttention: a bool mask is
--- true where attention is not allowed.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local util = require "moonshard.tensor.util"
local ops = require "moonshard.nn.ops"
local base = require "moonshard.nn.module"
local containers = require "moonshard.nn.module.containers"
local init = require "moonshard.nn.initial".init
local Dropout = require "moonshard.nn.dropout.layers".Dropout
local LayerNorm = require "moonshard.nn.norm.layer_norm".LayerNorm
local Linear = require "moonshard.nn.linear.linear".Linear
local MultiheadAttention = require "moonshard.nn.attention.attention".MultiheadAttention
local a_module = base.a_module

local raise, show, is_tensor = errors.raise, errors.kind, tensor.is_tensor
local Module, is_module = base.Module, base.is_module

local layer_options = {
  dim_feedforward = 2048, dropout = 0.1, activation = opts.any, layer_norm_eps = 1e-5, batch_first = false,
  norm_first = false, bias = true, dtype = opts.string, device = opts.any,
}

local activations = { relu = ops.relu, gelu = ops.gelu }

local function activation_of(who, given)
  if given == nil then return ops.relu end
  if type(given) == "function" or is_module(given) then return given end
  local fn = activations[given]
  if not fn then raise("%s: activation should be relu/gelu, not %s", who, errors.show(given)) end
  return fn
end

-- Makes attention, feed-forward, norms and dropouts in the order of PyTorch's constructors.
local function construct(self, d, heads, given, attentions)
  local who = self:class_name()
  local o = opts(who, given, layer_options)
  opts.expect(d, opts.whole, "%s: d_model", who)
  opts.expect(heads, opts.whole, "%s: nhead", who)
  local kind = { dtype = o.dtype, device = o.device, bias = o.bias }
  for _, name in ipairs(attentions) do
    self[name] = MultiheadAttention(d, heads,
      { dropout = o.dropout, bias = o.bias, batch_first = o.batch_first, dtype = o.dtype, device = o.device })
  end
  self.linear1 = Linear(d, o.dim_feedforward, kind)
  self.dropout = Dropout(o.dropout)
  self.linear2 = Linear(o.dim_feedforward, d, kind)
  self.norm_first = o.norm_first
  for i = 1, #attentions + 1 do
    self["norm" .. i] = LayerNorm(d, { eps = o.layer_norm_eps, bias = o.bias, dtype = o.dtype, device = o.device })
  end
  for i = 1, #attentions + 1 do self["dropout" .. i] = Dropout(o.dropout) end
  self.activation = activation_of(who, o.activation)
end

-- Attention of x to y, without returning the weights.
local function attend(attention, dropout, x, y, mask, padding, causal)
  return dropout((attention(x, y, y, { attn_mask = mask, key_padding_mask = padding, is_causal = causal,
    need_weights = false })))
end

local function feed_forward(self, dropout, x)
  return dropout(self.linear2(self.dropout(self.activation(self.linear1(x)))))
end

-- ---- layers -------------------------------------------------------------------------------------

--- Self-attention and feed-forward, each with a residual connection and a LayerNorm (before them with norm_first). The
--- default activation is "relu".
---@class TransformerEncoderLayer: Module
---@overload fun(d_model: integer, nhead: integer, opts?: { dim_feedforward: integer, dropout: number, activation: string|fun(x: Tensor): Tensor, layer_norm_eps: number, batch_first: boolean, norm_first: boolean, bias: boolean, dtype: string, device: string }): TransformerEncoderLayer
---   d_model: channels; nhead: heads, which divide d_model
local TransformerEncoderLayer = Module:extend("TransformerEncoderLayer")

function TransformerEncoderLayer:init(d_model, nhead, given) construct(self, d_model, nhead, given, { "self_attn" }) end

local encoder_layer_call = { src_mask = opts.any, src_key_padding_mask = opts.any, is_causal = false }

---@param src Tensor  [S, N, d], [N, S, d] with batch_first, or [S, d]
---@param given? { src_mask: Tensor, src_key_padding_mask: Tensor, is_causal: boolean }
---   src_mask: [S, S] or [N * heads, S, S]; src_key_padding_mask: [N, S]; true: the key is not attended to; is_causal:
---   position t attends to positions up to t; a mask given with is_causal must do the same
---@return Tensor
function TransformerEncoderLayer:forward(src, given)
  local o = opts("TransformerEncoderLayer", given, encoder_layer_call)
  local x = src
  if self.norm_first then
    local y = self.norm1(x)
    x = x + attend(self.self_attn, self.dropout1, y, y, o.src_mask, o.src_key_padding_mask, o.is_causal)
    return x + feed_forward(self, self.dropout2, self.norm2(x))
  end
  x = self.norm1(x + attend(self.self_attn, self.dropout1, x, x, o.src_mask, o.src_key_padding_mask, o.is_causal))
  return self.norm2(x + feed_forward(self, self.dropout2, x))
end

--- Self-attention, attention to the encoder's output, and feed-forward.
---@class TransformerDecoderLayer: Module
---@overload fun(d_model: integer, nhead: integer, opts?: { dim_feedforward: integer, dropout: number, activation: string|fun(x: Tensor): Tensor, layer_norm_eps: number, batch_first: boolean, norm_first: boolean, bias: boolean, dtype: string, device: string }): TransformerDecoderLayer
---   d_model: channels; nhead: heads, which divide d_model
local TransformerDecoderLayer = Module:extend("TransformerDecoderLayer")

function TransformerDecoderLayer:init(d_model, nhead, given)
  construct(self, d_model, nhead, given, { "self_attn", "multihead_attn" })
end

local decoder_call = {
  tgt_mask = opts.any, memory_mask = opts.any, tgt_key_padding_mask = opts.any, memory_key_padding_mask = opts.any,
  tgt_is_causal = false, memory_is_causal = false,
}

---@param tgt Tensor  [T, N, d], [N, T, d] with batch_first, or [T, d]
---@param memory Tensor  the encoder's output: [S, N, d], [N, S, d] with batch_first, or [S, d]
---@param given? table  tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal: as the encoder layer's options, for tgt or memory
---@return Tensor
function TransformerDecoderLayer:forward(tgt, memory, given)
  local o = opts("TransformerDecoderLayer", given, decoder_call)
  local x = tgt
  local function to_self(y)
    return attend(self.self_attn, self.dropout1, y, y, o.tgt_mask, o.tgt_key_padding_mask, o.tgt_is_causal)
  end
  local function to_memory(y)
    return attend(self.multihead_attn, self.dropout2, y, memory, o.memory_mask, o.memory_key_padding_mask,
      o.memory_is_causal)
  end
  if self.norm_first then
    x = x + to_self(self.norm1(x))
    x = x + to_memory(self.norm2(x))
    return x + feed_forward(self, self.dropout3, self.norm3(x))
  end
  x = self.norm1(x + to_self(x))
  x = self.norm2(x + to_memory(x))
  return self.norm3(x + feed_forward(self, self.dropout3, x))
end

-- ---- stacks -------------------------------------------------------------------------------------

-- The most layers of a stack. Each is a copy; with more, the constructor would run for hours before memory runs out.
local MOST_LAYERS = 2 ^ 16
local stack_options = { norm = opts.any }

local function construct_stack(self, layer, n, given)
  local who = self:class_name()
  local o = opts(who, given, stack_options)
  opts.expect(layer, a_module, "%s: the layer", who)
  opts.expect(n, opts.whole_from(0), "%s: the number of layers", who)
  if n > MOST_LAYERS then raise("%s: the number of layers is %s, expected at most %d", who, show(n), MOST_LAYERS) end
  if o.norm then opts.expect(o.norm, a_module, "%s: option 'norm'", who) end
  self.layers = containers.ModuleList {}
  for _ = 1, n do self.layers:append(util.deepcopy(layer)) end
  self.num_layers = n
  self.norm = o.norm
end

--- Copies of one encoder layer, applied in order.
---@class TransformerEncoder: Module
---@field layers ModuleList  the copies
---@field norm Module?  the module given as option norm
---@overload fun(layer: Module, n: integer, opts?: { norm: Module }): TransformerEncoder
---   layer: copied n times; n: number of layers; norm: runs at the end
local TransformerEncoder = Module:extend("TransformerEncoder")
TransformerEncoder.init = construct_stack

local encoder_call = { mask = opts.any, src_key_padding_mask = opts.any, is_causal = false }

---@param src Tensor  [S, N, d], [N, S, d] with batch_first, or [S, d]
---@param given? { mask: Tensor, src_key_padding_mask: Tensor, is_causal: boolean }
---   mask: [S, S] or [N * heads, S, S]; src_key_padding_mask: [N, S]; true: the key is not attended to; is_causal:
---   position t attends to positions up to t; a mask given with is_causal must do the same
---@return Tensor
function TransformerEncoder:forward(src, given)
  local o = opts("TransformerEncoder", given, encoder_call)
  local x = src
  local call = { src_mask = o.mask, src_key_padding_mask = o.src_key_padding_mask, is_causal = o.is_causal }
  for _, layer in ipairs(self.layers) do x = layer(x, call) end
  return self.norm and self.norm(x) or x
end

--- Copies of one decoder layer, applied in order.
---@class TransformerDecoder: Module
---@field layers ModuleList  the copies
---@field norm Module?  the module given as option norm
---@overload fun(layer: Module, n: integer, opts?: { norm: Module }): TransformerDecoder
---   layer: copied n times; n: number of layers; norm: runs at the end
local TransformerDecoder = Module:extend("TransformerDecoder")
TransformerDecoder.init = construct_stack

---@param tgt Tensor  [T, N, d], [N, T, d] with batch_first, or [T, d]
---@param memory Tensor  the encoder's output: [S, N, d], [N, S, d] with batch_first, or [S, d]
---@param given? table  the options of TransformerDecoderLayer:forward
---@return Tensor
function TransformerDecoder:forward(tgt, memory, given)
  local o = opts("TransformerDecoder", given, decoder_call)
  local x = tgt
  for _, layer in ipairs(self.layers) do x = layer(x, memory, o) end
  return self.norm and self.norm(x) or x
end

-- ---- encoder and decoder ------------------------------------------------------------------------

local transformer_options = {
  d_model = 512, nhead = 8, num_encoder_layers = 6, num_decoder_layers = 6, custom_encoder = opts.any,
  custom_decoder = opts.any,
}
for name, default in pairs(layer_options) do transformer_options[name] = default end

--- Encoder and decoder, each followed by a LayerNorm unless it is a custom one. Called with (src, tgt, opts).
---@class Transformer: Module
---@field encoder TransformerEncoder  or the option custom_encoder
---@field decoder TransformerDecoder  or the option custom_decoder
---@overload fun(opts?: { d_model: integer, nhead: integer, num_encoder_layers: integer, num_decoder_layers: integer, custom_encoder: Module, custom_decoder: Module, dim_feedforward: integer, dropout: number, activation: string|fun(x: Tensor): Tensor, layer_norm_eps: number, batch_first: boolean, norm_first: boolean, bias: boolean, dtype: string, device: string }): Transformer
---   d_model: channels; nhead: heads, which divide d_model; num_encoder_layers: layers of the encoder;
---   num_decoder_layers: layers of the decoder; custom_encoder: instead of a TransformerEncoder; custom_decoder:
---   instead of a TransformerDecoder
local Transformer = Module:extend("Transformer")

function Transformer:init(given)
  local o = opts("Transformer", given, transformer_options)
  local layer = {}
  for name in pairs(layer_options) do layer[name] = o[name] end
  local function norm()
    return LayerNorm(o.d_model, { eps = o.layer_norm_eps, bias = o.bias, dtype = o.dtype, device = o.device })
  end
  self.encoder = o.custom_encoder
    or TransformerEncoder(TransformerEncoderLayer(o.d_model, o.nhead, layer), o.num_encoder_layers, { norm = norm() })
  self.decoder = o.custom_decoder
    or TransformerDecoder(TransformerDecoderLayer(o.d_model, o.nhead, layer), o.num_decoder_layers, { norm = norm() })
  self.d_model, self.nhead, self.batch_first = o.d_model, o.nhead, o.batch_first
  self:reset_parameters()
end

--- Initialises every matrix again, xavier-uniform; vectors do not change.
function Transformer:reset_parameters()
  for _, p in ipairs(self:parameters()) do
    if p.ndim > 1 then init.xavier_uniform_(p) end
  end
end

local transformer_call = {
  src_mask = opts.any, tgt_mask = opts.any, memory_mask = opts.any, src_key_padding_mask = opts.any,
  tgt_key_padding_mask = opts.any,
  memory_key_padding_mask = opts.any, src_is_causal = false, tgt_is_causal = false, memory_is_causal = false,
}

---@param src Tensor  [S, N, d], [N, S, d] with batch_first, or [S, d]
---@param tgt Tensor  [T, N, d], [N, T, d] with batch_first, or [T, d]
---@param given? table  src_mask, tgt_mask, memory_mask, and for each a key_padding_mask and an is_causal: src_key_padding_mask, src_is_causal, ...
---@return Tensor
function Transformer:forward(src, tgt, given)
  local o = opts("Transformer", given, transformer_call)
  if not is_tensor(src) or not is_tensor(tgt) then
    opts.wrong(not is_tensor(src) and src or tgt, "a tensor", "Transformer: %s", is_tensor(src) and "tgt" or "src")
  end
  local batch = self.batch_first and 1 or 2
  if src.ndim == 3 and tgt.ndim == 3 and src:size(batch) ~= tgt:size(batch) then
    raise("the batch number of src and tgt must be equal")
  end
  if src:size(-1) ~= self.d_model or tgt:size(-1) ~= self.d_model then
    raise("the feature number of src and tgt must be equal to d_model")
  end
  local memory = self.encoder(src, { mask = o.src_mask, src_key_padding_mask = o.src_key_padding_mask,
    is_causal = o.src_is_causal })
  return self.decoder(tgt, memory, {
    tgt_mask = o.tgt_mask, memory_mask = o.memory_mask, tgt_key_padding_mask = o.tgt_key_padding_mask,
    memory_key_padding_mask = o.memory_key_padding_mask, tgt_is_causal = o.tgt_is_causal,
    memory_is_causal = o.memory_is_causal,
  })
end

--- [n, n]: 0 on and below the diagonal, -infinity above: position i attends only to positions up to i.
---@param n integer  number of positions
---@param given? { dtype: string, device: string }
---@return Tensor
function Transformer.generate_square_subsequent_mask(n, given)
  opts.expect(n, opts.whole_from(0), "generate_square_subsequent_mask: the size")
  local o = opts("generate_square_subsequent_mask", given, { dtype = opts.string, device = opts.any })
  return create.full({ n, n }, -math.huge, { dtype = o.dtype, device = o.device }):triu(1)
end

return {
  TransformerEncoderLayer = TransformerEncoderLayer, TransformerDecoderLayer = TransformerDecoderLayer,
  TransformerEncoder = TransformerEncoder, TransformerDecoder = TransformerDecoder, Transformer = Transformer,
}
