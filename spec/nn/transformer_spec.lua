-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn
local close = ms.testing.assert_close
local message = require "spec.support.message"
local names = require "spec.support.names"

local f64 = { dtype = "float64" }
local tight = { rtol = 1e-10, atol = 1e-10 }

-- Attention by definition, one batch entry and one head at a time. q, k, v: projected [T, N, d]; mask(n, h) -> [T, S]
-- to add.
local function by_hand(q, k, v, heads, mask)
  local N, D = q:size(2), q:size(3) / heads
  local outs, weights = {}, {}
  for n = 1, N do
    local cols, rows = {}, {}
    for h = 1, heads do
      local function one(t) return t:select(2, n):narrow(2, (h - 1) * D + 1, D) end
      local s = one(q):matmul(one(k):t()) / math.sqrt(D)
      if mask then s = s + mask(n, h) end
      rows[h] = s:softmax(-1)
      cols[h] = rows[h]:matmul(one(v))
    end
    outs[n] = ms.cat(cols, 2)
    weights[n] = ms.stack(rows, 1)
  end
  return ms.stack(outs, 2), ms.stack(weights, 1)      -- [T, N, d], [N, heads, T, S]
end

local function packed(m, q, k, v)
  local function part(x, i)
    return nn.F.linear(x, m.in_proj_weight:narrow(1, (i - 1) * m.d + 1, m.d), m.in_proj_bias
      and m.in_proj_bias:narrow(1, (i - 1) * m.d + 1, m.d))
  end
  return part(q, 1), part(k, 2), part(v, 3)
end

local function random_biases(m)
  ms.no_grad(function()
    for _, p in ipairs(m:parameters()) do
      if p.ndim == 1 then nn.init.normal_(p, 0, 0.3) end
    end
  end)
  return m
end

describe("MultiheadAttention", function()
  before_each(function() ms.manual_seed(11) end)

  local function make(given)
    given = given or {}
    given.dtype = "float64"
    return random_biases(nn.MultiheadAttention(8, 2, given))
  end
  local function inputs() return ms.randn(5, 3, 8, f64), ms.randn(7, 3, 8, f64), ms.randn(7, 3, 8, f64) end

  it("is attention of each head, projected in and out, with the weights averaged over heads", function()
    local m = make()
    local q, k, v = inputs()
    local pq, pk, pv = packed(m, q, k, v)
    local expected, weights = by_hand(pq, pk, pv, 2)
    local out, w = m(q, k, v)
    close(out, m.out_proj(expected), tight)
    close(w, weights:mean(2), tight)
    local out2, all = m(q, k, v, { average_attn_weights = false })
    close(out2, out, tight)
    close(all, weights, tight)
    local out3, none = m(q, k, v, { need_weights = false })
    close(out3, out, tight)
    assert.is_nil(none)
  end)

  it("of a tensor to itself, or with one tensor as key and value, gives the same result with fewer products", function()
    local m = make()
    local x, y = ms.randn(5, 3, 8, f64), ms.randn(7, 3, 8, f64)
    close((m(x, x, x)), (m(x, x:clone(), x:clone())), tight)
    close((m(x, y, y)), (m(x, y:clone(), y:clone())), tight)
  end)

  it("accepts the batch first, or no batch", function()
    local m = make()
    local q, k, v = inputs()
    local out, w = m(q, k, v)
    local first = make { batch_first = true }
    first:load_state_dict(m:state_dict())
    local out2, w2 = first(q:transpose(1, 2), k:transpose(1, 2), v:transpose(1, 2))
    close(out2:transpose(1, 2), out, tight)
    close(w2, w, tight)
    local out3, w3 = m(q:select(2, 2), k:select(2, 2), v:select(2, 2))
    close(out3, out:select(2, 2), tight)
    close(w3, w:select(1, 2), tight)
  end)

  for _, need in ipairs { true, false } do
    it("does not attend to masked keys" .. (need and ", and shows it in the weights" or ""), function()
      local m = make()
      local q, k, v = inputs()
      local pq, pk, pv = packed(m, q, k, v)
      local o = { need_weights = need }
      local forbidden = ms.randn(5, 7):gt(0.5)
      forbidden[1] = false
      local function as_numbers(b) return ms.zeros(b.shape, f64):masked_fill(b, -math.huge) end
      local add = as_numbers(forbidden)
      local two_d = m.out_proj((by_hand(pq, pk, pv, 2, function() return add end)))
      o.attn_mask = forbidden
      local out, w = m(q, k, v, o)
      close(out, two_d, tight)
      if need then assert.are.equal(0, w:select(1, 1):masked_fill(forbidden:eq(false), 0):sum():item()) end
      -- A floating mask is added.
      o.attn_mask = add
      close((m(q, k, v, o)), two_d, tight)
      -- One mask per batch entry and head: [N * heads, T, S].
      local each = ms.randn(6, 5, 7, f64)
      o.attn_mask = each
      close((m(q, k, v, o)), m.out_proj((by_hand(pq, pk, pv, 2, function(n, h) return each[(n - 1) * 2 + h] end))),
        tight)
      -- A padding mask of the keys, together with an attention mask.
      local padding = ms.zeros(3, 7, { dtype = "bool" })
      padding[2]:narrow(1, 5, 3):fill_(true)
      o.attn_mask, o.key_padding_mask = each, padding
      close((m(q, k, v, o)), m.out_proj((by_hand(pq, pk, pv, 2, function(n, h)
        return each[(n - 1) * 2 + h] + as_numbers(padding)[n]
      end))), tight)
    end)

    it("is causal on request" .. (need and ", with weights" or ""), function()
      local m = make()
      local x = ms.randn(5, 3, 8, f64)
      local pq, pk, pv = packed(m, x, x, x)
      local add = nn.Transformer.generate_square_subsequent_mask(5, f64)
      local expected = m.out_proj((by_hand(pq, pk, pv, 2, function() return add end)))
      close((m(x, x, x, { is_causal = true, need_weights = need })), expected, tight)
      close((m(x, x, x, { is_causal = true, attn_mask = add, need_weights = need })), expected, tight)
    end)
  end

  it("takes keys and values of other sizes", function()
    local m = make { kdim = 6, vdim = 10 }
    assert.are.equal("q_proj_weight k_proj_weight v_proj_weight in_proj_bias out_proj.weight out_proj.bias",
      names(m:named_parameters()))
    local q, k, v = ms.randn(5, 3, 8, f64), ms.randn(7, 3, 6, f64), ms.randn(7, 3, 10, f64)
    local b = m.in_proj_bias
    local linear = nn.F.linear
    close((m(q, k, v)), m.out_proj((by_hand(linear(q, m.q_proj_weight, b:narrow(1, 1, 8)),
      linear(k, m.k_proj_weight, b:narrow(1, 9, 8)),
      linear(v, m.v_proj_weight, b:narrow(1, 17, 8)), 2))), tight)
  end)

  it("adds a learned key and value, or zeros, at the end", function()
    local m = make { add_bias_kv = true, add_zero_attn = true }
    assert.are.equal("in_proj_weight in_proj_bias bias_k bias_v out_proj.weight out_proj.bias",
      names(m:named_parameters()))
    local q, k, v = inputs()
    local pq, pk, pv = packed(m, q, k, v)
    local zeros = ms.zeros(1, 3, 8, f64)
    pk = ms.cat({ pk, m.bias_k:expand(1, 3, 8), zeros }, 1)
    pv = ms.cat({ pv, m.bias_v:expand(1, 3, 8), zeros }, 1)
    local mask = ms.randn(5, 7, f64)
    local wide = ms.cat({ mask, ms.zeros(5, 2, f64) }, 2)
    local expected, weights = by_hand(pq, pk, pv, 2, function() return wide end)
    local out, w = m(q, k, v, { attn_mask = mask })
    close(out, m.out_proj(expected), tight)
    assert.are.same({ 3, 5, 9 }, { unpack(w.shape) })
    close(w, weights:mean(2), tight)
    close((m(q, k, v, { attn_mask = mask, need_weights = false })), out, tight)
  end)

  it("starts as PyTorch's: xavier-uniform projections, biases of 0", function()
    local m = nn.MultiheadAttention(32, 4)
    assert.are.equal("in_proj_weight in_proj_bias out_proj.weight out_proj.bias", names(m:named_parameters()))
    assert.are.same({ 96, 32 }, { unpack(m.in_proj_weight.shape) })
    local bound = math.sqrt(6 / (96 + 32))
    local most = m.in_proj_weight:detach():abs():max():item()
    assert.is_true(most <= bound and most > 0.95 * bound)
    most = m.out_proj.weight:detach():abs():max():item()
    assert.is_true(most <= 1 / math.sqrt(32) and most > 0.95 / math.sqrt(32))
    assert.are.equal(0, m.in_proj_bias:detach():norm():item())
    assert.are.equal(0, m.out_proj.bias:detach():norm():item())
    assert.are.equal("in_proj_weight out_proj.weight",
      names(nn.MultiheadAttention(8, 2, { bias = false }):named_parameters()))
  end)

  it("drops weights only in training", function()
    local m = make { dropout = 0.5 }
    local x = ms.randn(5, 3, 8, f64)
    local _, w = m(x, x, x, { average_attn_weights = false })
    assert.is_true(w:eq(0):any():item())
    m:eval()
    _, w = m(x, x, x, { average_attn_weights = false })
    close(w:sum(-1), ms.ones(3, 2, 5, f64), tight)
    close((m(x, x, x, { need_weights = false })), (m(x, x, x)), tight)
  end)

  it("gives all its parameters gradients, the same with and without weights", function()
    local m = make()
    local x = ms.randn(4, 2, 8, f64)
    local grads = {}
    for _, need in ipairs { true, false } do
      m:zero_grad()
      local out = m(x, x, x, { need_weights = need })
      ;(out * out):sum():backward()
      for name, p in m:named_parameters() do
        if need then grads[name] = p.grad:clone() else close(p.grad, grads[name], { rtol = 1e-8, atol = 1e-9 }) end
      end
    end
    assert.is_true(grads.in_proj_weight:abs():sum():item() > 0)
  end)

  it("names arguments that do not fit", function()
    assert.are.equal("embed_dim must be divisible by num_heads, got embed_dim=8 and num_heads=3 instead",
      message(nn.MultiheadAttention, 8, 3))
    assert.are.equal("embed_dim and num_heads must be greater than 0, got embed_dim=8 and num_heads=0 instead",
      message(nn.MultiheadAttention, 8, 0))
    local m = nn.MultiheadAttention(8, 2)
    local x = ms.zeros(5, 3, 8)
    assert.are.equal("was expecting embedding dimension of 8, but got 4", message(m, ms.zeros(5, 3, 4), x, x))
    assert.are.equal("key shape [7, 3, 8] does not match value shape [5, 3, 8]", message(m, x, ms.zeros(7, 3, 8), x))
    assert.are.equal("The shape of the 2D attn_mask is [4, 5], but should be [5, 5].",
      message(m, x, x, x, { attn_mask = ms.zeros(4, 5) }))
    assert.are.equal("The shape of the 3D attn_mask is [3, 5, 5], but should be [6, 5, 5].",
      message(m, x, x, x, { attn_mask = ms.zeros(3, 5, 5) }))
    assert.are.equal("expecting key_padding_mask shape of [3, 5], but got [5, 3]",
      message(m, x, x, x, { key_padding_mask = ms.zeros(5, 3) }))
    assert.are.equal("only bool and floating types of attn_mask are supported, got int64",
      message(m, x, x, x, { attn_mask = ms.zeros(5, 5, { dtype = "int64" }) }))
    assert.truthy(message(m, x, x, x, { attn_maks = x }):find("did you mean 'attn_mask'?", 1, true))
    assert.are.equal("MultiheadAttention: value is nil, expected a tensor", message(m, x, x))
  end)
end)

describe("Transformer", function()
  before_each(function() ms.manual_seed(12) end)

  local small = { d_model = 8, nhead = 2, num_encoder_layers = 2, num_decoder_layers = 1, dim_feedforward = 12,
    dtype = "float64" }
  local function make(more)
    local o = {}
    for k, v in ms.sorted_pairs(small) do o[k] = v end
    for k, v in ms.sorted_pairs(more or {}) do o[k] = v end
    return nn.Transformer(o)
  end

  it("has PyTorch's names in PyTorch's order", function()
    local m = make()
    local layer = " self_attn.in_proj_weight self_attn.in_proj_bias self_attn.out_proj.weight self_attn.out_proj.bias"
    local tail = " linear1.weight linear1.bias linear2.weight linear2.bias norm1.weight norm1.bias norm2.weight norm2.bias"
    assert.are.equal((layer .. tail):sub(2), names(m.encoder.layers[2]:named_parameters()))
    assert.are.equal((layer .. layer:gsub("self_attn", "multihead_attn") .. tail .. " norm3.weight norm3.bias"):sub(2),
      names(m.decoder.layers[1]:named_parameters()))
    assert.are.equal("encoder decoder", names(m:named_children()))
    assert.are.equal("layers norm", names(m.decoder:named_children()))
    assert.are.equal("self_attn linear1 dropout linear2 norm1 norm2 dropout1 dropout2",
      names(m.encoder.layers[1]:named_children()))
    assert.truthy(m:get_parameter "encoder.layers.1.self_attn.in_proj_weight")
  end)

  it("draws every matrix of its own, xavier-uniform", function()
    local m = make { d_model = 32 }
    local a, b = m.encoder.layers[1].linear1.weight, m.encoder.layers[2].linear1.weight
    assert.is_false(a:equal(b))
    local bound = math.sqrt(6 / (32 + 12))
    local most = a:detach():abs():max():item()
    assert.is_true(most <= bound and most > 0.95 * bound)
  end)

  -- The layers by definition, composed of their own parts.
  local function encoder_by_hand(l, x, mask)
    local function sa(y) return (l.self_attn(y, y, y, { attn_mask = mask })) end
    local function ff(y) return l.linear2(l.activation(l.linear1(y))) end
    if l.norm_first then
      x = x + sa(l.norm1(x))
      return x + ff(l.norm2(x))
    end
    x = l.norm1(x + sa(x))
    return l.norm2(x + ff(x))
  end
  local function decoder_by_hand(l, x, memory, mask, memory_mask)
    local function sa(y) return (l.self_attn(y, y, y, { attn_mask = mask })) end
    local function ma(y) return (l.multihead_attn(y, memory, memory, { attn_mask = memory_mask })) end
    local function ff(y) return l.linear2(l.activation(l.linear1(y))) end
    if l.norm_first then
      x = x + sa(l.norm1(x))
      x = x + ma(l.norm2(x))
      return x + ff(l.norm3(x))
    end
    x = l.norm1(x + sa(x))
    x = l.norm2(x + ma(x))
    return l.norm3(x + ff(x))
  end

  for _, norm_first in ipairs { false, true } do
    for _, activation in ipairs { "relu", "gelu" } do
      it(("encodes and decodes by the definition: norm %s, %s"):format(norm_first and "first" or "last", activation),
        function()
        local m = random_biases(make { norm_first = norm_first, activation = activation }):eval()
        local src, tgt = ms.randn(6, 3, 8, f64), ms.randn(4, 3, 8, f64)
        local causal = nn.Transformer.generate_square_subsequent_mask(4, f64)
        local src_mask, memory_mask = ms.randn(6, 6, f64), ms.randn(4, 6, f64)
        local x = src
        for _, l in ipairs(m.encoder.layers) do x = encoder_by_hand(l, x, src_mask) end
        local memory = m.encoder.norm(x)
        local y = tgt
        for _, l in ipairs(m.decoder.layers) do y = decoder_by_hand(l, y, memory, causal, memory_mask) end
        y = m.decoder.norm(y)
        close(m(src, tgt, { src_mask = src_mask, tgt_mask = causal, memory_mask = memory_mask }), y, tight)
        close(m.encoder(src, { mask = src_mask }), memory, tight)
        close(m(src, tgt, { src_mask = src_mask, tgt_is_causal = true, memory_mask = memory_mask }), y, tight)
      end)
    end
  end

  it("does not see padded positions", function()
    local m = make():eval()
    local src, tgt = ms.randn(6, 2, 8, f64), ms.randn(4, 2, 8, f64)
    local padding = ms.zeros(2, 6, { dtype = "bool" })
    padding[2]:narrow(1, 4, 3):fill_(true)
    local out = m(src, tgt, { src_key_padding_mask = padding, memory_key_padding_mask = padding })
    local short = m(src:narrow(1, 1, 3):narrow(2, 2, 1), tgt:narrow(2, 2, 1))
    close(out:select(2, 2), short:select(2, 1), tight)
    close(out:select(2, 1), m(src, tgt):select(2, 1), tight)
    assert.is_false(out:select(2, 2):allclose(m(src, tgt):select(2, 2)))
  end)

  it("accepts the batch first, or no batch", function()
    local m, first = make():eval(), make { batch_first = true }:eval()
    first:load_state_dict(m:state_dict())
    local src, tgt = ms.randn(6, 3, 8, f64), ms.randn(4, 3, 8, f64)
    local out = m(src, tgt)
    close(first(src:transpose(1, 2), tgt:transpose(1, 2)):transpose(1, 2), out, tight)
    close(m(src:select(2, 1), tgt:select(2, 1)), out:select(2, 1), tight)
  end)

  it("leaves biases out on request, and takes any activation", function()
    local m = make { bias = false, activation = function(x) return x * 2 end }
    for name in m:named_parameters() do assert.is_nil(name:match "bias") end
    assert.are.same({ 4, 8 }, { unpack(m(ms.randn(6, 8, f64), ms.randn(4, 8, f64)).shape) })
  end)

  it("drops only in training, and the same for the same seed", function()
    local m = make { dropout = 0.3 }
    local src, tgt = ms.randn(6, 3, 8, f64), ms.randn(4, 3, 8, f64)
    ms.manual_seed(1)
    local a = m(src, tgt)
    local b = m(src, tgt)
    assert.is_false(a:allclose(b))
    ms.manual_seed(1)
    assert.is_true(a:equal(m(src, tgt)))
    m:eval()
    assert.is_true(m(src, tgt):equal(m(src, tgt)))
  end)

  it("stacks copies of any layer", function()
    local layer = nn.TransformerEncoderLayer(8, 2, { dim_feedforward = 4, dropout = 0 })
    local stack = nn.TransformerEncoder(layer, 3, { norm = nn.LayerNorm(8) })
    assert.are.equal(3, #stack.layers)
    for _, copy in ipairs(stack.layers) do
      assert.are_not.equal(layer, copy)
      assert.is_true(copy.linear1.weight:equal(layer.linear1.weight))
      assert.are_not.equal(copy.linear1.weight, layer.linear1.weight)
    end
    local decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, { dim_feedforward = 4 }), 2)
    assert.are.equal("layers", names(decoder:named_children()))
    assert.are.same({ 3, 2, 8 }, { unpack(decoder(ms.zeros(3, 2, 8), ms.zeros(5, 2, 8)).shape) })
  end)

  it("masks with -infinity above the diagonal", function()
    local mask = nn.Transformer.generate_square_subsequent_mask(3)
    local inf = -math.huge
    assert.are.same({ { 0, inf, inf }, { 0, 0, inf }, { 0, 0, 0 } }, mask:tolist())
    assert.are.equal("float64", nn.Transformer.generate_square_subsequent_mask(2, f64).dtype)
  end)

  it("names arguments that do not fit", function()
    local m = make()
    assert.are.equal("the batch number of src and tgt must be equal",
      message(m, ms.zeros(6, 3, 8, f64), ms.zeros(4, 2, 8, f64)))
    assert.are.equal("the feature number of src and tgt must be equal to d_model",
      message(m, ms.zeros(6, 3, 7, f64), ms.zeros(4, 3, 8, f64)))
    assert.truthy(message(nn.Transformer, { activation = "swish" }):find("activation should be relu/gelu, not 'swish'",
      1, true))
    assert.truthy(message(nn.Transformer, { d_modle = 8 }):find("did you mean 'd_model'?", 1, true))
    assert.truthy(message(nn.TransformerEncoder, 3, 2):find("the layer is a number", 1, true))
  end)
end)
