-- SPDX-License-Identifier: MIT
--- CLIP (Radford et al. 2021): a tower for texts and one for images, whose results lie in one space.
---   local texts = clip(ids)                            -- [B, T] -> [B, projection]
---   local images = clip(nil, pixels)                   -- [B, channels, image, image] -> [B, projection]
---   local logits = clip(ids, pixels)                   -- of each text for each image, [texts, images]
---   local loss = clip(ids, pixels, { loss = true })    -- contrastive: text b belongs to image b
--- Option: attention_mask [B, T], 0 where a text is padded. A text's value is that at its token eos_token_id.
require "moonshard.autograd.methods"
local create = require "moonshard.tensor.create"
local block = require "moonshard.hf.block"
local Config = require "moonshard.hf.config"
local masks = require "moonshard.hf.masks"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local patches = require "moonshard.hf.patches"

local size = Config.size

---@class HFClipText: Module
local Text = nn.Module:extend "HFClipText"

function Text:init(o)
  local kind = { dtype = o.dtype, device = o.device }
  self.words, self.positions = nn.Embedding(o.vocab, o.dim, kind), nn.Embedding(o.context, o.dim, kind)
  self.layers, self.norm, self.eos, self.name = block.stack(o), block.norm(o), o.eos, o.name
end

function Text:forward(ids, attention_mask)
  local B, T = ids:size(1), ids:size(2)
  local x = self.words(ids) + self.positions(create.arange(0, T, { dtype = "int64", device = ids.device }))
  local call = { see = masks.causal { B = B, T = T, S = T, attention_mask = attention_mask, who = self.name } }
  for _, layer in ipairs(self.layers) do x = layer(x, call) end
  -- Configurations with eos_token_id 2 are older than this key's use: their last token has the largest id.
  local last = self.eos == 2 and ids:argmax(2) or ids:eq(self.eos):to("int64"):argmax(2)
  local at = last:reshape(B, 1, 1):expand(B, 1, x:size(3))
  return self.norm(x):gather(2, at):squeeze(2)
end

---@class HFClipVision: Module
local Vision = nn.Module:extend "HFClipVision"

function Vision:init(o)
  self.patches = patches.Patches(o)
  self.before, self.layers, self.norm = block.norm(o), block.stack(o), block.norm(o)
end

function Vision:forward(images)
  local x, call = self.before(self.patches(images)), { see = { is_causal = false } }
  for _, layer in ipairs(self.layers) do x = layer(x, call) end
  return self.norm(x:select(2, 1))
end

---@class HFClip: Module
local Clip = nn.Module:extend "HFClip"

function Clip:init(o)
  self.text, self.vision = Text(o.text), Vision(o.vision)
  self.text_projection = block.linear(o, o.text.dim, o.projection)
  self.visual_projection = block.linear(o, o.vision.dim, o.projection)
  self.logit_scale = nn.Parameter(create.full({ 1 }, o.logit_scale, { dtype = o.dtype, device = o.device }))
  self.name = o.name
end

local function normalized(x) return x / x:norm({ p = 2, dim = -1, keepdim = true }) end

---@param ids? Tensor  int64 [texts, T]
---@param images? Tensor  [images, channels, image, image]
---@param given? { attention_mask: Tensor, loss: boolean }
---@return Tensor  features of texts or images, logits, or the loss []
function Clip:forward(ids, images, given)
  local o = opts(self.name, given, { attention_mask = opts.any, loss = false })
  local texts = ids and self.text_projection(self.text(ids, o.attention_mask))
  local pictures = images and self.visual_projection(self.vision(images))
  if not (texts and pictures) then return texts or pictures end
  local logits = normalized(texts):matmul(normalized(pictures):transpose(1, 2)) * self.logit_scale:exp()
  if not o.loss then return logits end
  local own = create.arange(0, logits:size(1), { dtype = "int64", device = logits.device })
  return (nn.F.cross_entropy(logits, own) + nn.F.cross_entropy(logits:transpose(1, 2), own)) * 0.5
end

-- What a tower's part of the configuration says. Old files leave out what is as in CLIP's first model.
local function tower_of(c, dim, mlp_dim, heads)
  local o = {
    dim = c:get("hidden_size", size, dim), layers = c:get("num_hidden_layers", Config.layers, 12),
    heads = c:get("num_attention_heads", size, heads), mlp_dim = c:get("intermediate_size", size, mlp_dim),
    act = c:get("hidden_act", Config.act, "quick_gelu"),
    attention_dropout = c:get("attention_dropout", Config.share, 0),
    norm = { kind = "layer", eps = c:get("layer_norm_eps", Config.positive, 1e-5), bias = true },
    bias = { qkv = true, out = true, mlp = true },
  }
  if o.dim % o.heads ~= 0 then
    c:fail("hidden_size", "is %d, expected a multiple of num_attention_heads, %d", o.dim, o.heads)
  end
  c:ignore("projection_dim", "tie_word_embeddings")
  c:only("dropout", 0)
  return o
end

local function options_of(c)
  local text, vision = c:part "text_config", c:part "vision_config"
  if not text or not vision then c:fail(text and "vision_config" or "text_config", "is missing, expected an object") end
  local o = { projection = c:get("projection_dim", size, 512), text = tower_of(text, 512, 2048, 8),
    vision = tower_of(vision, 768, 3072, 12), logit_scale = c:get("logit_scale_init_value", opts.number, 2.6592) }
  o.text.vocab, o.text.context = text:get("vocab_size", size, 49408), text:get("max_position_embeddings", size, 77)
  o.text.eos = text:get("eos_token_id", opts.whole_from(0), 49407)
  local images, positions = patches.read(vision, 224, 32)
  o.vision.image, o.vision.patch, o.vision.channels = images.image, images.patch, images.channels
  o.vision.first, o.vision.positions = { o.vision.dim }, { positions, o.vision.dim }
  c:ignore("text_config_dict", "vision_config_dict")
  text:finish()
  vision:finish()
  return o
end

-- fully_shard takes no parameter without dimensions.
local NAMES = {
  { "logit_scale", "logit_scale", scalar = true },
  { "text.words.", "text_model.embeddings.token_embedding." },
  { "text.positions.", "text_model.embeddings.position_embedding." },
  { "text.norm.", "text_model.final_layer_norm." },
  { "vision.patches.projection.", "vision_model.embeddings.patch_embedding." },
  { "vision.patches.first", "vision_model.embeddings.class_embedding" },
  { "vision.patches.positions", "vision_model.embeddings.position_embedding.weight" },
  { "vision.before.", "vision_model.pre_layrnorm." }, { "vision.norm.", "vision_model.post_layernorm." },
}
for _, tower in ipairs { "text", "vision" } do
  for _, pair in ipairs { { "attn.q.", "self_attn.q_proj." }, { "attn.k.", "self_attn.k_proj." },
    { "attn.v.", "self_attn.v_proj." }, { "attn.out.", "self_attn.out_proj." }, { "attn_norm.", "layer_norm1." },
    { "mlp_norm.", "layer_norm2." }, { "mlp.up.", "mlp.fc1." }, { "mlp.down.", "mlp.fc2." } } do
    NAMES[#NAMES + 1] = { tower .. ".layers.#." .. pair[1], tower .. "_model.encoder.layers.#." .. pair[2] }
  end
end

return { { architecture = "CLIPModel", model_type = "clip", usual = true, names = NAMES, build = function(c, kind)
  local o = options_of(c)
  for _, part in ipairs { o, o.text, o.vision } do
    part.name, part.dtype, part.device = "CLIPModel", kind.dtype, kind.device
  end
  return Clip(o)
end } }
