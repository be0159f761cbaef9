-- SPDX-License-Identifier: MIT
--- The memory test of the composable suite with its own model and numbers (docs/semantics.md#memory): 2 ranks, float32,
--- Transformer(vocab 32, 3 layers, dim 768, 12 heads, untied), Adam. Tests the upper bounds, without the suite's
--- tolerance, on the memory that the engine counts; that count against the kernel's for the same pages; and resident
--- memory on different numbers of ranks.
local ranks = require "spec.support.ranks"
local collected = require "spec.support.collected"

local B, U, N = 7084800, 21317376, 62976        -- elements of a block, of the model, and outside the blocks
local S = math.ceil(U / 2)
local MB = 1e6

local function build(device)
  local ms = require "moonshard"
  local TransformerLM = require("spec.support.models.transformer_lm").TransformerLM
  local model = TransformerLM { vocab = 32, layers = 3, dim = 768, heads = 12, max_seq = 16, tie = false,
    device = device }
  return model, ms
end

local function shard(model, options)
  local fsdp = require "moonshard.parallel.fsdp"
  for _, layer in ipairs(model.layers) do fsdp.fully_shard(layer, options) end
  return fsdp.fully_shard(model, options)
end

-- Ways to shard the model, which is on meta: function, and whether it reshards after forward. They return the
-- initialized model.
local function of_fully_shard(reshard)
  return function(model)
    shard(model, { reshard_after_forward = reshard })
    model:to_empty "cpu"
    for _, m in ipairs(model:modules()) do
      if m.reset_parameters then m:reset_parameters() end
    end
    return model
  end
end

local function of_FSDP(strategy, pieces)
  return function(model)
    local fsdp = require "moonshard.parallel.fsdp"
    local options = { sharding_strategy = strategy, use_orig_params = pieces, device_id = "cpu" }
    for k, layer in ipairs(model.layers) do model.layers[k] = fsdp.FSDP(layer, options) end
    return fsdp.FSDP(model, options)
  end
end

local WAYS = {
  { "fully_shard, reshard_after_forward = true", of_fully_shard(true), true },
  { "fully_shard, reshard_after_forward = false", of_fully_shard(false), false },
  { "FSDP, full_shard", of_FSDP("full_shard", false), true },
  { "FSDP, full_shard, original parameters", of_FSDP("full_shard", true), true },
  { "FSDP, shard_grad_op", of_FSDP("shard_grad_op", false), false },
  { "FSDP, shard_grad_op, original parameters", of_FSDP("shard_grad_op", true), false },
}

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
  for _, way in ipairs(WAYS) do
    local title, sharded, reshard = unpack(way)
    it("stays within the reference's bounds without allowance: " .. title, function()
      local ms = require "moonshard"
      ms.scope(function() ms.nn.Linear(8, 8)(ms.ones(2, 8)):sum():backward() end)
      collected()
      local base = ms.memory_stats().allocated
      local function current() return (ms.memory_stats().allocated - base) / MB end
      local function peak() return (ms.memory_stats().peak_allocated - base) / MB end
      local function within(bound, value, what)
        assert.is_true(value <= 4 * bound / MB, ("%s: %.3f MB, the bound is %.3f MB"):format(what, value,
          4 * bound / MB))
      end

      local model = build "meta"
      assert.equal(U, (function()
        local n = 0
        for _, p in ipairs(model:parameters()) do n = n + p:numel() end
        return n
      end)())
      ms.reset_peak_memory_stats()
      model = sharded(model)
      within(S + B, peak(), "initialisation, peak")
      within(S + MB, current(), "initialisation")             -- the suite allows 4 MB here: 1e6 elements

      local optim = ms.optim.Adam(model:parameters(), { lr = 1e-2 })
      for step = 1, 2 do                                      -- the second has Adam's moments and a known order
        local states = step == 1 and 0 or 2 * S               -- Adam's moments, in addition to the table's numbers
        ms.scope(function()
          local ids = ms.randint(0, 32, { 1, 4 })
          ms.reset_peak_memory_stats()
          local loss = model(ids):sum()
          within(states + (reshard and 3 * B + N + S or S + U + B), peak(), "forward of step " .. step)
          ms.reset_peak_memory_stats()
          loss:backward()
          within(states + (reshard and 4 * B + N + 2 * S or S + U + 1.5 * B), peak(), "backward of step " .. step)
        end)
        optim:step()
        within(4 * S, current(), "after step " .. step)
        optim:zero_grad()
        within(3 * S, current(), "after zero_grad " .. step)
      end
    end)
  end

  it("has no gradients beyond a unit's with an optimizer in backward: its peak stays within 4 B + N + S + B / 2",
    function()
    local ms = require "moonshard"
    ms.scope(function() ms.nn.Linear(8, 8)(ms.ones(2, 8)):sum():backward() end)
    collected()
    local base = ms.memory_stats().allocated
    local model, steps = of_fully_shard(true)(build "meta"), 0
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
      local peak = (ms.memory_stats().peak_allocated - base) / MB
      local bound = 4 * (2 * S + 4 * B + N + S + B / 2) / MB            -- 2 S: Adam's moments
      assert.is_true(peak <= bound, ("backward of step %d: %.3f MB, the bound is %.3f MB"):format(step, peak, bound))
      for _, p in ipairs(model:parameters()) do assert.is_nil(p.grad) end
      assert.is_true((ms.memory_stats().allocated - base) / MB <= (4 * 3 * S + MB) / MB)
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
  local model, ms = build "meta"
  shard(model)
  local _, before = resident()
  model:to_empty "cpu"
  for _, m in ipairs(model:modules()) do
    if m.reset_parameters then m:reset_parameters() end
  end
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
