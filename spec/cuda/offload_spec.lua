-- SPDX-License-Identifier: MIT
--- cpu_offload: shards and gradients on the CPU while another device computes (the emulated GPU if there is no other);
--- zoo_offload_spec trains.
local ranks = require "spec.support.ranks"

for world = 1, 4 do
  ranks.describe(world, ("CPU offload on %d ranks"):format(world), function()
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
          {}, { flat = true, prefetch = "none" }, { precision = { param_dtype = "bfloat16" }, prefetch = "post" },
          { precision = { param_dtype = "bfloat16", reduce_dtype = "float32" } },
          { precision = { param_dtype = "float16", keep_low_precision_grads = true } }, { hook = hook },
          { hook = fsdp.comm_hooks.bf16_compress_hook, state = fsdp.comm_hooks.LowPrecisionState() },
        } do
          local function make(offload)
            ms.manual_seed(0)
            local options = { sharding_strategy = strategy, use_orig_params = not case.hook and not case.flat,
              cpu_offload = offload, device_id = "cuda:0", backward_prefetch = case.prefetch,
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
              if step > 1 then
                m:no_sync(function() for k = 1, step do m(input(10 * step + k)):sum():backward() end end)
              end
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
            if not (case.precision or case.hook or case.flat) then
              assert.is_true(p:numel() == 0 or p:eq(0.25):all():item())
            end
          end
        end
        assert.same({ ["cuda:0"] = true }, seen)
      end)
    end
  end)
end
