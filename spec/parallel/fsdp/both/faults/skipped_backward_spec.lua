-- SPDX-License-Identifier: MIT
--- A rank whose script catches its own error between forward and backward skips a backward. Its next step must not be
--- paired with the others' previous step: every rank gets the error, and they continue together.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local ways = require "spec.support.ways"

local function net()
  local ms, nn = load()
  ms.manual_seed(0)
  return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
end

local function nested(strategy)
  return ways.FSDP({ "1", "3" }, { sharding_strategy = strategy, use_orig_params = true })
end

local WAYS = {
  { "fully_shard of the root", ways.fully_shard {} },
  { "fully_shard, reshard_after_forward = false", ways.fully_shard({ "1", "3" }, { reshard_after_forward = false }) },
  { "fully_shard, reshard_after_forward = true", ways.fully_shard({ "1", "3" }, { reshard_after_forward = true }) },
  { "FSDP of the root", ways.FSDP {} },
  { "FSDP, full_shard", nested "full_shard" },
  { "FSDP of the root, shard_grad_op", ways.FSDP({}, { sharding_strategy = "shard_grad_op" }) },
  { "FSDP, shard_grad_op", nested "shard_grad_op" },
}

for _, world in ipairs { 2, 3 } do
  ranks.describe(world, ("a backward that one of %d ranks leaves out"):format(world), function(rank)
    for _, way in ipairs(WAYS) do
      it("raises on all of them: " .. way[1], function()
        local ms, _, fsdp, _, quietly = load()
        local model = quietly(way[2], net())
        local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
        local good, told, step = 0, nil, 0
        while good < 5 do
          step = step + 1
          local ok, message = pcall(function()
            local loss = model(ms.ones(2, 4) * (rank + 1)):pow(2):sum()
            if step == 2 and rank == 1 then error("the script's own error", 0) end
            loss:backward()
            optim:step()
            optim:zero_grad()
          end)
          if ok then
            good = good + 1
          else
            if message ~= "the script's own error" then
              told = message
              ms.dist.recover()
            end
            optim:zero_grad()
          end
          assert.is_true(step < 20, told)
        end
        assert.truthy(told and told:find("the ranks ask for different things", 1, true), told)
        -- From here on the ranks run the same steps again, with the same weights.
        local w = model:parameters()[1]
        w = w.placements and w:full_tensor() or fsdp.summon_full_params(model,
          function() return model[1].weight:detach():clone() end)
        for _, other in ipairs(ms.dist.all_gather_object(w:sum():item())) do assert.equal(w:sum():item(), other) end
      end)
    end

    it("is no error if all ranks leave it out, nor are two forwards before their backwards", function()
      local ms, _, fsdp, _, quietly = load()
      for _, way in ipairs(WAYS) do
        local model, want = quietly(way[2], net()), net()
        model(ms.ones(2, 4))
        local a, b = model(ms.ones(2, 4) * (rank + 1)):pow(2):sum(), model(ms.ones(2, 4) * (rank + 2)):pow(2):sum()
        b:backward()
        a:backward()
        for r = 0, world - 1 do
          for k = 1, 2 do (want(ms.ones(2, 4) * (r + k)):pow(2):sum() / world):backward() end
        end
        fsdp.check_sharded_parity(want, model)
      end
    end)
  end)
end
