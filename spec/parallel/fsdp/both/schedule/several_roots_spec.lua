-- SPDX-License-Identifier: MIT
--- Several models of one class: their collectives are never paired, in whatever order the ranks run them. Also modules
--- that are wrapped again, with instances below them that have already run.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function make(front)
  local _, nn, fsdp = load()
  local m = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
  if front == "FSDP" then
    m[3] = fsdp.FSDP(m[3])
    return fsdp.FSDP(m)
  end
  fsdp.fully_shard(m[3])
  return fsdp.fully_shard(m)
end

for _, world in ipairs { 2, 3 } do
  for _, front in ipairs { "FSDP", "fully_shard" } do
    ranks.describe(world, ("two models of one class, %s, on %d ranks"):format(front, world), function(rank)
      it("are distinguished if one rank runs them in another order", function()
        local ms = load()
        local a, b = make(front), make(front)
        local x = ms.ones(2, 4)
        local ok, message = pcall(function()
          local order = rank == 1 and { b, a } or { a, b }
          for _, m in ipairs(order) do m(x) end
        end)
        assert.is_false(ok)
        assert.truthy(message:find("the ranks ask for different things", 1, true), message)
        assert.truthy(message:find("of model #", 1, true), message)
        assert.truthy(message:find("all ranks of a group must wrap the same models, in the same order", 1, true),
          message)
        ms.dist.recover()
        -- The models run if all ranks run them in the same order.
        for _ = 1, 2 do
          for _, m in ipairs { a, b } do m(x):sum():backward() end
        end
        assert.is_truthy(a:parameters()[1].grad)
      end)

      it("may run in any order that all ranks share, and in backward too", function()
        local ms = load()
        local a, b = make(front), make(front)
        for step = 1, 3 do
          local y = step % 2 == 0 and a(ms.ones(2, 4)) * b(ms.ones(2, 4)) or b(ms.ones(2, 4)) + a(ms.ones(2, 4))
          y:sum():backward()
        end
      end)
    end)
  end
end

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("a module that is wrapped again on %d ranks"):format(world), function(rank)
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        it(("trains under either root: %s, use_orig_params = %s"):format(strategy, tostring(pieces)), function()
          local ms, nn, fsdp, _, quietly = load()
          local function net()
            ms.manual_seed(2)
            return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
          end
          local options = { sharding_strategy = strategy, use_orig_params = pieces }
          local inner, plain = net(), net()
          for k = 1, 2 do inner[k] = quietly(fsdp.FSDP, inner[k], options) end
          local first = quietly(fsdp.FSDP, inner, options)
          local optimizers = { ms.optim.SGD(plain:parameters(), { lr = 0.01 }),
            ms.optim.SGD(first:parameters(), { lr = 0.01 }) }
          local function train(model)
            for _ = 1, 2 do
              for r = 0, world - 1 do (plain(ms.ones(2, 5) * (r + 1)):pow(2):mean() / world):backward() end
              model(ms.ones(2, 5) * (rank + 1)):pow(2):mean():backward()
              fsdp.check_sharded_parity(plain, model)
              for _, optimizer in ipairs(optimizers) do
                optimizer:step()
                optimizer:zero_grad()
              end
            end
          end
          train(first)
          local second = quietly(fsdp.FSDP, inner, options)
          assert.is_true(second(ms.ones(1, 5)):detach():equal(first(ms.ones(1, 5)):detach()))
          assert.is_false(inner[1]:check_is_root())
          for _, model in ipairs { second, first, second } do train(model) end
        end)
      end
    end

    it("keeps an instance that was a root a root", function()
      local ms, nn, fsdp, _, quietly = load()
      local root = quietly(fsdp.FSDP, nn.Linear(4, 4))
      root(ms.ones(1, 4))
      local around = quietly(fsdp.FSDP, nn.Sequential(root))
      local ok, text = pcall(around, ms.ones(1, 4))
      assert.is_false(ok)
      local expected = "FSDP state has already been lazily initialized for 1\nFSDP requires running forward through the root module first"
      assert.truthy(text:find(expected, 1, true), text)
    end)
  end)
end

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("a part of a sharded model called separately on %d ranks"):format(world), function(rank)
    for _, front in ipairs { "FSDP", "fully_shard" } do
      it("runs forward and backward once the root has: " .. front, function()
        local ms, nn, fsdp, _, quietly = load()
        local function net()
          ms.manual_seed(2)
          return nn.Sequential(nn.Linear(5, 3), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), nn.Linear(5, 5))
        end
        local plain, model = net(), net()
        quietly(function()
          if front == "FSDP" then
            model[2][1] = fsdp.FSDP(model[2][1])
            model[2] = fsdp.FSDP(model[2])
            model = fsdp.FSDP(model)
          else
            fsdp.fully_shard(model[2][1])
            fsdp.fully_shard(model[2])
            fsdp.fully_shard(model)
          end
        end)
        local function both(part, size)
          for r = 0, world - 1 do (part(plain)(ms.ones(2, size) * (r + 1)):pow(2):mean() / world):backward() end
          part(model)(ms.ones(2, size) * (rank + 1)):pow(2):mean():backward()
          fsdp.check_sharded_parity(plain, model)
          for _, m in ipairs { plain, model } do m:zero_grad() end
        end
        local function whole(m) return m end
        both(whole, 5)
        both(function(m) return m[2] end, 3)
        both(function(m) return m[2][1] end, 3)
        both(whole, 5)
      end)
    end
  end)
end
