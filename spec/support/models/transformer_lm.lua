-- SPDX-License-Identifier: MIT
--- The golden runs' language model: the composable suite's Transformer without dropout, over 11 tokens.
local ms = require "moonshard"
local optim, F = ms.optim, ms.nn.F
local Transformer = require "spec.support.models.transformer".Transformer

--- Options of `given`: layers, heads, vocab, max_seq, dim, tie, dtype, device.
local function TransformerLM(given)
  local o = given or {}
  return Transformer {
    n_layers = o.layers, n_heads = o.heads, vocab_size = o.vocab or 11, max_seq_len = o.max_seq, dim = o.dim,
    dropout_p = 0,
    weight_tying = o.tie ~= false, dtype = o.dtype, device = o.device,
  }
end

return {
  TransformerLM = TransformerLM,
  make = TransformerLM,
  loss = function(model, rank, step, golden)
    local list = golden.id_list(18, 11, rank, step)
    for i, id in ipairs(list) do list[i] = (id * id + 2 * id) % 11 end
    local ids = ms.tensor(list, { dtype = "int64" }):reshape(2, 9)
    return F.cross_entropy(model(ids:narrow(2, 1, 8)):reshape(-1, 11), ids:narrow(2, 2, 8):reshape(-1))
  end,
  optim = function(params) return optim.AdamW(params, { lr = 1e-2, weight_decay = 0.1, betas = { 0.9, 0.95 } }) end,
  units = function(model) return { model.layers[1], model.layers[2] } end,
}
