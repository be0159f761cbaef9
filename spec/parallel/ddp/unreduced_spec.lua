-- SPDX-License-Identifier: MIT
--- Gradients that nn.DDP has not reduced: optimizers and clipping refuse them on all ranks, until a backward or the
--- script itself has reduced them (docs/semantics.md#ddp-no-sync).
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"

local function make(options)
  local ms, nn = load()
  local net = nn.Sequential(nn.Linear(2, 1, { bias = false }))
  ms.no_grad(function() net[1].weight:zero_() end)
  return nn.DDP(net, options), net[1].weight
end

local function input(rank) return load().full({ 1, 2 }, rank + 1) end

-- Ways to leave a gradient of rank + 1 on each rank.
local ways = {
  { "a backward inside no_sync", function(m, x) m:no_sync(function() m(x):sum():backward() end) end },
  { "a forward inside no_sync, its backward outside", function(m, x)
    m:no_sync(function() return m(x):sum() end):backward()
  end },
  { "a forward of the wrapped module", function(m, x) m.module(x):sum():backward() end },
  { "a gradient divided in place", function(m, x, p)
    m:no_sync(function() (m(x):sum() * 2):backward() end)
    p.grad:div_(2)
  end },
  { "a gradient replaced by a multiple", function(m, x, p)
    m:no_sync(function() (m(x):sum() * 2):backward() end)
    p.grad = p.grad / 2
  end },
  { "a reduced gradient, then a backward inside no_sync", function(m, x, p)
    m(x):sum():backward()
    p.grad:zero_()
    m:no_sync(function() m(x):sum():backward() end)
  end },
}

local function sgd(m) return load().optim.SGD(m:parameters(), { lr = 1 }) end

-- What reads gradients.
local readers = {
  { "step", function(m) return sgd(m):step() end },
  { "step_clipped", function(m) return sgd(m):step_clipped(1) end },
  { "clip_grad_norm_", function(m) return load().nn.utils.clip_grad_norm_(m:parameters(), 1) end },
  { "clip_grad_value_", function(m) return load().nn.utils.clip_grad_value_(m:parameters(), 1) end },
  { "clip_grads_with_norm_", function(m) return load().nn.utils.clip_grads_with_norm_(m:parameters(), 1, 2) end },
  { "a scaler's step", function(m)
    local scaler = load().amp.GradScaler { init_scale = 1 }
    scaler:scale(load().ones(1))
    return scaler:step(sgd(m))
  end },
  { "ZeroRedundancyOptimizer", function(m)
    local ms = load()
    return ms.optim.ZeroRedundancyOptimizer(m:parameters(), { optimizer_class = ms.optim.SGD, lr = 1 }):step()
  end },
  { "PostLocalSGDOptimizer", function(m)
    local hooks = load().nn.ddp_hooks
    return hooks.PostLocalSGDOptimizer(sgd(m), hooks.PeriodicModelAverager { period = 2 }):step()
  end },
  { "AdamW", function(m) return load().optim.AdamW(m:parameters(), { lr = 1 }):step() end },
  { "LAMB", function(m) return load().optim.LAMB(m:parameters(), { lr = 1 }):step() end },
  { "Muon", function(m) return load().optim.Muon(m:parameters(), { lr = 1 }):step() end },
  { "Adafactor", function(m) return load().optim.Adafactor(m:parameters(), { lr = 1 }):step() end },
  { "LBFGS", function(m) return load().optim.LBFGS(m:parameters(), { lr = 1 }):step(function() return load().ones(1) end) end },
}

-- What makes a gradient usable: fn(m, x, p) -> the right gradient on `world` ranks.
local function mean(world) return (world + 1) / 2 end
local remedies = {
  { "a later backward outside of no_sync", function(m, x) m(x):sum():backward() end,
    function(world) return 2 * mean(world) end },
  { "the script's all_reduce", function(_, _, p) load().dist.all_reduce(p.grad, { op = "avg" }) end, mean },
  { "a copy of what the script has reduced", function(_, _, p)
    local flat = p.grad:clone():view(-1)
    load().dist.all_reduce(flat)
    p.grad:copy_(flat:div_(load().dist.world_size()):view(1, 2))
  end, mean },
  { "an assignment of what the script has reduced", function(_, _, p)
    local whole = p.grad:clone()
    load().dist.all_reduce(whole, { op = "avg" })
    p.grad = whole
  end, mean },
  { "an assignment after the gradient was cleared", function(_, _, p)
    local whole = p.grad:clone()
    load().dist.all_reduce(whole)
    p.grad = nil
    p.grad = whole / load().dist.world_size()
  end, mean },
  { "zero_grad { set_to_none = false }", function(m) m:zero_grad { set_to_none = false } end, function() return 0 end },
  { "zeros", function(_, _, p) p.grad:zero_() end, function() return 0 end },
}

local REASON = "has not been reduced: it comes from a backward inside no_sync, or of a forward that was not called through nn.DDP, or one that "
  .. "did not reach all parameters of nn.DDP; run a backward that reduces it first"

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("gradients that DDP has not reduced on %d ranks #mpi"):format(world), function()
    -- All ranks raise, and continue together; a single rank has nothing to reduce.
    local function refused(fn, ...)
      local _, _, dist = load()
      local ok, why = pcall(fn, ...)
      if world == 1 then return assert.is_true(ok, tostring(why)) end
      assert.is_false(ok)
      assert.truthy(tostring(why):find(REASON, 1, true), tostring(why))
      dist.recover()
    end

    for _, options in ipairs { {}, { gradient_as_bucket_view = true }, { find_unused_parameters = true } } do
      local name = next(options) or "no options"
      it("are refused by optimizers and clipping: " .. name, function(rank)
        load().catch_warnings(function()
          for k, way in ipairs(ways) do
            for j, reader in ipairs(readers) do
              if k == 1 or j == 1 then
                local m, p = make(options)
                way[2](m, input(rank), p)
                refused(reader[2], m)
              end
            end
          end
        end)
      end)

      for _, remedy in ipairs(remedies) do
        it(("are taken after %s: %s"):format(remedy[1], name), function(rank)
          load().catch_warnings(function()
            local m, p = make(options)
            local optimizer = sgd(m)
            m:no_sync(function() m(input(rank)):sum():backward() end)
            refused(optimizer.step, optimizer)
            local ms = load()
            ms.no_grad(function() p:zero_() end)          -- a single rank has stepped
            remedy[2](m, input(rank), p)
            ms.testing.assert_close(p.grad, ms.full({ 1, 2 }, remedy[3](world)))
            optimizer:step()
            ms.testing.assert_close(p:detach(), ms.full({ 1, 2 }, -remedy[3](world)))
          end)
        end)
      end
    end

    it("are refused at the first step if the backward did not reach all parameters", function(rank)
      local ms, nn = load()
      local m = nn.DDP(require("spec.support.models.double_linear").DoubleLinear(3, { use_second_linear = false }))
      m(ms.ones(1, 3) * (rank + 1)):sum():backward()
      refused(function() sgd(m):step() end)
    end)

    it("are refused if they are sparse", function(rank)
      local ms, nn = load()
      local ids = ms.tensor({ rank }, { dtype = "int64" })
      for _, name in ipairs { "SGD", "SparseAdam", "LBFGS", "clip_grad_norm_", "clip_grad_value_" } do
        local m = nn.DDP(nn.Embedding(4, 1, { sparse = true }))
        local optimizer = not name:find "clip" and ms.optim[name](m:parameters(), { lr = 1 })
        local function read()
          if not optimizer then return nn.utils[name](m:parameters(), 1) end
          return optimizer:step(name == "LBFGS" and function() return ms.ones(1) end or nil)
        end
        m:no_sync(function() m(ids):sum():backward() end)
        local ok, why = pcall(read)
        assert.equal(world == 1, ok)
        if world > 1 then assert.truthy(tostring(why):find("has not been reduced", 1, true), tostring(why)) end
        ms.dist.recover()
        m(ids):sum():backward()
        assert.near(2 / world, m.weight.grad:tolist()[rank + 1][1], 1e-6)
        if optimizer and name == "SGD" then optimizer:step() end
      end
    end)

    it("are not captured", function(rank)
      local ms = load()
      local m = make()
      local step = ms.capture(function(x) m:no_sync(function() m(x):sum():backward() end) end)
      step(input(rank))
      local ok, why = pcall(step, input(rank))
      assert.equal(world == 1, ok)
      if world > 1 then assert.truthy(why:find("it leaves gradients of DDP unreduced, as in no_sync", 1, true), why) end
    end)

    it("are reduced by a captured step that follows", function(rank)
      local ms = load()
      local m, p = make()
      local optimizer = ms.optim.SGD(m:parameters(), { lr = 0 })
      local step = ms.capture(function(x) m(x):sum():backward() end, { warmup = 2 })
      for k = 1, 5 do
        m:no_sync(function() m(input(rank)):sum():backward() end)
        step(input(rank))
        optimizer:step()
        ms.testing.assert_close(p.grad, ms.full({ 1, 2 }, 2 * k * mean(world)))
      end
    end)
  end)
end
