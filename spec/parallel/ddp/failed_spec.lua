-- SPDX-License-Identifier: MIT
--- nn.DDP after a step that failed on one rank: which parameters count as used, and buckets that could not be
--- allocated.
local ranks = require "spec.support.ranks"

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.dist
end

for world = 2, 3 do
  ranks.describe(world, ("DDP after a failed step on %d ranks"):format(world), function(rank)
    local function input()
      local ms = load()
      return ms.ones(2, 4) * (rank + 1)
    end
    local function failing_input()
      local x = input():requires_grad_(true)
      x:register_hook(function() error("its own", 0) end)
      return x
    end

    it("leaves a parameter alone that only the failed step used", function()
      local _, nn, dist = load()
      local Net = nn.Module:extend "Net"
      function Net:init() self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4) end
      function Net:forward(x, both) return both and self.a(x) + self.b(x) or self.a(x) end
      for _, bad in ipairs { 0, world - 1 } do
        local ddp = nn.DDP(Net(), { find_unused_parameters = true, bucket_cap_mb = 1e-5 })
        for step = 1, 4 do
          local fails = step == 2
          ddp:zero_grad()
          local ok = pcall(function()
            ddp(fails and rank == bad and failing_input() or input(), fails):sum():backward()
            if fails then dist.barrier() end
          end)
          pcall(dist.barrier)
          assert.equal(not fails, ok)
          if ok then
            assert.is_nil(ddp.module.b.weight.grad)
            assert.is_true(ddp.module.a.weight.grad:abs():sum():item() > 0)
          end
        end
      end
    end)

    it("makes buckets later for which there was no memory", function()
      local ms, nn, dist = load()
      local buckets = require "moonshard.parallel.ddp.buckets"
      local build = buckets.build
      finally(function() buckets.build = build end)
      for _, bad in ipairs { 0, world - 1 } do
        for _, when in ipairs { "rebuilt after the first iteration", "made anew after an error" } do
          ms.manual_seed(1)
          local ddp, failed = nn.DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), { bucket_cap_mb = 1e-5 }), 0
          for step = 1, 6 do
            local fails = rank == bad and step == (when:find "^rebuilt" and 2 or 4)
            if fails then buckets.build = function() error("no memory", 0) end end
            local ok = pcall(function()
              ddp:zero_grad()
              ddp(fails and when:find "^made" and failing_input() or input()):sum():backward()
              dist.barrier()
            end)
            buckets.build = build
            pcall(dist.barrier)
            failed = failed + (ok and 0 or 1)
            assert.is_true(ok or step == (when:find "^rebuilt" and 2 or 4), step)
          end
          assert.equal(1, failed)
          assert.is_true(#rawget(ddp, "_ddp").buckets > 1)
        end
      end
    end)
  end)
end
