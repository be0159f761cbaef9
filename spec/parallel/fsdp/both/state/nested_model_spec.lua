-- SPDX-License-Identifier: MIT
--- The optimizer-state suite's grid over NestedModel (docs/semantics.md#state-dicts). The state of one model and
--- optimizer is loaded into a model wrapped in another way, on half the ranks, with another order of parameters in the
--- optimizer; it must equal that model's own optimizer state.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

-- A model over a group, wrapped by `wrap` or `wrap_alt`, and its optimizer. o: alt, pieces, groups (two, without the
-- model's own bias), reversed (the optimizer's order), strategy.
local function make(group, o, seed)
  local ms, _, fsdp, _, quietly = load()
  local nested = require "spec.support.models.nested_model"
  ms.manual_seed(seed or 0)
  local model = nested.NestedModel()
  local options = { process_group = group, use_orig_params = o.pieces, sharding_strategy = o.strategy }
  quietly(function() (o.alt and nested.wrap_alt or nested.wrap)(model, options) end)
  local lists = o.groups and model:param_groups() or { model:parameters() }
  for k, list in ipairs(lists) do
    if o.reversed then
      local back = {}
      for i, p in ipairs(list) do back[#list + 1 - i] = p end
      list = back
    end
    lists[k] = { params = list, lr = 0.01 * k }
  end
  return model, ms.optim.Adam(lists, { lr = 0.01 }), fsdp, ms
end

-- Trains for some steps; returns the last loss. Averages gradients of parameters that no unit manages, as a script
-- must.
local function train(model, optimizer, group, steps)
  local ms, _, _, dist = load()
  local mean
  for step = 1, steps do
    ms.manual_seed(step)                        -- one batch for all ranks, so that fewer ranks train alike
    local x = ms.rand(8, 5)
    ms.scope(function()
      local loss = model(x):pow(2):mean()
      loss:backward()
      mean = loss:item()
    end)
    for _, p in ipairs(model:parameters()) do
      if p.grad and not rawget(p, "_unit") and not rawget(p, "_flat") then
        dist.all_reduce(p.grad, { op = "avg", group = group })
      end
    end
    optimizer:step()
    optimizer:zero_grad()
  end
  return mean
end

local function compare(want, got)
  local ms = load()
  local names = {}
  for name in ms.sorted_pairs(want.state) do
    names[#names + 1] = name
    local a, b = want.state[name], got.state[name]
    assert.is_not_nil(b, name)
    for key, value in ms.sorted_pairs(a) do
      if ms.is_tensor(value) then ms.testing.assert_close(b[key], value) else assert.equal(value, b[key], name .. " "
        .. key) end
    end
  end
  for name in ms.sorted_pairs(got.state) do assert.is_not_nil(want.state[name], name) end
  assert.equal(#want.param_groups, #got.param_groups)
  for k, group in ipairs(want.param_groups) do
    assert.equal(group.lr, got.param_groups[k].lr)
    local a, b = { unpack(group.params) }, { unpack(got.param_groups[k].params) }
    table.sort(a)
    table.sort(b)
    assert.same(a, b)
  end
  return #names
end

ranks.describe(4, "the state of NestedModel's optimizer", function(_, world)
  local cases = {}
  for _, halve in ipairs { false, true } do
    for _, alt in ipairs { false, true } do
      for _, groups in ipairs { false, true } do
        for _, pieces in ipairs { false, true } do
          cases[#cases + 1] = { halve = halve, alt = alt, groups = groups, pieces = pieces, strategy = "full_shard" }
        end
      end
    end
  end
  cases[#cases + 1] = { alt = true, groups = true, strategy = "no_shard" }
  cases[#cases + 1] = { halve = true, alt = true, groups = true, pieces = true, strategy = "shard_grad_op" }
  for _, case in ipairs(cases) do
    local what = ("%s, %s%s%s%s"):format(case.strategy, case.halve and "by half the ranks" or "by as many ranks",
      case.alt and ", wrapped in another way" or "", case.groups and ", two groups without the model's bias" or "",
      case.pieces and ", original parameters" or "")
    it("loads as the model's own state: " .. what, function()
      local _, _, _, dist = load()
      local all = dist.default_group()
      local evens = {}
      for r = 0, world - 1, 2 do evens[#evens + 1] = r end
      local half = dist.new_group(evens)
      local here = { groups = case.groups, pieces = case.pieces, strategy = case.strategy }
      local model, optimizer, fsdp = make(all, here)
      train(model, optimizer, all, 3)
      local sd, osd = fsdp.state_dict(model), fsdp.optim_state_dict(model, optimizer)
      local group = case.halve and half or all
      if not dist.rank(group) then return end                 -- this rank has finished

      local there = { alt = case.alt, groups = case.groups, pieces = case.pieces, strategy = case.strategy }
      local second, its_optimizer = make(group, there)
      train(second, its_optimizer, group, 3)
      local own = fsdp.optim_state_dict(second, its_optimizer)
      local n = compare(own, osd)
      assert.equal(case.groups and 15 or 16, n)
      -- A new model with another seed and order, and a third order on odd ranks.
      there.reversed = not case.groups
      local third, loaded = make(group, there, 9)
      fsdp.load_state_dict(third, sd)
      fsdp.load_optim_state_dict(third, loaded, osd)
      compare(own, fsdp.optim_state_dict(third, loaded))
      -- Both models continue training alike.
      local a, b = train(second, its_optimizer, group, 3), train(third, loaded, group, 3)
      assert.near(a, b, 1e-4 * math.abs(a) + 1e-6)
    end)
  end
end)
