-- SPDX-License-Identifier: MIT
--- Sparse tensors, and sparse gradients of embeddings.
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local failure = require "spec.support.message"
local function ids(list) return ms.tensor(list, { dtype = "int64" }) end

local function example(given)
  return ms.sparse_coo(ids { { 0, 1, 1 }, { 2, 0, 2 } }, ms.tensor { 16, 32, 64 }, { 2, 3 }, given)
end

describe("a sparse tensor", function()
  it("consists of positions, values and a shape", function()
    local s = example()
    assert.is_true(ms.is_tensor(s) and s:isa(ms.Tensor) and s.is_sparse)
    assert.is_false(ms.ones(1).is_sparse)
    assert.are.equal("[2, 3]", tostring(s.shape))
    assert.are.equal("[2, 3]", tostring(s:size()))
    assert.are.equal(3, s:size(-1))
    assert.are.equal(6, s:numel())
    assert.are.equal(2, s.ndim)
    assert.are.equal("float32", s.dtype)
    assert.are.equal("cpu", s.device)
    assert.are.same({ { 0, 1, 1 }, { 2, 0, 2 } }, s:indices():tolist())
    assert.are.same({ 16, 32, 64 }, s:values():tolist())
    assert.are.same({ { 0, 0, 16 }, { 32, 0, 64 } }, s:to_dense():tolist())
    assert.are.same({ { 0, 0, 16 }, { 32, 0, 64 } }, s:tolist())
    assert.are.equal("float16", example({ dtype = "float16" }).dtype)
    assert.is_true(example({ requires_grad = true }).requires_grad)
    assert.are.equal("[2, 3]", tostring(ms.sparse_coo({ { 0 }, { 1 } }, { 5 }, { 2, 3 }).shape))
  end)

  it("may have values of several dimensions, and none at all", function()
    local s = ms.sparse_coo(ids { { 2, 0, 2 } }, ms.tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } }, { 4, 2 })
    assert.are.same({ { 3, 4 }, { 0, 0 }, { 6, 8 }, { 0, 0 } }, s:to_dense():tolist())
    assert.are.same({ { 3, 4 }, { 6, 8 } }, s:coalesce():values():tolist())
    local none = ms.sparse_coo(ms.zeros(2, 0, { dtype = "int64" }), ms.zeros(0), { 2, 2 })
    assert.are.same({ { 0, 0 }, { 0, 0 } }, none:to_dense():tolist())
    assert.are.equal("[2, 0]", tostring(none:coalesce():indices().shape))
  end)

  it("is summed by position", function()
    local s = ms.sparse_coo(ids { { 1, 0, 1, 1 }, { 0, 2, 0, 1 } }, ms.tensor { 1, 2, 4, 8 }, { 2, 3 })
    local c = s:coalesce()
    assert.are.same({ { 0, 1, 1 }, { 2, 0, 1 } }, c:indices():tolist())
    assert.are.same({ 2, 5, 8 }, c:values():tolist())
    assert.is_true(rawequal(c, c:coalesce()))
    assert.is_true(c:equal(s) and s:equal(s:to_dense()))
    assert.are.equal(4, s:values():numel())
  end)

  it("overflows in float16 when equal positions are summed", function()
    local s = ms.sparse_coo(ids { { 1, 1, 0 }, { 0, 0, 2 } }, ms.tensor({ 2 ^ 15, 2 ^ 15, 1 }, { dtype = "float16" }),
      { 2, 3 })
    assert.is_true(s:values():isfinite():all():item())
    assert.are.same({ 1, math.huge }, s:coalesce():values():tolist())
    assert.are.equal(65536, s:float():coalesce():values()[2]:item())
  end)

  it("takes operations that keep zeros", function()
    local s = example()
    assert.are.same({ 8, 16, 32 }, (s / 2):values():tolist())
    assert.are.same({ 32, 64, 128 }, (2 * s):values():tolist())
    assert.are.same({ -16, -32, -64 }, (-s):values():tolist())
    assert.are.same({ 8, 16, 32 }, (s / ms.tensor(2)):values():tolist())
    assert.are.equal("float64", s:double().dtype)
    assert.are.equal("float16", s:to("float16"):values().dtype)
    assert.is_true(rawequal(s, s:float()))
    local copy = s:clone()
    copy:mul_(2)
    assert.are.same({ 16, 32, 64 }, s:values():tolist())
    assert.are.same({ 32, 64, 128 }, copy:values():tolist())
    assert.are.same({ { 0, 0, 32 }, { 64, 0, 128 } }, (s + s):to_dense():tolist())
    assert.is_true((s + s).is_sparse)
    assert.are.same({ { 1, 1, 17 }, { 33, 1, 65 } }, (ms.ones(2, 3) + s):tolist())
    assert.are.same({ { -1, -1, 15 }, { 31, -1, 63 } }, (s - ms.ones(2, 3)):tolist())
    assert.are.same({ { 1, 1, 33 }, { 65, 1, 129 } }, ms.ones(2, 3):add(s, { alpha = 2 }):tolist())
    assert.are.same({ { 1, 1, 17 }, { 33, 1, 65 } }, ms.ones(2, 3):add_(s):tolist())
    assert.are.same({ 0, 0, 0 }, s:clone():zero_():values():tolist())
    assert.are.equal(112, s:sum():item())
    assert.are.same({ 0 }, ms.sparse_coo(ids { { 0, 0 } }, ms.tensor { -2, 2 }, { 1 }):abs():values():tolist())
  end)

  it("refuses the others", function()
    local s = example()
    for _, fn in ipairs { function() return s + 1 end, function() return s * s end,
      function() return s * ms.ones(2, 3) end,
      function() return s:exp() end, function() return s:item() end, function() return s:view(3, 2) end,
        function() return s[1] end,
      function() return s:matmul(ms.ones(3, 1)) end, function() return ms.cat { s, s } end,
        function() return s:fill_(1) end } do
      assert.matches("to_dense%(%)", failure(fn))
    end
  end)

  it("is checked when it is made", function()
    assert.matches("index 3 of value 2 is outside dimension 2 of size 3",
      failure(ms.sparse_coo, ids { { 0, 1 }, { 2, 3 } }, ms.ones(2), { 2, 3 }))
    assert.matches("index %-1 of value 1 is outside dimension 1", failure(ms.sparse_coo, ids { { -1 } }, ms.ones(1),
      { 2 }))
    assert.matches("values have shape %[2%], expected %[3, %.%.%.%]", failure(ms.sparse_coo, ids { { 0, 1, 1 } }, ms.ones(2),
      { 2 }))
    assert.matches("float32 %[1, 1%], expected int64", failure(ms.sparse_coo, ms.zeros(1, 1), ms.ones(1), { 2 }))
    assert.matches("shape %[2, 3%] has 2 dimensions, expected 1 for the indices", failure(ms.sparse_coo, ids { { 0 } }, ms.ones(1),
      { 2, 3 }))
    assert.matches("size 2 of shape %[2, 3%] is 3, expected that of dimension 2 of the values, 4",
      failure(ms.sparse_coo, ids { { 0 } }, ms.ones(1, 4), { 2, 3 }))
    assert.matches("at most 8 dimensions", failure(ms.sparse_coo, ms.zeros(9, 1, { dtype = "int64" }), ms.ones(1),
      { 1, 1, 1, 1, 1, 1, 1, 1, 1 }))
    assert.matches("too many elements for int64 positions", failure(ms.sparse_coo, ms.zeros(2, 1, { dtype = "int64" }),
      ms.ones(1), { 2 ^ 50, 2 ^ 50 }))
    assert.matches("unknown option 'dtpye'", failure(ms.sparse_coo, ids { { 0 } }, ms.ones(1), { 2 },
      { dtpye = "float32" }))
  end)

  it("prints what it holds", function()
    assert.are.equal("Tensor float32 [2, 3] cpu, sparse, 3 values, not coalesced\n[[0, 1, 1],\n [2, 0, 2]]\n[16., 32., 64.]", tostring(example()))
    assert.matches("^Tensor float32 %[2, 3%] cpu, sparse, 3 values\n", tostring(example():coalesce()))
  end)

  it("is released with scopes", function()
    local out, inside = ms.scope(function()
      local s = example()
      return s * 2, { gone = function() return s end }
    end)
    assert.are.same({ 32, 64, 128 }, out:values():tolist())
    assert.is_true(inside.gone():is_released())
    assert.is_true(ms.deepcopy(out):equal(out))
  end)
end)

describe("a sparse gradient", function()
  it("is a grad of a dense leaf and of a sparse one", function()
    local p = ms.zeros(2, 3, { requires_grad = true })
    ms.scope(function() p.grad = example() end)
    assert.is_true(p.grad.is_sparse)
    assert.is_true(rawequal(p.grad, p.grad))
    assert.are.same({ 16, 32, 64 }, p.grad:values():tolist())
    p.grad = ms.ones(2, 3)
    assert.is_false(p.grad.is_sparse)
    p.grad = example()
    p.grad = nil
    assert.is_nil(p.grad)
    assert.matches("value is float32 %[2, 3%] cpu, expected float32 %[3%] cpu",
      failure(function() ms.zeros(3).grad = example() end))
    local s = example { requires_grad = true }
    s.grad = s:clone()
    assert.is_true(s.grad.is_sparse)
    assert.is_true(optim.SGD({ s }, { lr = 0.5 }):step())
    assert.are.same({ { 0, 0, 8 }, { 16, 0, 32 } }, s:to_dense():tolist())
    assert.matches("sparse parameters are only supported by SGD", failure(function() optim.Adam({ s }):step() end))
  end)

  local function tables(given)
    ms.manual_seed(5)
    local dense = nn.Embedding(10, 4, given)
    local o = { sparse = true }
    for k, v in ms.sorted_pairs(given or {}) do o[k] = v end
    local sparse = nn.Embedding(10, 4, o)
    sparse:load_state_dict(dense:state_dict())
    return dense, sparse
  end

  for name, given in ms.sorted_pairs { plain = {}, padded = { padding_idx = 1 }, float64 = { dtype = "float64" } } do
    it("comes from an Embedding made sparse: " .. name, function()
      local dense, sparse = tables(given)
      local where = ids { { 1, 2, 2 }, { 9, 1, 0 } }
      local weight = ms.randn(2, 3, 4, { dtype = given.dtype })
      for pass = 1, 2 do
        assert.is_true(dense(where):equal(sparse(where)))
        ;(dense(where) * weight):sum():backward()
        ;(sparse(where) * weight):sum():backward()
        assert.is_true(sparse.weight.grad.is_sparse)
        assert.are.equal(6 * pass, sparse.weight.grad:values():size(1))
        ms.testing.assert_close(sparse.weight.grad:to_dense(), dense.weight.grad)
      end
      sparse.weight.grad = dense.weight.grad:clone()            -- a copy into a dense tensor sums duplicates
      ;(sparse(where) * weight):sum():backward()
      assert.is_false(sparse.weight.grad.is_sparse)
      ms.testing.assert_close(sparse.weight.grad, dense.weight.grad * 1.5)
    end)
  end

  local makers = {
    { "SGD", function(p) return optim.SGD(p, { lr = 0.1 }) end },
    { "SGD with momentum", function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9 }) end },
    { "Adam", function(p) return optim.Adam(p, { lr = 0.1 }) end },
    { "AdamW", function(p) return optim.AdamW(p, { lr = 0.1 }) end },
  }
  for _, row in ipairs(makers) do
    it("is taken by " .. row[1] .. " as the dense one it stands for", function()
      local dense, sparse = tables()
      local a, b = row[2](dense:parameters()), row[2](sparse:parameters())
      for step = 1, 5 do
        ms.scope(function()
          local where = ids { step, (step * 3) % 10, step }
          for _, e in ipairs { dense, sparse } do (e(where) ^ 2):sum():backward() end
        end)
        assert.is_true(a:step() and b:step())
        assert.is_true(sparse.weight.grad.is_sparse)
        ms.testing.assert_close(sparse.weight, dense.weight)
        a:zero_grad()
        b:zero_grad()
        assert.is_nil(sparse.weight.grad)
      end
    end)
  end

  for _, row in ipairs {
    { "fully_shard", function(m) return ms.fsdp.fully_shard(m) end },
    { "FSDP", function(m) return ms.fsdp.FSDP(m) end },
    { "FSDP with the original parameters", function(m) return ms.fsdp.FSDP(m, { use_orig_params = true }) end },
  } do
    it("is dense in a sharded unit, where it is reduced: " .. row[1], function()
      local dense, sparse = tables()
      ms.catch_warnings(function() sparse = row[2](sparse) end)
      local a, b = optim.SGD(dense:parameters(), { lr = 0.1 }), optim.SGD(sparse:parameters(), { lr = 0.1 })
      for step = 1, 2 do
        local where = ids { step, 2, 2 }
        for _, e in ipairs { dense, sparse } do (e(where) ^ 2):sum():backward() end
        a:step()
        b:step()
        a:zero_grad()
        b:zero_grad()
      end
      ms.testing.assert_close(sparse(ids { 0, 1, 2, 3 }), dense(ids { 0, 1, 2, 3 }))
    end)
  end

  it("is copied with its leaf", function()
    local _, e = tables()
    e(ids { 1, 2 }):sum():backward()
    local copy = ms.scope(function() return { ms.deepcopy(e) } end)[1]
    assert.is_true(copy.weight.grad.is_sparse)
    assert.is_false(rawequal(copy.weight.grad, e.weight.grad))
    assert.is_true(copy.weight.grad:equal(e.weight.grad))
  end)

  it("is clipped with the others", function()
    local dense, sparse = tables()
    local where = ids { 1, 1, 3 }
    for _, e in ipairs { dense, sparse } do (e(where) * 3):sum():backward() end
    local norm = nn.utils.clip_grad_norm_(dense:parameters(), 1)
    ms.testing.assert_close(nn.utils.clip_grad_norm_(sparse:parameters(), 1), norm)
    assert.is_true(sparse.weight.grad.is_sparse)
    ms.testing.assert_close(sparse.weight.grad:to_dense(), dense.weight.grad)
  end)

  it("keeps native memory flat over steps", function()
    local _, e = tables()
    local o = optim.SGD(e:parameters(), { lr = 0.1 })
    require "spec.support.flat_memory"(function()
      e(ids { 1, 2, 3 }):sum():backward()
      o:step()
      o:zero_grad()
    end)
  end)
end)
