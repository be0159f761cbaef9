-- SPDX-License-Identifier: MIT
--- nn.init: identities, orthogonal and sparse matrices. The expected values follow from the definitions.
local ms = require "moonshard"
local init = ms.nn.init
local raises = require "spec.support.raises"

describe("nn.init.eye_", function()
  it("puts ones on the diagonal of any matrix, also of a transposed one", function()
    assert.are.same({ { 1, 0, 0 }, { 0, 1, 0 } }, init.eye_(ms.full({ 2, 3 }, 7)):tolist())
    local t = ms.full({ 2, 3 }, 7, { dtype = "float64" })
    init.eye_(t:t())
    assert.are.same({ { 1, 0, 0 }, { 0, 1, 0 } }, t:tolist())
  end)

  it("leaves a parameter a leaf without history", function()
    local p = ms.nn.Parameter(ms.empty(2, 2))
    assert.equal(p, init.eye_(p))
    assert.is_true(p.is_leaf and p.requires_grad)
  end)

  it("refuses other shapes", function()
    raises("eye_: the tensor has shape [3], expected 2 dimensions", init.eye_, ms.empty(3))
    raises("eye_: argument 1 is a number (3), expected a tensor", init.eye_, 3)
  end)

  it("refuses a sharded parameter, as the others do", function()
    local w = ms.fsdp.fully_shard(ms.nn.Linear(2, 3)).weight
    for _, name in ipairs { "eye_", "orthogonal_" } do
      raises(name .. ": the tensor, shape [3, 2], is sharded; fill it before it is sharded", init[name], w)
    end
  end)
end)

describe("nn.init.dirac_", function()
  it("makes a convolution that returns its input", function()
    local x = ms.rand(2, 3, 5, 5)
    local w = init.dirac_(ms.empty(3, 3, 3, 3))
    assert.is_true(ms.nn.F.conv2d(x, w, nil, { padding = 1 }):allclose(x))
    local grouped = init.dirac_(ms.empty(4, 2, 3, 3), { groups = 2 })
    local y = ms.rand(1, 4, 5, 5)
    assert.is_true(ms.nn.F.conv2d(y, grouped, nil, { padding = 1, groups = 2 }):allclose(y))
  end)

  it("puts one 1 at the middle of a kernel of 1 and 3 dimensions", function()
    assert.are.same({ { { 0, 1, 0 }, { 0, 0, 0 } } }, init.dirac_(ms.empty(1, 2, 3)):tolist())
    local w = init.dirac_(ms.empty(2, 1, 3, 4, 5))
    assert.equal(1, w:sum():item())
    assert.equal(1, w[1][1][2][3][3]:item())
  end)

  it("refuses groups that do not divide the output channels", function()
    raises("dirac_: the number of output channels, 3, is not divisible by the number of groups, 2", init.dirac_,
      ms.empty(3, 1, 3), { groups = 2 })
    raises("dirac_: the tensor has shape [3, 1], expected 3 to 5 dimensions", init.dirac_, ms.empty(3, 1))
  end)
end)

describe("nn.init.orthogonal_", function()
  for _, sizes in ipairs { { 6, 6 }, { 4, 9 }, { 9, 4 }, { 5, 2, 3 }, { 64, 64 } } do
    it(("gives orthonormal rows or columns times gain, for [%s]"):format(table.concat(sizes, ", ")), function()
      local w = init.orthogonal_(ms.empty(sizes, { dtype = "float64" }), { gain = 3 }):reshape(sizes[1], -1)
      if w:size(1) > w:size(2) then w = w:t() end
      ms.testing.assert_close(w:matmul(w:t()), 9 * ms.eye(w:size(1), { dtype = "float64" }),
        { rtol = 1e-12, atol = 1e-12 })
    end)
  end

  it("has no direction of its own: the mean over many draws is 0", function()
    ms.manual_seed(3)
    local sum = ms.zeros(2, 2)
    for _ = 1, 400 do sum:add_(init.orthogonal_(ms.empty(2, 2))) end
    assert.is_true((sum / 400):abs():max():item() < 0.15)
  end)

  it("refuses vectors, and does nothing without elements", function()
    raises("orthogonal_: the tensor has shape [3], expected at least 2 dimensions", init.orthogonal_, ms.empty(3))
    assert.are.same({ 0, 3 }, { unpack(init.orthogonal_(ms.empty(0, 3)).shape) })
  end)
end)

describe("nn.init.sparse_", function()
  it("has the fraction of zeros in every column, and normal numbers elsewhere", function()
    ms.manual_seed(5)
    local w = init.sparse_(ms.empty(101, 40), 0.25, 2)
    for _, n in ipairs(w:eq(0):long():sum(1):tolist()) do assert.equal(26, n) end
    local kept = w:numel() * 75 / 101
    assert.is_true(math.abs(math.sqrt(w:square():sum():item() / kept) - 2) < 0.15)
    assert.is_true(w[1]:eq(0):long():sum():item() < 40)               -- the columns draw their own rows
    assert.equal(0, init.sparse_(ms.empty(3, 2), 1):abs():sum():item())
  end)

  it("refuses fractions above 1", function()
    raises("sparse_: sparsity is a number (1.5), expected a number from 0 to 1", init.sparse_, ms.empty(2, 2), 1.5)
  end)
end)
