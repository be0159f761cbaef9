-- SPDX-License-Identifier: MIT
--- Whisper (Radford et al. 2022): a spectrogram of 30 seconds of speech, [B, mel bins, frames], to text. Calls:
--- seq2seq.lua.
local create = require "moonshard.tensor.create"
local block = require "moonshard.hf.block"
local Config = require "moonshard.hf.config"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local Seq2Seq = require "moonshard.hf.seq2seq"

local size, share = Config.size, Config.share
local gelu = nn.F.gelu

---@class HFWhisperEncoder: Module
local Encoder = nn.Module:extend "HFWhisperEncoder"

function Encoder:init(o)
  local kind = { dtype = o.dtype, device = o.device }
  self.conv1 = nn.Conv1d(o.bins, o.dim, 3, { padding = 1, dtype = o.dtype, device = o.device })
  self.conv2 = nn.Conv1d(o.dim, o.dim, 3, { padding = 1, stride = 2, dtype = o.dtype, device = o.device })
  self.positions = nn.Embedding(o.frames, o.dim, kind)
  self.positions.weight:requires_grad_(false)                 -- sines, which are not trained
  self.layers, self.norm, self.options = block.stack(o), block.norm(o), o
  if o.dropout > 0 then self.drop = nn.Dropout(o.dropout) end
end

function Encoder:forward(features)
  local o = self.options
  if features.ndim ~= 3 or features:size(2) ~= o.bins or features:size(3) ~= 2 * o.frames then
    errors.raise("%s: features have shape %s, expected [B, %d, %d]", o.name, tostring(features.shape), o.bins,
      2 * o.frames)
  end
  local x, call = gelu(self.conv2(gelu(self.conv1(features)))):transpose(2, 3), { see = { is_causal = false } }
  x = x + self.positions.weight
  if self.drop then x = self.drop(x) end
  for _, layer in ipairs(self.layers) do x = layer(x, call) end
  return self.norm(x)
end

---@class HFWhisperDecoder: Module
local Decoder = nn.Module:extend "HFWhisperDecoder"

function Decoder:init(o)
  local kind = { dtype = o.dtype, device = o.device }
  self.words = nn.Embedding(o.vocab, o.dim, { dtype = o.dtype, device = o.device, padding_idx = o.padding_row })
  self.positions = nn.Embedding(o.context, o.dim, kind)
  self.layers, self.norm = block.stack(o), block.norm(o)
  if o.dropout > 0 then self.drop = nn.Dropout(o.dropout) end
end

function Decoder:forward(x, call)
  if self.drop then x = self.drop(x) end
  for _, layer in ipairs(self.layers) do x = layer(x, call) end
  return self.norm(x)
end

---@class HFWhisper: HFSeq2Seq
local Whisper = Seq2Seq:extend "HFWhisper"

function Whisper:init(o)
  self.encoder, self.decoder = Encoder(o.encoder), Decoder(o.decoder)
  self.lm_head = block.linear(o, o.dim, o.vocab)
  if o.tied then self.lm_head.weight = self.decoder.words.weight end
  self.options = o
end

function Whisper:encode(features) return self.encoder(features) end

function Whisper:embed(ids, past)
  local o, last = self.options, past + ids:size(2)
  if last > o.context then errors.raise("%s: %d positions are more than the model has, %d", o.name, last, o.context) end
  local at = create.arange(past, last, { dtype = "int64", device = ids.device })
  return self.decoder.words(ids) + self.decoder.positions(at)
end

function Whisper:logits(x) return self.lm_head(x) end

local function options_of(c)
  local o = {
    vocab = c:get("vocab_size", size), dim = c:get("d_model", size), bins = c:get("num_mel_bins", size, 80),
    frames = c:get("max_source_positions", size, 1500), context = c:get("max_target_positions", size, 448),
    act = c:get("activation_function", Config.act, "gelu"), dropout = c:get("dropout", share, 0),
    attention_dropout = c:get("attention_dropout", share, 0), mlp_dropout = c:get("activation_dropout", share, 0),
    norm = { kind = "layer", eps = 1e-5, bias = true }, bias = { qkv = true, k = false, out = true, mlp = true },
    tied = c:get("tie_word_embeddings", opts.boolean, true), start = c:get("decoder_start_token_id",
      opts.whole_from(0), 50257), pad = c:get("pad_token_id", opts.whole_from(0), 50256),
  }
  o.padding_row = c:padding_row(o.vocab, 50256)
  for _, part in ipairs { "encoder", "decoder" } do
    local heads = c:get(part .. "_attention_heads", size)
    if o.dim % heads ~= 0 then
      c:fail("d_model", "is %d, expected a multiple of %s_attention_heads, %d", o.dim, part, heads)
    end
    o[part] = setmetatable({ layers = c:get(part .. "_layers", Config.layers), heads = heads, cross = part == "decoder",
      mlp_dim = c:get(part .. "_ffn_dim", size) }, { __index = o })
    c:only(part .. "_layerdrop", 0)
  end
  c:only("scale_embedding", false)
  c:only("apply_spec_augment", false)
  c:ignore("num_hidden_layers", "mask_feature_length", "mask_feature_min_masks", "mask_feature_prob",
    "mask_time_length", "mask_time_min_masks", "mask_time_prob", "median_filter_width", "classifier_proj_size",
    "use_weighted_layer_sum", "lang_ids", "alignment_heads")
  return o
end

local NAMES = { { "decoder.words.", "model.decoder.embed_tokens." }, { "lm_head.", "proj_out." } }
for _, part in ipairs { "encoder", "decoder" } do
  local ours, theirs = part .. ".layers.#.", "model." .. part .. ".layers.#."
  for _, pair in ipairs { { "attn", "self_attn" }, { "cross", "encoder_attn" } } do
    for _, p in ipairs { "q", "k", "v" } do
      NAMES[#NAMES + 1] = { ours .. pair[1] .. "." .. p .. ".", theirs .. pair[2] .. "." .. p .. "_proj." }
    end
    NAMES[#NAMES + 1] = { ours .. pair[1] .. ".out.", theirs .. pair[2] .. ".out_proj." }
    NAMES[#NAMES + 1] = { ours .. pair[1] .. "_norm.", theirs .. pair[2] .. "_layer_norm." }
  end
  for _, pair in ipairs { { "mlp.up.", "fc1." }, { "mlp.down.", "fc2." }, { "mlp_norm.", "final_layer_norm." } } do
    NAMES[#NAMES + 1] = { ours .. pair[1], theirs .. pair[2] }
  end
  NAMES[#NAMES + 1] = { part .. ".positions.", "model." .. part .. ".embed_positions." }
  NAMES[#NAMES + 1] = { part .. ".norm.", "model." .. part .. ".layer_norm." }
end
NAMES[#NAMES + 1] = { "encoder.conv", "model.encoder.conv" }

return { { architecture = "WhisperForConditionalGeneration", model_type = "whisper", usual = true, names = NAMES,
  build = function(c, kind)
    local o = options_of(c)
    o.name, o.dtype, o.device = "WhisperForConditionalGeneration", kind.dtype, kind.device
    return Whisper(o)
  end } }
