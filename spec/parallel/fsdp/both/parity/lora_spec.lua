-- SPDX-License-Identifier: MIT
--- Fine-tuning with low-rank adapters: frozen weights and trained adapters in one unit train as in one process, over
--- 20 steps; merging and the adapters' state dict work on shards.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local STEPS, BATCH = 20, 12                             -- BATCH: a multiple of 1 to 4 ranks

local function make()
  local ms, nn = load()
  local GPT = require "moonshard.models.gpt"
  ms.manual_seed(2)
  local model = GPT { vocab = 13, context = 6, layers = 2, heads = 2, dim = 10, tie = false, dtype = "float64" }
  ms.manual_seed(5)
  local lora = nn.lora(model, { target = { "qkv", "mlp%.%d", "token" }, rank = 3, alpha = 6, trainable = "head%.weight" })
  return model, lora
end

local function wrap(kind, model)
  local _, nn, fsdp, _, quietly = load()
  return quietly(function()
    if kind == "DDP" then return nn.DDP(model) end
    if kind == "fully_shard" then
      for _, block in ipairs(model.blocks) do fsdp.fully_shard(block) end
      return fsdp.fully_shard(model)
    end
    for k, block in ipairs(model.blocks) do model.blocks[k] = fsdp.FSDP(block, { use_orig_params = true }) end
    return fsdp.FSDP(model, { use_orig_params = true })
  end)
end

-- Trains on this rank's part of each step's batch; returns the losses over the whole batch.
local function train(model, lora, rank, world)
  local ms, _, _, dist = load()
  local optimizer = ms.optim.AdamW(lora:parameters(), { lr = 0.02 })
  local losses = {}
  for step = 1, STEPS do
    ms.manual_seed(100 + step)
    ms.scope(function()
      local ids = (ms.randint(0, 13, { BATCH, 1 }) + ms.arange(0, 7)) % 13      -- each id is the one before plus 1
      local n = BATCH / world
      local mine = ids:narrow(1, rank * n + 1, n)
      local loss = model(mine:narrow(2, 1, 6):contiguous(), mine:narrow(2, 2, 6):contiguous())
      loss:backward()
      local all = loss:detach():clone()
      if world > 1 then dist.all_reduce(all, { op = "avg" }) end
      losses[step] = all:item()
    end)
    optimizer:step()
    optimizer:zero_grad()
  end
  return losses
end

for world = 1, 4 do
  ranks.describe(world, ("adapters over %d ranks"):format(world), function()
    for _, kind in ipairs { "fully_shard", "FSDP", "DDP" } do
      it("train, merge and save as in one process: " .. kind, function(rank)
        local ms = load()
        local reference, reference_lora = make()
        local want = train(reference, reference_lora, 0, 1)
        local base, lora = make()
        local model = wrap(kind, base)
        local frozen = {}
        for name, p in base:named_parameters() do
          if not p.requires_grad then frozen[name] = (p.full_tensor and p:full_tensor() or p:detach():clone()) end
        end
        assert.same({ reference_lora:count() }, { lora:count() })
        local got = train(model, lora, rank, world)
        for step = 1, STEPS do assert.near(want[step], got[step], 1e-5, "step " .. step) end
        assert.is_true(want[STEPS] < want[1])
        local a, b = reference_lora:state_dict(), lora:state_dict()
        for name, t in ms.sorted_pairs(a) do
          ms.testing.assert_close(b[name], t, { rtol = 1e-5, atol = 1e-7 })
          b[name .. " seen"] = true
        end
        for name in ms.sorted_pairs(b) do assert.is_not_nil(a[name:match "^%S+"], name) end
        for name, p in base:named_parameters() do
          if frozen[name] then
            assert.is_nil(p.grad)
            assert.is_true((p.full_tensor and p:full_tensor() or p):equal(frozen[name]), name)
          end
        end

        ms.manual_seed(1)
        local ids = ms.randint(0, 13, { 2, 6 })
        model:eval()
        local before = model(ids)
        lora:merge()
        assert.is_true(model(ids):allclose(before, { rtol = 1e-5, atol = 1e-7 }))
        lora:unmerge()
        assert.is_true(model(ids):allclose(before, { rtol = 1e-5, atol = 1e-7 }))

        local fresh, fresh_lora = make()
        local other = wrap(kind == "FSDP" and "fully_shard" or "FSDP", fresh)
        fresh_lora:load_state_dict(reference_lora:state_dict())
        other:eval()
        reference:eval()
        assert.is_true(other(ids):allclose(reference(ids), { rtol = 1e-5, atol = 1e-6 }))
      end)
    end
  end)
end
