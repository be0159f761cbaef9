-- SPDX-License-Identifier: MIT
--- An error among backwards whose gradients accumulate without a reduction (docs/semantics.md#accumulation): these
--- gradients are not added to those of the next step, and are not lost without an error.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local ways = require "spec.support.ways"

local STRATEGIES = { "full_shard", "shard_grad_op", "no_shard" }

for _, world in ipairs { 2, 4 } do
  ranks.describe(world, ("an error among backwards without a reduction on %d ranks"):format(world), function(rank)
    local ms, nn, fsdp, dist, quietly = load()

    -- Each makes a model of the layers, and returns it with a function that runs fn without the reduction or a part of
    -- it.
    local fronts = {
      fully_shard = function(m)
        fsdp.fully_shard(m)
        return m, function(fn) ways.without(m, "set_requires_gradient_sync", fn) end
      end,
    }
    for _, strategy in ipairs(STRATEGIES) do
      for _, orig in ipairs { false, true } do
        fronts[strategy .. (orig and ", use_orig_params" or "")] = function(m)
          m = quietly(fsdp.FSDP, m, { sharding_strategy = strategy, use_orig_params = orig })
          return m, function(fn) m:no_sync(fn) end
        end
      end
    end
    if world == 4 then
      fronts["fully_shard, all-reduce"] = function(m)
        fsdp.fully_shard(m, { mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } }) })
        return m, function(fn) ways.without(m, "set_requires_all_reduce", fn) end
      end
    end

    local function build(front)
      ms.manual_seed(1)
      return front(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    end
    local function gradients(m)
      local list = {}
      for k, p in ipairs(m:parameters()) do
        local g = (p.placements and p:to_local() or p).grad
        list[k] = g and g:tolist() or "none"
      end
      return list
    end
    local function input() return ms.ones(2, 4) * (rank + 1) end
    local function failing_input()
      local x = input():requires_grad_(true)
      x:register_hook(function() error("its own", 0) end)
      return x
    end

    local places = { "before", "after the first", "in the second forward", "in the second backward", "a refused call" }
    for name, front in ms.sorted_pairs(fronts) do
      for _, clear in ipairs { "the optimizer's zero_grad", "the module's zero_grad", "zero_grad to zeros" } do
        it(("leaves nothing to the next step after %s: %s"):format(clear, name), function()
          local want
          for _, bad in ipairs { 0, world - 1 } do
            for _, place in ipairs(places) do
              local m, unreduced = build(front)
              local o, failed = ms.optim.SGD(m:parameters(), { lr = 0.1 }), 0
              for step = 1, 5 do
                local fails = step == 2 and rank == bad
                local function here(at) if fails and at == place then error("its own", 0) end end
                local ok = pcall(function()
                  if clear == "the module's zero_grad" then m:zero_grad()
                  else o:zero_grad { set_to_none = clear ~= "zero_grad to zeros" } end
                  here "before"
                  unreduced(function() m(input()):sum():backward() end)
                  here "after the first"
                  if fails and place == "a refused call" then dist.all_reduce "x" end
                  unreduced(function()
                    local y = m(fails and place == "in the second backward" and failing_input() or input())
                    here "in the second forward"
                    y:sum():backward()
                  end)
                  m(input()):sum():backward()
                end)
                dist.recover()
                if ok then
                  local got = gradients(m)
                  want = want or got
                  assert.same(want, got, ("step %d, error %s"):format(step, place))
                else
                  failed = failed + 1
                end
              end
              assert.is_true(failed >= 1 and failed <= 3)
            end
          end
        end)
      end

      it("is an error again if the script continues without clearing them: " .. name, function()
        local m, unreduced = build(front)
        unreduced(function() m(input()):sum():backward() end)
        -- The error below could otherwise end the backward above on a rank that is behind: the replicas of a mesh share
        -- no collective so far.
        dist.barrier()
        assert.is_false((pcall(function()
          unreduced(function() m(rank == 1 and failing_input() or input()):sum():backward() end)
          dist.barrier()
        end)))
        dist.recover()
        for _ = 1, 2 do
          local _, why = pcall(function() m(input()):sum():backward() end)
          assert.matches("had accumulated without a reduction were dropped when a backward failed", tostring(why))
          dist.recover()
        end
        m:zero_grad()
        m(input()):sum():backward()
        local other = build(front)
        other(input()):sum():backward()
        assert.same(gradients(other), gradients(m))
      end)
    end
  end)
end
