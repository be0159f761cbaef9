-- SPDX-License-Identifier: MIT
--- The memory test of the composable suite with its own model and numbers (docs/semantics.md#memory): 2 ranks, float32,
--- Transformer(vocab 32, 3 layers, dim 768, 12 heads, untied), Adam. Tests the upper bounds, without the suite's
--- tolerance, on the memory that the engine counts; that count against the kernel's for the same pages; and resident
--- memory on different numbers of ranks.
local bounds = require "spec.support.memory_bounds"
local ranks = require "spec.support.ranks"
local collected = require "spec.support.collected"

local DIM, HEADS, U = 768, 12, 21317376         -- U: elements of the model
local MB = 1e6

-- The kernel's count of this process's resident pages in bytes: all of them (Rss), and with shared pages divided by the
-- number of processes that map them (Pss).
local function resident()
  local rss, pss = 0, 0
  for line in io.lines "/proc/self/smaps_rollup" do
    local key, kb = line:match "^(%w+):%s+(%d+) kB"
    if key == "Rss" then rss = tonumber(kb) * 1024 elseif key == "Pss" then pss = tonumber(kb) * 1024 end
  end
  return rss, pss
end

-- Resident bytes of the file mapped at an address (the kernel splits the allocator's arena into several mappings): this
-- rank's allocations, without peers' arenas and the rest of the process.
local function mapped(address)
  local ours, file, by_file = nil, nil, {}
  for line in io.lines "/proc/self/smaps" do
    local from, to, inode = line:match "^(%x+)%-(%x+) %S+ %x+ %S+ (%d+)"
    if from then
      file = inode
      if tonumber(from, 16) <= address and address < tonumber(to, 16) then ours = file end
    end
    local kb = line:match "^Rss:%s+(%d+) kB"
    if kb then by_file[file] = (by_file[file] or 0) + tonumber(kb) * 1024 end
  end
  assert(ours and ours ~= "0", "the tensor is not in a shared arena")
  return by_file[ours]
end

ranks.describe(2, "memory of the reference model", function()
  for _, way in ipairs(bounds.WAYS) do
    it("stays within the reference's bounds without allowance: " .. way[1], function()
      bounds.check(way, DIM, HEADS, "cpu", 0)
    end)
  end

  it("has no gradients beyond a unit's with an optimizer in backward: its peak stays within 4 B + N + S + B / 2",
    function()
    local ms = require "moonshard"
    local now, peak = bounds.meter("cpu", 0)
    local model, n = bounds.model(DIM, HEADS, "meta")
    assert.equal(U, n.U)
    local steps = 0
    model = bounds.WAYS[1][2](model, ms, "cpu")
    for _, p in ipairs(model:parameters()) do
      local optim = ms.optim.Adam({ p }, { lr = 1e-2 })
      p:register_post_accumulate_grad_hook(function()
        optim:step()
        optim:zero_grad()
        steps = steps + 1
      end)
    end
    for step = 1, 3 do
      ms.scope(function()
        local loss = model(ms.randint(0, 32, { 1, 4 })):sum()
        ms.reset_peak_memory_stats()
        loss:backward()
      end)
      peak(2 * n.S + 4 * n.B + n.N + n.S + n.B / 2, "backward of step " .. step)        -- 2 S: Adam's moments
      for _, p in ipairs(model:parameters()) do assert.is_nil(p.grad) end
      now(3 * n.S + MB / 4, "after step " .. step)
    end
    assert.equal(3 * #model:parameters(), steps)
  end)

  it("equals the kernel's count within 2 %", function()
    local ms = require "moonshard"
    collected()
    ms.empty_cache()
    local here = ms.ones(1000003):keep()
    local before, ledger = mapped(here:data_ptr()), ms.memory_stats().allocated
    -- Tensors whose sizes are not multiples of a page; all of their pages are touched.
    local held = {}
    for k = 1, 12 do held[k] = ms.ones(1000003 + 77777 * k):keep() end
    local seen, counted = mapped(here:data_ptr()) - before, ms.memory_stats().allocated - ledger
    for _, t in ipairs(held) do t:release() end
    here:release()
    assert.is_true(math.abs(seen - counted) <= 0.02 * counted,
      ("the kernel sees %.2f MB more, the ledger %.2f MB"):format(seen / MB, counted / MB))
  end)
end)

-- This rank's share of resident memory after two steps, in bytes. The model starts on meta, so that nothing whole is
-- ever allocated.
local function trained_bytes()
  local ms = require "moonshard"
  local model = bounds.model(DIM, HEADS, "meta")
  local _, before = resident()
  model = bounds.WAYS[1][2](model, ms, "cpu")
  local optim = ms.optim.AdamW(model:parameters(), { lr = 1e-4 })
  for _ = 1, 2 do
    ms.scope(function() model(ms.randint(0, 32, { 1, 4 })):sum():backward() end)
    optim:step()
    optim:zero_grad()
  end
  collected()
  ms.empty_cache()
  ms.dist.barrier()
  local _, after = resident()
  local bytes = after - before
  ms.dist.barrier()
  return bytes
end

for _, world in ipairs { 1, 2, 4 } do
  ranks.describe(world, "resident memory", function()
    it("is a rank's share of parameters and moments and little else", function()
      if require("spec.support.process").tool then return pending "the sanitizer's own memory is resident, too" end
      local bytes, state = trained_bytes(), 3 * 4 * U / world
      -- The rest is code of oneDNN and LuaJIT's traces and stacks, whose pages are touched only now.
      assert.is_true(bytes <= 1.05 * state + 24 * MB, (
        "%.1f MB resident, %.1f MB are this rank's shards and moments"):format(bytes / MB, state / MB))
    end)
  end)
end
