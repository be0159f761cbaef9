--- behaviour.md 2.2, the composable suite's Transformer: pre-norm, causal, tied embedding and head, no dropout.
local ms = require "moonshard"
local nn, optim, F = ms.nn, ms.optim, ms.nn.F

local Attention = nn.Module:extend("Attention")

function Attention:init(dim, heads, kind)
  local o = { bias = false, dtype = kind.dtype, device = kind.device }
  self.heads = heads
  self.head_dim = dim / heads
  self.wq = nn.Linear(dim, dim, o)
  self.wk = nn.Linear(dim, dim, o)
  self.wv = nn.Linear(dim, dim, o)
  self.wo = nn.Linear(dim, dim, o)
end

function Attention:forward(x)
  local B, T, C = unpack(x.shape)
  local function heads(w) return w(x):view(B, T, self.heads, self.head_dim):transpose(2, 3) end
  local y = F.scaled_dot_product_attention(heads(self.wq), heads(self.wk), heads(self.wv), { is_causal = true })
  return self.wo(y:transpose(2, 3):reshape(B, T, C))
end

local Block = nn.Module:extend("Block")

function Block:init(dim, heads, kind)
  self.attention_norm = nn.LayerNorm(dim, kind)
  self.attention = Attention(dim, heads, kind)
  self.ffn_norm = nn.LayerNorm(dim, kind)
  self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim, kind), nn.GELU(), nn.Linear(4 * dim, dim, kind))
end

function Block:forward(x)
  local h = x + self.attention(self.attention_norm(x))
  return h + self.feed_forward(self.ffn_norm(h))
end

local TransformerLM = nn.Module:extend("TransformerLM")

function TransformerLM:init(given)
  local o = given or {}
  local kind = { dtype = o.dtype, device = o.device }
  local dim, vocab = o.dim or 16, o.vocab or 11
  self.tok_embeddings = nn.Embedding(vocab, dim, kind)
  self.pos_embeddings = nn.Embedding(o.max_seq or 16, dim, kind)
  self.layers = nn.ModuleList {}
  for _ = 1, o.layers or 2 do self.layers:append(Block(dim, o.heads or 4, kind)) end
  self.norm = nn.LayerNorm(dim, kind)
  self.output = nn.Linear(dim, vocab, { bias = false, dtype = o.dtype, device = o.device })
  if o.tie ~= false then self.output.weight = self.tok_embeddings.weight end
end

function TransformerLM:forward(ids)
  local h = self.tok_embeddings(ids) + self.pos_embeddings(ms.arange(0, ids.shape[2], { dtype = "int64" }))
  for _, layer in ipairs(self.layers) do h = layer(h) end
  return self.output(self.norm(h))
end

return {
  TransformerLM = TransformerLM,
  make = function(kind) return TransformerLM(kind) end,
  loss = function(model, rank, step, golden)
    local list = golden.id_list(18, 11, rank, step)
    for i, id in ipairs(list) do list[i] = (id * id + 2 * id) % 11 end
    local ids = ms.tensor(list, { dtype = "int64" }):reshape(2, 9)
    return F.cross_entropy(model(ids:narrow(2, 1, 8)):reshape(-1, 11), ids:narrow(2, 2, 8):reshape(-1))
  end,
  optim = function(params) return optim.AdamW(params, { lr = 1e-2, weight_decay = 0.1, betas = { 0.9, 0.95 } }) end,
  units = function(model) return { model.layers[1], model.layers[2] } end,
}
