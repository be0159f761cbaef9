--- behaviour.md 2.2, TransformerWithSharedParams: an embedding tied to the output projection around nn.Transformer,
--- a batch norm over the target's 2 positions, buffers of both kinds.
local ms = require "moonshard"
local nn, optim, F = ms.nn, ms.optim, ms.nn.F

local TransformerWithSharedParams = nn.Module:extend("TransformerWithSharedParams")

--- given: dtype, device, dropout (0.1), add_bn (true), eval (false).
function TransformerWithSharedParams:init(given)
  local o = given or {}
  local kind = { dtype = o.dtype, device = o.device }
  local vocab, d = 23, 16
  self.embed_tokens = nn.Embedding(vocab, d, kind)
  self.transformer = nn.Transformer {
    d_model = d, num_encoder_layers = 2, num_decoder_layers = 2, dim_feedforward = 8, dropout = o.dropout or 0.1,
    dtype = o.dtype, device = o.device,
  }
  self.output_proj = nn.Linear(d, vocab, kind)
  self.output_proj.weight = self.embed_tokens.weight
  self:register_buffer("vocab_bias", ms.ones(d, kind))
  self:register_buffer("long_buffer", ms.zeros(d, { dtype = "int64", device = o.device }))
  self.bs = 2
  self.bn = o.add_bn == false and nn.Identity() or nn.BatchNorm1d(self.bs, kind)
  if o.eval then self:eval() end
end

function TransformerWithSharedParams:forward(src_ids, tgt_ids)
  local src = self.embed_tokens(src_ids)
  src = src + self.vocab_bias + self.long_buffer:to(src.dtype)
  local tgt = self.bn(self.embed_tokens(tgt_ids))
  return self.output_proj(self.transformer(src, tgt))
end

return {
  TransformerWithSharedParams = TransformerWithSharedParams,
  make = function(kind) return TransformerWithSharedParams { dtype = kind and kind.dtype, dropout = 0, eval = true } end,
  loss = function(model, rank, step, golden)
    local function ids(rows, cols, r)
      return ms.tensor(golden.id_list(rows * cols, 23, r, step), { dtype = "int64" }):reshape(rows, cols)
    end
    local src, tgt = ids(6, 2, rank), ids(4, 2, rank + 1)
    return F.cross_entropy(model(src, tgt):reshape(-1, 23), tgt:reshape(-1), { reduction = "sum" })
  end,
  optim = function(params) return optim.Adam(params, { lr = 1e-2 }) end,
  units = function(model)
    local list = {}
    for _, stack in ipairs { model.transformer.encoder, model.transformer.decoder } do
      for _, layer in ipairs(stack.layers) do list[#list + 1] = layer end
    end
    return list
  end,
}
