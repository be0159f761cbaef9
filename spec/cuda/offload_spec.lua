-- SPDX-License-Identifier: MIT
--- cpu_offload: shards, gradients and optimizer on the CPU while another device computes (the emulated GPU if there is
--- no other).
local ranks = require "spec.support.ranks"

for world = 1, 4 do
  ranks.describe(world, ("CPU offload on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        it(("FSDP computes on cuda and keeps its shards on the CPU: %s, use_orig_params = %s"):format(strategy,
          tostring(pieces)), function(rank)
          local ms = require "moonshard"
          local quietly = require "spec.support.wrapped".quietly
          local nn, fsdp = ms.nn, ms.fsdp
          local function build()
            ms.manual_seed(0)
            return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
          end
          local reference, model = build(), build()
          local options = { sharding_strategy = strategy, use_orig_params = pieces, cpu_offload = true,
            device_id = "cuda:0" }
          model = quietly(function()
            model[3] = fsdp.FSDP(model[3], options)
            return fsdp.FSDP(model, options)
          end)
          local a, b = ms.optim.Adam(reference:parameters(), { lr = 0.01 }),
            ms.optim.Adam(model:parameters(), { lr = 0.01 })
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

    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      it("gives what FSDP gives without offload, to the bit: precision, no_sync, hooks, clipping, summoning; "
        .. strategy, function(rank)
        local ms = require "moonshard"
        local quietly = require "spec.support.wrapped".quietly
        local nn, fsdp, dist = ms.nn, ms.fsdp, ms.dist
        local function input(step)
          ms.manual_seed(100 + rank + step * 10)
          return ms.rand(4, 8)
        end
        local function check(a, b)
          for k, p in ipairs(a:parameters()) do
            local q = b:parameters()[k]
            assert.equal("cuda:0", p.grad.device)
            assert.truthy(q.grad.device:find "^cpu")
            assert.equal(p.grad.dtype, q.grad.dtype)
            assert.is_true(p.grad:to("cpu"):equal(q.grad))
          end
        end
        local seen = {}
        local function hook(_, grad, output)
          seen[grad.device] = true
          if output then dist.reduce_scatter(output, grad) else dist.all_reduce(grad) end
        end
        for _, case in ipairs {
          {}, { precision = { param_dtype = "bfloat16" } },
          { precision = { param_dtype = "bfloat16", reduce_dtype = "float32" } },
          { precision = { param_dtype = "float16", keep_low_precision_grads = true } }, { hook = hook },
          { hook = fsdp.comm_hooks.bf16_compress_hook, state = fsdp.comm_hooks.LowPrecisionState() },
        } do
          local function make(offload)
            ms.manual_seed(0)
            local options = { sharding_strategy = strategy, use_orig_params = case.hook == nil, cpu_offload = offload,
              device_id = "cuda:0",
              mixed_precision = case.precision and fsdp.MixedPrecision(case.precision) or nil }
            local model = quietly(function()
              return fsdp.FSDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), fsdp.FSDP(nn.Linear(16, 8), options)),
                options)
            end)
            if case.hook then model:register_comm_hook(case.state, case.hook) end
            return model
          end
          local plain, model = make(false), make(true)
          for step = 1, 3 do
            for _, m in ipairs { plain, model } do
              if step == 2 then m:no_sync(function() m(input(7)):sum():backward() end) end
              m(input(step)):sum():backward()                   -- moves the input to the device
            end
            check(plain, model)
          end
          if not case.precision then
            ms.testing.assert_close(model:clip_grad_norm_(0.5):to "cpu", plain:clip_grad_norm_(0.5):to "cpu")
          end
          fsdp.summon_full_params(model, function()
            for _, p in ipairs(model:parameters()) do
              assert.equal("cuda:0", p.device)
              ms.no_grad(function() p:fill_(0.25) end)
            end
          end)
          for _, p in ipairs(model:parameters()) do
            assert.truthy(p.device:find "^cpu")
            if case.precision == nil and case.hook == nil then
              assert.is_true(p:numel() == 0 or p:eq(0.25):all():item())
            end
          end
        end
        assert.same({ ["cuda:0"] = true }, seen)
      end)
    end
  end)
end
