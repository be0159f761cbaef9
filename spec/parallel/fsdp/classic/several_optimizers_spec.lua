-- SPDX-License-Identifier: MIT
--- Several optimizers over the parameters of one flat unit: a step leaves out gradients that were set to nil, and moves
--- parameters whose gradients were set to zero by their averages, as with the whole model.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net()
  local ms, nn = load()
  ms.manual_seed(0)
  return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))
end

-- Weights and biases, each with an optimizer of its own.
local function optimizers(model)
  local ms = load()
  local weights, biases = {}, {}
  for name, p in model:named_parameters() do table.insert(name:find "weight$" and weights or biases, p) end
  return ms.optim.Adam(weights, { lr = 0.05 }), ms.optim.AdamW(biases, { lr = 0.02, weight_decay = 0.1 }), biases
end

-- In step 3 the biases are frozen. One optimizer sets gradients to nil (that of weights if `weights_to_nil`), the other
-- to zeros.
local function run(models, step, weights_to_nil, backward)
  local optim, other, biases = models.optim, models.other, models.biases
  if step == 3 then
    for _, p in ipairs(biases) do p.requires_grad = false end
  elseif step == 4 then
    for _, p in ipairs(biases) do p.requires_grad = true end
  end
  backward()
  optim:step()
  other:step()
  optim:zero_grad { set_to_none = weights_to_nil }
  other:zero_grad { set_to_none = not weights_to_nil }
end

for world = 1, 4 do
  ranks.describe(world, ("several optimizers over a flat unit on %d ranks"):format(world), function(rank)
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, weights_to_nil in ipairs { true, false } do
        it(("train as over the whole model: %s, %s are cleared to nil"):format(strategy, weights_to_nil and "weights"
          or "biases"), function()
          local ms, _, fsdp, _, quietly = load()
          local whole = net()
          local model = quietly(fsdp.FSDP, net(), { use_orig_params = true, sharding_strategy = strategy })
          local a, b = {}, {}
          a.optim, a.other, a.biases = optimizers(whole)
          b.optim, b.other, b.biases = optimizers(model)
          local function input(step, r)
            ms.manual_seed(10 * step + r)
            return ms.rand(4, 5)
          end
          for step = 1, 5 do
            run(a, step, weights_to_nil, function()
              for r = 0, world - 1 do (whole(input(step, r)):pow(2):sum() / world):backward() end
            end)
            run(b, step, weights_to_nil, function() model(input(step, rank)):pow(2):sum():backward() end)
            for name, t in ms.sorted_pairs(fsdp.state_dict(model)) do
              ms.testing.assert_close(t, whole:get_parameter(name):detach())
            end
          end
          -- Each has its own state, by parameter names.
          local osd, want = fsdp.optim_state_dict(model, b.other), fsdp.optim_state_dict(whole, a.other)
          for name, entry in ms.sorted_pairs(want.state) do
            assert.matches("bias$", name)
            assert.equal(entry.step, osd.state[name].step)
            ms.testing.assert_close(osd.state[name].exp_avg, entry.exp_avg)
          end
          assert.is_nil(osd.state["1.weight"])
        end)
      end
    end
  end)
end
