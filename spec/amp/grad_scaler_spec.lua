-- SPDX-License-Identifier: MIT
--- Gradient scalers: scaling, unscaling dense and sparse gradients, skipped steps, growth and backoff, over ranks.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"
local nn, optim, amp = ms.nn, ms.optim, ms.amp

local failure = require "spec.support.message"
local function ids(list) return ms.tensor(list, { dtype = "int64" }) end
local function one(value) return ms.full({ 1 }, value) end

-- A leaf with these gradients, under plain gradient descent.
local function with_grad(grad)
  local p = nn.Parameter(ms.zeros_like(grad))
  p.grad = grad
  return p, optim.SGD({ p }, { lr = 1 })
end

for _, name in ipairs { "GradScaler", "ShardedGradScaler" } do
  local Scaler = amp[name]

  describe(name, function()
    it("scales tensors and tables of them to any depth", function()
      local scaler = Scaler { init_scale = 2 }
      assert.is_nil(scaler.scale_tensor)
      local out = scaler:scale { one(8), { one(4), one(8) }, { deep = { one(4) }, flat = one(8) } }
      assert.are.same({ 16, 8, 16, 8, 16 },
        { out[1]:item(), out[2][1]:item(), out[2][2]:item(), out[3].deep[1]:item(), out[3].flat:item() })
      assert.are.equal("cpu", scaler.scale_tensor.device)
      assert.are.equal(1, scaler.scale_tensor:numel())
      local list, at = { one(1), one(2) }, 0
      local seen = {}
      for t in scaler:scale(function() at = at + 1; return list[at] end) do seen[#seen + 1] = t:item() end
      assert.are.same({ 2, 4 }, seen)
      assert.are.equal("outputs must be a Tensor or an iterable of Tensors",
        failure(scaler.scale, scaler, { one(1), 5 }))
      assert.are.equal("outputs must be a Tensor or an iterable of Tensors", failure(scaler.scale, scaler, nn.ReLU()))
    end)

    it("keeps the dtype of what it scales, and its graph", function()
      local scaler = Scaler { init_scale = 2 ^ 10 }
      for _, dtype in ipairs { "float16", "bfloat16", "float32", "float64" } do
        for _, shape in ipairs { {}, { 2 } } do
          local t = ms.ones(shape, { dtype = dtype, requires_grad = true })
          local out = scaler:scale(t)
          assert.are.equal(dtype, out.dtype)
          out:sum():backward()
          assert.are.equal(1024, t.grad:flatten()[1]:item())
        end
      end
      assert.are.equal(math.huge, Scaler({}):scale(ms.tensor(2, { dtype = "float16" })):item())
    end)

    it("unscales gradients once, and refuses wrong use", function()
      local scaler = Scaler { init_scale = 4 }
      local p, o = with_grad(ms.tensor { 8, 16 })
      assert.matches("^Attempted unscale_ but scale_tensor is nil", failure(scaler.unscale_, scaler, o))
      assert.matches("^Attempted update but scale_tensor is nil", failure(scaler.update, scaler))
      scaler:scale(one(1))
      assert.are.equal("No inf checks were recorded prior to update.", failure(scaler.update, scaler))
      scaler:unscale_(o)
      assert.are.same({ 2, 4 }, p.grad:tolist())
      assert.are.equal("unscale_() has already been called on this optimizer since the last update().",
        failure(scaler.unscale_, scaler, o))
      assert.is_true(scaler:step(o))
      assert.are.same({ -2, -4 }, p:tolist())
      assert.are.equal("step() has already been called since the last update().", failure(scaler.step, scaler, o))
      assert.are.equal("unscale_() is being called after step().", failure(scaler.unscale_, scaler, o))
      scaler:update()
      scaler:unscale_(o)
      assert.are.equal("Closure use is not currently supported if GradScaler is enabled.",
        failure(scaler.step, scaler, o, function() end))
    end)

    it("skips a step if a gradient is not finite, and lowers the scale", function()
      for _, bad in ipairs { math.huge, -math.huge, 0 / 0 } do
        local scaler = Scaler { init_scale = 4 }
        local p, o = with_grad(ms.tensor { 1, bad })
        scaler:scale(one(4))
        assert.is_nil(scaler:step(o))
        assert.are.same({ 0, 0 }, p:tolist())
        scaler:update()
        assert.are.equal(2, scaler:get_scale())
        p.grad = ms.tensor { 2, 2 }
        assert.is_true(scaler:step(o))
        assert.are.same({ -1, -1 }, p:tolist())
      end
    end)

    it("raises the scale after growth_interval good steps in a row", function()
      local scaler = Scaler { init_scale = 8, growth_interval = 3, growth_factor = 4, backoff_factor = 0.25 }
      local p, o = with_grad(ms.tensor { 1 })
      scaler:scale(one(1))
      local seen = {}
      for step = 1, 9 do
        p.grad = ms.tensor { step == 3 and math.huge or 1 }
        scaler:step(o)
        scaler:update()
        seen[step] = scaler:get_scale()
      end
      assert.are.same({ 8, 8, 2, 2, 2, 8, 8, 8, 32 }, seen)
      assert.are.equal(4, scaler:get_growth_factor())
      assert.are.equal(0.25, scaler:get_backoff_factor())
      assert.are.equal(3, scaler:get_growth_interval())
      scaler:step(o)
      scaler:update(ms.tensor { 5 })
      assert.are.equal(5, scaler:get_scale())
      scaler:update(6)
      assert.are.equal(6, scaler:get_scale())
      assert.matches("^new_scale should be a float", failure(scaler.update, scaler, ms.ones(2)))
      assert.matches("^new_scale should be a float", failure(scaler.update, scaler,
        ms.ones(1, { requires_grad = true })))
    end)

    it("does not grow beyond float32", function()
      local scaler = Scaler { init_scale = 2 ^ 127, growth_interval = 1 }
      local _, o = with_grad(ms.zeros(1))
      scaler:scale(one(0))
      scaler:step(o)
      scaler:update()
      assert.are.equal(2 ^ 127, scaler:get_scale())
    end)

    it("keeps its state in checkpoints", function()
      local scaler = Scaler { init_scale = 8, growth_interval = 2 }
      local _, o = with_grad(ms.zeros(1))
      scaler:scale(one(0))
      scaler:step(o)
      scaler:update()
      local sd = scaler:state_dict()
      assert.are.same({ scale = 8, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2, growth_tracker = 1 },
        sd)
      local again = Scaler()
      again:load_state_dict(sd)
      assert.are.equal(8, again:get_scale())
      again:scale(one(0))
      again:step(o)
      again:update()
      assert.are.equal(16, again:get_scale())
      assert.matches("^The source state dict is empty", failure(again.load_state_dict, again, {}))
    end)

    it("does nothing when it is not enabled", function()
      local scaler = Scaler { enabled = false }
      assert.is_false(scaler:is_enabled())
      local t = one(3)
      assert.is_true(rawequal(t, scaler:scale(t)))
      local p, o = with_grad(ms.tensor { math.huge })
      scaler:unscale_(o)
      assert.is_true(scaler:step(o))
      assert.are.equal(-math.huge, p:item())
      scaler:update()
      assert.are.equal(1, scaler:get_scale())
      assert.are.same({}, scaler:state_dict())
    end)

    it("checks its options", function()
      assert.are.equal("The growth factor must be > 1.0.", failure(Scaler, { growth_factor = 1 }))
      assert.are.equal("The backoff factor must be < 1.0.", failure(Scaler, { backoff_factor = 1 }))
      assert.matches("unknown option 'init_scal'; did you mean 'init_scale'", failure(Scaler, { init_scal = 1 }))
      local scaler, _, o = Scaler(), with_grad(ms.zeros(1))
      assert.are.equal("inv_scale must be a 1-element tensor.", failure(scaler.unscale_grads_, scaler, o, ms.ones(2),
        one(0)))
      assert.are.equal("found_inf must be a 1-element tensor.", failure(scaler.unscale_grads_, scaler, o, one(1),
        ms.ones(2)))
    end)

    it("unscales sparse gradients", function()
      local scaler, inv_scale, found_inf = Scaler { init_scale = 2 }, one(0.5), one(0)
      local where = ids { { 0, 1, 1 }, { 2, 0, 2 } }
      local function sparse(values) return ms.sparse_coo(where, ms.tensor(values), { 2, 3 }) end
      local s = sparse { 16, 32, 64 }
      local p = s:clone()
      p.grad = s:clone()
      local o = optim.SGD({ p }, { lr = 1 })
      assert.are.equal(0, scaler:unscale_grads_(o, inv_scale, found_inf)[p.device]:item())
      assert.is_true(p.grad:to_dense():equal((s / 2):to_dense()))
      p.grad = sparse { 16, 32, math.huge }
      assert.are.equal(1, scaler:unscale_grads_(o, inv_scale, found_inf:zero_())[p.device]:item())
    end)
  end)
end

describe("GradScaler", function()
  it("refuses float16 gradients and steps without gradients", function()
    local scaler = amp.GradScaler()
    scaler:scale(one(1))
    local _, o = with_grad(ms.ones(2, { dtype = "float16" }))
    assert.are.equal("Attempting to unscale FP16 gradients.", failure(scaler.step, scaler, o))
    local p, other = with_grad(ms.ones(1))
    p.grad = nil
    assert.are.equal("No inf checks were recorded for this optimizer.", failure(scaler.step, scaler, other))
  end)

  it("trains with autocast as without, in a wider range", function()
    ms.manual_seed(1)
    local plain = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    local mixed = ms.deepcopy(plain)
    local optimizers = { optim.SGD(plain:parameters(), { lr = 0.1 }), optim.SGD(mixed:parameters(), { lr = 0.1 }) }
    local scaler = amp.GradScaler { init_scale = 2 ^ 12 }
    local x, y = ms.randn(32, 4), ms.randn(32, 1)
    local first, last, reference
    for _ = 1, 40 do
      reference = nn.F.mse_loss(plain(x), y)
      reference:backward()
      optimizers[1]:step()
      local loss = amp.autocast("float16", function()
        local out = mixed(x)
        assert.are.equal("float16", out.dtype)
        return nn.F.mse_loss(out, y)
      end)
      assert.are.equal("float32", loss.dtype)
      scaler:scale(loss):backward()
      assert.is_true(scaler:step(optimizers[2]))
      scaler:update()
      first, last = first or loss:item(), loss:item()
      for _, o in ipairs(optimizers) do o:zero_grad() end
    end
    assert.is_true(last < 0.9 * first)
    assert.near(reference:item(), last, 0.02 * first)
  end)
end)

describe("a loop with a scaler", function()
  it("keeps native memory flat, skipped steps included", function()
    ms.manual_seed(1)
    local m = nn.Linear(8, 8)
    local o, scaler = optim.SGD(m:parameters(), { lr = 0.1 }),
      amp.ShardedGradScaler { init_scale = 4, growth_interval = 5 }
    local x = ms.randn(4, 8)
    require "spec.support.flat_memory"(function(step)
      scaler:scale(m(x):sum()):backward()
      if step % 4 == 0 then m.weight.grad:mul_(math.huge) end
      scaler:step(o)
      scaler:update()
      o:zero_grad()
    end)
  end)
end)

describe("ShardedGradScaler", function()
  it("takes float16 gradients, whose sums may overflow when they are sparse", function()
    local scaler = amp.ShardedGradScaler { init_scale = 2 }
    local p, o = with_grad(ms.full({ 2 }, 8, { dtype = "float16" }))
    scaler:scale(one(1))
    assert.is_true(scaler:step(o))
    assert.are.same({ -4, -4 }, p:tolist())
    -- 2^15 twice at one place: finite values whose sum exceeds float16.
    local function sparse(where)
      return ms.sparse_coo(ids(where), ms.tensor({ 2 ^ 15, 2 ^ 15, 1 }, { dtype = "float16" }), { 2, 3 })
    end
    local twice = sparse { { 1, 1, 0 }, { 0, 0, 2 } }
    for _, row in ipairs { { twice, 1 }, { sparse { { 1, 1, 0 }, { 0, 1, 2 } }, 0 } } do
      local leaf = row[1]:clone()
      leaf.grad = row[1]:clone()
      local other = optim.SGD({ leaf }, { lr = 1 })            -- each leaf has its own optimizer
      assert.are.equal(row[2], scaler:unscale_grads_(other, one(0.5), one(0)).cpu:item())
    end
  end)

  it("stops at the first gradient that is not finite", function()
    local a, b = nn.Parameter(ms.zeros(1)), nn.Parameter(ms.zeros(1))
    local c = nn.Parameter(ms.zeros(1))
    a.grad, b.grad, c.grad = one(8), one(math.huge), one(8)
    local o = optim.SGD({ a, b, c })
    amp.ShardedGradScaler():unscale_grads_(o, one(0.5), one(0))
    assert.are.same({ 4, 8 }, { a.grad:item(), c.grad:item() })
  end)

  it("gives a found_inf without gradients, too", function()
    local p, o = with_grad(one(1))
    p.grad = nil
    assert.are.equal(0, amp.ShardedGradScaler():unscale_grads_(o, one(0.5), one(0)).cpu:item())
  end)

  it("divides the gradients of every inner tensor", function()
    local Two = ms.Tensor:extend "Two"
    function Two:init(a, b) self.a, self.b = a, b end
    function Two:inner_tensors() return { self.a, self.b } end
    local p = nn.Parameter(Two(ms.zeros(1), ms.zeros(1)))
    p.grad = Two(one(4), one(8))
    amp.ShardedGradScaler():unscale_grads_(optim.SGD { p }, one(0.5), one(0))
    assert.are.same({ 2, 4 }, { p.grad.a:item(), p.grad.b:item() })
  end)
end)

for _, world in ipairs { 2, 3 } do
  ranks.describe(world, ("a scaler over %d ranks #mpi"):format(world), function()
    it("of the sharded kind skips a step on every rank if one found an infinity", function(rank)
      local scaler = amp.ShardedGradScaler { init_scale = 2 }
      for step = 1, 4 do
        local p, o = with_grad(ms.tensor { 2, 4 })
        if rank == 1 and step % 2 == 0 then p.grad[2] = math.huge end
        scaler:scale(one(1))
        local before = scaler:get_scale()
        local result
        local entries = ms.dist.record(function() result = scaler:step(o) end)
        assert.are.equal(1, #entries)
        assert.are.equal("all_reduce", entries[1].op)
        scaler:update()
        if step % 2 == 0 then
          assert.is_nil(result)
          assert.are.same({ 0, 0 }, p:tolist())
          assert.are.equal(before / 2, scaler:get_scale())
        else
          assert.is_true(result)
          assert.are.equal(before, scaler:get_scale())
          assert.are.equal(-2 / before, p[1]:item())
        end
      end
    end)

    it("of the sharded kind asks ranks without gradients too", function(rank)
      local scaler = amp.ShardedGradScaler { init_scale = 2 }
      local p, o = with_grad(ms.tensor { rank == 0 and math.huge or 2 })
      if rank > 0 then p.grad = nil end
      scaler:scale(one(1))
      assert.is_nil(scaler:step(o))
      scaler:update()
      assert.are.equal(1, scaler:get_scale())
    end)

    it("of the sharded kind reduces over its group only", function(rank)
      local scaler = amp.ShardedGradScaler { init_scale = 2, process_group = ms.dist.self_group() }
      local _, o = with_grad(ms.tensor { rank == 0 and math.huge or 2 })
      scaler:scale(one(1))
      assert.are.equal(rank ~= 0 or nil, scaler:step(o))
    end)

    for _, kind in ipairs { "ShardedGradScaler", "GradScaler" } do
      it("steps fully sharded models as one process does: " .. kind, function(rank)
        ms.manual_seed(2)
        local reference = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 1))
        local model = ms.deepcopy(reference)
        ms.fsdp.fully_shard(model[1])
        ms.fsdp.fully_shard(model)
        local make = function(m) return optim.Adam(m:parameters(), { lr = 1e-2 }) end
        local optimizers = { make(reference), make(model) }
        local scalers = { amp.GradScaler { init_scale = 2 }, amp[kind] { init_scale = 2 } }
        for step = 1, 6 do
          local x = ms.randn(4, 6)
          for k, m in ipairs { reference, model } do
            scalers[k]:scale(m(x):sum()):backward()
            if step % 2 == 0 then                          -- an infinity in the sharded gradient, on rank 0 only
              local p = m:parameters()[1]
              if k == 1 then p.grad[1]:fill_(math.huge) elseif rank == 0 then p.grad:to_local():fill_(math.huge) end
            end
            local before = {}
            for i, p in ipairs(m:parameters()) do before[i] = (k == 2 and p:to_local() or p):detach():clone() end
            local result, scale = scalers[k]:step(optimizers[k]), scalers[k]:get_scale()
            scalers[k]:update()
            for i, p in ipairs(m:parameters()) do
              local now = k == 2 and p:to_local() or p
              if now:numel() > 0 then assert.are.equal(step % 2 == 0, now:equal(before[i])) end
            end
            assert.are.equal(step % 2 == 1 or nil, result)
            assert.are.equal(step % 2 == 0 and scale / 2 or scale, scalers[k]:get_scale())
            optimizers[k]:zero_grad()
          end
          ms.fsdp.check_sharded_parity(reference, model)
        end
      end)
    end

    it("of the plain kind asks the ranks that share its parameters, over a mesh, too, and without gradients", function(rank)
      local mesh = ms.dist.init_device_mesh("cpu", { world, 1 }, { names = { "replicate", "shard" } })
      for _, options in ipairs { {}, { mesh = mesh } } do
        ms.manual_seed(2)
        local model = ms.fsdp.fully_shard(nn.Linear(4, 4), options)
        local o, scaler = optim.SGD(model:parameters(), { lr = 1 }), amp.GradScaler { init_scale = 2 }
        scaler:scale(one(1))
        assert.error_matches(function() scaler:step(o) end, "No inf checks were recorded for this optimizer.")
        model(ms.ones(1, 4)):sum():backward()
        if rank > 0 then model:zero_grad() else model.weight.grad:to_local():fill_(math.huge) end
        local before = model.weight:to_local():detach():clone()
        local again = amp.GradScaler { init_scale = 2 }
        again:scale(one(1))
        assert.is_nil(again:step(o))
        again:update()
        assert.are.equal(1, again:get_scale())
        assert.is_true(model.weight:to_local():equal(before))
      end
    end)

    -- One rank's second step fails, and the rank's script catches the error. The other ranks may already have done the
    -- part of the step that it skipped.
    local FRONTS = {
      DDP = function(m) return nn.DDP(m) end,
      FSDP = function(m) return require("spec.support.wrapped").quietly(ms.fsdp.FSDP, m) end,
      fully_shard = function(m) return ms.fsdp.fully_shard(m) end,
    }
    local function part(p) return (p.placements and p:to_local() or p):detach() end
    for front, wrap in ms.sorted_pairs(FRONTS) do
      for _, kind in ipairs { "ShardedGradScaler", "GradScaler" } do
        for _, place in ipairs { "before unscale_", "after unscale_", "in the optimizer's step", "before update" } do
          -- Also with an infinite gradient, except for DDP and FSDP with a plain GradScaler: there each rank checks its
          -- own gradients only.
          for _, infinite in ipairs { false, (kind == "ShardedGradScaler" or front == "fully_shard") or nil } do
            it(("of class %s scales right again after an error %s of %s%s"):format(kind, place, front, infinite
              and ", with an infinity" or ""), function(rank)
              local bad = world - 1
              ms.manual_seed(3)
              local model = wrap(nn.Linear(5, 4))
              local o, scaler = optim.SGD(model:parameters(), { lr = 0.1 }), amp[kind] { init_scale = 8,
                growth_interval = 4 }
              local start = {}
              for k, p in ipairs(model:parameters()) do start[k] = part(p):clone() end
              local function train(step, with, fails)
                local function here(at) if fails and at == place then error("its own", 0) end end
                o:zero_grad()
                with:scale(model(ms.ones(2, 5) * (rank + step)):sum()):backward()
                if infinite and step == 2 then
                  for _, p in ipairs(model:parameters()) do
                    local g = (p.placements and p:to_local() or p).grad
                    if g then g:fill_(math.huge) end
                  end
                end
                here "before unscale_"
                with:unscale_(o)
                here "after unscale_"
                if fails and place == "in the optimizer's step" then o.param_groups[1].lr = "x" end
                with:step(o)
                here "before update"
                with:update()
              end
              local function from_start(with)
                ms.no_grad(function() for k, p in ipairs(model:parameters()) do part(p):copy_(start[k]) end end)
                for step = 7, 8 do train(step, with) end
                local parts = {}
                for k, p in ipairs(model:parameters()) do parts[k] = part(p):tolist() end
                return parts
              end
              for step = 1, 6 do
                local ok = pcall(train, step, scaler, rank == bad and step == 2)
                o.param_groups[1].lr = 0.1
                ms.dist.recover()
                assert.is_true(ok or step < 5)
              end
              local scales = ms.dist.all_gather_object(scaler:get_scale())
              for _, scale in ipairs(scales) do assert.equal(scales[1], scale) end
              assert.same(from_start(amp[kind] { init_scale = 8 }), from_start(scaler))
            end)
          end
        end
      end
    end

    it("retries a step that failed, but not with other gradients", function()
      local model = ms.fsdp.fully_shard(nn.Linear(world, 2))
      local o, scaler = optim.SGD(model:parameters(), { lr = 0.1 }), amp.ShardedGradScaler { init_scale = 8 }
      local function backward() scaler:scale(model(ms.ones(2, world)):sum()):backward() end
      local function failing()
        o.param_groups[1].lr = "x"
        assert.matches("lr", failure(scaler.step, scaler, o))
        o.param_groups[1].lr = 0.1
      end
      backward()
      failing()
      assert.is_true(scaler:step(o))
      scaler:update()
      o:zero_grad()
      backward()
      failing()
      backward()
      assert.matches("^step%(%) has failed after it had unscaled these gradients", failure(scaler.step, scaler, o))
      o:zero_grad()
      backward()
      assert.is_true(scaler:step(o))
    end)

    -- Ways to leave gradients unreduced. Each returns the wrapped model, and a function that runs fn without the
    -- reduction.
    local quietly, ways = require("spec.support.wrapped").quietly, require "spec.support.ways"
    local WAYS = {
      ["FSDP"] = function(m)
        m = quietly(ms.fsdp.FSDP, m)
        return m, function(fn) m:no_sync(fn) end
      end,
      ["FSDP, use_orig_params"] = function(m)
        m = quietly(ms.fsdp.FSDP, m, { use_orig_params = true })
        return m, function(fn) m:no_sync(fn) end
      end,
      ["fully_shard, gradient sync"] = function(m)
        ms.fsdp.fully_shard(m)
        return m, function(fn) ways.without(m, "set_requires_gradient_sync", fn) end
      end,
      ["fully_shard, all-reduce"] = function(m)
        ms.fsdp.fully_shard(m, { mesh = ms.dist.init_device_mesh("cpu", { world, 1 },
          { names = { "replicate", "shard" } }) })
        return m, function(fn) ways.without(m, "set_requires_all_reduce", fn) end
      end,
      ["fully_shard, last backward"] = function(m)
        ms.fsdp.fully_shard(m)
        return m, function(fn) ways.without(m, "set_is_last_backward", fn) end
      end,
    }
    for way, make in ms.sorted_pairs(WAYS) do
      for _, kind in ipairs { "ShardedGradScaler", "GradScaler" } do
        it(("of class %s refuses gradients of which some are not reduced yet, and accepts all of them later: %s"):format(kind,
          way), function(rank)
          ms.manual_seed(3)
          local reference = nn.Linear(5, 4)
          local model, unreduced = make(ms.deepcopy(reference))
          local optimizers = { optim.SGD(reference:parameters(), { lr = 0.1 }),
            optim.SGD(model:parameters(), { lr = 0.1 }) }
          local scalers = { amp.GradScaler { init_scale = 8 }, amp[kind] { init_scale = 8 } }
          local function backward(k)
            for r = 0, world - 1 do
              (scalers[1]:scale(reference(ms.ones(2, 5) * (r + k)):pow(2):sum()) / world):backward()
            end
            scalers[2]:scale(model(ms.ones(2, 5) * (rank + k)):pow(2):sum()):backward()
          end
          for step = 1, 2 do
            backward(1)                                     -- a reduced gradient comes first
            unreduced(function() backward(2) end)
            for _, name in ipairs { "unscale_", "step" } do
              assert.truthy(failure(scalers[2][name], scalers[2],
                optimizers[2]):find("^the gradients of parameter '[%w_]+' have not been reduced; run a backward that "
                .. "reduces them first: outside of no_sync, with set_requires_gradient_sync, "
                .. "set_requires_all_reduce and set_is_last_backward at true$"), step)
            end
            backward(3)
            ms.fsdp.check_sharded_parity(reference, model)  -- no gradient has been unscaled
            for k = 1, 2 do
              scalers[k]:unscale_(optimizers[k])
              assert.is_true(scalers[k]:step(optimizers[k]))
              scalers[k]:update()
            end
            ms.fsdp.check_sharded_parity(reference, model)
            for k = 1, 2 do optimizers[k]:zero_grad() end
          end
        end)
      end
    end
  end)
end
