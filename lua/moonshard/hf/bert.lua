-- SPDX-License-Identifier: MIT
--- BERT (Devlin et al. 2018) and RoBERTa (Liu et al. 2019), with the heads that fill in masked words, and that classify
--- texts or tokens.
---
---   local x, pooled = bert(ids)                       -- [B, T, C], and [B, C] of the first position
---   local logits = masked(ids)                        -- [B, T, vocab]; of classifiers [B, labels] or [B, T, labels]
---   local loss = masked(ids, { labels = labels })     -- int64, of the logits' shape but the last size; -100: none
--- Options: attention_mask [B, T], 0 where a text is padded; token_types int64 [B, T] (default: 0); positions.
local create = require "moonshard.tensor.create"
local activations = require "moonshard.hf.activations"
local block = require "moonshard.hf.block"
local Config = require "moonshard.hf.config"
local errors = require "moonshard.core.errors"
local masks = require "moonshard.hf.masks"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"

local size, share = Config.size, Config.share

local options = { attention_mask = opts.any, token_types = opts.any, positions = opts.any, labels = opts.any }

---@class HFBert: Module
local Bert = nn.Module:extend "HFBert"

function Bert:init(o)
  local kind = { dtype = o.dtype, device = o.device }
  local function padded(n, row)
    return nn.Embedding(n, o.dim, { dtype = o.dtype, device = o.device, padding_idx = row })
  end
  self.words, self.positions = padded(o.vocab, o.padding_row), padded(o.context, o.pad)
  self.types = nn.Embedding(o.types, o.dim, kind)
  self.norm = block.norm(o)
  if o.dropout > 0 then self.drop = nn.Dropout(o.dropout) end
  self.layers = block.stack(o)
  if o.pooler then self.pooler = block.linear(o, o.dim, o.dim, true) end
  self.options = o
end

-- RoBERTa counts the tokens that are not padding, from pad_token_id + 1; padding has the position pad_token_id.
local function positions_of(ids, pad)
  if not pad then return create.arange(0, ids:size(2), { dtype = "int64", device = ids.device }) end
  local there = ids:ne(pad):to "int64"
  return there:cumsum(2) * there + pad
end

---@param ids Tensor  int64 [B, T]
---@param given? table  options
---@return Tensor x  [B, T, C]
---@return Tensor? pooled  [B, C]; nil without a pooler
function Bert:forward(ids, given)
  local o = self.options
  given = opts(o.name, given, options)
  local B, T = ids:size(1), ids:size(2)
  if T + (o.pad and o.pad + 1 or 0) > o.context then
    errors.raise("%s: %d tokens are more than the model has positions", o.name, T)
  end
  local x = self.words(ids) + self.positions(given.positions or positions_of(ids, o.pad))
  local types = given.token_types
  x = x + (types and self.types(types) or self.types.weight:narrow(1, 1, 1))
  x = self.norm(x)
  if self.drop then x = self.drop(x) end
  local call = { see = { is_causal = false, attn_mask = masks.padding(o.name, given.attention_mask, B, T) } }
  for _, layer in ipairs(self.layers) do x = layer(x, call) end
  return x, self.pooler and self.pooler(x:select(2, 1)):tanh()
end

---@class HFBertHead: Module
local Head = nn.Module:extend "HFBertHead"

-- kind: "masked" (words of the vocabulary), "text" or "token" (classes).
function Head:init(o)
  self.encoder, self.kind, self.name = Bert(o), o.head, o.name
  if o.head == "masked" then
    self.dense, self.act, self.norm = block.linear(o, o.dim, o.dim, true), o.head_act, block.norm(o)
    self.decoder = block.linear(o, o.dim, o.vocab, true)
    if o.tied then
      self.decoder.weight = self.encoder.words.weight
    else
      self.bias = nn.Parameter(create.zeros({ o.vocab }, { dtype = o.dtype, device = o.device }))
    end
    return
  end
  if o.classifier_dropout > 0 then self.drop = nn.Dropout(o.classifier_dropout) end
  if o.head_dense then self.dense = block.linear(o, o.dim, o.dim, true) end
  self.classifier = block.linear(o, o.dim, o.labels, true)
end

local function logits_of(self, x, pooled)
  if self.kind == "masked" then return self.decoder(self.norm(activations[self.act](self.dense(x)))) end
  if self.kind == "text" then x = pooled or x:select(2, 1) end
  if self.drop then x = self.drop(x) end
  if self.dense then
    x = self.dense(x):tanh()
    if self.drop then x = self.drop(x) end
  end
  return self.classifier(x)
end

---@param ids Tensor  int64 [B, T]
---@param given? table  options
---@return Tensor  logits, or the mean loss []
function Head:forward(ids, given)
  local logits = logits_of(self, self.encoder(ids, given))
  local labels = given and given.labels
  if not labels then return logits end
  if self.kind == "text" and logits:size(-1) == 1 then return nn.F.mse_loss(logits:squeeze(-1), labels) end
  return nn.F.cross_entropy(logits:reshape(-1, logits:size(-1)), labels:reshape(-1))
end

-- ---- configurations and names -------------------------------------------------------------------

local function options_of(c, head, is_roberta)
  local o = {
    vocab = c:get("vocab_size", size), dim = c:get("hidden_size", size), layers = c:get("num_hidden_layers",
      Config.layers),
    heads = c:get("num_attention_heads", size), mlp_dim = c:get("intermediate_size", size),
    context = c:get("max_position_embeddings", size, 512), types = c:get("type_vocab_size", size, 2),
    act = c:get("hidden_act", Config.act, "gelu"), dropout = c:get("hidden_dropout_prob", share, 0.1),
    attention_dropout = c:get("attention_probs_dropout_prob", share, 0.1), post_norm = true,
    norm = { kind = "layer", eps = c:get("layer_norm_eps", Config.positive, 1e-12), bias = true },
    bias = { qkv = true, out = true, mlp = true }, tied = c:get("tie_word_embeddings", opts.boolean, true), head = head,
  }
  if o.dim % o.heads ~= 0 then
    c:fail("hidden_size", "is %d, expected a multiple of num_attention_heads, %d", o.dim, o.heads)
  end
  if is_roberta then o.pad = c:get("pad_token_id", opts.whole_from(0), 1) end
  o.padding_row = c:padding_row(o.vocab, is_roberta and 1 or 0)
  o.pooler = head == nil or head == "text" and not is_roberta
  o.head_act = is_roberta and "gelu" or o.act
  if head == "text" or head == "token" then
    o.labels = c:labels()
    o.head_dense = is_roberta and head == "text"
    o.classifier_dropout = c:maybe("classifier_dropout", share) or o.dropout
  end
  c:only("position_embedding_type", "absolute")
  c:only("is_decoder", false)
  c:only("add_cross_attention", false)
  return o
end

local function names_of(ours, theirs, is_roberta, untied)
  local rows, layer = {}, { ours .. "layers.#.", theirs .. "encoder.layer.#." }
  for _, pair in ipairs { { "attn.q.", "attention.self.query." }, { "attn.k.", "attention.self.key." },
    { "attn.v.", "attention.self.value." }, { "attn.out.", "attention.output.dense." },
    { "attn_norm.", "attention.output.LayerNorm." }, { "mlp.up.", "intermediate.dense." },
    { "mlp.down.", "output.dense." }, { "mlp_norm.", "output.LayerNorm." } } do
    rows[#rows + 1] = { layer[1] .. pair[1], layer[2] .. pair[2] }
  end
  for _, pair in ipairs { { "words.", "embeddings.word_embeddings." },
    { "positions.", "embeddings.position_embeddings." }, { "types.", "embeddings.token_type_embeddings." },
    { "norm.", "embeddings.LayerNorm." }, { "pooler.", "pooler.dense." } } do
    rows[#rows + 1] = { ours .. pair[1], theirs .. pair[2] }
  end
  local head = is_roberta and "lm_head." or "cls.predictions."
  local inner = is_roberta and head or head .. "transform."
  -- Files of untied heads have a second bias, on which no logit depends; old ones have the first one by its name.
  local bias = untied and { "decoder.bias", head .. "decoder.bias", old = head .. "bias" }
    or { "decoder.bias", head .. "bias" }
  for _, pair in ipairs { { "dense.", inner .. "dense." }, { "norm.", inner .. (is_roberta and "layer_norm." or "LayerNorm.") },
    bias, { "decoder.weight", head .. "decoder.weight" }, { "bias", head .. "bias" } } do
    rows[#rows + 1] = pair
  end
  return rows
end

-- RoBERTa's classifier of texts has names of its own.
local ROBERTA_TEXT = { { "dense.", "classifier.dense." }, { "classifier.", "classifier.out_proj." } }

local M = {}
for model_type, is_roberta in pairs { bert = false, roberta = true } do
  local class = is_roberta and "Roberta" or "Bert"
  for suffix, head in pairs { Model = false, ForMaskedLM = "masked", ForSequenceClassification = "text",
    ForTokenClassification = "token" } do
    local prefix = model_type .. "."
    local names = head and names_of("encoder.", prefix, is_roberta) or names_of("", "", is_roberta)
    if is_roberta and head == "text" then
      for k, row in ipairs(ROBERTA_TEXT) do table.insert(names, k, row) end
    end
    M[#M + 1] = { architecture = class .. suffix, model_type = model_type, usual = not head, names = names,
      prefix = prefix, build = function(c, kind)
        local o = options_of(c, head or nil, is_roberta)
        o.name, o.dtype, o.device = class .. suffix, kind.dtype, kind.device
        return (head and Head or Bert)(o), head == "masked" and not o.tied and names_of("encoder.", prefix, is_roberta, true)
          or names
      end }
  end
end

return M
