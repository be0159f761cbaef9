-- SPDX-License-Identifier: MIT
--- Evaluation between training steps: forwards without a backward, in eval mode, with and without gradients, with and
--- without prefetching. Outputs are equal every time, and training continues as if there had been no evaluation.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net()
  local ms, nn = load()
  ms.manual_seed(4)
  return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2))
end

local function wrap(kind, prefetch)
  local _, _, fsdp, _, quietly = load()
  local options = { sharding_strategy = kind, backward_prefetch = prefetch and "pre" or "none",
    forward_prefetch = prefetch }
  return quietly(function()
    local m = net()
    for _, k in ipairs { 1, 3, 4 } do
      if kind == "fully_shard" then fsdp.fully_shard(m[k],
        { reshard_after_forward = prefetch }) else m[k] = fsdp.FSDP(m[k], options) end
    end
    return kind == "fully_shard" and fsdp.fully_shard(m) or fsdp.FSDP(m, options)
  end)
end

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("evaluation on %d ranks"):format(world), function(rank)
    for _, kind in ipairs { "shard_grad_op", "full_shard", "no_shard", "fully_shard" } do
      it("changes nothing: " .. kind, function()
        local ms, _, fsdp = load()
        for _, prefetch in ipairs { true, false } do
          local plain, model = net(), wrap(kind, prefetch)
          local optims = {}
          for k, m in ipairs { plain, model } do optims[k] = ms.optim.SGD(m:parameters(), { lr = 0.05 }) end
          for _ = 1, 2 do
            model:train()
            for r = 0, world - 1 do (plain(ms.ones(2, 3) * (r + 1)):pow(2):mean() / world):backward() end
            model(ms.ones(2, 3) * (rank + 1)):pow(2):mean():backward()
            for _, optim in ipairs(optims) do
              optim:step()
              optim:zero_grad()
            end
            model:eval()
            local want = ms.no_grad(function() return plain(ms.ones(2, 3)) end)
            for n = 1, 3 do
              local out = n == 2 and ms.no_grad(function() return model(ms.ones(2, 3)) end) or model(ms.ones(2, 3))
              ms.testing.assert_close(out:detach(), want)
            end
          end
          fsdp.check_sharded_parity(plain, model)
        end
      end)
    end
  end)
end
