-- SPDX-License-Identifier: MIT
--- nn.utils.prune: masks as PyTorch chooses them for the same weights, training, state dicts.
local ms = require "moonshard"
local message = require "spec.support.message"
local nn = ms.nn
local prune = nn.utils.prune

local W = { { 0.5, -2, 1.5, 0.1 }, { 3, -0.2, 0.3, -1 }, { 0.05, 0.6, -0.7, 2.5 } }
local B = { { -0.9, 0.8 }, { 1.2, -0.15 } }

local function layer(rows)
  local m = nn.Linear(#rows[1], #rows)
  ms.no_grad(function() m.weight:copy_(ms.tensor(rows)) end)
  return m
end

-- The mask of a layer's weight; checks that the weight has zeros where the mask has them, and else its values.
local function mask_of(m, rows)
  local mask = m:state_dict().weight_mask
  assert.is_true(m.weight:equal(ms.tensor(rows) * mask))
  return mask:tolist()
end

describe("prune", function()
  it("takes the elements of the least absolute value, again and again among those that are left", function()
    local m = layer(W)
    assert.are.equal(m, prune.l1_unstructured(m, "weight", 0.3))
    assert.are.same({ { 1, 1, 1, 0 }, { 1, 0, 0, 1 }, { 0, 1, 1, 1 } }, mask_of(m, W))
    prune.l1_unstructured(m, "weight", 0.3)
    assert.are.same({ { 0, 1, 1, 0 }, { 1, 0, 0, 1 }, { 0, 0, 1, 1 } }, mask_of(m, W))
    prune.l1_unstructured(m, "weight", 2)
    assert.are.same({ { 0, 1, 1, 0 }, { 1, 0, 0, 0 }, { 0, 0, 0, 1 } }, mask_of(m, W))
  end)

  it("takes the rows or columns of the least norm", function()
    local m = layer(W)
    prune.ln_structured(m, "weight", 0.3, { n = 2, dim = 2 })
    assert.are.same({ { 1, 1, 0, 1 }, { 1, 1, 0, 1 }, { 1, 1, 0, 1 } }, mask_of(m, W))
    prune.ln_structured(m, "weight", 1, { n = 1, dim = 1 })
    assert.are.same({ { 0, 0, 0, 0 }, { 1, 1, 0, 1 }, { 1, 1, 0, 1 } }, mask_of(m, W))
    prune.ln_structured(m, "weight", 0.5, { n = math.huge, dim = -1 })
    assert.are.same({ { 0, 0, 0, 0 }, { 1, 0, 0, 0 }, { 1, 0, 0, 0 } }, mask_of(m, W))
  end)

  it("takes elements of several parameters together", function()
    local a, b = layer(W), layer(B)
    prune.l1_unstructured(b, "weight", 1)
    prune.global_unstructured({ { a, "weight" }, { b, "weight" } }, 0.4)
    assert.are.same({ { 0, 1, 1, 0 }, { 1, 0, 0, 1 }, { 0, 0, 1, 1 } }, mask_of(a, W))
    assert.are.same({ { 1, 1 }, { 1, 0 } }, mask_of(b, B))
  end)

  it("takes random elements or parts by ms.manual_seed, as many as asked for", function()
    local function draw(fn, amount, options)
      ms.manual_seed(4)
      local m = layer(W)
      prune[fn](m, "weight", amount, options)
      return mask_of(m, W)
    end
    local mask = draw("random_unstructured", 5)
    assert.are.same(mask, draw("random_unstructured", 5))
    assert.are.equal(7, ms.tensor(mask):sum():item())
    local columns = ms.tensor(draw("random_structured", 0.5, { dim = 2 }))
    assert.are.same({ 0, 0, 3, 3 }, columns:sum(1):sort():tolist())
    local m = layer(W)
    prune.global_unstructured({ { m, "weight" } }, 0.5, { method = "random" })
    assert.are.equal(6, ms.tensor(mask_of(m, W)):sum():item())
  end)

  it("keeps zeros in training, with gradients of the other elements alone", function()
    local m = layer(W)
    local optimizer = ms.optim.SGD(m:parameters(), { lr = 0.1, momentum = 0.9 })
    prune.l1_unstructured(m, "weight", 0.5)
    local mask = m:state_dict().weight_mask
    for _ = 1, 3 do
      optimizer:zero_grad()
      m(ms.ones(2, 4)):pow(2):sum():backward()
      optimizer:step()
    end
    assert.is_true(m.weight:ne(0):equal(mask:ne(0)))
    assert.is_false(m.weight:equal(ms.tensor(W) * mask))
    local original = m.parametrizations.weight.original
    assert.are.equal(0, (original.grad * (1 - mask)):abs():sum():item())
    -- remove leaves the same parameter, which optimizers already have.
    local before = m.weight:tolist()
    prune.remove(m, "weight")
    assert.is_true(rawequal(original, m.weight))
    assert.are.same(before, m.weight:tolist())
    assert.is_false(prune.is_pruned(m))
    assert.are.equal("Linear", m:class_name())
  end)

  it("has PyTorch's names in state dicts", function()
    local a, b = nn.Sequential(layer(W)), nn.Sequential(layer(W))
    prune.l1_unstructured(a[1], "weight", 0.5)
    assert.is_true(prune.is_pruned(a))
    local sd, names = a:state_dict(), {}
    for name in ms.sorted_pairs(sd) do names[#names + 1] = name end
    assert.are.same({ "1.bias", "1.weight_mask", "1.weight_orig" }, names)
    prune.identity(b[1], "weight")
    b:load_state_dict(sd)
    assert.are.same(mask_of(a[1], W), mask_of(b[1], W))
    prune.remove(a[1], "weight")
    assert.is_not_nil(a:state_dict()["1.weight"])
  end)

  it("multiplies with a mask of the script, after other parametrizations, too", function()
    local m = layer(B)
    prune.custom_from_mask(m, "weight", ms.tensor({ { 1, 0 }, { 1, 1 } }, { dtype = "bool" }))
    prune.custom_from_mask(m, "weight", ms.tensor { { 1, 1 }, { 0, 1 } })
    assert.are.same({ { 1, 0 }, { 0, 1 } }, mask_of(m, B))
    local normed = nn.utils.weight_norm(layer(B))
    prune.custom_from_mask(normed, "weight", ms.tensor { { 1, 0 }, { 1, 1 } })
    assert.are.equal(0, normed.weight[{ 1, 2 }]:item())
    prune.remove(normed, "weight")
    assert.are.equal(0, normed.weight[{ 1, 2 }]:item())
  end)

  it("of a sharded model trains as that of a whole one", function()
    local function make()
      ms.manual_seed(8)
      local m = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
      prune.l1_unstructured(m[1], "weight", 0.5)
      return m
    end
    local whole, sharded = make(), ms.fsdp.fully_shard(make())
    for _, m in ipairs { whole, sharded } do
      local optimizer = ms.optim.Adam(m:parameters(), { lr = 0.05 })
      ms.manual_seed(9)
      for _ = 1, 3 do
        m(ms.randn(5, 4)):pow(2):sum():backward()
        optimizer:step()
        optimizer:zero_grad()
      end
    end
    local want, got = whole:state_dict(), ms.fsdp.state_dict(sharded)
    for name, t in pairs(want) do assert.is_true(t:equal(got[name]), name) end
  end)

  it("names what does not fit", function()
    local m = layer(W)
    for _, case in ipairs {
      { "l1_unstructured", { m, "weigth", 1 }, "l1_unstructured: Linear: unknown parameter 'weigth'; did you mean 'weight'?" },
      { "l1_unstructured", { m, "weight", 1.5 }, "l1_unstructured: the amount is a number (1.5), expected a fraction below 1, or a whole number of elements" },
      { "l1_unstructured", { m, "weight", 13 }, "l1_unstructured: the amount is 13, expected at most the number left to prune, 12" },
      { "ln_structured", { m, "bias", 1 }, "ln_structured: a parameter of shape [3] has no parts to prune, expected at least 2 dimensions" },
      { "ln_structured", { m, "weight", 1, { dim = 3 } }, "ln_structured: option 'dim' is 3, expected a dimension of a parameter of shape [3, 4]" },
      { "custom_from_mask", { m, "weight", ms.ones(2) },
        "custom_from_mask: the mask has shape [2], expected that of the parameter, [3, 4]" },
      { "global_unstructured", { {}, 1 }, "global_unstructured: argument 1 is an empty list, expected a list of pairs { module, name }" },
      { "remove", { m, "weight" }, "remove: 'weight' of Linear is not pruned" },
      { "is_pruned", { 3 }, "is_pruned: argument 1 is a number (3), expected a module" },
    } do
      local said = message(prune[case[1]], unpack(case[2]))
      assert.are.equal(case[3], said:sub(1, #case[3]))
    end
    assert.are.equal("Linear", m:class_name())
  end)
end)
