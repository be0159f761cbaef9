-- SPDX-License-Identifier: MIT
--- nn.utils: parameters as a vector, clipping by value, total norms.
local ms = require "moonshard"
local nn, utils = ms.nn, ms.nn.utils
local collected = require "spec.support.collected"
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"

describe("nn.utils.clip_grad_value_", function()
  it("limits the elements of dense and sparse gradients, and leaves parameters without one out", function()
    local p, none = nn.Parameter(ms.ones(3)), nn.Parameter(ms.ones(1))
    p.grad = ms.tensor { -3, 0.2, 5 }
    local table_of_rows = nn.Embedding(4, 1, { sparse = true })
    local out = table_of_rows(ms.tensor({ 2, 2 }, { dtype = "int64" }))
    out:sum():backward()
    utils.clip_grad_value_({ p, none, table_of_rows.weight }, 1)
    assert.is_true(p.grad:allclose(ms.tensor { -1, 0.2, 1 }))
    assert.is_nil(none.grad)
    assert.are.same({ { 0 }, { 0 }, { 1 }, { 0 } }, table_of_rows.weight.grad:to_dense():tolist())
  end)

  it("takes one tensor, and refuses others", function()
    local p = nn.Parameter(ms.ones(1))
    p.grad = ms.tensor { 9 }
    utils.clip_grad_value_(p, 0.5)
    assert.equal(0.5, p.grad:item())
    raises("clip_grad_value_: clip_value is a number (-1), expected a number from 0", utils.clip_grad_value_, { p }, -1)
    raises("clip_grad_value_: argument 1 is a Linear, expected a list of tensors; write model:parameters()",
      utils.clip_grad_value_, nn.Linear(1, 1), 1)
  end)
end)

describe("nn.utils.get_total_norm", function()
  it("is the norm of all elements together", function()
    local list = { ms.tensor { 1, -2 }, ms.tensor { { 2 }, { 4 } } }
    assert.equal(5, utils.get_total_norm(list):item())
    assert.equal(9, utils.get_total_norm(list, { norm_type = 1 }):item())
    assert.equal(4, utils.get_total_norm(list, { norm_type = math.huge }):item())
    assert.equal(0, utils.get_total_norm({}):item())
  end)
end)

describe("nn.utils.parameters_to_vector", function()
  it("concatenates the elements in order, and passes gradients on", function()
    local m = nn.Linear(3, 2)
    local v = utils.parameters_to_vector(m:parameters())
    assert.is_true(v:narrow(1, 1, 6):reshape(2, 3):equal(m.weight) and v:narrow(1, 7, 2):equal(m.bias))
    v:square():sum():backward()
    assert.is_true(m.weight.grad:allclose(2 * m.weight:detach()))
    raises("parameters_to_vector: argument 1 is an empty list, expected a list of at least one tensor", utils.parameters_to_vector, {})
  end)

  it("is inverted by vector_to_parameters, which keeps the parameters", function()
    local a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    local w = b.weight
    utils.vector_to_parameters(utils.parameters_to_vector(a:parameters()), b:parameters())
    assert.is_true(b.weight:equal(a.weight) and b.bias:equal(a.bias))
    assert.equal(w, b.weight)
    assert.is_true(w.is_leaf and w.requires_grad)
    raises("vector_to_parameters: the vector has shape [7], expected [8]",
      utils.vector_to_parameters, ms.ones(7), a:parameters())
  end)

  it("release their intermediate tensors", function()
    local list = { ms.ones(2, 3), ms.ones(4) }
    collected()
    local before = ms.memory_stats("cpu").live_tensors
    local v, norm = utils.parameters_to_vector(list), utils.get_total_norm(list)
    utils.vector_to_parameters(v, list)
    assert.equal(before + 2, ms.memory_stats("cpu").live_tensors)
    assert.equal(norm:item(), v:norm():item())
  end)
end)

describe("error_if_nonfinite", function()
  local function text(who, order)
    return ("%s: The total norm of order %s for gradients from `parameters` is non-finite, so it cannot be clipped. To disable this error and "
      .. "scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=false`"):format(who, order)
  end
  for _, bad in ipairs { math.huge, -math.huge, 0 / 0 } do
    it(("of clip_grad_norm_ refuses %s, and leaves the gradients alone"):format(bad), function()
      local p, q = nn.Parameter(ms.ones(2)), nn.Parameter(ms.ones(1))
      p.grad, q.grad = ms.tensor { 3, bad }, ms.tensor { 4 }
      raises(text("clip_grad_norm_", "2"), utils.clip_grad_norm_, { p, q }, 1, { error_if_nonfinite = true })
      raises(text("clip_grad_norm_", "inf"), utils.clip_grad_norm_, { p, q }, 1,
        { error_if_nonfinite = true, norm_type = math.huge })
      raises(text("get_total_norm", "2"), utils.get_total_norm, { p.grad, q.grad }, { error_if_nonfinite = true })
      local optimizer = ms.optim.SGD({ p, q }, { lr = 1 })
      assert.is_false(pcall(optimizer.step_clipped, optimizer, 1, { error_if_nonfinite = true }))
      assert.are.equal(3, p.grad[1]:item())
      assert.are.equal(4, q.grad:item())
      assert.are.same({ 1, 1 }, p:tolist())
      utils.clip_grad_norm_({ p, q }, 1, { error_if_nonfinite = false })
      assert.are_not.equal(4, q.grad:item())
    end)
  end

  it("changes nothing where the norm is finite", function()
    local function clipped(given)
      local p = nn.Parameter(ms.ones(2))
      p.grad = ms.tensor { 3, 4 }
      return utils.clip_grad_norm_(p, 1, given):item(), p.grad
    end
    local norm, grad = clipped { error_if_nonfinite = true }
    local right_norm, right = clipped()
    assert.are.equal(right_norm, norm)
    assert.is_true(right:equal(grad))
  end)

  ranks.describe(2, "over shards #mpi", function(rank)
    for _, front in ipairs { "fully_shard", "FSDP" } do
      it("is raised by every rank, which then continue: " .. front, function()
        local m = nn.Linear(2, 2)
        if front == "FSDP" then m = ms.fsdp.FSDP(m) else ms.fsdp.fully_shard(m) end
        local function clip(scale)
          m:zero_grad()
          m(ms.ones(1, 2) * scale):sum():backward()
          if front == "FSDP" then return m:clip_grad_norm_(1, { error_if_nonfinite = true }) end
          return utils.clip_grad_norm_(m:parameters(), 1, { error_if_nonfinite = true })
        end
        local ok, message = pcall(clip, rank == 1 and math.huge or 1)
        assert.is_false(ok)
        assert.truthy(message:find(text("clip_grad_norm_", "2"), 1, true), message)
        local norm = clip(1):item()
        assert.is_true(norm > 0 and norm < math.huge)
      end)
    end
  end)
end)
