-- SPDX-License-Identifier: MIT
--- Gradients accumulated over several backwards, with and without no_sync between them, where FSDP keeps its shards on
--- the CPU: they equal those of one combined batch.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net()
  local ms, nn = load()
  ms.manual_seed(0)
  return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))
end

local function input(k, r)
  local ms = load()
  ms.manual_seed(10 * k + r)
  return ms.rand(2, 6)
end

-- How many backwards are in no_sync, and how many follow outside it, alternating.
local PLANS = { { 2, 1 }, { 3, 1, 2, 1 }, { 1, 2 }, { 0, 3 } }

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("accumulated gradients with offload on %d ranks #cuda"):format(world), function(rank)
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      it("are those of all batches at once: " .. strategy, function()
        local ms, _, fsdp, _, quietly = load()
        if not ms.cuda.is_available() then return end
        for n, plan in ipairs(PLANS) do
          local options = { sharding_strategy = strategy, cpu_offload = true, device_id = "cuda:0",
            use_orig_params = n % 2 == 0,
            backward_prefetch = ({ "pre", "post", "none", "pre" })[n] }
          local whole, model = net(), net()
          quietly(function()
            model[3] = fsdp.FSDP(model[3], options)
            model = fsdp.FSDP(model, options)
          end)
          local a, b = ms.optim.SGD(whole:parameters(), { lr = 0.1 }), ms.optim.SGD(model:parameters(), { lr = 0.1 })
          for step = 1, 2 do
            local k = 10 * step
            local batches = {}
            local function backward()
              k = k + 1
              for r = 0, world - 1 do batches[#batches + 1] = input(k, r) end
              model(input(k, rank)):pow(2):sum():backward()
            end
            for at = 1, #plan, 2 do
              model:no_sync(function() for _ = 1, plan[at] do backward() end end)
              for _ = 1, plan[at + 1] do backward() end
            end
            (whole(ms.cat(batches, 1)):pow(2):sum() / world):backward()
            a:step()
            b:step()
            a:zero_grad()
            b:zero_grad()
            for _, p in ipairs(model:parameters()) do assert.truthy(p.device:find "^cpu") end
            for name, t in ms.sorted_pairs(fsdp.state_dict(model)) do
              ms.testing.assert_close(t:to "cpu", whole:get_parameter(name):detach(), { rtol = 1e-4, atol = 1e-5 })
            end
          end
        end
      end)
    end
  end)
end
