-- SPDX-License-Identifier: MIT
--- The memory test of the classic suite with its own model (docs/semantics.md#memory), at the points that hold
--- activations: FSDP around convolutions and around each batch norm, on 2 ranks, SGD with momentum. As in the suite,
--- shards are counted in whole MiB, and each bound has 1 MiB more.
---
--- The suite took its numbers after forward, 340 MiB and with a checkpoint 51, from a run with inputs 2 x 3 x 224 x
--- 224. They are the sum of this rank's shards, 1 MiB, and the activations kept for backward. Each convolution has two
--- of these, both of the size of its output: the inputs of the batch norm and of the next convolution (ReLUs work in
--- place). The three blocks inside a checkpoint keep none. Here the images are smaller.
local ranks = require "spec.support.ranks"
local collected = require "spec.support.collected"

local MIB, HIDDEN = 2 ^ 20, 128

-- MiB of activations that a forward keeps for its backward, for batches of 2. The first convolution shrinks images by 2
-- in each direction.
local function activations(side, checkpointed)
  local image = 4 * 2 * (side - 2) ^ 2
  return image * (2 * 64 + (checkpointed and 0 or 6 * HIDDEN)) / MIB
end

local function build(checkpointed, pieces)
  local ms = require "moonshard"
  local nn = ms.nn
  local function unit(m) return ms.fsdp.FSDP(m, { use_orig_params = pieces }) end
  local ReLU = nn.Module:extend "InPlaceReLU"
  function ReLU.forward(_, x) return x:relu_() end
  local Pool = nn.Module:extend "Pool"
  function Pool.forward(_, x) return x:mean { 3, 4 } end
  local Model = nn.Module:extend "Model"
  function Model:init()
    local function block(from, to, size, padding)
      return nn.Conv2d(from, to, size, { padding = padding }), unit(nn.BatchNorm2d(to)), ReLU()
    end
    self.stem = nn.Sequential(block(3, 64, 3, 0))
    self.blocks = nn.Sequential()
    for k = 1, 3 do
      for _, layer in ipairs { block(k == 1 and 64 or HIDDEN, HIDDEN, 5, 2) } do self.blocks:append(layer) end
    end
    self.blocks:append(Pool())
    self.head = nn.Linear(HIDDEN, 10)
  end
  function Model:forward(x)
    x = self.stem(x)
    return self.head(checkpointed and ms.checkpoint(self.blocks, x) or self.blocks(x))
  end
  local model = Model()
  local elements = 0
  for _, p in ipairs(model:parameters()) do elements = elements + p:numel() end
  for _, name in ipairs { "stem", "blocks", "head" } do model[name] = unit(model[name]) end
  return unit(model), elements
end

ranks.describe(2, "memory after forward", function()
  for _, way in ipairs { { false, false }, { false, true }, { true, false }, { true, true } } do
    local checkpointed, pieces = unpack(way)
    it(("is shards and activations, checkpoint = %s, use_orig_params = %s"):format(tostring(checkpointed),
      tostring(pieces)), function()
      local ms = require "moonshard"
      -- Memory that operators allocate once and keep.
      ms.scope(function() ms.nn.Conv2d(3, 8, 3)(ms.ones(1, 3, 8, 8)):sum():backward() end)
      collected()
      local base = ms.memory_stats().allocated
      local model, elements = build(checkpointed, pieces)
      collected()
      local M = math.floor(4 * elements / MIB + 0.5)
      local s = math.floor(M / 2)
      assert.equal(4, M)
      -- The suite's own numbers at the original size.
      assert.equal(checkpointed and 51 or 340, math.floor(activations(224, checkpointed) + s + 1 + 0.5))
      local side = 34
      local kept = activations(side, checkpointed)
      local optim = ms.optim.SGD(model:parameters(), { lr = 1e-4, momentum = 0.9 })
      local batch = ms.randn(2, 3, side, side):keep()
      base = base + 4 * batch:numel()
      for iteration = 0, 3 do
        local moments = iteration > 0 and s or 0
        local function within(bound, what)
          local now = (ms.memory_stats().allocated - base) / MIB
          assert.is_true(now <= bound, ("%s of iteration %d: %.2f MiB, at most %.2f expected"):format(what, iteration,
            now, bound))
        end
        within(s + moments + 1, "start")
        ms.scope(function()
          local out = model(batch)
          within(kept + s + moments + 1, "after forward")
          local loss = out:select(1, 1):sum():pow(2)
          within(kept + s + moments + 1, "after the loss")
          loss:backward()
          within(2 * s + moments + 1, "after backward")
        end)
        optim:step()
        within(3 * s + 1, "after step")
        optim:zero_grad()
        within(2 * s + 1, "after zero_grad")
      end
    end)
  end
end)
