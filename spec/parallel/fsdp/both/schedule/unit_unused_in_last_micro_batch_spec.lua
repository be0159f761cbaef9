-- SPDX-License-Identifier: MIT
--- Micro-batches without a reduction use a unit that the last one, which reduces, does not use: its gradients are
--- reduced all the same, as those of one process.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local ways = require "spec.support.ways"

local function net()
  local ms, nn = load()
  local Parts = nn.Module:extend "Parts"
  function Parts:init() self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2) end
  function Parts:forward(x, part) return self.head(part == "none" and x or self[part](x)) end
  ms.manual_seed(1)
  return Parts()
end

local PLANS = { { "a", "b" }, { "a", "a", "b" }, { "a", "none" }, { "none", "a", "b" } }

local PARTS = { "a", "b", "head" }
local function classic(options) return ways.FSDP(PARTS, options), function(m, micro) m:no_sync(micro) end end
local function sharded(switch, options)
  return ways.fully_shard(PARTS, options), function(m, micro) ways.without(m, switch, micro) end
end

local function grid() return load().dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } }) end

for world = 1, 4 do
  ranks.describe(world, ("a unit that the last of several micro-batches does not use, over %d ranks"):format(world),
    function(rank)
      local list = {
        { "fully_shard", sharded "set_requires_gradient_sync" },
        { "FSDP", classic {} },
        { "FSDP, original parameters", classic { use_orig_params = true } },
        { "FSDP, shard_grad_op", classic { sharding_strategy = "shard_grad_op" } },
        { "FSDP, no_shard", classic { sharding_strategy = "no_shard" } },
      }
      if world == 4 then
        local function over_grid() return { mesh = grid() } end
        list[6] = { "FSDP, hybrid", classic(function() return { sharding_strategy = "hybrid_shard", device_mesh = grid() } end) }
        list[7] = { "fully_shard over a mesh", sharded("set_requires_gradient_sync", over_grid) }
        list[8] = { "fully_shard over a mesh, without all-reduce", sharded("set_requires_all_reduce", over_grid) }
      end
      for _, way in ipairs(list) do
        for _, plan in ipairs(PLANS) do
          it(("%s: %s"):format(way[1], table.concat(plan, " then ")), function()
            local ms, _, fsdp, _, quietly = load()
            local want, m = net(), quietly(way[2], net())
            local function loss(model, step, k, r)
              ms.manual_seed(100 * step + 10 * k + r)
              return model(ms.randn(2, 4), plan[k]):pow(2):mean()
            end
            local its_opt = ms.optim.SGD(want:parameters(), { lr = 0.1 })
            local opt = ms.optim.SGD(m:parameters(), { lr = 0.1 })
            for step = 1, 2 do
              for k = 1, #plan do
                for r = 0, world - 1 do (loss(want, step, k, r) / world):backward() end
                local function micro() loss(m, step, k, rank):backward() end
                if k < #plan then way[3](m, micro) else micro() end
              end
              for _, o in ipairs { its_opt, opt } do
                o:step()
                o:zero_grad()
              end
            end
            for name, t in ms.sorted_pairs(fsdp.state_dict(m)) do
              ms.testing.assert_close(t, want:state_dict()[name])
            end
          end)
        end
      end

      it("does not get what the script has cleared", function()
        local ms, _, _, _, quietly = load()
        local m = quietly(list[2][2], net())
        m:no_sync(function() m(ms.ones(2, 4), "a"):sum():backward() end)
        m:zero_grad()
        m(ms.ones(2, 4), "b"):sum():backward()
        assert.is_nil(m.a.flat_param.grad)
        assert.is_not_nil(m.b.flat_param.grad)
      end)
    end)
end
