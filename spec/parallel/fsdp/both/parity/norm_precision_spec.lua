-- SPDX-License-Identifier: MIT
--- Normalization in mixed precision (docs/semantics.md#mixed-precision): supported and refused combinations, and batch
--- norms in units of their own.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

for world = 2, 3 do
  ranks.describe(world, ("norms in mixed precision on %d ranks"):format(world), function()
    for _, dtype in ipairs { "bfloat16", "float16" } do
      -- Three layers, the second one a norm, each a unit, and the root; norm: the policy of the second.
      local function sharded(layers, norm)
        local _, nn, fsdp = load()
        local policy = fsdp.MixedPrecisionPolicy { param_dtype = dtype }
        local model = nn.Sequential(unpack(layers))
        for k = 1, 3 do fsdp.fully_shard(model[k], { mp_policy = k == 2 and norm or policy }) end
        return fsdp.fully_shard(model, { mp_policy = policy })
      end

      local function run(model, ...)
        local ms = load()
        local out = model(ms.randn(...))
        assert.equal(dtype, out.dtype)
        out:sum():backward()
        for name, p in model:named_parameters() do
          assert.equal("float32", p.grad.dtype, name)
          assert.is_true(p.grad:to_local():isfinite():all():item(), name)
        end
      end

      local function images()
        local _, nn = load()
        return { nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3) }
      end

      it("LayerNorm and BatchNorm1d compute in " .. dtype, function()
        local _, nn = load()
        for _, norm in ipairs { nn.LayerNorm, nn.BatchNorm1d } do
          run(sharded { nn.Linear(32, 32), norm(32), nn.Linear(32, 32) }, 4, 32)
        end
      end)

      it(("BatchNorm2d with weights in %s and statistics in float32 is refused"):format(dtype), function()
        local ms = load()
        local text = message(run, sharded(images()), 3, 1, 9, 9)
        assert.truthy(text:find(("Expected running_mean to have type %s but got float32"):format(dtype), 1, true), text)
        -- As in PyTorch, the mixed dtypes are no error without a graph or in eval mode.
        ms.no_grad(function() assert.equal(dtype, sharded(images())(ms.randn(3, 1, 9, 9)).dtype) end)
        assert.equal(dtype, sharded(images()):eval()(ms.randn(3, 1, 9, 9)).dtype)
      end)

      it(("BatchNorm2d in %s works if its buffers are cast, too"):format(dtype), function()
        local ms = load()
        local model = sharded(images())
        for _, name in ipairs { "running_mean", "running_var" } do model[2][name] = model[2][name]:to(dtype) end
        run(model, 3, 1, 9, 9)
        assert.equal(dtype, model[2].running_mean.dtype)
        assert.is_true(ms.no_grad(function() return model[2].running_mean:ne(0):any():item() end))
      end)

      it(("BatchNorm2d among layers in %s works in full precision, where its policy has an output_dtype only"):format(
        dtype), function()
        local _, _, fsdp = load()
        local model = sharded(images(), fsdp.MixedPrecisionPolicy { output_dtype = dtype })
        local seen
        model[2]:register_forward_hook(function(m) seen = m.weight.dtype end)
        run(model, 3, 1, 9, 9)
        assert.equal("float32", seen)
        assert.equal("float32", model[2].running_mean.dtype)
      end)

      for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
        it(("batch norms train in units of their own, FSDP in %s, %s"):format(dtype, strategy), function(rank)
          local ms, nn, fsdp, _, quietly = load()
          local function build()
            ms.manual_seed(3)
            return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 3),
              nn.BatchNorm2d(3))
          end
          local plain, model = nn.DDP(build(), { broadcast_buffers = false }), build()
          local norms = { model[2], model[5] }
          model = quietly(fsdp.FSDP, model, { sharding_strategy = strategy,
          auto_wrap_policy = fsdp.wrap.module_wrap_policy { nn.Conv2d },
            mixed_precision = fsdp.MixedPrecision { param_dtype = dtype, reduce_dtype = dtype, buffer_dtype = dtype } })
          assert.equal(5, #fsdp.fsdp_modules(model))                -- two convolutions, two norms, the root
          local seen = {}
          for k, norm in ipairs(norms) do norm:register_forward_hook(function(m) seen[k] = m.weight.dtype .. " "
            .. m.running_mean.dtype end) end
          local losses, target = {}, ms.ones(8, 3, 4, 4)
          for which, m in ipairs { plain, model } do
            local optim = ms.optim.SGD(m:parameters(), { lr = 0.05, momentum = 0.9 })
            for step = 1, 20 do
              ms.manual_seed(100 * step + rank)
              ms.scope(function()
                local x = ms.randn(8, 1, 8, 8)
                local loss = (m(x):float() * x:narrow(3, 3, 4):narrow(4, 3, 4) - target):pow(2):mean()
                losses[which] = losses[which] or {}
                losses[which][step] = loss:item()
                loss:backward()
              end)
              optim:step()
              optim:zero_grad()
            end
          end
          assert.same({ "float32 float32", "float32 float32" }, seen)
          -- The loss decreases, and stays close to that in float32.
          local last, first = 0, 0
          for step = 16, 20 do
            last, first = last + losses[2][step], first + losses[2][step - 15]
            assert.near(losses[1][step], losses[2][step], 0.02 * losses[1][step])
          end
          assert.is_true(last < 0.9 * first, ("losses %.4f, then %.4f"):format(first / 5, last / 5))
          for k, norm in ipairs { plain.module[2], plain.module[5] } do
            for _, name in ipairs { "running_mean", "running_var" } do
              local a, b = norms[k][name], norm[name]
              assert.is_true((a - b):norm():item() <= 0.03 * b:norm():item() + 1e-3, name)
            end
            assert.equal(20, norms[k].num_batches_tracked:item())
          end
        end)
      end
    end
  end)
end
