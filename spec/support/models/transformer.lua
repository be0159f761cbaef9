-- SPDX-License-Identifier: MIT
--- The Transformer of PyTorch's composable suite: pre-norm, causal, with tied embedding and head.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn, F = ms.nn, ms.nn.F

local defaults = {
  n_layers = 2, vocab_size = 8, max_seq_len = 16, dim = 16, n_heads = 4, dropout_p = 0.1, use_attn_mask = true,
  weight_tying = true,
  checkpoint_activations = false,
}

--- The given arguments, and the defaults of all others; dtype and device may be given, too.
local function ModelArgs(given)
  local o = {}
  for key, value in ms.sorted_pairs(defaults) do o[key] = value end
  for key, value in ms.sorted_pairs(given or {}) do
    if defaults[key] == nil and key ~= "dtype" and key ~= "device" then
      error("ModelArgs: no argument '" .. tostring(key) .. "'", 2)
    end
    o[key] = value
  end
  return o
end

local Attention = nn.Module:extend("Attention")

function Attention:init(args)
  local o = { bias = false, dtype = args.dtype, device = args.device }
  self.heads, self.head_dim = args.n_heads, args.dim / args.n_heads
  self.dropout_p, self.use_attn_mask = args.dropout_p, args.use_attn_mask
  self.resid_dropout = nn.Dropout(args.dropout_p)
  for _, name in ipairs { "wq", "wk", "wv", "wo" } do self[name] = nn.Linear(args.dim, args.dim, o) end
end

function Attention:forward(x)
  local B, T, C = unpack(x.shape)
  local function heads(w) return w(x):view(B, T, self.heads, self.head_dim):transpose(2, 3) end
  local y = F.scaled_dot_product_attention(heads(self.wq), heads(self.wk), heads(self.wv),
    { is_causal = self.use_attn_mask, dropout_p = self.training and self.dropout_p or 0 })
  return self.resid_dropout(self.wo(y:transpose(2, 3):reshape(B, T, C)))
end

local Block = nn.Module:extend("TransformerBlock")

function Block:init(args)
  local kind = { dtype = args.dtype, device = args.device }
  self.attention_norm = nn.LayerNorm(args.dim, kind)
  self.attention = Attention(args)
  self.ffn_norm = nn.LayerNorm(args.dim, kind)
  self.feed_forward = nn.Sequential(nn.Linear(args.dim, 4 * args.dim, kind), nn.GELU(),
    nn.Linear(4 * args.dim, args.dim, kind),
    nn.Dropout(args.dropout_p))
end

function Block:forward(x)
  local h = x + self.attention(self.attention_norm(x))
  return h + self.feed_forward(self.ffn_norm(h))
end

local Transformer = nn.Module:extend("Transformer")

function Transformer:init(given)
  local args = ModelArgs(given)
  local kind = { dtype = args.dtype, device = args.device }
  self.args = args
  self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim, kind)
  self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim, kind)
  self.dropout = nn.Dropout(args.dropout_p)
  self.layers = nn.ModuleList {}
  for _ = 1, args.n_layers do self.layers:append(Block(args)) end
  self.norm = nn.LayerNorm(args.dim, kind)
  self.output = nn.Linear(args.dim, args.vocab_size, { bias = false, dtype = args.dtype, device = args.device })
  if args.weight_tying then self.output.weight = self.tok_embeddings.weight end
end

function Transformer:forward(ids)
  local T = ids:size(2)
  if T > self.args.max_seq_len then error(("the sequence has %d tokens, at most %d are allowed"):format(T, self.args.max_seq_len)) end
  local h = self.tok_embeddings(ids) + self.pos_embeddings(ms.arange(0, T, { dtype = "int64", device = ids.device }))
  h = self.dropout(h)
  for _, layer in ipairs(self.layers) do
    if self.args.checkpoint_activations then h = ms.checkpoint(layer, h) else h = layer(h) end
  end
  local out = self.output(self.norm(h))
  return out.dtype == "float64" and out or out:float()
end

function Transformer:get_input(device)
  ms.manual_seed(1 + self.rank)
  return { ms.randint(0, self.args.vocab_size, { 2, 9 }, { device = device }) }
end

-- The cross-entropy of the next token. PyTorch's suite has no such function: its tests define their losses.
function Transformer.get_loss(_, input, logits)
  local T, vocab = logits:size(2), logits:size(3)
  return F.cross_entropy(logits:narrow(2, 1, T - 1):reshape(-1, vocab), input[1]:narrow(2, 2, T - 1):reshape(-1),
    { reduction = "sum" })
end

function Transformer.run_backward(_, loss) loss:backward() end

return {
  --- Options of `given` besides the common ones: args (fields of ModelArgs). deterministic also turns dropout off.
  init = common.init_of(function(o)
    local args = {}
    for key, value in ms.sorted_pairs(o.args or {}) do args[key] = value end
    if o.deterministic then args.dropout_p = 0 end
    return Transformer(args)
  end, function(m) return { unpack(m.layers) } end),
  ModelArgs = ModelArgs, Attention = Attention, Block = Block, Transformer = Transformer,
  --- Makes a unit of every block, and one of all other parameters. options: for fully_shard.
  fully_shard = function(model, options)
    for _, layer in ipairs(model.layers) do ms.fsdp.fully_shard(layer, options) end
    return ms.fsdp.fully_shard(model, options)
  end,
}
