-- SPDX-License-Identifier: MIT
--- VisionTransformer (Dosovitskiy et al. 2021): an image as a sequence of patches, a transformer encoder, and a
--- classifier on its first position. Parameters have torchvision's names, with the elements of a Sequential counted
--- from 1.
require "moonshard.autograd.methods"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local shapes = require "moonshard.tensor.shape"

---@class EncoderBlock: Module
local Block = nn.Module:extend "EncoderBlock"

function Block:init(o, kind)
  self.ln_1 = nn.LayerNorm(o.dim, { eps = 1e-6, dtype = o.dtype, device = o.device })
  self.self_attention = nn.MultiheadAttention(o.dim, o.heads, { dropout = o.attention_dropout, batch_first = true,
    dtype = o.dtype, device = o.device })
  self.dropout = nn.Dropout(o.dropout)
  self.ln_2 = nn.LayerNorm(o.dim, { eps = 1e-6, dtype = o.dtype, device = o.device })
  self.mlp = nn.Sequential(nn.Linear(o.dim, o.mlp_dim, kind), nn.GELU(), nn.Dropout(o.dropout),
    nn.Linear(o.mlp_dim, o.dim, kind), nn.Dropout(o.dropout))
end

function Block:forward(x)
  local y = self.ln_1(x)
  x = x + self.dropout((self.self_attention(y, y, y, { need_weights = false })))
  return x + self.mlp(self.ln_2(x))
end

-- Adds the embeddings of positions, applies dropout, runs the blocks and applies a norm.
---@class ViTEncoder: Module
local Encoder = nn.Module:extend "ViTEncoder"

function Encoder:init(o, kind, length)
  self.pos_embedding = nn.Parameter(create.randn(1, length, o.dim, kind) * 0.02)
  self.dropout = nn.Dropout(o.dropout)
  self.layers = nn.ModuleDict()
  for k = 0, o.layers - 1 do self.layers["encoder_layer_" .. k] = Block(o, kind) end
  self.ln = nn.LayerNorm(o.dim, { eps = 1e-6, dtype = o.dtype, device = o.device })
  self.depth = o.layers
end

function Encoder:forward(x)
  x = self.dropout(x + self.pos_embedding)
  for k = 0, self.depth - 1 do x = self.layers["encoder_layer_" .. k](x) end
  return self.ln(x)
end

---@class VisionTransformer: Module
---@overload fun(opts: { image: integer, patch: integer, classes: integer, channels: integer, dim: integer, layers: integer, heads: integer, mlp_dim: integer, dropout: number, attention_dropout: number, dtype: string, device: string }): VisionTransformer
---   image: height and width of an image (default: 224); patch: height and width of a patch, divides image (default:
---   16); classes: number of logits (default: 1000); channels: channels of an image (default: 3); dim: size of an
---   embedding (default: 768); layers: number of blocks (default: 12); heads: attention heads per block (default: 12);
---   mlp_dim: hidden size of the MLP (default: 3072); dropout: probability of dropout (default: 0); attention_dropout:
---   probability of dropout of attention weights (default: 0)
local VisionTransformer = nn.Module:extend "VisionTransformer"

function VisionTransformer:init(given)
  local o = opts("VisionTransformer", given, { image = 224, patch = 16, classes = 1000, channels = 3, dim = 768,
    layers = 12, heads = 12, mlp_dim = 3072, dropout = 0, attention_dropout = 0, dtype = opts.string,
    device = opts.any })
  if o.image % o.patch ~= 0 then
    errors.raise("VisionTransformer: image size %d is not a multiple of the patch size %d", o.image, o.patch)
  end
  local kind = { dtype = o.dtype, device = o.device }
  local side = o.image / o.patch
  self.image, self.channels = o.image, o.channels
  self.class_token = nn.Parameter(create.zeros(1, 1, o.dim, kind))
  self.conv_proj = nn.Conv2d(o.channels, o.dim, o.patch, { stride = o.patch, dtype = o.dtype, device = o.device })
  self.encoder = Encoder(o, kind, side * side + 1)
  self.heads = nn.ModuleDict { head = nn.Linear(o.dim, o.classes, kind) }
end

---@param x Tensor  [B, channels, image, image]
---@return Tensor  [B, classes]
function VisionTransformer:forward(x)
  if x.ndim ~= 4 or x:size(2) ~= self.channels or x:size(3) ~= self.image or x:size(4) ~= self.image then
    errors.raise("VisionTransformer: images have shape %s, expected [B, %d, %d, %d]", tostring(x.shape),
      self.channels, self.image, self.image)
  end
  local patches = self.conv_proj(x):flatten(3):transpose(2, 3)
  local first = self.class_token:expand(x:size(1), -1, -1)
  return self.heads.head(self.encoder(shapes.cat({ first, patches }, 2)):select(2, 1))
end

return VisionTransformer
