-- SPDX-License-Identifier: MIT
--- FSDP's environment variables, parameters that change between forward and backward, and optimizers on low-precision
--- gradients (docs/semantics.md#switches).
local ranks = require "spec.support.ranks"

local load = require("spec.support.wrapped").load

local function wrapped(options)
  local ms, nn, fsdp, _, quietly = load()
  ms.manual_seed(0)
  return quietly(function()
    local model = nn.Sequential(fsdp.FSDP(nn.Linear(5, 5), options), nn.ReLU(), fsdp.FSDP(nn.Linear(5, 3), options))
    model:register_buffer("scale", ms.ones(3, { dtype = "float64" }))
    return fsdp.FSDP(model, options)
  end)
end

local raises = require "spec.support.raises"

local CHANGED = "FSDP does not support changing the parameters between forward and backward"

for world = 2, 3 do
  ranks.describe(world, ("parameters that a script replaces on %d ranks"):format(world), function()
    it("are refused between a forward that leaves them whole and its backward", function(rank)
      local ms, nn, fsdp = load()
      local model = wrapped { sharding_strategy = "shard_grad_op", use_orig_params = true }
      local x = ms.rand(2, 5) + rank
      for _ = 1, 2 do
        local loss = model(x):sum()
        model[1].module.weight = nn.Parameter(model[1].module.weight:detach():clone())
        raises(CHANGED, loss.backward, loss)
        raises(CHANGED, function()
          model(x)                                      -- writes back, as always
          model[1].module.weight = nn.Parameter(ms.zeros(5, 5))
          loss:backward()
        end)
        model(x)
        assert.equal(0, model[1].module.weight:abs():sum():item())
      end
      model(x):sum():backward()
      assert.is_not_nil(fsdp.fsdp_modules(model)[2].module.bias)
    end)

    it("are written back when their instance was sharded after its forward", function()
      local ms, nn = load()
      local model = wrapped { use_orig_params = true }
      local x = ms.ones(2, 5)
      local loss = model(x):sum()
      model[1].module.weight = nn.Parameter(ms.zeros(5, 5))
      loss:backward()
      model(x):sum():backward()
      assert.equal(0, model[1].module.weight:full_tensor():abs():sum():item())
    end)
  end)

  ranks.describe(world, ("FSDP_SKIP_WRITEBACK_CHECK on %d ranks"):format(world),
    { env = { FSDP_SKIP_WRITEBACK_CHECK = "1" } }, function()
    it("does not check for replaced parameters, and warns once", function()
      local ms, nn, fsdp = load()
      local options = { sharding_strategy = "shard_grad_op", use_orig_params = true }
      local function make() return fsdp.FSDP(nn.Linear(5, 5), options) end
      local told = ms.catch_warnings(make)
      assert.same({ "Since FSDP_SKIP_WRITEBACK_CHECK=1, FSDP will not check for parameter or gradient writeback. "
        .. "Changing parameter or gradient storages may lead to silent correctness errors." }, told)
      assert.same({}, (ms.catch_warnings(make)))
      local model = make()
      local loss = model(ms.ones(2, 5)):sum()
      local mine = nn.Parameter(ms.zeros(5, 5))
      model.module.weight = mine
      loss:backward()
      model(ms.ones(2, 5))
      assert.equal(mine, rawget(model.module, "_slots").weight)
    end)
  end)

  ranks.describe(world, ("FSDP_USE_FULL_PREC_IN_EVAL on %d ranks"):format(world),
    { env = { FSDP_USE_FULL_PREC_IN_EVAL = "1" } }, function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      it("casts nothing in eval mode, and everything again in training, " .. strategy, function(rank)
        local ms, _, fsdp, dist = load()
        for _, pieces in ipairs { false, true } do
          local options = { sharding_strategy = strategy, use_orig_params = pieces,
            mixed_precision = fsdp.MixedPrecision { param_dtype = "bfloat16", reduce_dtype = "float16",
              buffer_dtype = "bfloat16" } }
          local model, plain = wrapped(options), wrapped { sharding_strategy = strategy, use_orig_params = pieces }
          local x = ms.rand(2, 5) + rank
          for _, training in ipairs { true, false, false, true, false } do
            model:train(training)
            local out
            local told = dist.record(function()
              out = model(x)
              out:sum():backward()
            end)
            assert.equal(training and "bfloat16" or "float32", out.dtype)
            assert.equal(training and "bfloat16" or "float64", model.module.scale.dtype)
            for _, c in ipairs(told) do
              assert.equal(training and (c.op == "all_gather" and "bfloat16" or "float16") or "float32", c.dtype)
            end
            if not training then assert.is_true(out:equal(plain(x))) end
            for _, p in ipairs(model:parameters()) do
              assert.equal("float32", p.dtype)
              assert.equal("float32", p.grad.dtype)
            end
          end
        end
      end)
    end
  end)

  ranks.describe(world, ("fake collectives of FSDP on %d ranks"):format(world),
    { env = { FSDP_USE_FAKE_ALL_GATHER = "1", FSDP_USE_FAKE_REDUCE = "1" } }, function()
      it("are not issued, and steps continue", function(rank)
        local ms, nn, fsdp, dist, quietly = load()
        local told = ms.catch_warnings(function() fsdp.FSDP(nn.Linear(2, 2)) end)
        assert.matches("^Since FSDP_USE_FAKE_ALL_GATHER=1, FSDP will not execute all%-gather ops", told[1])
        assert.matches("^Since FSDP_USE_FAKE_REDUCE=1, FSDP will not execute reduce%-scatter ops", told[2])
        for _, strategy in ipairs { "full_shard", "no_shard" } do
          local model = quietly(wrapped, { sharding_strategy = strategy })
          local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
          local issued = dist.record(function()
            for _ = 1, 2 do
              model(ms.ones(2, 5) * (rank + 1)):sum():backward()
              for _, p in ipairs(model:parameters()) do assert.equal(tostring(p.shape), tostring(p.grad.shape)) end
              optim:step()
              optim:zero_grad()
            end
          end)
          assert.equal(0, #issued)
        end
      end)
    end)

  ranks.describe(world, ("gradients kept in low precision on %d ranks"):format(world), function()
    for _, pieces in ipairs { false, true } do
      it("are cast to the parameter's dtype for a step, use_orig_params = " .. tostring(pieces),
        function(rank)
        local ms, _, fsdp = load()
        for _, kind in ipairs { "SGD", "Adam", "AdamW" } do
          local function make(keep)
            local model = wrapped { use_orig_params = pieces,
              mixed_precision = fsdp.MixedPrecision { param_dtype = "float16", keep_low_precision_grads = keep } }
            return model, ms.optim[kind](model:parameters(), { lr = 0.1 })
          end
          local low, a = make(true)
          local wide, b = make(false)
          for step = 1, 3 do
            for _, m in ipairs { low, wide } do
              ms.manual_seed(10 * step + rank)
              m(ms.rand(2, 5)):float():pow(2):sum():backward()
            end
            for _, p in ipairs(low:parameters()) do assert.equal("float16", p.grad.dtype) end
            a:step()
            b:step()
            for _, p in ipairs(low:parameters()) do assert.equal("float16", p.grad.dtype) end
            for k, p in ipairs(low:parameters()) do assert.is_true(p:equal(wide:parameters()[k])) end
            a:zero_grad()
            b:zero_grad()
          end
        end
      end)
    end
  end)
end
