-- SPDX-License-Identifier: MIT
--- nn.utils: parameters as a vector, clipping by value, total norms.
local ms = require "moonshard"
local nn, utils = ms.nn, ms.nn.utils
local collected = require "spec.support.collected"
local raises = require "spec.support.raises"

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
