-- SPDX-License-Identifier: MIT
--- Memory of a GPU in sharded training, counted by the engine: the bounds of docs/semantics.md#memory, for both front
--- ends, where ranks map each other's memory and where bytes go through CPU memory.
local bounds = require "spec.support.memory_bounds"
local ranks = require "spec.support.ranks"

for _, case in ipairs { { 2, {} }, { 3, {} }, { 2, { MOONSHARD_CUDA_SHARE = "staging" } } } do
  local world, env = case[1], case[2]
  local name = ("memory of a GPU in sharded training, %d ranks%s #cuda"):format(world,
    env.MOONSHARD_CUDA_SHARE and ", through CPU memory" or "")
  ranks.describe(world, name, { env = env }, function()
    for _, way in ipairs(bounds.WAYS) do
      it("stays within the bounds: " .. way[1], function()
        local device = require "moonshard".empty(1, { device = "cuda" }).device         -- the rank's GPU
        bounds.check(way, 48, 2, device, 2048)                 -- 2048: scalars, and activations
      end)
    end
  end)
end
