-- SPDX-License-Identifier: MIT
--- Layers that change only the shape.
local ms = require "moonshard"
local nn = ms.nn
local raises = require "spec.support.raises"

describe("Flatten", function()
  it("keeps the batch by default", function()
    local x = ms.arange(24, { dtype = "float32" }):reshape(2, 3, 4)
    local y = nn.Flatten()(x)
    assert.are.same({ 2, 12 }, { unpack(y.shape) })
    assert.are.same(x:reshape(-1):tolist(), y:reshape(-1):tolist())
    assert.are.same({ 6, 4 }, { unpack(nn.Flatten(1, 2)(x).shape) })
    assert.are.same({ 24 }, { unpack(nn.Flatten(1)(x).shape) })
  end)

  it("prints its dimensions and refuses others", function()
    assert.equal("Flatten(2, -1)", tostring(nn.Flatten()))
    raises("Flatten: first dimension is a number (1.5), expected a whole number", nn.Flatten, 1.5)
    raises("Flatten: argument is a number (3), expected a tensor", nn.Flatten(), 3)
  end)
end)

describe("Unflatten", function()
  it("divides a dimension, and finds one size itself", function()
    local x = ms.ones(2, 12, 5)
    assert.are.same({ 2, 3, 4, 5 }, { unpack(nn.Unflatten(2, { 3, 4 })(x).shape) })
    assert.are.same({ 2, 2, 6, 5 }, { unpack(nn.Unflatten(-2, { 2, -1 })(x).shape) })
    assert.are.same({ 0, 3, 4 }, { unpack(nn.Unflatten(2, { 3, -1 })(ms.ones(0, 12)).shape) })
  end)

  it("inverts Flatten, gradients included", function()
    local x = ms.rand(2, 3, 4):requires_grad_(true)
    local y = nn.Sequential(nn.Flatten(), nn.Unflatten(2, { 3, 4 }))(x)
    assert.is_true(y:equal(x))
    y:square():sum():backward()
    assert.is_true(x.grad:allclose(2 * x:detach()))
  end)

  it("prints its sizes and refuses those that do not fit", function()
    assert.equal("Unflatten(2, [3, -1])", tostring(nn.Unflatten(2, { 3, -1 })))
    raises("Unflatten: size of dimension 2 is a number (12), expected a multiple of 5 for the sizes [5, -1]",
      function() return nn.Unflatten(2, { 5, -1 })(ms.ones(2, 12)) end)
    raises("Unflatten: size of dimension 2 is a number (12), expected 10, the product of the sizes [5, 2]",
      function() return nn.Unflatten(2, { 5, 2 })(ms.ones(2, 12)) end)
    raises("Unflatten: number of sizes that are -1 is a number (2), expected at most 1", nn.Unflatten, 2, { -1, -1 })
    raises("Unflatten: argument 2 is a number (3), expected a list of sizes", nn.Unflatten, 2, 3)
  end)
end)
