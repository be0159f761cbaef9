-- SPDX-License-Identifier: MIT
--- summon_full_params with all its options, apply, and the parameters visible in forward (docs/semantics.md#summon).
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"

local load = require("spec.support.wrapped").load

local function build(nn, dtype)
  return nn.Sequential(nn.Linear(5, 7, { dtype = dtype }), nn.Sequential(nn.Linear(7, 3, { dtype = dtype })))
end

local function twins(options)
  local ms, nn, fsdp, _, quietly = load()
  ms.manual_seed(3)
  local plain = build(nn)
  ms.manual_seed(3)
  local model = build(nn)
  return plain, quietly(function()
    model[2] = fsdp.FSDP(model[2], options)
    return fsdp.FSDP(model, options)
  end)
end

local function names_of(m)
  local list = {}
  for name, p in m:named_parameters() do list[#list + 1] = name .. tostring(p.shape) end
  return table.concat(list, " ")
end

for world = 1, 4 do
  ranks.describe(world, ("summon_full_params on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        for _, low in ipairs { false, "float16" } do
          local what = ("%s, use_orig_params = %s, param_dtype = %s"):format(strategy, tostring(pieces), tostring(low))
          local function make()
            local _, _, fsdp = load()
            return twins { sharding_strategy = strategy, use_orig_params = pieces,
              mixed_precision = low and fsdp.MixedPrecision { param_dtype = low } or nil }
          end

          it("shows the parameters of the unwrapped model: " .. what, function()
            local _, nn, fsdp = load()
            local plain, model = make()
            local before = names_of(model)
            fsdp.summon_full_params(model, function()
              assert.equal(names_of(plain), names_of(model))
              local k, params = 0, plain:parameters()
              for _, p in model:named_parameters() do
                k = k + 1
                assert.is_true(p:isa(nn.Parameter))
                assert.is_true(p:equal(params[k]))
              end
              assert.is_true(model[1].weight:equal(plain[1].weight))
            end)
            assert.equal(before, names_of(model))
          end)

          for _, writeback in ipairs { true, false } do
            it(("%s what is written: %s"):format(writeback and "keeps" or "drops", what), function()
              local ms, _, fsdp = load()
              local plain, model = make()
              fsdp.summon_full_params(model, { writeback = writeback }, function()
                ms.no_grad(function()
                  for _, p in ipairs(model:parameters()) do p:mul_(2) end
                end)
              end)
              -- Without sharding and casts, summon_full_params gives the parameters themselves, so a change stays.
              local stays = writeback or ((strategy == "no_shard" or world == 1) and not low)
              fsdp.summon_full_params(model, function()
                for k, p in ipairs(plain:parameters()) do
                  assert.is_true(model:parameters()[k]:equal(stays and p:detach() * 2 or p:detach()))
                end
              end)
            end)
          end

          it("without recurse shows the instance's own parameters only: " .. what, function()
            local _, _, fsdp = load()
            local plain, model = make()
            fsdp.summon_full_params(model, { recurse = false }, function()
              assert.is_true(model[1].weight:equal(plain[1].weight))
              assert.equal("1.weight[7, 5] 1.bias[7]", names_of(model):match "^1%.weight%S+ %S+ 1%.bias%S+")
            end)
          end)

          it("does not affect training, also between forward and backward: " .. what, function()
            local ms, _, fsdp = load()
            local _, a = make()
            local _, b = make()
            local x = ms.rand(4, 5)
            for _ = 1, 2 do
              local loss = a(x):float():sum()
              fsdp.summon_full_params(a, function() end)
              loss:backward()
              b(x):float():sum():backward()
              local p, q = a:parameters(), b:parameters()
              for k = 1, #p do
                assert.is_true(p[k].grad:equal(q[k].grad))
                p[k].grad, q[k].grad = nil, nil
              end
            end
          end)
        end
      end

      for _, writeback in ipairs { true, false } do
        it(("shows gradients, and %s what is written to them: %s"):format(writeback and "keeps" or "drops", strategy),
          function(rank)
          local ms, _, fsdp = load()
          local plain, model = twins { sharding_strategy = strategy, use_orig_params = true }
          fsdp.summon_full_params(model, { with_grads = true }, function()
            for _, p in ipairs(model:parameters()) do assert.is_nil(p.grad) end
          end)
          for r = 0, world - 1 do
            ms.manual_seed(r)
            ;(plain(ms.rand(4, 5)):sum() / world):backward()
          end
          ms.manual_seed(rank)
          model(ms.rand(4, 5)):sum():backward()
          local whole = plain:parameters()
          fsdp.summon_full_params(model, { with_grads = true, writeback = writeback }, function()
            for k, p in ipairs(model:parameters()) do
              ms.testing.assert_close(p.grad, whole[k].grad)
              p.grad:mul_(2)
            end
          end)
          local factor = (writeback or strategy == "no_shard" or world == 1) and 2 or 1
          fsdp.summon_full_params(model, { with_grads = true }, function()
            for k, p in ipairs(model:parameters()) do ms.testing.assert_close(p.grad, whole[k].grad * factor) end
          end)
        end)
      end
    end

    it("lists parameters and buffers as the unwrapped model does, with any prefix, recursive or not", function()
      local ms, nn, fsdp, _, quietly = load()
      local function make()
        local m = build(nn)
        m[2][1]:register_buffer("inner", ms.ones(3))
        return m
      end
      for _, pieces in ipairs { false, true } do
        local plain, model = make(), make()
        quietly(function()
          model[2] = fsdp.FSDP(model[2], { use_orig_params = pieces })
          model = fsdp.FSDP(model, { use_orig_params = pieces })
        end)
        for _, m in ipairs { plain, model } do m:register_buffer("own", ms.ones(2)) end
        fsdp.summon_full_params(model, function()
          for _, prefix in ipairs { "", "test_prefix" } do
            for _, recurse in ipairs { true, false } do
              for _, listing in ipairs { "named_parameters", "named_buffers" } do
                local lists = {}
                for k, m in ipairs { plain, model } do
                  lists[k] = {}
                  for name, t in m[listing](m, { prefix = prefix, recurse = recurse }) do
                    table.insert(lists[k], name .. tostring(t.shape))
                  end
                end
                assert.same(lists[1], lists[2])
                assert.equal(recurse and (listing == "named_buffers" and 2 or 4)
                  or (listing == "named_buffers" and 1 or 0), #lists[1])
              end
            end
          end
        end)
      end
    end)

    it("with rank0_only shows them on rank 0", function(rank)
      local _, _, fsdp = load()
      local plain, model = twins {}
      local before = names_of(model)
      fsdp.summon_full_params(model, { rank0_only = true, writeback = false }, function()
        assert.equal(rank == 0 and names_of(plain) or before, names_of(model))
      end)
      assert.equal(before, names_of(model))
    end)

    it("works on every root below a module that is not wrapped", function()
      local ms, nn, fsdp, _, quietly = load()
      ms.manual_seed(1)
      local plain = build(nn)
      ms.manual_seed(1)
      local model = build(nn)
      quietly(function() model[1], model[2] = fsdp.FSDP(model[1]), fsdp.FSDP(model[2]) end)
      fsdp.summon_full_params(model, function()
        for k, p in ipairs(plain:parameters()) do assert.is_true(model:parameters()[k]:equal(p)) end
      end)
    end)

    it("does not keep changes of padding", function(rank)
      local ms, nn, fsdp, _, quietly = load()
      local model = quietly(fsdp.FSDP, nn.Linear(1, 1, { bias = false }))
      fsdp.summon_full_params(model, function()
        ms.no_grad(function() model.weight:fill_(7) end)
      end)
      assert.equal(1, model.flat_param:numel())
      assert.equal(rank == 0 and 7 or 0, model.flat_param:detach()[1]:item())
    end)

    it("apply writes the whole parameters", function()
      local ms, nn, fsdp = load()
      local _, model = twins {}
      model:apply(function(m)
        if m:isa(nn.Linear) then ms.no_grad(function() m.weight:fill_(m.weight.shape[1]) end) end
      end)
      fsdp.summon_full_params(model, function()
        assert.equal(7, model[1].weight[1][1]:item())
        assert.equal(3, model[2][1].weight[3][7]:item())
      end)
    end)

    it("with gradients can be called again after one rank had no memory for one of them", function(rank)
      local ms, nn, fsdp, _, quietly = load()
      local lib = require("moonshard.core.ffi").lib
      local model = quietly(fsdp.FSDP, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), { use_orig_params = true })
      model(ms.ones(2, 3)):sum():backward()
      local function sums()
        local list = {}
        fsdp.summon_full_params(model, { with_grads = true }, function()
          for k, p in ipairs(model:parameters()) do list[k] = p.grad:sum():item() end
        end)
        return list
      end
      local want = sums()
      for n = 1, 16 do
        if rank == world - 1 then lib.ms_fail_allocation(n) end
        local ok, why = pcall(sums)
        lib.ms_fail_allocation(0)
        if not ok then assert.matches("no memory", why) end
        ms.dist.recover()
        assert.same(want, sums())
      end
    end)

    it("has messages for wrong use", function()
      local _, nn, fsdp, _, quietly = load()
      local _, model = twins {}
      raises("writeback=true and rank0_only=true is not supported yet", fsdp.summon_full_params, model,
        { rank0_only = true }, function() end)
      raises("with_grads=true, use_orig_params=false, offload_to_cpu=false is not supported yet",
        fsdp.summon_full_params, model,
        { with_grads = true }, function() end)
      local _, whole = twins { sharding_strategy = "no_shard" }
      raises("offload_to_cpu=true and NO_SHARD is not supported yet", fsdp.summon_full_params, whole,
        { offload_to_cpu = true }, function() end)
      local Net, inside = nn.Module:extend "Net", nil
      function Net:init() self.layer = nn.Linear(2, 2) end
      function Net:forward(x)
        fsdp.summon_full_params(inside, function() end)
        return self.layer(x)
      end
      inside = quietly(fsdp.FSDP, Net())
      raises("Cannot manually unshard parameters during forward/backward", inside, require "moonshard".ones(1, 2))
      local _, busy = twins {}
      raises("expected to be in states ['idle'] but current state is 'summon_full_params'", fsdp.summon_full_params,
        busy, function()
        busy(require "moonshard".ones(1, 5))
      end)
      -- An error inside is raised unchanged, and everything is sharded again.
      raises("mine", fsdp.summon_full_params, busy, function() error("mine", 0) end)
      assert.truthy(names_of(busy):find("flat_param", 1, true))
    end)
  end)
end
