-- SPDX-License-Identifier: MIT
--- Models of an encoder and a decoder that attends to its result: T5 and Whisper.
---
---   local loss = model(inputs, { labels = labels })               -- int64 [B, T]; -100: none
---   local logits, memory = model(inputs, { decoder_ids = ids })   -- [B, T, vocab], and the encoder's result [B, S, C]
---   local logits = model(nil, { memory = memory, decoder_ids = next, cache = cache, last = 1 })
--- The decoder begins with config.decoder_start_token_id, which labels get put before them. Other options:
---   attention_mask          [B, S], 0 where the inputs are padded; also beside `memory`
---   decoder_attention_mask  [B, positions of the cache and T]
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local masks = require "moonshard.hf.masks"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local shape = require "moonshard.tensor.shape"

local options = {
  attention_mask = opts.any, decoder_ids = opts.any, decoder_attention_mask = opts.any, labels = opts.any,
  memory = opts.any, cache = opts.any, last = opts.whole_from(1),
}

--- A class of it has `encode(inputs, attention_mask)`, which returns the memory, `embed(ids, past)`, `decoder(x, call)`
--- and `logits(x)`.
---@class HFSeq2Seq: Module
local Seq2Seq = nn.Module:extend "HFSeq2Seq"

-- The decoder's input that belongs to labels.
local function shifted(self, labels)
  local B, T, o = labels:size(1), labels:size(2), self.options
  local first = create.full({ B, 1 }, o.start, { dtype = "int64", device = labels.device })
  local rest = labels:narrow(2, 1, T - 1)
  return shape.cat({ first, rest:masked_fill(rest:eq(-100), o.pad) }, 2)
end

---@param inputs? Tensor  what the encoder reads; nil with `memory`
---@param given { attention_mask: Tensor, decoder_ids: Tensor, decoder_attention_mask: Tensor, labels: Tensor, memory: Tensor, cache: table, last: integer }
---@return Tensor  logits [B, T, vocab], or the mean loss []
---@return Tensor memory  [B, S, C]
function Seq2Seq:forward(inputs, given)
  local o = opts(self.options.name, given, options)
  local ids = o.decoder_ids or o.labels and shifted(self, o.labels)
  if not ids then errors.raise("%s: give option 'decoder_ids' or 'labels'", self.options.name) end
  local memory = o.memory or self:encode(inputs, o.attention_mask)
  local B, T, past = ids:size(1), ids:size(2), o.cache and o.cache.length or 0
  local see = { B = B, T = T, S = past + T, attention_mask = o.decoder_attention_mask, who = self.options.name }
  local x = self.decoder(self:embed(ids, past), { cache = o.cache, see = masks.causal(see), memory = memory,
    memory_seen = { is_causal = false, attn_mask = masks.padding(see.who, o.attention_mask, B, memory:size(2)) } })
  if o.cache then o.cache.length = past + T end
  if o.last then x = x:narrow(2, T - o.last + 1, o.last) end
  local logits = self:logits(x)
  if not o.labels then return logits, memory end
  return nn.F.cross_entropy(logits:flatten(1, 2), o.labels:reshape(-1)), memory
end

return Seq2Seq
