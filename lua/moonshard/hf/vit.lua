-- SPDX-License-Identifier: MIT
--- ViT (Dosovitskiy et al. 2021), and its classifier of images.
---   local x, pooled = vit(images)                     -- [B, channels, image, image] -> [B, 1 + patches, C], [B, C]
---   local logits = classifier(images)                 -- [B, labels]
---   local loss = classifier(images, { labels = labels })
local activations = require "moonshard.hf.activations"
local block = require "moonshard.hf.block"
local Config = require "moonshard.hf.config"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local patches = require "moonshard.hf.patches"

local share = Config.share

---@class HFViT: Module
local ViT = nn.Module:extend "HFViT"

function ViT:init(o)
  self.patches = patches.Patches(o)
  if o.dropout > 0 then self.drop = nn.Dropout(o.dropout) end
  self.layers, self.norm = block.stack(o), block.norm(o)
  if o.pooled then self.pooler, self.act = block.linear(o, o.dim, o.pooled, true), o.pooler_act end
end

---@param images Tensor  [B, channels, image, image]
---@return Tensor x  [B, 1 + patches, C]
---@return Tensor? pooled  nil in a classifier
function ViT:forward(images)
  local x, call = self.patches(images), { see = { is_causal = false } }
  if self.drop then x = self.drop(x) end
  for _, layer in ipairs(self.layers) do x = layer(x, call) end
  x = self.norm(x)
  return x, self.pooler and activations[self.act](self.pooler(x:select(2, 1)))
end

---@class HFViTClassifier: Module
local Classifier = nn.Module:extend "HFViTClassifier"

function Classifier:init(o)
  self.vit, self.classifier, self.name = ViT(o), block.linear(o, o.dim, o.labels, true), o.name
end

---@param images Tensor  [B, channels, image, image]
---@param given? { labels: Tensor }  int64 [B]
---@return Tensor  logits [B, labels], or the mean loss []
function Classifier:forward(images, given)
  local labels = opts(self.name, given, { labels = opts.any }).labels
  local logits = self.classifier(self.vit(images):select(2, 1))
  return labels and nn.F.cross_entropy(logits, labels) or logits
end

local function options_of(c, classifies)
  local o, positions = patches.read(c, 224, 16)
  o.dim, o.layers = c:get("hidden_size", Config.size), c:get("num_hidden_layers", Config.layers)
  o.heads, o.mlp_dim = c:get("num_attention_heads", Config.size), c:get("intermediate_size", Config.size)
  o.act, o.dropout = c:get("hidden_act", Config.act, "gelu"), c:get("hidden_dropout_prob", share, 0)
  o.attention_dropout = c:get("attention_probs_dropout_prob", share, 0)
  o.norm = { kind = "layer", eps = c:get("layer_norm_eps", Config.positive, 1e-12), bias = true }
  if o.dim % o.heads ~= 0 then
    c:fail("hidden_size", "is %d, expected a multiple of num_attention_heads, %d", o.dim, o.heads)
  end
  o.bias = { qkv = c:get("qkv_bias", opts.boolean, true), out = true, mlp = true }
  o.patch_bias, o.first, o.positions = true, { 1, 1, o.dim }, { 1, positions, o.dim }
  local pooled, act = c:get("pooler_output_size", Config.size, o.dim), c:get("pooler_act", Config.act, "tanh")
  if classifies then o.labels = c:labels() else o.pooled, o.pooler_act = pooled, act end
  return o
end

local function names_of(ours, theirs)
  local rows, layer = {
    { ours .. "patches.projection.", theirs .. "embeddings.patch_embeddings.projection." },
    { ours .. "patches.first", theirs .. "embeddings.cls_token" },
    { ours .. "patches.positions", theirs .. "embeddings.position_embeddings" },
    { ours .. "norm.", theirs .. "layernorm." }, { ours .. "pooler.", theirs .. "pooler.dense." },
  }, { ours .. "layers.#.", theirs .. "encoder.layer.#." }
  for _, pair in ipairs { { "attn.q.", "attention.attention.query." }, { "attn.k.", "attention.attention.key." },
    { "attn.v.", "attention.attention.value." }, { "attn.out.", "attention.output.dense." },
    { "attn_norm.", "layernorm_before." }, { "mlp_norm.", "layernorm_after." }, { "mlp.up.", "intermediate.dense." },
    { "mlp.down.", "output.dense." } } do
    rows[#rows + 1] = { layer[1] .. pair[1], layer[2] .. pair[2] }
  end
  return rows
end

local M = {}
for name, classifies in pairs { ViTModel = false, ViTForImageClassification = true } do
  M[#M + 1] = { architecture = name, model_type = "vit", usual = not classifies, prefix = "vit.",
    names = classifies and names_of("vit.", "vit.") or names_of("", ""), build = function(c, kind)
      local o = options_of(c, classifies)
      o.name, o.dtype, o.device = name, kind.dtype, kind.device
      return (classifies and Classifier or ViT)(o)
    end }
end

return M
