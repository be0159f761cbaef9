-- SPDX-License-Identifier: MIT
--- summon_full_params of instances that compute on a GPU (the emulated one where there is no other): where the whole
--- parameters are, and whether writes to them are kept (docs/semantics.md#summon).
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function build()
  local ms, nn = load()
  ms.manual_seed(3)
  return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 3)))
end

local function make(options)
  local _, _, fsdp, _, quietly = load()
  return quietly(function()
    local model = build()
    model[2] = fsdp.FSDP(model[2], options)
    return fsdp.FSDP(model, options)
  end)
end

local function listed(m)
  local out = {}
  for name, p in m:named_parameters() do out[#out + 1] = ("%s %s %s"):format(name, tostring(p.shape), p.device) end
  return table.concat(out, ", ")
end

local function step(model, rank)
  local ms = load()
  ms.manual_seed(rank)
  ms.scope(function() model(ms.rand(4, 5, { device = "cuda:0" })):float():sum():backward() end)
  local out = {}
  for k, p in ipairs(model:parameters()) do
    if p.grad then out[k] = p.grad:to("cpu"):clone() end
  end
  model:zero_grad()
  return out
end

for _, world in ipairs { 2, 3 } do
  ranks.describe(world, ("summon_full_params where a GPU computes, on %d ranks #cuda"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op" } do
      for _, pieces in ipairs { false, true } do
        for _, low in ipairs { false, "bfloat16" } do
          for _, offload in ipairs { false, true } do
            it(("offload_to_cpu shows them on the CPU: %s, use_orig_params = %s, param_dtype = %s, cpu_offload = %s"):format(strategy, tostring(pieces),
              tostring(low), tostring(offload)), function(rank)
              local ms, _, fsdp = load()
              local plain = build()
              local model = make { sharding_strategy = strategy, use_orig_params = pieces, cpu_offload = offload,
                device_id = "cuda:0",
                mixed_precision = low and fsdp.MixedPrecision { param_dtype = low } or nil }
              local before, grads = listed(model), step(model, rank)

              local function check(where, want)
                for k, p in ipairs(plain:parameters()) do
                  local whole = model:parameters()[k]
                  assert.equal(where, whole.device)
                  assert.equal("float32", whole.dtype)
                  assert.is_true(whole:to("cpu"):equal(want or p))
                end
              end
              -- Without options, the whole parameters are on the device.
              fsdp.summon_full_params(model, function() check "cuda:0" end)
              local allocated = ms.memory_stats("cuda:0").allocated
              fsdp.summon_full_params(model, { offload_to_cpu = true, writeback = false }, function()
                assert.equal((listed(plain):gsub(" cpu$", "")), (listed(model):gsub(" cpu$", "")))
                check "cpu"
                -- The whole parameters take no device memory.
                assert.is_true(ms.memory_stats("cuda:0").allocated <= allocated)
                ms.no_grad(function() model:parameters()[1]:fill_(9) end)
              end)
              -- Without writeback, the change was dropped.
              fsdp.summon_full_params(model, function() check "cuda:0" end)

              fsdp.summon_full_params(model, { offload_to_cpu = true, rank0_only = true, writeback = false }, function()
                assert.equal(rank == 0 and listed(plain) or before, listed(model))
                if rank == 0 then check "cpu" end
              end)
              fsdp.summon_full_params(model, { rank0_only = true, writeback = false }, function()
                if rank == 0 then check "cuda:0" else assert.equal(before, listed(model)) end
              end)
              assert.equal(before, listed(model))
              -- Without recursion, the parameters of the inner instance stay sharded.
              fsdp.summon_full_params(model, { offload_to_cpu = true, recurse = false }, function()
                assert.equal("cpu", model[1].weight.device)
                assert.is_true(model[1].weight:equal(plain[1].weight))
              end)

              -- The model trains as before, and with writeback it keeps changes.
              local again = step(model, rank)
              for k, g in pairs(grads) do assert.is_true(g:equal(again[k])) end     -- order does not matter
              fsdp.summon_full_params(model, { offload_to_cpu = true }, function()
                ms.no_grad(function()
                  for k, p in ipairs(model:parameters()) do p:fill_(k) end
                end)
              end)
              fsdp.summon_full_params(model, function()
                for k, p in ipairs(model:parameters()) do assert.is_true(p:eq(k):all():item()) end
              end)
              assert.equal(before, listed(model))
            end)
          end
        end
      end
    end
  end)
end
