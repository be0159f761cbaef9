-- SPDX-License-Identifier: MIT
--- Models of an encoder and a decoder that attends to its result: T5 and Whisper.
---
---   local loss = model(inputs, { labels = labels })               -- int64 [B, T]; -100: none
---   local logits, memory = model(inputs, { decoder_ids = ids })   -- [B, T, vocab], and the encoder's result [B, S, C]
---   local ids, new = model:generate(inputs, { num_beams = 4 })
---   local logits = model(nil, { memory = memory, decoder_ids = next, cache = cache, last = 1 })
--- The decoder begins with config.decoder_start_token_id, which labels get put before them. Other options:
---   attention_mask          [B, S], 0 where the inputs are padded; also beside `memory`
---   decoder_attention_mask  [B, positions of the cache and T]
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local generation = require "moonshard.text.generation"
local masks = require "moonshard.hf.masks"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"
local shape = require "moonshard.tensor.shape"
local is_tensor = require("moonshard.tensor").is_tensor

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

Seq2Seq._forwarding = { generate = true }

--- Generates what the decoder says to inputs: the options are those of text.generate, and two more. The decoder begins
--- with config.decoder_start_token_id. The encoder runs once, and so do the keys and values of cross-attention.
---@param inputs Tensor|integer[][]  what the encoder reads: ids [B, S], of T5 also a list of token lists of one length;
---   of Whisper, features [B, bins, frames]
---@param given? GenerateOptions  the options of text.generate; decoder_ids: [B, T], what the decoder begins with
---   instead, such as Whisper's tokens of language and task; attention_mask: [B, S], 0 where the inputs are padded
---@return Tensor ids  int64 [B * num_return_sequences, T + new], padded on the right
---@return integer[][] new  the new tokens of each row
function Seq2Seq:generate(inputs, given)
  local o, rest = self.options, {}
  for key, value in pairs(given or {}) do rest[key] = value end
  local ids, mask = rest.decoder_ids, rest.attention_mask
  rest.decoder_ids, rest.attention_mask = nil, nil
  if not is_tensor(inputs) then
    opts.need(opts.is_plain(inputs) and #inputs > 0, inputs, "a tensor, or a list of lists of ids", "generate: the inputs")
    inputs = create.tensor(inputs, { dtype = "int64" })
  end
  if mask then opts.need(is_tensor(mask), mask, "a tensor [B, S]", "generate: option 'attention_mask'") end
  local B = inputs:size(1)
  ids = ids or create.full({ B, 1 }, o.start, { dtype = "int64", device = inputs.device })
  if not is_tensor(ids) or ids.ndim ~= 2 or ids:size(1) ~= B then
    opts.wrong(ids, ("token ids [%d, T], a row for each input"):format(B), "generate: option 'decoder_ids'")
  end
  return generation._generate_from({ inputs = inputs, mask = mask }, self, ids, rest)
end

return Seq2Seq
