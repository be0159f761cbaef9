-- SPDX-License-Identifier: MIT
--- A failure in work that a backward runs again (a checkpointed region around whole units, a forward in a hook) is
--- published to the other ranks, although the graph of the backward contains no unit.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function make()
  local ms, nn = load()
  ms.manual_seed(6)
  return nn.Sequential(nn.Linear(4, 4, { dtype = "float64" }), nn.Tanh(), nn.Linear(4, 4, { dtype = "float64" }))
end

local function wrapped(kind)
  local _, _, fsdp, _, quietly = load()
  return quietly(function()
    local m = make()
    if kind == "fully_shard" then
      fsdp.fully_shard(m[3])
      return fsdp.fully_shard(m)
    end
    local o = { use_orig_params = true, sharding_strategy = kind }
    m[3] = fsdp.FSDP(m[3], o)
    return fsdp.FSDP(m, o)
  end)
end

for _, world in ipairs { 2, 3 } do
  ranks.describe(world, ("failures in recomputed work on %d ranks"):format(world), function(rank)
    for _, kind in ipairs { "fully_shard", "full_shard", "no_shard" } do
      for _, where in ipairs { "a checkpoint's region", "a hook's forward" } do
        it(("in %s: %s"):format(where, kind), function()
          local ms, _, fsdp = load()
          local plain, model = make(), wrapped(kind)
          local failing
          model[2]:register_forward_hook(function()
            if failing then
              failing = failing - 1
              if failing == 0 then error("no luck", 0) end
            end
          end)
          local function input(step, r)
            ms.manual_seed(10 * step + r)
            return ms.randn(3, 4, { dtype = "float64" })
          end
          for step = 1, 3 do
            local ok, message = pcall(function()
              local x = input(step, rank):requires_grad_(true)
              if where == "a checkpoint's region" then
                if rank == step % world then failing = 2 end
                ms.checkpoint(function(y) return model(y) end, x):sum():backward()
              else
                local y = x * 2
                y:register_hook(function()
                  if rank == step % world then failing = 1 end
                  ms.no_grad(function() model(input(step, rank)) end)
                  ms.enable_grad(function() model(input(step, rank)):sum():backward() end)
                end)
                y:sum():backward()
              end
            end)
            failing = nil
            assert.is_false(ok)
            assert.matches("no luck", message)
            ms.dist.recover()
            model:zero_grad()
            plain:zero_grad()
            for r = 0, world - 1 do (plain(input(step, r)):pow(2):sum() / world):backward() end
            model(input(step, rank)):pow(2):sum():backward()
            fsdp.check_sharded_parity(plain, model)
          end
        end)
      end
    end
  end)
end
