--- cpu_offload: shards, gradients and optimizer on the CPU while another device computes. On the emulated GPU where there is no other.
local ranks = require "spec.support.ranks"

for world = 1, 4 do
  ranks.describe(world, ("CPU offload on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        it(("FSDP computes on cuda and keeps its shards on the CPU: %s, use_orig_params = %s"):format(strategy, tostring(pieces)), function(rank)
          local ms = require "moonshard"
          local quietly = require "spec.support.wrapped".quietly
          local nn, fsdp = ms.nn, ms.fsdp
          local function build()
            ms.manual_seed(0)
            return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
          end
          local reference, model = build(), build()
          local options = { sharding_strategy = strategy, use_orig_params = pieces, cpu_offload = true, device_id = "cuda:0" }
          model = quietly(function()
            model[3] = fsdp.FSDP(model[3], options)
            return fsdp.FSDP(model, options)
          end)
          local a, b = ms.optim.Adam(reference:parameters(), { lr = 0.01 }), ms.optim.Adam(model:parameters(), { lr = 0.01 })
          local function input(r, step)
            ms.manual_seed(100 + r + step * 10)
            return ms.rand(4, 8)
          end
          for step = 1, 3 do
            for r = 0, world - 1 do (reference(input(r, step)):sum() / world):backward() end
            local out = model(input(rank, step):to "cuda:0")
            assert.equal("cuda:0", out.device)
            out:sum():backward()
            for _, p in ipairs(model:parameters()) do
              assert.truthy(p.device:find "^cpu")
              if p.grad then assert.truthy(p.grad.device:find "^cpu") end
            end
            fsdp.check_sharded_parity(reference, model)
            a:step()
            b:step()
            fsdp.check_sharded_parity(reference, model)
            a:zero_grad()
            b:zero_grad()
          end
          fsdp.summon_full_params(model, function()
            for k, p in ipairs(reference:parameters()) do
              local whole = model:parameters()[k]
              assert.equal("cuda:0", whole.device)
              ms.testing.assert_close(whole:to "cpu", p:detach())
            end
          end)
        end)
      end
    end
  end)
end
