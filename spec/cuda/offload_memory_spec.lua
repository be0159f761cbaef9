-- SPDX-License-Identifier: MIT
--- The rows of the composable suite's memory test about CPU offload (docs/semantics.md#memory): a device's memory while
--- shards, gradients and optimizer are on the CPU. On the emulated GPU if there is no other, with a smaller version of
--- the suite's Transformer; upper bounds, without tolerance, on the memory that the engine counts for that device.
local ranks = require "spec.support.ranks"
local collected = require "spec.support.collected"

local MB = 1e6

ranks.describe(2, "memory of a device beside offloaded parameters #cuda", function(_, world)
  -- Checks the limit at every point of two steps. Sizes: the parameters of a block, of the model, and outside the
  -- blocks; this rank's part.
  local function check(shard, what)
    local ms = require "moonshard"
    local TransformerLM = require("spec.support.models.transformer_lm").TransformerLM
    local function numel(m)
      local n = 0
      for _, p in ipairs(m:parameters()) do n = n + p:numel() end
      return n
    end
    local device = ms.empty(1, { device = "cuda" }).device       -- the rank's GPU
    ms.scope(function()
      ms.nn.Linear(8, 8, { device = device })(ms.ones(2, 8, { device = device })):sum():backward()
    end)
    collected()
    local base = ms.memory_stats(device).allocated
    local function current() return (ms.memory_stats(device).allocated - base) / MB end
    local function peak() return (ms.memory_stats(device).peak_allocated - base) / MB end
    local model = TransformerLM { vocab = 32, layers = 3, dim = 96, heads = 4, max_seq = 16, tie = false,
      device = "cpu" }
    local B, U = numel(model.layers[1]), numel(model)
    local N = U - 3 * B
    local function within(bound, value, point)
      assert.is_true(value <= 4 * bound / MB, ("%s, %s: %.3f MB, the bound is %.3f MB"):format(what, point, value,
        4 * bound / MB))
    end
    ms.reset_peak_memory_stats(device)
    model = shard(model)
    within(1.5 * B, peak(), "initialisation, peak")
    within(1.5 * B, current(), "initialisation")
    local optim = ms.optim.Adam(model:parameters(), { lr = 1e-2 })
    for step = 1, 2 do
      ms.scope(function()
        local ids = ms.randint(0, 32, { 1, 4 }):to(device)
        ms.reset_peak_memory_stats(device)
        local loss = model(ids):sum()
        within(3 * B + N, peak(), "forward of step " .. step)
        assert.is_true(peak() >= 4 * B / MB)                     -- computation does take place there
        ms.reset_peak_memory_stats(device)
        loss:backward()
        within(4 * B + N, peak(), "backward of step " .. step)
      end)
      optim:step()
      within(0, current(), "after step " .. step)
      optim:zero_grad()
      within(0, current(), "after zero_grad " .. step)
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
    end, "fully_shard")
  end)

  for _, pieces in ipairs { false, true } do
    it("stays within the bounds: FSDP with cpu_offload, use_orig_params = " .. tostring(pieces), function()
      local ms = require "moonshard"
      check(function(model)
        local options = { cpu_offload = true, device_id = "cuda", use_orig_params = pieces }
        for k, layer in ipairs(model.layers) do model.layers[k] = ms.fsdp.FSDP(layer, options) end
        return ms.fsdp.FSDP(model, options)
      end, "FSDP")
    end)
  end
end)
