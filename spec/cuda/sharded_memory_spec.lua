-- SPDX-License-Identifier: MIT
--- Memory of a GPU in sharded training, counted by the engine: the bounds of docs/semantics.md#memory without
--- tolerance, for both front ends, where ranks map each other's memory and where bytes go through CPU memory.
local ranks = require "spec.support.ranks"
local collected = require "spec.support.collected"

local DIM, WIDE, BLOCKS = 64, 256, 4
local B = 2 * DIM * WIDE + WIDE + DIM           -- elements of a block
local N = DIM * 8 + 8                           -- elements outside the blocks
local U = BLOCKS * B + N

local function make()
  local ms = require "moonshard"
  local nn = ms.nn
  local Block = nn.Module:extend "Block"
  function Block:init()
    self.up = nn.Linear(DIM, WIDE, { device = "meta" })
    self.down = nn.Linear(WIDE, DIM, { device = "meta" })
  end
  function Block:forward(x) return x + self.down(self.up(x):relu()) end
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.blocks = nn.ModuleList {}
    for _ = 1, BLOCKS do self.blocks:append(Block()) end
    self.head = nn.Linear(DIM, 8, { device = "meta" })
  end
  function Net:forward(x)
    for _, block in ipairs(self.blocks) do x = block(x) end
    return self.head(x)
  end
  return Net(), ms
end

-- Return functions that shard the model onto a device.
local function fully_shard(reshard)
  return function(model, ms, device)
    for _, block in ipairs(model.blocks) do ms.fsdp.fully_shard(block, { reshard_after_forward = reshard }) end
    ms.fsdp.fully_shard(model, { reshard_after_forward = reshard })
    model:to_empty(device)
    for _, m in ipairs(model:modules()) do
      if m.reset_parameters then m:reset_parameters() end
    end
    return model
  end
end
local function FSDP(strategy, pieces)
  return function(model, ms, device)
    local options = { sharding_strategy = strategy, use_orig_params = pieces, device_id = device }
    for k, block in ipairs(model.blocks) do model.blocks[k] = ms.fsdp.FSDP(block, options) end
    return ms.fsdp.FSDP(model, options)
  end
end
-- Name, the function, and whether it reshards after forward.
local WAYS = {
  { "fully_shard, reshard_after_forward = true", fully_shard(true), true },
  { "fully_shard, reshard_after_forward = false", fully_shard(false), false },
  { "FSDP, full_shard", FSDP("full_shard", false), true },
  { "FSDP, full_shard, original parameters", FSDP("full_shard", true), true },
  { "FSDP, shard_grad_op", FSDP("shard_grad_op", false), false },
}

for _, case in ipairs { { 2, {} }, { 3, {} }, { 2, { MOONSHARD_CUDA_SHARE = "staging" } } } do
  local world, env = case[1], case[2]
  local name = ("memory of a GPU in sharded training, %d ranks%s #cuda"):format(world,
    env.MOONSHARD_CUDA_SHARE and ", through CPU memory" or "")
  ranks.describe(world, name, { env = env }, function()
    -- Elements of a shard. fully_shard cuts every parameter along its rows, which do not divide evenly.
    local function rows(n) return math.ceil(n / world) end
    local S = BLOCKS * (rows(WIDE) * (DIM + 1) + rows(DIM) * (WIDE + 1)) + rows(8) * (DIM + 1)
    local slack = 2048                                         -- activations of one sequence, and scalars

    for _, way in ipairs(WAYS) do
      it("stays within the bounds: " .. way[1], function()
        local model, ms = make()
        local device = ms.empty(1, { device = "cuda" }).device -- the rank's GPU
        ms.scope(function()                                    -- operators allocate what they keep
          ms.nn.Linear(8, 8, { device = device })(ms.ones(2, 8, { device = device })):sum():backward()
        end)
        collected()
        local base = ms.memory_stats(device).allocated
        local function current() return (ms.memory_stats(device).allocated - base) / 4 end
        local function within(bound, point)
          ms.cuda.synchronize()
          local most = (ms.memory_stats(device).peak_allocated - base) / 4
          ms.reset_peak_memory_stats(device)
          assert.is_true(most <= bound + slack, ("%s: %d elements, the bound is %d"):format(point, most, bound))
          return most
        end
        ms.reset_peak_memory_stats(device)
        model = way[2](model, ms, device)
        within(S + 2 * B, "initialisation")
        local optim = ms.optim.Adam(model:parameters(), { lr = 1e-4 })
        for step = 1, 3 do
          local held = step == 1 and S or 3 * S                -- shards and, from the second step on, two moments
          ms.scope(function()
            ms.reset_peak_memory_stats(device)
            local loss = model(ms.ones(1, DIM, { device = device })):sum()
            local forward = within(way[3] and held + 3 * B + N or held + U + B, "forward of step " .. step)
            assert.is_true(forward >= held + B - slack)        -- gathered parameters are counted
            loss:backward()
            within(way[3] and held + S + 4 * B + N or held + U + 1.5 * B, "backward of step " .. step)
          end)
          optim:step()
          ms.cuda.synchronize()
          assert.is_true(current() <= 4 * S + slack, ("after step %d: %d"):format(step, current()))
          optim:zero_grad()
          assert.is_true(current() <= 3 * S + slack)
        end
        assert.is_true(current() >= 0.9 * 3 * U / world)       -- the last rank has fewer rows
      end)
    end
  end)
end
