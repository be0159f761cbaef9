-- SPDX-License-Identifier: MIT
--- TransformerWithSharedParams: an embedding tied to the output projection around nn.Transformer, a batch norm whose 2
--- channels are the sequences of the target, a float and an int64 buffer. Every encoder and decoder layer is a unit.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn, optim, F = ms.nn, ms.optim, ms.nn.F

local TransformerWithSharedParams = nn.Module:extend("TransformerWithSharedParams")

--- Fields of o: group, device_init_mode, deterministic (also turns dropout off), add_bn (true), dropout (0.1), dtype.
function TransformerWithSharedParams:init(o)
  common.begin(self, o)
  local kind = { dtype = o.dtype }
  local vocab, d = 23, 16
  self.embed_tokens = nn.Embedding(vocab, d, kind)
  self.transformer = nn.Transformer {
    d_model = d, num_encoder_layers = 2, num_decoder_layers = 2, dim_feedforward = 8, dropout = o.dropout or 0.1,
    dtype = o.dtype,
  }
  self.output_proj = nn.Linear(d, vocab, kind)
  self.output_proj.weight = self.embed_tokens.weight
  self:register_buffer("vocab_bias", ms.ones(d, kind))
  self:register_buffer("long_buffer", ms.zeros(d, { dtype = "int64" }))
  self.bs = 2
  self.bn = o.add_bn == false and nn.Identity() or nn.BatchNorm1d(self.bs, kind)
  common.place(self, o)
  if o.deterministic then self:eval() end
end

function TransformerWithSharedParams:get_input(device)
  ms.manual_seed(1 + self.rank)
  local kind = { dtype = "int64", device = device }
  return { ms.arange(0, 12, kind):view(6, self.bs), ms.arange(0, 4 * self.bs, kind):view(4, self.bs) }
end

function TransformerWithSharedParams:forward(src_ids, tgt_ids)
  local src = self.embed_tokens(src_ids)
  src = src + self.vocab_bias + self.long_buffer:to(src.dtype)
  local tgt = self.bn(self.embed_tokens(tgt_ids))
  return self.output_proj(self.transformer(src, tgt))
end

function TransformerWithSharedParams.get_loss(_, input, output)
  return F.cross_entropy(output:reshape(-1, output:size(-1)), input[2]:reshape(-1), { reduction = "sum" })
end

function TransformerWithSharedParams.run_backward(_, loss) loss:backward() end

return {
  TransformerWithSharedParams = TransformerWithSharedParams,
  --- Options of `given` besides the common ones: add_bn.
  init = function(group, fsdp_init_mode, device_init_mode, given)
    local o = common.options(group, fsdp_init_mode, device_init_mode, given)
    if not o.wrap_fsdp then return TransformerWithSharedParams(o) end
    local options = common.fsdp_options(o)
    options.auto_wrap_policy = options.auto_wrap_policy
      or ms.fsdp.wrap.module_wrap_policy { nn.TransformerEncoderLayer, nn.TransformerDecoderLayer }
    local hybrid = options.sharding_strategy == "hybrid_shard" or options.sharding_strategy == "hybrid_shard_zero2"
    if hybrid and common.first_group(group) == group then options.process_group = nil end
    local model = ms.fsdp.FSDP(TransformerWithSharedParams(o), options)
    if device_init_mode == "after" then model = model:to(o.device or ms.default_device()) end
    return model
  end,
  make = function(kind) return TransformerWithSharedParams { dtype = kind and kind.dtype, dropout = 0 }:eval() end,
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
