-- SPDX-License-Identifier: MIT
--- T5 (Raffel et al. 2019) and its encoder alone. Scores have a learned bias for each distance of two positions, in
--- ranges that grow with the distance; there are no other positions. Calls: seq2seq.lua. T5EncoderModel(ids, {
--- attention_mask }) returns [B, S, C].
local create = require "moonshard.tensor.create"
local block = require "moonshard.hf.block"
local Config = require "moonshard.hf.config"
local masks = require "moonshard.hf.masks"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local Seq2Seq = require "moonshard.hf.seq2seq"
local weights = require "moonshard.hf.weights"

local size = Config.size

-- The range that a distance of a key from its query is in, from 0.
local function range_of(distance, o, both_ways)
  local n, base = o.ranges, 0
  if both_ways then
    n = n / 2
    if distance > 0 then base = n end
    distance = math.abs(distance)
  else
    distance = math.max(-distance, 0)
  end
  local exact = math.floor(n / 2)
  if distance < exact then return base + distance end
  local far = math.floor(math.log(distance / exact) / math.log(o.farthest / exact) * (n - exact))
  return base + math.min(exact + far, n - 1)
end

---@class HFT5Stack: Module
local Stack = nn.Module:extend "HFT5Stack"

function Stack:init(o, decodes)
  local kind = { dtype = o.dtype, device = o.device }
  self.bias = nn.Embedding(o.ranges, o.heads, kind)
  self.layers = block.stack(setmetatable({ cross = decodes, layers = decodes and o.decoder_layers or o.layers },
    { __index = o }))
  self.norm, self.options, self.decodes = block.norm(o), o, decodes
  if o.dropout > 0 then self.drop = nn.Dropout(o.dropout) end
end

-- [1, H, T, S]: the bias of T queries, the last positions of S.
local function biases(self, T, S, device)
  local o, of = self.options, {}
  for distance = 1 - S, S - 1 do of[distance + S] = range_of(distance, o, not self.decodes) end
  local kind = { dtype = "int64", device = device }
  local by_distance = self.bias(create.tensor(of, kind))                            -- [2 S - 1, H]
  local at = create.arange(0, S, kind):unsqueeze(1) - create.arange(S - T, S, kind):unsqueeze(2) + (S - 1)
  return by_distance:index_select(1, at:reshape(-1)):reshape(T, S, o.heads):permute(3, 1, 2):unsqueeze(1)
end

function Stack:forward(x, call)
  local T, past = x:size(2), call.cache and call.cache.length or 0
  local bias, mask = biases(self, T, past + T, x.device), call.see.attn_mask
  if mask then bias = bias:masked_fill(mask:logical_not(), -1e4) end
  local inner = setmetatable({ see = { is_causal = self.decodes, attn_mask = bias } }, { __index = call })
  if self.drop then x = self.drop(x) end
  for _, layer in ipairs(self.layers) do x = layer(x, inner) end
  x = self.norm(x)
  return self.drop and self.drop(x) or x
end

local function encode(self, ids, attention_mask)
  local mask = masks.padding(self.options.name, attention_mask, ids:size(1), ids:size(2))
  return self.encoder(self.words(ids), { see = { attn_mask = mask } })
end

---@class HFT5: HFSeq2Seq
local T5 = Seq2Seq:extend "HFT5"

function T5:init(o)
  self.words = nn.Embedding(o.vocab, o.dim, { dtype = o.dtype, device = o.device })
  self.encoder, self.decoder = Stack(o, false), Stack(o, true)
  self.lm_head = block.linear(o, o.dim, o.vocab)
  if o.tied then self.lm_head.weight = self.words.weight end
  self.options = o
end

T5.encode = encode
function T5:embed(ids) return self.words(ids) end
function T5:logits(x) return self.lm_head(self.options.scaled and x * self.options.dim ^ -0.5 or x) end

---@class HFT5Encoder: Module
local Encoder = nn.Module:extend "HFT5Encoder"

function Encoder:init(o)
  self.words = nn.Embedding(o.vocab, o.dim, { dtype = o.dtype, device = o.device })
  self.encoder, self.options = Stack(o, false), o
end

function Encoder:forward(ids, given)
  return encode(self, ids, opts(self.options.name, given, { attention_mask = opts.any }).attention_mask)
end

local MLPS = { relu = { "relu" }, ["gated-gelu"] = { "gelu_new", true }, ["gated-silu"] = { "silu", true },
  gelu = { "gelu" } }
local mlp_kind = opts.one_of { "relu", "gelu", "gated-gelu", "gated-silu" }

local function options_of(c)
  local mlp = MLPS[c:get("feed_forward_proj", mlp_kind, "relu")]
  local gated = c:maybe("is_gated_act", opts.boolean, mlp[2])
  local o = {
    vocab = c:get("vocab_size", size), dim = c:get("d_model", size), head_dim = c:get("d_kv", size),
    mlp_dim = c:get("d_ff", size), heads = c:get("num_heads", size), layers = c:get("num_layers", Config.layers),
    ranges = c:get("relative_attention_num_buckets", size, 32), scale = 1, act = c:get("dense_act_fn", Config.act, mlp[1]),
    gated = gated,
    farthest = c:get("relative_attention_max_distance", size, 128), dropout = c:get("dropout_rate", Config.share, 0.1),
    norm = { kind = "rms", eps = c:get("layer_norm_epsilon", Config.positive, 1e-6) },
    tied = c:get("tie_word_embeddings", opts.boolean, true), pad = c:get("pad_token_id", opts.whole_from(0), 0),
  }
  o.decoder_layers = c:get("num_decoder_layers", Config.layers, o.layers)
  o.attention_dropout, o.mlp_dropout = o.dropout, o.dropout
  o.scaled = c:get("scale_decoder_outputs", opts.boolean, o.tied)
  -- T5 1.1 has a head of its own, which files of transformers 5 call tied nevertheless.
  o.tied = o.tied and (o.scaled or not c.folder or not weights.has(c.folder, "lm_head.weight"))
  o.start = c:get("decoder_start_token_id", opts.whole_from(0), o.pad)
  if o.ranges < 4 or o.ranges % 2 ~= 0 or o.farthest <= o.ranges / 2 then
    c:fail("relative_attention_num_buckets", "is %d, expected an even number from 4, less than twice "
      .. "relative_attention_max_distance, %d", o.ranges, o.farthest)
  end
  c:ignore "n_positions"
  c:only("is_decoder", false)
  return o
end

local function names_of(gated)
  local rows = { { "words.", "shared." } }
  for _, stack in ipairs { "encoder", "decoder" } do
    local ours, theirs, last = stack .. ".layers.#.", stack .. ".block.#.layer.", stack == "encoder" and "1" or "2"
    local function add(a, b) rows[#rows + 1] = { ours .. a, theirs .. b } end
    for _, part in ipairs { "q", "k", "v" } do
      add("attn." .. part .. ".", "0.SelfAttention." .. part .. ".")
      add("cross." .. part .. ".", "1.EncDecAttention." .. part .. ".")
    end
    add("attn.out.", "0.SelfAttention.o.")
    add("attn_norm.", "0.layer_norm.")
    add("cross.out.", "1.EncDecAttention.o.")
    add("cross_norm.", "1.layer_norm.")
    add("mlp.gate.", last .. ".DenseReluDense.wi_0.")
    add("mlp.up.", last .. (gated and ".DenseReluDense.wi_1." or ".DenseReluDense.wi."))
    add("mlp.down.", last .. ".DenseReluDense.wo.")
    add("mlp_norm.", last .. ".layer_norm.")
    rows[#rows + 1] = { stack .. ".bias.", stack .. ".block.0.layer.0.SelfAttention.relative_attention_bias." }
    rows[#rows + 1] = { stack .. ".norm.", stack .. ".final_layer_norm." }
  end
  return rows
end

local M = {}
for name, class in pairs { T5ForConditionalGeneration = T5, T5EncoderModel = Encoder } do
  M[#M + 1] = { architecture = name, model_type = "t5", usual = class == T5,
    repeats = { ["encoder.embed_tokens.weight"] = true, ["decoder.embed_tokens.weight"] = true },
    build = function(c, kind)
      local o = options_of(c)
      o.name, o.dtype, o.device = name, kind.dtype, kind.device
      return class(o), names_of(o.gated)
    end }
end

return M
