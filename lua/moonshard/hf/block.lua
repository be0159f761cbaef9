-- SPDX-License-Identifier: MIT
--- The block of all transformers here: attention and an MLP, each beside a residual connection. What families do
--- differently is an option of the block; a family's file names them.
---
--- A block is called with the stream x [B, T, C] and a table that the model makes once a forward:
---   see            what self-attention attends to: { is_causal, attn_mask }
---   turns          cosines and sines of the positions (rotary.lua); nil without rotary positions
---   cache          holds the keys and values of earlier calls (text/generation/cache.lua); nil without
---   memory         what cross-attention attends to, [B, S, C]; memory_seen: as `see`
-- Sizes: B batch, T queries, S keys, C channels (dim), H heads, K heads of keys and values, D channels of a head.
require "moonshard.autograd.methods"
local activations = require "moonshard.hf.activations"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local rotary = require "moonshard.hf.rotary"
local scope = require "moonshard.tensor.scope"

local F, parts = nn.F, nn.Linear._parts
local M = {}

---@class HFBlockOptions
---@field dim integer
---@field heads integer
---@field kv_heads? integer  (default: heads)
---@field head_dim? integer  (default: dim / heads)
---@field mlp_dim integer
---@field layer integer  number of the block, from 1, by which the cache knows it
---@field norm { kind: string, eps: number, bias: boolean }  kind: "layer", "rms", or "rms1", whose weight counts from -1
---@field post_norm? boolean  norm(x + part(x)), as BERT, not x + part(norm(x))
---@field sandwich? boolean  another norm after each part, as Gemma 2
---@field qk_norm? boolean  norms of each head's queries and keys, as Qwen3
---@field fused? boolean  one projection makes queries, keys and values, and one the two halves of a gated MLP
---@field bias? { qkv: boolean, k: boolean, out: boolean, mlp: boolean }
---@field gated? boolean  down(act(gate(x)) * up(x)), not down(act(up(x)))
---@field act string  a name in activations.lua
---@field scale? number  factor of the scores (default: 1 / sqrt(D))
---@field softcap? number  c: scores become c tanh(score / c)
---@field window? integer  attends to so many last positions only; windows: the blocks for which that is so
---@field cross? boolean  has attention to `memory` between the two parts
---@field dropout? number
---@field attention_dropout? number
---@field mlp_dropout? number  between the two layers of the MLP
---@field dtype? string
---@field device? string

-- RMSNorm with the weight 1 + w, of Gemma; in float32, because bfloat16 has no numbers between 1 and 1 + 2^-7.
local OffsetRMSNorm = nn.RMSNorm:extend "OffsetRMSNorm"

function OffsetRMSNorm:reset_parameters() nn.init.zeros_(self.weight) end

function OffsetRMSNorm:forward(x, residual)
  if residual then x = x + residual end
  local is_half = x.dtype == "bfloat16" or x.dtype == "float16"
  local y = F.rms_norm(is_half and x:float() or x, self.sizes, (is_half and self.weight:float() or self.weight) + 1,
    { eps = self.eps })
  if is_half then y = y:to(x.dtype) end
  if residual then return y, x end
  return y
end

--- A norm over `size` channels.
---@param o HFBlockOptions  norm, dtype and device are read
---@param size? integer  (default: dim)
---@return Module
function M.norm(o, size)
  local kind = { eps = o.norm.eps, dtype = o.dtype, device = o.device }
  size = size or o.dim
  if o.norm.kind == "rms" then return nn.RMSNorm(size, kind) end
  if o.norm.kind == "rms1" then return OffsetRMSNorm(size, kind) end
  kind.bias = o.norm.bias
  return nn.LayerNorm(size, kind)
end

--- A linear layer of a model.
local function linear(o, from, to, bias)
  return nn.Linear(from, to, { bias = bias or false, dtype = o.dtype, device = o.device })
end

---@class HFAttention: Module
local Attention = nn.Module:extend "HFAttention"

function Attention:init(o, cross)
  local D, bias = o.head_dim or o.dim / o.heads, o.bias or {}
  self.heads, self.kv_heads, self.head_dim, self.cross = o.heads, o.kv_heads or o.heads, D, cross or false
  self.layer, self.window, self.softcap, self.scale = o.layer, not cross and o.window or nil, o.softcap,
    o.scale or D ^ -0.5
  self.dropout = o.attention_dropout or 0
  if o.fused then
    self.qkv = linear(o, o.dim, (self.heads + 2 * self.kv_heads) * D, bias.qkv)
  else
    self.q = linear(o, o.dim, self.heads * D, bias.qkv)
    self.k = linear(o, o.dim, self.kv_heads * D, bias.qkv and bias.k ~= false)
    self.v = linear(o, o.dim, self.kv_heads * D, bias.qkv)
  end
  self.out = linear(o, self.heads * D, o.dim, bias.out)
  if o.qk_norm then self.q_norm, self.k_norm = M.norm(o, D), M.norm(o, D) end
end

-- [B, T, H D] -> [B, H, T, D]
local function split(x, heads, D) return x:reshape(x:size(1), x:size(2), heads, D):transpose(2, 3) end

-- Queries, keys and values, turned by their positions.
local function project(self, x, turns)
  local H, K, D = self.heads, self.kv_heads, self.head_dim
  local all, q, k, v = self.qkv and self.qkv(x) or parts(x, { self.q, self.k, self.v })
  if not all then
    q, k, v = split(self.q(x), H, D), split(self.k(x), K, D), split(self.v(x), K, D)
  elseif H == K and not turns then
    q, k, v = F.split_heads(all, H)
  else
    all = split(all, H + 2 * K, D)
    v = all:narrow(2, H + K + 1, K)
    if turns and not self.q_norm then all, turns = rotary.turn(all:narrow(2, 1, H + K), turns), nil end
    q, k = all:narrow(2, 1, H), all:narrow(2, H + 1, K)
  end
  if turns then return rotary.turn(q, turns, self.q_norm), rotary.turn(k, turns, self.k_norm), v end
  if self.q_norm then q, k = self.q_norm(q), self.k_norm(k) end
  return q, k, v
end

-- The keys and values of cross-attention, which a cache computes once.
local function memory_of(self, call)
  local function make() return split(self.k(call.memory), self.kv_heads, self.head_dim),
    split(self.v(call.memory), self.kv_heads, self.head_dim) end
  if call.cache then return call.cache:memory(self.layer, make) end
  return make()
end

function Attention:forward(x, call)
  local q, k, v
  local see = self.cross and call.memory_seen or call.see
  if self.cross then
    q = split(self.q(x), self.heads, self.head_dim)
    k, v = memory_of(self, call)
  else
    q, k, v = project(self, x, call.turns)
    if call.cache then k, v = call.cache:update(self.layer, k, v, self.window) end
  end
  local mask, S, causal = see.attn_mask, k:size(3), see.is_causal
  -- A cache may have left the oldest keys out.
  if mask and mask:size(-1) > S then mask = mask:narrow(-1, mask:size(-1) - S + 1, S) end
  return self.out(F.merge_heads(F.scaled_dot_product_attention(q, k, v, { attn_mask = mask, is_causal = causal,
    causal_offset = causal and S - q:size(3) or nil, window = causal and self.window or nil, scale = self.scale,
    softcap = self.softcap, enable_gqa = true, dropout_p = self.training and self.dropout or 0 })))
end

function Attention:extra_repr()
  return errors.count(self.heads, "head") .. (self.kv_heads < self.heads and ", " .. errors.count(self.kv_heads,
    "kv_head") or "") .. (self.window and ", window " .. self.window or "")
end

---@class HFMLP: Module
local MLP = nn.Module:extend "HFMLP"

function MLP:init(o)
  local bias = o.bias and o.bias.mlp
  self.act = o.act
  if o.gated and o.fused then
    self.gate_up = linear(o, o.dim, 2 * o.mlp_dim, bias)
  else
    if o.gated then self.gate = linear(o, o.dim, o.mlp_dim, bias) end
    self.up = linear(o, o.dim, o.mlp_dim, bias)
  end
  self.down = linear(o, o.mlp_dim, o.dim, bias)
  if (o.mlp_dropout or 0) > 0 then self.drop = nn.Dropout(o.mlp_dropout) end
end

-- The inner values of the MLP.
local function inner_of(self, x)
  local act = activations[self.act]
  local both = self.gate_up and self.gate_up(x) or self.gate and parts(x, { self.gate, self.up })
  if both then
    local n = both:size(-1) / 2
    return act(both:narrow(-1, 1, n)) * both:narrow(-1, n + 1, n)
  end
  if self.gate then return act(self.gate(x)) * self.up(x) end
  return act(self.up(x))
end

function MLP:forward(x)
  local y = inner_of(self, x)
  return self.down(self.drop and self.drop(y) or y)
end

function MLP:extra_repr() return self.act end

---@class HFBlock: Module
local Block = nn.Module:extend "HFBlock"

---@param o HFBlockOptions
function Block:init(o)
  self.post_norm = o.post_norm or false
  self.attn, self.attn_norm = Attention(o), M.norm(o)
  if o.cross then self.cross, self.cross_norm = Attention(o, true), M.norm(o) end
  self.mlp, self.mlp_norm = MLP(o), M.norm(o)
  if o.sandwich then self.attn_after, self.mlp_after = M.norm(o), M.norm(o) end
  if (o.dropout or 0) > 0 then self.drop = nn.Dropout(o.dropout) end
end

local function residual(self, x, norm, part, after, call)
  local y = part(self.post_norm and x or norm(x), call)
  if after then y = after(y) end
  if self.drop then y = self.drop(y) end
  if self.post_norm then return (norm(y, x)) end
  return x + y
end

-- Each part has its own scope: its intermediate results are released before the next part allocates memory.
function Block:forward(x, call)
  local h = scope.run("residual", residual, self, x, self.attn_norm, self.attn, self.attn_after, call)
  if self.cross then h = scope.run("residual", residual, self, h, self.cross_norm, self.cross, nil, call) end
  return residual(self, h, self.mlp_norm, self.mlp, self.mlp_after, call)
end

M.Block, M.linear = Block, linear

--- The blocks of a model, in order.
---@param o HFBlockOptions  with the number of `layers`
---@return Module[]
function M.stack(o)
  local list = nn.ModuleList {}
  for k = 1, o.layers do
    local window = o.window and (not o.windows or o.windows[k]) and o.window or false
    list:append(Block(setmetatable({ layer = k, window = window }, { __index = o })))
  end
  return list
end

return M
