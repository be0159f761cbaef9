-- SPDX-License-Identifier: MIT
--- The rows of the composable suite's memory test about CPU offload (docs/semantics.md#memory): a device's memory while
--- shards, gradients and optimizer are on the CPU. On the emulated GPU if there is no other, with a smaller version of
--- the suite's Transformer; upper bounds, without tolerance, on the memory that the engine counts for that device.
local bounds = require "spec.support.memory_bounds"
local ranks = require "spec.support.ranks"

ranks.describe(2, "memory of a device beside offloaded parameters #cuda", function(_, world)
  -- Checks the limit at every point of two steps.
  local function check(shard)
    local ms = require "moonshard"
    local device = ms.empty(1, { device = "cuda" }).device       -- the rank's GPU
    local now, peak = bounds.meter(device, 0)
    local model, n = bounds.model(96, 4, "cpu")
    local B, N = n.B, n.N
    model = shard(model)
    peak(1.5 * B, "initialisation, peak")
    local optim = ms.optim.Adam(model:parameters(), { lr = 1e-2 })
    for step = 1, 2 do
      ms.scope(function()
        local loss = model(ms.randint(0, 32, { 1, 4 }):to(device)):sum()
        assert.is_true(peak(3 * B + N, "forward of step " .. step) >= B)         -- computation does take place there
        loss:backward()
        peak(4 * B + N, "backward of step " .. step)
      end)
      optim:step()
      now(0, "after step " .. step)
      optim:zero_grad()
      now(0, "after zero_grad " .. step)
      for _, p in ipairs(model:parameters()) do assert.truthy(p.device:find "^cpu") end
    end
  end

  it("stays within the bounds: fully_shard with a CPUOffloadPolicy", function()
    local ms = require "moonshard"
    local mesh = ms.dist.init_device_mesh("cuda", { world })
    check(function(model)
      local options = { mesh = mesh, offload_policy = ms.fsdp.CPUOffloadPolicy(), reshard_after_forward = true }
      for _, layer in ipairs(model.layers) do ms.fsdp.fully_shard(layer, options) end
      return ms.fsdp.fully_shard(model, options)
    end)
  end)

  for _, pieces in ipairs { false, true } do
    it("stays within the bounds: FSDP with cpu_offload, use_orig_params = " .. tostring(pieces), function()
      local ms = require "moonshard"
      check(function(model)
        local options = { cpu_offload = true, device_id = "cuda", use_orig_params = pieces }
        for k, layer in ipairs(model.layers) do model.layers[k] = ms.fsdp.FSDP(layer, options) end
        return ms.fsdp.FSDP(model, options)
      end)
    end)
  end
end)
