-- SPDX-License-Identifier: MIT
--- nn.DDP after a step that failed on one rank: which parameters count as used, buckets that could not be allocated,
--- the reason that the other ranks get, and join.
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"

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

    it("does not reduce a parameter that only the failed step used", function()
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
          dist.recover()
          assert.equal(not fails, ok)
          if ok then
            assert.is_nil(ddp.module.b.weight.grad)
            assert.is_true(ddp.module.a.weight.grad:abs():sum():item() > 0)
          end
        end
      end
    end)

    it("allocates later the buckets for which there was no memory", function()
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
            dist.recover()
            failed = failed + (ok and 0 or 1)
            assert.is_true(ok or step == (when:find "^rebuilt" and 2 or 4), step)
          end
          assert.equal(1, failed)
          assert.is_true(#rawget(ddp, "_ddp").buckets > 1)
        end
      end
    end)

    it("raises on all ranks the error of a backward that failed before it reached a parameter", function()
      local _, nn, dist = load()
      for _, bad in ipairs { 0, world - 1 } do
        local ddp = nn.DDP(nn.Linear(4, 4))
        for _, how in ipairs { "a hook of the output", "no graph" } do
          local ok, why = pcall(function()
            local y = ddp(input())
            if rank == bad and how == "a hook of the output" then y:register_hook(function() error("its own", 0) end) end
            y = y:sum()
            if rank == bad and how == "no graph" then y = y:detach() end
            y:backward()
          end)
          assert.is_false(ok)
          local reason = how == "no graph" and "does not require grad" or "its own"
          assert.matches(rank == bad and reason or ("rank %d failed: .*%s"):format(bad, reason), why)
          dist.recover()
          ddp:zero_grad()
          ddp(input()):sum():backward()
          dist.barrier()
        end
      end
    end)

    it("joins again after an error of a rank that still had inputs", function()
      local ms, nn, dist = load()
      for _, place in ipairs { "before the forward", "before the backward", "in the backward" } do
        ms.manual_seed(1)
        local ddp = nn.DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), { bucket_cap_mb = 1e-5 })
        local function train(fails)
          ddp:join({}, function()
            for k = 1, rank == 0 and 3 or 1 do
              local function here(at) if fails and k == 2 and at == place then error("its own", 0) end end
              ddp:zero_grad()
              here "before the forward"
              local y = ddp(fails and k == 2 and place == "in the backward" and failing_input() or input())
              here "before the backward"
              y:sum():backward()
            end
          end)
        end
        for time = 1, 5 do
          local ok, why = pcall(train, time == 2)
          assert.equal(time ~= 2, ok)
          if not ok and rank > 0 then assert.matches("rank 0 failed: its own", why) end
          dist.recover()
        end
      end
    end)
  end)
end
