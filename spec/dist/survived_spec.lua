-- SPDX-License-Identifier: MIT
-- Errors that scripts survive: work that fails on one rank fails on all ranks, and after dist.recover goes on right.
local ranks = require "spec.support.ranks"

-- An error reaches 2 peers as it reaches 3: scripts/test --long has 3 ranks, too.
for _, world in ipairs(os.getenv "MOONSHARD_LONG" and { 2, 3, 4 } or { 2, 4 }) do
  ranks.describe(world, "errors that scripts survive", function()
    local ms = require "moonshard"
    local nn, fsdp, dist, optim = ms.nn, ms.fsdp, ms.dist, ms.optim
    local rank = dist.rank()
    local K = { dtype = "float64" }

    local fronts = {
      no_shard = function(m) return fsdp.FSDP(m, { sharding_strategy = "no_shard", use_orig_params = true }) end,
      no_shard_flat = function(m) return fsdp.FSDP(m, { sharding_strategy = "no_shard" }) end,
      full_shard = function(m) return fsdp.FSDP(m) end,
      fully_shard = function(m) return fsdp.fully_shard(m) end,
      ddp = function(m) return nn.DDP(m) end,
    }

    -- A module whose forward fails at the place that its field `armed` names.
    local Weak = nn.Module:extend "Weak"
    function Weak:init() self.a = nn.Linear(3, 3, K) end
    function Weak:forward(x)
      if self.armed then error("this rank's forward failed", 0) end
      return self.a(x):tanh()
    end

    local function input(step, r)
      ms.manual_seed(100 * step + r)
      return ms.randn(2, 3, K)
    end

    -- Attempts of a step: `failures` consecutive ones fail on rank `bad`, then one succeeds; compared with a single
    -- process that never fails.
    local function train(wrap, bad, failures)
      ms.manual_seed(1)
      local weak = Weak()
      ms.manual_seed(1)
      local alone = Weak()
      local m = wrap(weak)
      local o, ro = optim.SGD(m:parameters(), { lr = 0.1 }), optim.SGD(alone:parameters(), { lr = 0.1 })
      local texts = {}
      for step = 1, 3 do
        for try = 1, failures do
          weak.armed = rank == bad
          local ok, why = pcall(function() m(input(10 * step + try, rank)):pow(2):sum():backward() end)
          weak.armed = nil
          assert.is_false(ok)
          texts[#texts + 1] = tostring(why)
          dist.recover()
          o:zero_grad()
        end
        m(input(step, rank)):pow(2):sum():backward()
        o:step()
        o:zero_grad()
        for r = 0, world - 1 do (alone(input(step, r)):pow(2):sum() / world):backward() end
        ro:step()
        ro:zero_grad()
        local probe = input(99, 0)
        local want, got = alone(probe), m(probe)
        assert.is_true((want - got):abs():max():item() < 1e-12)
      end
      return texts
    end

    for name, wrap in ms.sorted_pairs(fronts) do
      for _, failures in ipairs { 1, 3 } do
        it(("%s: %d failed tries of one rank are %d on the others, and the other steps match"):format(name, failures,
          failures), function()
          for bad = 0, world - 1, world - 1 do
            for _, why in ipairs(train(wrap, bad, failures)) do
              assert.matches(rank == bad and "^this rank's forward failed"
                or ("rank %d failed: this rank's forward failed"):format(bad), why)
            end
          end
        end)
      end

      it(name .. ": all ranks fail three times by themselves, and the other steps match", function()
        for _, why in ipairs(train(wrap, rank, 3)) do assert.matches("this rank's forward failed", why) end
      end)
    end

    -- Calls that communicate several times: wrong on one rank, correct on the others.
    local process = require "spec.support.process"
    local fsdp_model, optimizer, folder
    local function model()
      if not fsdp_model then
        folder = process.temp_folder()
        ms.manual_seed(3)
        fsdp_model = fsdp.FSDP(Weak())
        optimizer = optim.AdamW(fsdp_model:parameters(), { lr = 0.1 })
        fsdp_model(input(1, rank)):sum():backward()
        optimizer:step()
      end
      return fsdp_model, optimizer
    end
    local function alone() return nn.Linear(2, 2) end
    local function zero(o) return optim.ZeroRedundancyOptimizer(alone():parameters(), o) end
    local function scaled(group)
      local scaler, p = ms.amp.ShardedGradScaler { init_scale = 2, process_group = group }, nn.Parameter(ms.ones(2))
      p.grad = ms.ones(2)
      scaler:scale(ms.ones(1))
      return scaler, optim.SGD({ p }, { lr = 0.1 })
    end
    local function average(params) nn.ddp_hooks.PeriodicModelAverager({ period = 2 }):average_parameters(params) end
    local sgd = { optimizer_class = optim.SGD, lr = 0.1 }
    local wrong = {
      ["fsdp.state_dict"] = { function() fsdp.state_dict(model(), { type = "ful" }) end,
        function() fsdp.state_dict((model())) end },
      ["FSDP:state_dict"] = { function() model():state_dict { full = true } end, function() model():state_dict() end },
      ["fsdp.load_state_dict"] = {
        function() fsdp.load_state_dict(model(), 3) end,
        function() fsdp.load_state_dict(model(), {}, { broadcast_from_rank0 = true, strict = false }) end,
      },
      ["fsdp.optim_state_dict"] = { function() fsdp.optim_state_dict(model(), {}) end,
        function() fsdp.optim_state_dict(model()) end },
      ["fsdp.summon_full_params"] = {
        function() fsdp.summon_full_params(model(), { writebak = true }, print) end,
        function() fsdp.summon_full_params(model(), function() end) end,
      },
      ["fsdp.save"] = { function() fsdp.save(3, model()) end, function() fsdp.save(folder .. "/saved", model()) end },
      ["fsdp.load"] = { function() fsdp.load(nil, model()) end, function() fsdp.load(folder .. "/saved", model()) end },
      ["FSDP:clip_grad_norm_"] = { function() model():clip_grad_norm_(-1) end,
        function() model():clip_grad_norm_(1) end },
      ["nn.utils.clip_grad_norm_"] = {
        function() nn.utils.clip_grad_norm_(model():parameters(), "x") end,
          function() nn.utils.clip_grad_norm_(model():parameters(), 1) end,
      },
      unshard = { function() fsdp.fully_shard(alone()):unshard { asinc = true } end,
      function() fsdp.fully_shard(alone()):unshard() end },
      ["nn.DDP"] = { function() nn.DDP(alone(), { bucket_cap_mb = 0 }) end, function() nn.DDP(alone()) end },
      ["fsdp.FSDP"] = {
        function() fsdp.FSDP(alone(), { sync_module_states = 1 }) end,
          function() fsdp.FSDP(alone(), { sync_module_states = true }) end,
      },
      ["optim.ZeroRedundancyOptimizer"] = { function() zero { optimizer_class = 3 } end, function() zero(sgd) end },
      ["ShardedGradScaler:step"] = {
        function()
          local scaler, o = scaled()
          scaler:step(o, function() end)
        end,
        function()
          local scaler, o = scaled()
          scaler:step(o)
        end,
      },
      ["ShardedGradScaler:unscale_"] = {
        function()
          local scaler, o = scaled()
          scaler.scale_tensor = nil
          scaler:unscale_(o)
        end,
        function()
          local scaler, o = scaled()
          scaler:unscale_(o)
        end,
      },
      ["average_parameters"] = { function() average(3) end, function() average { ms.ones(2) } end },
      ["consolidate_state_dict"] = {
        function() zero(sgd):consolidate_state_dict(world) end, function() zero(sgd):consolidate_state_dict(0) end,
      },
    }
    for name, calls in ms.sorted_pairs(wrong) do
      it(name .. " refused on one rank fails on the others, and the next collective is right", function()
        model()
        for _, bad in ipairs { 0, world - 1 } do
          local ok, why = pcall(calls[rank == bad and 1 or 2])
          -- A call that ends without the failing rank may be over before the error arrives; then the next collective
          -- raises it.
          if ok then ok, why = pcall(dist.barrier) end
          assert.is_false(ok)
          local from = tonumber(why:match "rank (%d) failed: " or why:match "%(on rank (%d)%)$")
          assert.are.equal(rank ~= bad and bad or nil, from)
          dist.recover()
          local t = ms.full({ 2 }, rank + 1)
          dist.all_reduce(t)
          assert.are.equal(world * (world + 1) / 2, t[1]:item())
        end
      end)
    end

    it("leave nothing behind", function() process.remove_folder(folder) end)

    it("a call without memory for what it receives fails on all ranks with the reason", function()
      local lib = require("moonshard.core.ffi").lib
      local calls = {
        function() return dist.all_gather_object { ms.ones(3), ms.ones(2) } end,
        function() return dist.broadcast_object({ ms.ones(3) }, { src = 0 }) end,
        function() return dist.gather(ms.ones(3), { dst = 0 }) or true end,
      }
      for _, call in ipairs(calls) do
        for _, bad in ipairs { 0, world - 1 } do
          for n = 1, 12 do
            if rank == bad then lib.ms_fail_allocation(n) end
            local ok, why = pcall(function()
              call()
              dist.barrier()
            end)
            lib.ms_fail_allocation(0)
            if not ok then assert.matches("no memory for %d+ bytes", why) end
            dist.recover()
          end
        end
      end
    end)

    -- The other ranks have completed this step, so their parameters no longer match this rank's.
    for name, wrap in ms.sorted_pairs(fronts) do
      it("a step of an optimizer, and a clipping, that fails on one rank is raised on the others: " .. name, function()
        local m = wrap(Weak())
        local o = optim.SGD(m:parameters(), { lr = 0.1 })
        local acts = {
          function(fails)
            o.param_groups[1].lr = fails and "x" or 0.1
            o:step()
          end,
          function(fails) nn.utils.clip_grad_norm_(m:parameters(), fails and "x" or 1) end,
        }
        for _, bad in ipairs { 0, world - 1 } do
          for _, act in ipairs(acts) do
            m(input(1, rank)):sum():backward()
            local ok, why = pcall(function()
              act(rank == bad)
              dist.barrier()
            end)
            assert.is_false(ok)
            if rank ~= bad then assert.matches(("rank %d failed: .*expected"):format(bad), why) end
            dist.recover()
            local t = ms.full({ 1 }, rank + 1)
            dist.all_reduce(t)
            assert.are.equal(world * (world + 1) / 2, t:item())
            o:zero_grad()
          end
        end
      end)
    end

    it("wrong calls that concern no other rank break nothing", function()
      local mine = dist.self_group()
      if rank == 0 then
        for _, fn in ipairs {
          function() dist.all_reduce("x", { group = mine }) end,
          function() nn.DDP(3, { process_group = mine }) end,
          function() fsdp.state_dict(alone(), { type = "x" }) end,
          function() fsdp.summon_full_params(alone(), 3) end,
          function() fsdp.summon_full_params(model(), function() error("in the block", 0) end) end,
          function() nn.utils.clip_grad_norm_({ ms.ones(1) }, "x") end,
          function() dist.rank "x" end,
          function()
            local scaler, o = scaled(mine)
            scaler:step(o, function() end)
          end,
          function() dist.mesh_from_group(3) end,
          function() alone():load_state_dict {} end,
          function()
            local o = optim.SGD(alone():parameters(), { lr = 0.1 })
            o.param_groups[1].lr = "x"
            o:step()
          end,
        } do
          assert.is_false((pcall(fn)))
        end
      else
        fsdp.summon_full_params(model(), function() end)
      end
      local t = ms.full({ 2 }, rank + 1)
      dist.all_reduce(t)
      assert.are.equal(world * (world + 1) / 2, t[1]:item())
    end)

    it("nested work that one error ends fails once", function()
      ms.manual_seed(2)
      local weak = Weak()
      local m = fsdp.fully_shard(weak)
      -- The backward fails because of an error in a forward inside one of its hooks.
      local hooked = true
      local function try()
        local out = m(input(1, rank))
        out:register_hook(function()
          if hooked then
            weak.armed = rank == 0
            m(input(2, rank))
          end
        end)
        out:sum():backward()
      end
      assert.is_false((pcall(try)))
      hooked, weak.armed = false, nil
      dist.recover()
      try()
      dist.barrier()
    end)
  end)
end
