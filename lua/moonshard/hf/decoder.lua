-- SPDX-License-Identifier: MIT
--- A causal language model of any decoder family: GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma, Gemma 2, Phi-3. Families
--- differ by the options in families.lua.
---
---   local logits = model(ids)                                       -- [B, T] -> [B, T, vocab]
---   local loss = model(ids, { labels = ids })                       -- position t predicts label t + 1; -100: none
---   local loss = model(ids, targets)                                -- position t predicts target t; -100: none
---   local logits = model(ids, { cache = cache, last = 1 })          -- continues the cache's sequences; [B, 1, vocab]
---   local x = model.model(ids)                                      -- the last hidden states, [B, T, C]
---
--- Options of a forward, all of them of a generation's calls, too:
---   attention_mask  [B, S], 0 where a sequence is padded, on either side. S: positions of the cache and T
---   positions       int64 [T] or [B, T] (default: cache.length, cache.length + 1, ...). Of sequences that are padded on
---                   the left, give the number of tokens before each one
---   segments        int64 [B, S]: the document of each position, in sequences that are packed from several; no position
---                   attends to another document, and `positions` count within each
---   cache           an object like that of text/generation/cache.lua, which describes what it must do; the model adds
---                   T to its length
---   labels          int64 [B, T], as of transformers: the mean loss is returned instead of logits
---   last            logits of this many last positions only
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local generation = require "moonshard.text.generation"
local block = require "moonshard.hf.block"
local masks = require "moonshard.hf.masks"
local checkpoint = require("moonshard.autograd.function").checkpoint
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local rotary = require "moonshard.hf.rotary"
local is_tensor = require("moonshard.tensor").is_tensor

local WIDE = { wide = true }
local options = {
  attention_mask = opts.any, positions = opts.any, segments = opts.any, cache = opts.any, labels = opts.any,
  last = opts.whole_from(1), targets = opts.any,
}

---@class HFDecoder: Module
---@field embed Embedding
---@field layers HFBlock[]
---@field norm Module
---@field recompute? boolean  backward computes each layer again, instead of keeping its activations
local Decoder = nn.Module:extend "HFDecoder"

---@param o table  what a family made of config.json (families.lua)
function Decoder:init(o)
  local kind = { dtype = o.dtype, device = o.device }
  self.embed = nn.Embedding(o.vocab, o.dim, { dtype = o.dtype, device = o.device, padding_idx = o.padding_row })
  if o.learned then self.positions = nn.Embedding(o.learned, o.dim, kind) end
  if (o.embed_dropout or 0) > 0 then self.drop = nn.Dropout(o.embed_dropout) end
  self.layers = block.stack(o)
  self.norm = block.norm(o)
  self.options, self.rates = o, o.rotary and rotary.rates(o.rotary)
end

-- A layer whose activations backward computes again. The checkpoint keeps the tensors that it is given.
local function recomputed(layer, x, call)
  local turns = call.turns or {}
  return checkpoint(function(stream, mask, cos, sin)
    local see = {}
    for key, value in pairs(call.see) do see[key] = value end
    see.attn_mask = mask
    return layer(stream, { see = see, turns = cos and { cos = cos, sin = sin } })
  end, x, call.see.attn_mask, turns.cos, turns.sin)
end

---@param ids Tensor  int64 [B, T]
---@param given? table  options of a forward
---@return Tensor  [B, T, C]
function Decoder:forward(ids, given)
  local o = self.options
  given = opts(o.name, given, options)
  if not is_tensor(ids) or ids.ndim ~= 2 then
    opts.wrong(ids, "token ids [B, T]", "%s: argument 1", o.name)
  end
  local B, T, cache = ids:size(1), ids:size(2), given.cache
  local past = cache and cache.length or 0
  local positions = given.positions or create.arange(past, past + T, { dtype = "int64", device = ids.device })
  local x = self.embed(ids)
  if o.embed_scale then x = x * o.embed_scale end
  if self.positions then
    if past + T > o.learned then
      errors.raise("%s: %d positions are more than the model has, %d", o.name, past + T, o.learned)
    end
    x = x + self.positions(positions)
  end
  if self.drop then x = self.drop(x) end
  -- LongRoPE and dynamic RoPE depend on the last position, which is that of the sequence if the caller gives none.
  local last = past + T
  if given.positions and self.rates and self.rates.context < math.huge then last = positions:max():item() + 1 end
  local call = { cache = cache, turns = self.rates and rotary.table(self.rates, positions, x.dtype, last),
    see = masks.causal { B = B, T = T, S = past + T, attention_mask = given.attention_mask, segments = given.segments,
      who = o.name } }
  for _, layer in ipairs(self.layers) do
    if self.recompute and not cache then x = recomputed(layer, x, call) else x = layer(x, call) end
  end
  if cache then cache.length = past + T end
  return self.norm(x)
end

---@class HFCausalLM: Module
---@field config table<string, any>  config.json
---@field model HFDecoder
---@field lm_head Linear
local CausalLM = nn.Module:extend "HFCausalLM"

function CausalLM:init(o)
  self.model = Decoder(o)
  self.lm_head = nn.Linear(o.dim, o.vocab, { bias = false, dtype = o.dtype, device = o.device })
  if o.tied then self.lm_head.weight = self.model.embed.weight end
  self.softcap, self.name, self.context = o.final_softcap, o.name, o.learned
  if o.renews then self.renewed_beyond = self.model.rates.context end
end

local function logits_of(self, x)
  local logits = self.lm_head(x)
  return self.softcap and (logits * (1 / self.softcap)):tanh() * self.softcap or logits
end

-- The mean loss. That of half-precision logits is float32, as in transformers: a mean in bfloat16 is off by up to
-- 0.4 %.
local function loss_of(self, x, targets)
  if not self.softcap then return nn.F.linear_cross_entropy(x, self.lm_head.weight, targets, WIDE) end
  local logits = logits_of(self, x):flatten(1, 2)
  local half = logits.dtype == "bfloat16" or logits.dtype == "float16"
  return nn.F.cross_entropy(half and logits:float() or logits, targets:reshape(-1))
end

--- The logits of the token after each position, or a loss: `model(ids)`, `model(ids, { labels = ids })`, `model(ids,
--- targets)`. Labels are shifted, as in transformers: position t predicts label t + 1; targets are not. -100 leaves a
--- position out of the loss.
---@param ids Tensor  int64 [B, T]
---@param given? Tensor|{ attention_mask: Tensor, positions: Tensor, segments: Tensor, cache: table, labels: Tensor, targets: Tensor, last: integer }
---   targets [B, T], or options. attention_mask: [B, S], 0 or false where a sequence is padded; S: positions of the cache
---   and T; positions: int64 [T] or [B, T] (default: 0, 1, ... after those of the cache); segments: int64 [B, S], the
---   document of each position, for sequences that are packed from several: no position attends to another document;
---   cache: keys and values of earlier calls; labels: [B, T]; targets: [B, T]; last: logits of so many last positions
---@return Tensor  logits [B, T, vocab], or the mean loss []
function CausalLM:forward(ids, given)
  if is_tensor(given) then given = { targets = given } end
  given = given or {}
  local x = self.model(ids, given)
  local targets = given.targets
  if given.labels then
    local T = ids:size(2)
    if T < 2 then errors.raise("%s: a loss with labels needs two positions, got %d", self.name, T) end
    x, targets = x:narrow(2, 1, T - 1), given.labels:narrow(2, 2, T - 1)
  end
  if not targets then
    if given.last then x = x:narrow(2, x:size(2) - given.last + 1, given.last) end
    return logits_of(self, x)
  end
  return loss_of(self, x, targets:contiguous())
end

CausalLM._forwarding = { generate = true, stream = true }

--- Generates tokens after those given: text.generate of this model.
---@param ids Tensor|integer[][]  int64 [T] or [B, T], padded on the left; or a list of token lists
---@param given? GenerateOptions  the options of text.generate
---@return Tensor ids  int64, the given tokens and the new ones
---@return integer[][] new  the new tokens of each row
function CausalLM:generate(ids, given) return generation.generate(self, ids, given) end

--- Generates one text, token by token: text.stream of this model.
---@param ids Tensor|integer[]  int64 [T] or [1, T], or a list of tokens
---@param given? GenerateOptions  the options of text.generate
---@return fun(): integer?
function CausalLM:stream(ids, given) return generation.stream(self, ids, given) end

return { CausalLM = CausalLM, Decoder = Decoder }
