-- SPDX-License-Identifier: MIT
--- Memory of sharded training on 2 ranks: the bounds of docs/semantics.md#memory without their tolerance (the engine
--- counts exactly, and one sequence of a wide model has hardly any activations), at most two gathered units, and no
--- leaks.
local ranks = require "spec.support.ranks"
local collected = require "spec.support.collected"

local DIM, WIDE, BLOCKS = 128, 512, 4
local B = 2 * DIM * WIDE + WIDE + DIM           -- elements of a block
local N = DIM * 8 + 8                           -- elements outside the blocks
local U = BLOCKS * B + N
local S = U / 2
local KIB = 1024

local function make(device)
  local ms = require "moonshard"
  local nn = ms.nn
  local Block = nn.Module:extend "Block"
  function Block:init()
    self.up = nn.Linear(DIM, WIDE, { device = device })
    self.down = nn.Linear(WIDE, DIM, { device = device })
  end
  function Block:forward(x) return x + self.down(self.up(x):relu()) end
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.blocks = nn.ModuleList {}
    for _ = 1, BLOCKS do self.blocks:append(Block()) end
    self.head = nn.Linear(DIM, 8, { device = device })
  end
  function Net:forward(x)
    for _, block in ipairs(self.blocks) do x = block(x) end
    return self.head(x)
  end
  return Net(), ms
end

local function shard(model, options)
  local fsdp = require "moonshard.parallel.fsdp"
  for _, block in ipairs(model.blocks) do fsdp.fully_shard(block, options) end
  return fsdp.fully_shard(model, options)
end

ranks.describe(2, "memory", function()
  -- First, let operators allocate what they keep.
  setup(function()
    local model, ms = make()
    shard(model)
    ms.scope(function() model(ms.ones(1, DIM)):sum():backward() end)
  end)

  local function elements(bytes) return bytes / 4 end
  local slack = 8 * KIB                          -- for activations of one sequence, the root's parameters, and scalars

  for _, reshard in ipairs { true, false } do
    it(("stays within the bounds, reshard_after_forward = %s"):format(tostring(reshard)), function()
      local ms = require "moonshard"
      collected()
      local base = ms.memory_stats().allocated
      local function current() return elements(ms.memory_stats().allocated - base) end
      local function peak()
        local p = elements(ms.memory_stats().peak_allocated - base)
        ms.reset_peak_memory_stats()
        return p
      end
      local model = make "meta"
      shard(model, { reshard_after_forward = reshard })
      assert.equal(0, current())
      ms.reset_peak_memory_stats()
      model:to_empty "cpu"
      for _, m in ipairs(model:modules()) do
        if m.reset_parameters then m:reset_parameters() end
      end
      assert.is_true(current() <= S + slack / 4)
      assert.is_true(peak() <= S + B + slack / 4)
      local optim = ms.optim.Adam(model:parameters(), { lr = 1e-4 })
      for step = 1, 3 do
        local held = step == 1 and S or 3 * S     -- shards and, from the second step on, Adam's two moments
        ms.scope(function()
          local x = ms.ones(1, DIM)
          ms.reset_peak_memory_stats()
          local loss = model(x):sum()
          local forward = peak()
          local bound = reshard and held + 3 * B + N or held + U + B
          assert.is_true(forward <= bound + slack, ("forward of step %d: %d elements, the bound is %d"):format(step,
            forward, bound))
          loss:backward()
          local backward = peak()
          bound = reshard and held + S + 4 * B + N or held + U + 1.5 * B
          assert.is_true(backward <= bound + slack, ("backward of step %d: %d elements, the bound is %d"):format(step,
            backward, bound))
        end)
        optim:step()
        assert.is_true(current() <= 4 * S + slack)
        optim:zero_grad()
        assert.is_true(current() <= 3 * S + slack)
      end
      -- A rank holds half of everything, not all of it.
      assert.is_true(current() <= 1.02 * 3 * S)
    end)
  end

  it("is at most two gathered blocks plus the shard and the root in forward", function()
    local model, ms = make()
    shard(model)
    for _ = 1, 2 do ms.no_grad(function() ms.scope(function() model(ms.ones(1, DIM)) end) end) end
    local base = ms.memory_stats().allocated
    ms.reset_peak_memory_stats()
    ms.no_grad(function() ms.scope(function() model(ms.ones(1, DIM)) end) end)
    local most = elements(ms.memory_stats().peak_allocated - base)
    assert.is_true(most <= 2 * B + N + slack / 4, ("%d elements beyond the shards; a block has %d, the root %d"):format(
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
