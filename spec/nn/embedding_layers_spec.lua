-- SPDX-License-Identifier: MIT
--- EmbeddingBag and RotaryEmbedding: what golden/embeddings_spec.lua does not compare.
local ms = require "moonshard"
local nn, F = ms.nn, ms.nn.F
local collected = require "spec.support.collected"
local raises = require "spec.support.raises"

local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

describe("from_pretrained", function()
  local weights = ms.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } }
  it("makes a frozen Embedding over the memory of a tensor", function()
    ms.manual_seed(3)
    local m = nn.Embedding.from_pretrained(weights, { padding_idx = 1 })
    local next_number = ms.rand(1):item()
    ms.manual_seed(3)
    assert.are.equal(ms.rand(1):item(), next_number)    -- it has drawn none
    assert.are.equal("Embedding(3 x 2, padding_idx 1)", tostring(m))
    assert.are.same({ { 5, 6 }, { 3, 4 } }, m(ids { 2, 1 }):tolist())  -- the padding row keeps its values
    assert.is_false(m.weight.requires_grad)
    assert.are.equal(weights:data_ptr(), m.weight:data_ptr())
  end)
  it("may be trained, with a gradient for the rows that were looked up", function()
    local m = nn.Embedding.from_pretrained(weights, { freeze = false, padding_idx = -1 })
    m(ids { 1, 1, 2 }):sum():backward()
    assert.are.same({ { 0, 0 }, { 2, 2 }, { 0, 0 } }, m.weight.grad:tolist())
    m = nn.Embedding.from_pretrained(weights, { freeze = false, sparse = true })
    m(ids { 1 }):sum():backward()
    assert.is_true(m.weight.grad.is_sparse)
  end)
  it("makes an EmbeddingBag, or the class before the colon", function()
    local bag = nn.EmbeddingBag.from_pretrained(weights, { mode = "sum" })
    assert.is_true(bag:isa(nn.EmbeddingBag))
    assert.are.same({ { 6, 8 } }, bag(ids { { 0, 2 } }):tolist())
    local Mine = nn.Embedding:extend "Mine"
    assert.are.equal("Mine(3 x 2)", tostring(Mine:from_pretrained(weights)))
    assert.is_true(nn.Embedding(3, 2).weight.requires_grad)
  end)
  it("refuses what is no matrix of floating-point numbers", function()
    raises("from_pretrained: the weights have shape [2], expected 2 dimensions", nn.Embedding.from_pretrained, ms.ones(2))
    raises("from_pretrained: the weights are int64, expected floating point", nn.Embedding.from_pretrained, weights:long())
    raises("from_pretrained: argument 1 is nil, expected a tensor", nn.Embedding.from_pretrained)
    raises("Embedding: padding_idx 3 is out of range for 3 rows", nn.Embedding.from_pretrained, weights, { padding_idx = 3 })
    assert.is_true(nn.Embedding(3, 2).weight.requires_grad)            -- nothing is left of the refused weights
  end)
end)

describe("EmbeddingBag", function()
  it("reduces the rows of an Embedding", function()
    local rows, list = nn.Embedding(6, 3), ids { { 1, 4, 2 }, { 5, 5, 0 } }
    for mode, reduce in pairs { sum = function(x) return x:sum(2) end, mean = function(x) return x:mean(2) end,
      max = function(x) return (x:max(2)) end } do
      local bag = nn.EmbeddingBag(6, 3, { mode = mode })
      bag:load_state_dict(rows:state_dict())
      ms.testing.assert_close(bag(list), reduce(rows(list)))
    end
  end)

  it("starts the row of padding_idx as zeros, and gives it no gradient", function()
    local bag = nn.EmbeddingBag(4, 2, { padding_idx = -1 })
    assert.are.same({ 0, 0 }, bag.weight[4]:tolist())
    bag(ids { { 3, 0 }, { 3, 3 } }):sum():backward()
    assert.are.same({ { 1, 1 }, { 0, 0 }, { 0, 0 }, { 0, 0 } }, bag.weight.grad:tolist())
    for _, mode in ipairs { "sum", "mean", "max" } do
      local empty = nn.EmbeddingBag(4, 2, { mode = mode, padding_idx = 3 })
      assert.are.same({ { 0, 0 } }, empty(ids { { 3, 3 } }):tolist())
      assert.are.same({ { 0, 0 } }, empty(ms.zeros(1, 0, { dtype = "int64" })):tolist())
    end
  end)

  it("weighs the rows of a sum", function()
    local bag = nn.EmbeddingBag(3, 2, { mode = "sum" })
    local y = bag(ids { { 0, 2 } }, { per_sample_weights = ms.tensor { { 2, -1 } } })
    ms.testing.assert_close(y[1], bag.weight[1] * 2 - bag.weight[3])
  end)

  it("prints its sizes, and refuses what does not fit", function()
    assert.equal("EmbeddingBag(4 x 2, padding_idx 0, mean)", tostring(nn.EmbeddingBag(4, 2, { padding_idx = 0 })))
    raises("embedding_bag: ids have shape [2], expected [B, L]: a row for each bag", nn.EmbeddingBag(4, 2), ids { 1, 2 })
    raises("embedding_bag: per_sample_weights was not nil. per_sample_weights is only supported for mode='sum' (got mode='mean')",
      nn.EmbeddingBag(4, 2), ids { { 1 } }, { per_sample_weights = ms.ones(1, 1) })
    raises("embedding_bag: per_sample_weights has shape [1, 2], expected the shape of ids, [1, 1]",
      nn.EmbeddingBag(4, 2, { mode = "sum" }), ids { { 1 } }, { per_sample_weights = ms.ones(1, 2) })
    raises("EmbeddingBag: option 'mode' is 'avg', expected one of 'sum', 'mean', 'max'", nn.EmbeddingBag, 4, 2,
      { mode = "avg" })
  end)
end)

describe("RotaryEmbedding", function()
  for _, interleaved in ipairs { false, true } do
    it(("makes products depend on distances only%s"):format(interleaved and ", interleaved" or ""), function()
      local rotary = nn.RotaryEmbedding(8, { interleaved = interleaved })
      local q, k = ms.rand(1, 8, { dtype = "float64" }), ms.rand(1, 8, { dtype = "float64" })
      local function product(at_q, at_k)
        return (rotary(q, { offset = at_q }) * rotary(k, { offset = at_k })):sum():item()
      end
      assert.is_true(math.abs(product(3, 7) - product(103, 107)) < 1e-12)
      assert.is_true(math.abs(product(3, 7) - product(3, 8)) > 1e-6)
      ms.testing.assert_close(rotary(q, { offset = 9 }):norm(), q:norm())
      ms.testing.assert_close(rotary(q), q)
    end)
  end

  it("continues a sequence at an offset, and keeps half types precise at large positions", function()
    local rotary, x = nn.RotaryEmbedding(4), ms.rand(2, 6, 4)
    ms.testing.assert_close(rotary(x:narrow(2, 4, 3), { offset = 3 }), rotary(x):narrow(2, 4, 3))
    local far = rotary(x:to "bfloat16", { offset = 5000 })
    assert.equal("bfloat16", far.dtype)
    ms.testing.assert_close(far:float(), rotary(x:to("bfloat16"):float(), { offset = 5000 }), { rtol = 1e-2, atol = 1e-2 })
  end)

  it("has no parameters, prints its sizes, and refuses what does not fit", function()
    assert.is_nil(next(nn.RotaryEmbedding(4):state_dict()))
    assert.equal("RotaryEmbedding(4, base 500, interleaved)",
      tostring(nn.RotaryEmbedding(4, { base = 500, interleaved = true })))
    raises("RotaryEmbedding: argument 1, the number of features, is a number (3), expected an even number from 2",
      nn.RotaryEmbedding, 3)
    for shape, x in pairs { ["[2, 6]"] = ms.ones(2, 6), ["[4]"] = ms.ones(4) } do
      raises("RotaryEmbedding: the input has shape " .. shape .. ", expected [..., T, 4]", nn.RotaryEmbedding(4), x)
    end
    raises("rotary_embedding: the input has shape [2, 3], expected [..., T, d] with an even d", F.rotary_embedding,
      ms.ones(2, 3))
  end)

  it("and the bags release their intermediate results", function()
    local x, w, list = ms.rand(2, 4, 6), ms.rand(4, 3), ids { { 0, 1 } }
    collected()
    local before = ms.memory_stats("cpu").live_tensors
    local kept = { F.rotary_embedding(x), F.rotary_embedding(x, { interleaved = true }), F.embedding_bag(list, w),
      F.embedding_bag(list, w, { mode = "max", padding_idx = 0 }) }
    assert.equal(before + #kept, ms.memory_stats("cpu").live_tensors)
  end)
end)
