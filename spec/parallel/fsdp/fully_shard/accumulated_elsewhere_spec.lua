-- SPDX-License-Identifier: MIT
--- Gradients that a backward without sync left in a unit which the reducing backward does not reach: they are reduced
--- at the end of that backward.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net()
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init() self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3) end
  function Net:forward(x, all) return self.c(all and self.b(self.a(x)) or self.a(x)) end
  ms.manual_seed(1)
  return Net()
end

for _, world in ipairs { 1, 2, 3, 4 } do
  ranks.describe(world, ("gradients accumulated by a unit that the last backward leaves out, on %d ranks"):format(
    world), function(rank)
    for _, reduce in ipairs { false, "float64" } do
      it("are reduced with the others', reduce_dtype = " .. tostring(reduce), function()
        local ms, _, fsdp, dist = load()
        local plain, model = net(), net()
        local options = { mp_policy = fsdp.MixedPrecisionPolicy { reduce_dtype = reduce or nil } }
        for _, name in ipairs { "a", "b", "c" } do fsdp.fully_shard(model[name], options) end
        fsdp.fully_shard(model, options)
        for _ = 1, 2 do
          for _, all in ipairs { true, false } do
            for r = 0, world - 1 do (plain(ms.ones(2, 3) * (r + 1), all):pow(2):mean() / world):backward() end
          end
          model:set_requires_gradient_sync(false)
          model(ms.ones(2, 3) * (rank + 1), true):pow(2):mean():backward()
          assert.is_nil(model.b.weight.grad)
          model:set_requires_gradient_sync(true)
          local seen = dist.record(function() model(ms.ones(2, 3) * (rank + 1), false):pow(2):mean():backward() end)
          local reductions = 0
          for _, c in ipairs(seen) do reductions = reductions + (c.op == "reduce_scatter" and 1 or 0) end
          if world > 1 then assert.equal(3, reductions) end
          fsdp.check_sharded_parity(plain, model)
          for _, m in ipairs { plain, model } do m:zero_grad() end
        end
      end)
    end
  end)
end
