-- SPDX-License-Identifier: MIT
--- ResNet: what it refuses, that it learns, and that sharded with SyncBatchNorm it trains as in one process.
local ms = require "moonshard"
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"
local ResNet = require "moonshard.models.resnet"
local nn = ms.nn

local function small(depth) return ResNet { depth = depth, classes = 3, width = 4, dtype = "float64" } end

describe("ResNet", function()
  it("has the number of parameters of the paper's models", function()
    for depth, count in pairs { [18] = 11689512, [34] = 21797672, [50] = 25557032 } do
      local n = 0
      for _, p in ipairs(ResNet { depth = depth, device = "meta" }:parameters()) do n = n + p:numel() end
      assert.are.equal(count, n)
    end
  end)

  it("learns in float32", function()
    ms.manual_seed(1)
    local m = ResNet { depth = 18, classes = 3, width = 4 }
    local x, ids = ms.randn(6, 3, 32, 32), ms.tensor({ 0, 1, 2, 0, 1, 2 }, { dtype = "int64" })
    local optimizer = ms.optim.SGD(m:parameters(), { lr = 0.05, momentum = 0.9 })
    local first, last
    for _ = 1, 15 do
      local loss = nn.F.cross_entropy(m(x), ids)
      optimizer:zero_grad()
      loss:backward()
      optimizer:step()
      first, last = first or loss:item(), loss:item()
    end
    assert.is_true(last < 0.2 * first, ("%g, then %g"):format(first, last))
  end)

  it("names what does not fit", function()
    assert.are.equal("ResNet: option 'depth' is 20, expected 18, 34, 50, 101 or 152", message(ResNet, { depth = 20 }))
    assert.are.equal("ResNet: images have shape [2, 1, 8, 8], expected [B, 3, H, W]",
      message(small(18), ms.zeros(2, 1, 8, 8, { dtype = "float64" })))
  end)
end)

-- Batches of different sizes: rank r has r + 2 pictures. The mean loss over all pictures is the mean of the ranks'
-- losses, weighted by the sizes of their batches.
-- Shards of three ranks are uneven; four ranks do nothing that two or three do not (scripts/test --long).
for world = 1, os.getenv "MOONSHARD_LONG" and 4 or 3 do
  ranks.describe(world, "ResNet over shards", function()
    for _, depth in ipairs { 18, 50 } do
      it(("with SyncBatchNorm trains as one process with batch norm for 20 steps, to 1e-5: %d layers"):format(depth),
        function(rank)
        local function make()
          ms.manual_seed(2)
          local m = small(depth)
          -- Freshly made, 50 layers amplify a rounding error of 1e-14 to 1e-1 within 20 steps, with or without shards.
          for _, block in ipairs(depth == 50 and m:modules() or {}) do
            if block.bn3 then ms.no_grad(function() block.bn3.weight:fill_(0.1) end) end
          end
          return m
        end
        local whole, sharded = make(), nn.SyncBatchNorm.convert_sync_batchnorm(make())
        for stage = 1, 4 do
          for _, block in ipairs(sharded["layer" .. stage]) do ms.fsdp.fully_shard(block) end
        end
        ms.fsdp.fully_shard(sharded)
        local a = ms.optim.SGD(whole:parameters(), { lr = 0.005, momentum = 0.9 })
        local b = ms.optim.SGD(sharded:parameters(), { lr = 0.005, momentum = 0.9 })
        local pictures, first, n = world * (world + 3) / 2, rank * (rank + 3) / 2 + 1, rank + 2
        for step = 1, 20 do
          ms.manual_seed(100 + step)
          local x, ids = ms.randn(pictures, 3, 48, 48):double(), ms.randint(0, 3, { pictures })
          a:zero_grad()
          b:zero_grad()
          nn.F.cross_entropy(whole(x), ids):backward()
          local loss = nn.F.cross_entropy(sharded(x:narrow(1, first, n)), ids:narrow(1, first, n))
          ;(loss * (n * world / pictures)):backward()
          a:step()
          b:step()
        end
        local want = whole:state_dict()
        for key, t in ms.sorted_pairs(ms.fsdp.state_dict(sharded)) do
          ms.testing.assert_close(t, want[key], { rtol = 1e-5, atol = 1e-7 })
        end
      end)
    end
  end)
end
