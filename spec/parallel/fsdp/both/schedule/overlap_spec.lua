-- SPDX-License-Identifier: MIT
--- Overlap (docs/semantics.md#overlap): all gathers except the first of a forward and of a backward, and all reductions
--- except the last, run during slow layers. A step without overlap waits for 3 x 3 collectives; with overlap only these
--- three take time.
local ranks = require "spec.support.ranks"

ranks.describe(2, "overlap", function()
  local overlap = require "spec.support.overlap"

  it("of fully_shard hides all gathers but the first of each pass, and all reductions but the last", function()
    local ms = require "moonshard"
    local layers, naps = overlap.layers()
    local model = ms.nn.Sequential(unpack(layers))
    for _, layer in ipairs(layers) do ms.fsdp.fully_shard(layer) end
    overlap.check(ms.fsdp.fully_shard(model), layers, naps, 1, 2)
  end)

  it("of fully_shard hides as much on a GPU, where the streams are delayed and the host runs ahead #cuda", function()
    local ms = require "moonshard"
    if not ms.cuda.is_available() then return end
    local layers, naps = overlap.layers "cuda"
    local model = ms.nn.Sequential(unpack(layers))
    for _, layer in ipairs(layers) do ms.fsdp.fully_shard(layer) end
    overlap.check(ms.fsdp.fully_shard(model), layers, naps, 1, 2)
  end)

  -- The number of delays visible in forward and backward.
  for _, case in ipairs { { "full_shard", 1, 2 }, { "shard_grad_op", 1, 1 }, { "no_shard", 0, 1 } } do
    local strategy, forward, backward = unpack(case)
    for _, pieces in ipairs { false, true } do
      it(("of FSDP, %s, hides as much, use_orig_params = %s"):format(strategy, tostring(pieces)), function()
        local ms = require "moonshard"
        local layers, naps = overlap.layers()
        local options = { sharding_strategy = strategy, use_orig_params = pieces, forward_prefetch = true }
        local model = require("spec.support.wrapped").quietly(function()
          local units = {}
          for k, layer in ipairs(layers) do units[k] = ms.fsdp.FSDP(layer, options) end
          return ms.fsdp.FSDP(ms.nn.Sequential(unpack(units)), options)
        end)
        overlap.check(model, layers, naps, forward, backward)
      end)
    end
  end

  it("is due to prefetching: without it every gather's time shows", function()
    local ms = require "moonshard"
    local layers, naps = overlap.layers()
    local options = { forward_prefetch = false, backward_prefetch = "none" }
    local units = {}
    for k, layer in ipairs(layers) do units[k] = ms.fsdp.FSDP(layer, options) end
    local forward, backward = overlap.exposed(ms.fsdp.FSDP(ms.nn.Sequential(unpack(units)), options), layers, naps,
      { 3, 4 })
    assert.is_true(forward > 2.5 and backward > 3.5, (
      "%.2f and %.2f delays of a collective are not hidden, expected 3 and 4"):format(forward, backward))
  end)
end)
