-- SPDX-License-Identifier: MIT
--- Llama: a decoder-only transformer of the Llama family (Touvron et al. 2023): RMSNorm, rotary positions,
--- grouped-query attention (Ainslie et al. 2023) and SwiGLU. `llama(ids)` returns logits [B, T, vocab]; `llama(ids,
--- targets)` returns the mean cross-entropy. Parameters have the names of Hugging Face's LlamaForCausalLM, with layers
--- counted from 1.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"

---@class LlamaAttention: Module
local Attention = nn.Module:extend "LlamaAttention"

function Attention:init(o)
  local kind = { bias = false, dtype = o.dtype, device = o.device }
  local d = o.dim / o.heads
  self.heads, self.kv_heads = o.heads, o.kv_heads
  self.q_proj = nn.Linear(o.dim, o.heads * d, kind)
  self.k_proj = nn.Linear(o.dim, o.kv_heads * d, kind)
  self.v_proj = nn.Linear(o.dim, o.kv_heads * d, kind)
  self.o_proj = nn.Linear(o.heads * d, o.dim, kind)
  self.rotary = nn.RotaryEmbedding(d, { base = o.base })
end

-- [B, T, heads D] -> [B, heads, T, D]
local function split(x, heads) return x:reshape(x:size(1), x:size(2), heads, -1):transpose(2, 3) end

local CAUSAL = { is_causal = true, enable_gqa = true }
local WIDE = { wide = true }

function Attention:forward(x)
  local q, k = self.rotary(split(self.q_proj(x), self.heads)), self.rotary(split(self.k_proj(x), self.kv_heads))
  local v = split(self.v_proj(x), self.kv_heads)
  return self.o_proj(nn.F.merge_heads(nn.F.scaled_dot_product_attention(q, k, v, CAUSAL)))
end

-- The SwiGLU of Shazeer (2020): down(silu(gate(x)) * up(x)).
---@class LlamaMLP: Module
local MLP = nn.Module:extend "LlamaMLP"

function MLP:init(o)
  local kind = { bias = false, dtype = o.dtype, device = o.device }
  self.gate_proj = nn.Linear(o.dim, o.mlp_dim, kind)
  self.up_proj = nn.Linear(o.dim, o.mlp_dim, kind)
  self.down_proj = nn.Linear(o.mlp_dim, o.dim, kind)
end

function MLP:forward(x) return self.down_proj(nn.F.silu(self.gate_proj(x)) * self.up_proj(x)) end

---@class LlamaBlock: Module
local Block = nn.Module:extend "LlamaBlock"

function Block:init(o)
  local kind = { eps = o.eps, dtype = o.dtype, device = o.device }
  self.self_attn = Attention(o)
  self.mlp = MLP(o)
  self.input_layernorm = nn.RMSNorm(o.dim, kind)
  self.post_attention_layernorm = nn.RMSNorm(o.dim, kind)
end

local function residual(x, norm, part) return x + part(norm(x)) end

-- The first half has its own scope: its intermediate results are released before the second half allocates memory.
function Block:forward(x)
  local h = scope.run("residual", residual, x, self.input_layernorm, self.self_attn)
  return residual(h, self.post_attention_layernorm, self.mlp)
end

---@class LlamaModel: Module
local Model = nn.Module:extend "LlamaModel"

function Model:init(o)
  self.embed_tokens = nn.Embedding(o.vocab, o.dim, { dtype = o.dtype, device = o.device })
  self.layers = nn.Sequential {}
  for _ = 1, o.layers do self.layers:append(Block(o)) end
  self.norm = nn.RMSNorm(o.dim, { eps = o.eps, dtype = o.dtype, device = o.device })
end

function Model:forward(ids) return self.norm(self.layers(self.embed_tokens(ids))) end

---@class Llama: Module
---@overload fun(opts?: { vocab: integer, layers: integer, heads: integer, kv_heads: integer, dim: integer, mlp_dim: integer, base: number, eps: number, tie: boolean, init_std: number, dtype: string, device: string }): Llama
---   vocab: number of token ids (default: 256, bytes); layers: number of blocks (default: 4); heads: query heads per
---   block (default: 4); kv_heads: key and value heads, divides heads (default: heads); dim: channels (default: 128);
---   mlp_dim: inner size of the MLP (default: 8 / 3 of dim, rounded up to a multiple of 32); base: base of the
---   powers in the rotary angles (default: 10000); eps: added to the mean square in the norms (default: 1e-5); tie: the
---   head's weight is the token table (default: false);
---   init_std: standard deviation of the initial weights (default: 0.02)
local Llama = nn.Module:extend "Llama"

function Llama:init(given)
  local o = opts("Llama", given, { vocab = 256, layers = 4, heads = 4, kv_heads = opts.whole_from(1), dim = 128,
    mlp_dim = opts.whole_from(1), base = 10000, eps = 1e-5, tie = false, init_std = 0.02, dtype = opts.string,
    device = opts.any })
  o.kv_heads = o.kv_heads or o.heads
  o.mlp_dim = o.mlp_dim or math.ceil(o.dim * 8 / 3 / 32) * 32
  if o.dim % (2 * o.heads) ~= 0 then
    errors.raise("Llama: dim is %d, expected a multiple of %d, twice the number of heads", o.dim, 2 * o.heads)
  end
  if o.heads % o.kv_heads ~= 0 then
    errors.raise("Llama: heads is %d, expected a multiple of kv_heads, %d", o.heads, o.kv_heads)
  end
  self.config = o
  self.model = Model(o)
  self.lm_head = nn.Linear(o.dim, o.vocab, { bias = false, dtype = o.dtype, device = o.device })
  if o.tie then self.lm_head.weight = self.model.embed_tokens.weight end
  self:reset_parameters()
end

--- Initialises the parameters: weights of norms 1, all others normal with standard deviation init_std.
function Llama:reset_parameters()
  for _, p in self:named_parameters() do
    if p.ndim == 1 then nn.init.ones_(p) else nn.init.normal_(p, 0, self.config.init_std) end
  end
end

---@param ids Tensor  int64 [B, T]
---@param targets? Tensor  int64 [B, T]: returns the loss, from logits that are computed in chunks of rows
---@return Tensor  logits [B, T, vocab], or the loss []
function Llama:forward(ids, targets)
  if ids.ndim ~= 2 then errors.raise("Llama: ids have shape %s, expected [B, T]", tostring(ids.shape)) end
  local x = self.model(ids)
  if targets then return nn.F.linear_cross_entropy(x, self.lm_head.weight, targets, WIDE) end
  return self.lm_head(x)
end

function Llama:extra_repr()
  local o = self.config
  return ("vocab %d, %s, %s, %s, dim %d"):format(o.vocab, errors.count(o.layers, "layer"),
    errors.count(o.heads, "head"), errors.count(o.kv_heads, "kv_head"), o.dim)
end

return Llama
