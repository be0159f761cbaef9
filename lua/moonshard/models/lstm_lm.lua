-- SPDX-License-Identifier: MIT
--- LSTMLanguageModel: a token embedding, LSTM layers, and a projection to the logits of the next token.
--- `model(ids, state)` returns logits [B, T, vocab] and the state after the last token, from which the next call
--- continues.
require "moonshard.autograd.methods"
local errors = require "moonshard.core.errors"
local nn = require "moonshard.nn"
local opts = require "moonshard.core.opts"

---@class LSTMLanguageModel: Module
---@overload fun(opts?: { vocab: integer, dim: integer, layers: integer, dropout: number, tie: boolean, dtype: string, device: string }): LSTMLanguageModel
---   vocab: number of token ids (default: 256, bytes); dim: channels of tokens and states (default: 256); layers:
---   layers of the LSTM (default: 2); dropout: probability after the embedding, between layers and before the head
---   (default: 0); tie: the head's weight is the embedding's (default: true)
local LSTMLanguageModel = nn.Module:extend "LSTMLanguageModel"

function LSTMLanguageModel:init(given)
  local o = opts("LSTMLanguageModel", given, { vocab = 256, dim = 256, layers = 2, dropout = 0, tie = true,
    dtype = opts.string, device = opts.any })
  local kind = { dtype = o.dtype, device = o.device }
  self.token = nn.Embedding(o.vocab, o.dim, kind)
  self.drop = nn.Dropout(o.dropout)
  self.lstm = nn.LSTM(o.dim, o.dim, { num_layers = o.layers, batch_first = true,
    dropout = o.layers > 1 and o.dropout or 0, dtype = o.dtype, device = o.device })
  self.head = nn.Linear(o.dim, o.vocab, kind)
  if o.tie then self.head.weight = self.token.weight end
end

--- The logits of the next token at every position of ids.
---@param ids Tensor  int64 [B, T]
---@param state? Tensor[]  { h, c }, each [layers, B, dim]: the second result of an earlier call, detached for training
---@return Tensor  [B, T, vocab]
---@return Tensor[]  { h, c }
function LSTMLanguageModel:forward(ids, state)
  if ids.ndim ~= 2 then errors.raise("LSTMLanguageModel: ids have shape %s, expected [B, T]", tostring(ids.shape)) end
  local y, h, c = self.lstm(self.drop(self.token(ids)), state and state[1], state and state[2])
  return self.head(self.drop(y)), { h, c }
end

return LSTMLanguageModel
