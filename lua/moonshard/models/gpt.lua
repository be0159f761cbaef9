-- SPDX-License-Identifier: MIT
--- GPT: decoder-only transformer, pre-norm, causal. Each block is a separate module, so that fully_shard can make it a
--- unit: `for _, block in ipairs(gpt.blocks) do fsdp.fully_shard(block) end`. `gpt(ids)` returns logits [B, T, vocab];
--- `gpt(ids, targets)` returns the mean cross-entropy; `gpt:generate(ids, opts)` continues texts.
-- Sizes: B batch, T time, C channels (dim), H heads, D = C / H.
require "moonshard.autograd.methods"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local gelu_mlp = require "moonshard.nn.ops".gelu_mlp
local generation = require "moonshard.text.generation"
local masks = require "moonshard.hf.masks"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local is_tensor = require("moonshard.tensor").is_tensor
local where = require("moonshard.tensor.ops").where

---@class CausalSelfAttention: Module
local Attention = nn.Module:extend("CausalSelfAttention")

function Attention:init(o)
  local kind = { bias = o.bias, dtype = o.dtype, device = o.device }
  self.heads, self.dropout, self.layer = o.heads, o.dropout, o.layer
  self.qkv = nn.Linear(o.dim, 3 * o.dim, kind)
  self.proj = nn.Linear(o.dim, o.dim, kind)
  if o.distance then self:register_buffer("distance", o.distance, { persistent = false }) end
end

local CAUSAL = { is_causal = true }

-- call: nil, or what the positions attend to, and the cache (hf/masks.lua).
function Attention:forward(x, call)
  local q, k, v = nn.F.split_heads(self.qkv(x), self.heads)
  if call and call.cache then k, v = call.cache:update(self.layer, k, v) end
  local mask, T, S = self.distance, x:size(2), k:size(3)
  if mask and T < mask:size(2) then mask = mask:narrow(2, S - T + 1, T):narrow(3, 1, S) end
  local p = self.training and self.dropout or 0
  local seen = call and call.attn_mask
  if seen then mask = mask and where(seen, mask, -1e9) or seen end
  local o = CAUSAL
  if mask or p > 0 or call then
    o = { attn_mask = mask, is_causal = true, causal_offset = S > T and S - T or nil, dropout_p = p }
  end
  return self.proj(nn.F.merge_heads(nn.F.scaled_dot_product_attention(q, k, v, o)))
end

function Attention:extra_repr() return errors.count(self.heads, "head") .. ", causal" end

--- x + attention(norm(x)), then x + mlp(norm(x)).
---@class GPTBlock: Module
local Block = nn.Module:extend("GPTBlock")

function Block:init(o)
  local kind = { bias = o.bias, dtype = o.dtype, device = o.device }
  self.attn_norm = nn.LayerNorm(o.dim, kind)
  self.attn = Attention(o)
  self.mlp_norm = nn.LayerNorm(o.dim, kind)
  self.mlp = nn.Sequential(nn.Linear(o.dim, o.mlp * o.dim, kind), nn.GELU { approximate = "tanh",
    recompute = o.recompute }, nn.Linear(o.mlp * o.dim, o.dim, kind))
  if o.dropout > 0 then self.drop = nn.Dropout(o.dropout) end
end

-- Returns the input of the mlp, norm(h), and h = x + attention(norm(x)).
local function attend(self, x, call)
  local part = self.attn(self.attn_norm(x), call)
  if self.drop then part = self.drop(part) end
  return self.mlp_norm(part, x)
end

-- Calls the mlp in one operator, unless a script has changed its modules or given them hooks.
local function call_mlp(mlp, x)
  local up, act, down = mlp[1], mlp[2], mlp[3]
  if #mlp == 3 and getmetatable(mlp) == nn.Sequential and getmetatable(up) == nn.Linear and getmetatable(act) == nn.GELU
    and getmetatable(down) == nn.Linear and act.approximate == "tanh"
    and not (mlp._hooked or up._hooked or act._hooked or down._hooked) then
    return gelu_mlp(x, up.weight, down.weight, up.bias, down.bias, act.recompute)
  end
  return mlp(x)
end

-- The first half has its own scope: its intermediate results are released before the second half allocates memory.
function Block:forward(x, call)
  local y, h = scope.run("attention", attend, self, x, call)
  y = call_mlp(self.mlp, y)
  if self.drop then y = self.drop(y) end
  return h + y
end

local WIDE = { wide = true }

-- The projection to logits; with targets, the loss, from logits that are computed in chunks of rows.
---@class GPTHead: Linear
local Head = nn.Linear:extend("GPTHead")

function Head:forward(x, targets)
  if targets then return nn.F.linear_cross_entropy(x, self.weight, targets, WIDE) end
  return nn.F.linear(x, self.weight)
end

---@class GPTOptions
---@field vocab? integer    number of token ids (default: 256, bytes)
---@field context? integer  tokens of the longest sequence (default: 256)
---@field layers? integer   number of blocks (default: 4)
---@field heads? integer    attention heads per block (default: 4)
---@field dim? integer      channels (default: 128)
---@field mlp? integer      hidden size of the MLP as a multiple of dim (default: 4)
---@field dropout? number   probability of dropout (default: 0)
---@field bias? boolean     Linear and LayerNorm have a bias (default: true)
---@field tie? boolean      the head's weight is the token table (default: true)
---@field position? string   "learned" (default): a table of positions; "alibi": each head subtracts its slope times the distance of query and key from the score
---@field recompute? boolean  backward computes the results of GELU again instead of keeping them, which saves a quarter of the blocks' activations (default: false)
---@field init_std? number  standard deviation of the initial weights (default: 0.02)
---@field dtype? string  dtype of the parameters (default: the default dtype)
---@field device? string  device of the parameters (default: the default device)

---@class GPT: Module
---@field blocks Module[]  the transformer blocks, in order
---@overload fun(opts?: GPTOptions): GPT
local GPT = nn.Module:extend("GPT")

-- The bias of attention scores (Press, Smith and Lewis 2021): -2^(-8 h / H) (t - s), for head h = 1 .. H. A model with
-- this bias learns to copy in a fraction of the steps that a model with a table of positions needs.
local function distances(o, device)
  local t = create.arange(0, o.context, { dtype = "float32", device = device })
  local slopes = {}
  for h = 1, o.heads do slopes[h] = -2 ^ (-8 * h / o.heads) end
  local back = t:unsqueeze(2) - t:unsqueeze(1)
  return create.tensor(slopes, { device = device }):reshape(o.heads, 1, 1) * back:unsqueeze(1)
end

function GPT:init(given)
  local o = opts("GPT", given, {
    vocab = 256, context = 256, layers = 4, heads = 4, dim = 128, mlp = 4, dropout = 0, bias = true, tie = true,
    position = opts.one_of({ "learned", "alibi" }, "learned"), recompute = false, init_std = 0.02, dtype = opts.string, device = opts.any,
  })
  if o.dim % o.heads ~= 0 then
    errors.raise("GPT: dim is %d, expected a multiple of the number of heads, %d", o.dim, o.heads)
  end
  if o.layers > 2 ^ 16 then errors.raise("GPT: option 'layers' is %g, expected at most 65536", o.layers) end
  local kind = { dtype = o.dtype, device = o.device }
  self.config, self.context = o, o.context
  self.token = nn.Embedding(o.vocab, o.dim, kind)
  local distance
  if o.position == "alibi" then distance = distances(o, o.device) else self.position = nn.Embedding(o.context, o.dim,
    kind) end
  if o.dropout > 0 then self.drop = nn.Dropout(o.dropout) end
  self.blocks = nn.Sequential {}
  for k = 1, o.layers do
    self.blocks:append(Block(setmetatable({ layer = k, distance = distance }, { __index = o })))
  end
  self.norm = nn.LayerNorm(o.dim, { bias = o.bias, dtype = o.dtype, device = o.device })
  self.head = Head(o.dim, o.vocab, { bias = false, dtype = o.dtype, device = o.device })
  if o.tie then self.head.weight = self.token.weight end
  self:reset_parameters()
end

--- Initialises the parameters as GPT-2 does: biases 0, weights of norms 1, projections into the residual stream normal
--- with standard deviation init_std / sqrt(2 * layers), all others normal with standard deviation init_std.
function GPT:reset_parameters()
  local o = self.config
  -- All blocks share one buffer of distances, which to_empty leaves uninitialised.
  if o.position == "alibi" and o.layers > 0 then
    local shared = self.blocks[1].attn.distance
    if shared.device ~= "meta" then shared:copy_(distances(o, shared.device)) end
  end
  local residual_std = o.init_std / math.sqrt(2 * o.layers)
  for name, p in self:named_parameters() do
    if name:match("norm%.weight$") then nn.init.ones_(p)
    elseif name:match("%.bias$") then nn.init.zeros_(p)
    elseif name:match("proj%.weight$") or name:match("mlp%.3%.weight$") then nn.init.normal_(p, 0, residual_std)
    else nn.init.normal_(p, 0, o.init_std) end
  end
end

--- Freezes the model and gives the linear layers of its blocks low-rank adapters, with alpha = 2 rank (nn.lora).
---@param rank integer
---@return LoRA
function GPT:adapters(rank)
  return nn.lora(self, { target = { "attn.qkv", "attn.proj", "mlp%.%d" }, rank = rank, alpha = 2 * rank })
end

local options = { cache = opts.any, attention_mask = opts.any, positions = opts.any, last = opts.whole_from(1) }

---@param ids Tensor  int64 [B, T]
---@param given? Tensor|{ cache: table, attention_mask: Tensor, positions: Tensor, last: integer }  targets [B, T], or
---   options: cache: keys and values of earlier calls; attention_mask: [B, S], 0 where a sequence is padded; positions:
---   int64 [T] or [B, T]; last: logits of so many last positions
---@return Tensor  logits [B, T, vocab], or the mean loss []
function GPT:forward(ids, given)
  if ids.ndim ~= 2 then errors.raise("GPT: ids have shape %s, expected [B, T]", tostring(ids.shape)) end
  local B, T, past, call = ids:size(1), ids:size(2), 0, nil
  local o, targets = self.config, is_tensor(given) and given or nil
  given = targets and {} or opts("GPT", given, options)
  local cache = given.cache
  if cache then past = cache.length end
  if past + T > o.context then errors.raise("GPT: %d positions are more than the context of %d", past + T, o.context) end
  if cache or given.attention_mask then
    call = masks.causal { B = B, T = T, S = past + T, attention_mask = given.attention_mask, who = "GPT" }
    call.cache = cache
  end
  local x = self.token(ids)
  if self.position then
    x = x + self.position(given.positions or create.arange(past, past + T, { dtype = "int64", device = ids.device }))
  end
  if self.drop then x = self.drop(x) end
  if call then
    for _, block in ipairs(self.blocks) do x = block(x, call) end
  else
    x = self.blocks(x)
  end
  if cache then cache.length = past + T end
  x = self.norm(x)
  if given.last then x = x:narrow(2, T - given.last + 1, given.last) end
  return self.head(x, targets)
end

GPT.generate, GPT.stream = generation.generate, generation.stream
GPT._forwarding = { generate = true, stream = true }

function GPT:extra_repr()
  local o = self.config
  return ("vocab %d, context %d, %s, %s, dim %d"):format(o.vocab, o.context, errors.count(o.layers, "layer"),
    errors.count(o.heads, "head"), o.dim)
end

return GPT
