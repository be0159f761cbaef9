-- SPDX-License-Identifier: MIT
--- Memory of sharded training on 2 ranks: at most two gathered units, and no leaks (the bounds of docs/semantics.md
--- are in both/schedule/memory_reference_spec).
local ranks = require "spec.support.ranks"
local collected = require "spec.support.collected"

local DIM, WIDE, BLOCKS = 128, 512, 4
local B = 2 * DIM * WIDE + WIDE + DIM           -- elements of a block
local N = DIM * 8 + 8                           -- elements outside the blocks

local function make()
  local ms = require "moonshard"
  local nn = ms.nn
  local Block = nn.Module:extend "Block"
  function Block:init()
    self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)
  end
  function Block:forward(x) return x + self.down(self.up(x):relu()) end
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.blocks = nn.ModuleList {}
    for _ = 1, BLOCKS do self.blocks:append(Block()) end
    self.head = nn.Linear(DIM, 8)
  end
  function Net:forward(x)
    for _, block in ipairs(self.blocks) do x = block(x) end
    return self.head(x)
  end
  return Net(), ms
end

local function shard(model)
  local fsdp = require "moonshard.parallel.fsdp"
  for _, block in ipairs(model.blocks) do fsdp.fully_shard(block) end
  return fsdp.fully_shard(model)
end

ranks.describe(2, "memory", function()
  -- First, let operators allocate what they keep.
  setup(function()
    local model, ms = make()
    shard(model)
    ms.scope(function() model(ms.ones(1, DIM)):sum():backward() end)
  end)

  it("is at most two gathered blocks plus the shard and the root in forward", function()
    local model, ms = make()
    shard(model)
    for _ = 1, 2 do ms.no_grad(function() ms.scope(function() model(ms.ones(1, DIM)) end) end) end
    local base = ms.memory_stats().allocated
    ms.reset_peak_memory_stats()
    ms.no_grad(function() ms.scope(function() model(ms.ones(1, DIM)) end) end)
    local most = (ms.memory_stats().peak_allocated - base) / 4
    -- 2048: activations of one sequence, and scalars.
    assert.is_true(most <= 2 * B + N + 2048, ("%d elements beyond the shards; a block has %d, the root %d"):format(
      most, B, N))
  end)

  it("is all released when the model is collected", function()
    local ms = require "moonshard"
    collected()
    local before = ms.memory_stats()
    local function live()
      local model = make()
      shard(model)
      local optim = ms.optim.Adam(model:parameters(), { lr = 1e-4 })
      for _ = 1, 2 do
        ms.scope(function() model(ms.ones(1, DIM)):sum():backward() end)
        optim:step()
        optim:zero_grad()
      end
    end
    live()
    collected()
    local after = ms.memory_stats()
    assert.equal(before.allocated, after.allocated)
  end)

  it("is the same after step 10 and after step 60 without the collector", function()
    local model, ms = make()
    shard(model)
    local optim = ms.optim.AdamW(model:parameters(), { lr = 1e-4 })
    collectgarbage "stop"
    local at, now
    for step in ms.steps(60) do
      local loss = model(ms.ones(1, DIM)):sum()
      loss:backward()
      ms.nn.utils.clip_grad_norm_(model:parameters(), 1)
      optim:step()
      optim:zero_grad()
      if step == 10 then at = ms.memory_stats() elseif step == 60 then now = ms.memory_stats() end
    end
    collectgarbage "restart"
    assert.equal(at.allocated, now.allocated)
    assert.equal(at.live_tensors, now.live_tensors)
  end)
end)
