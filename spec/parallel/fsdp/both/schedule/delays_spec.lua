-- SPDX-License-Identifier: MIT
--- Delays around a unit's collectives do not change results: before the optimizer's step, before a reduction, before an
--- instance vacates its parameters.
local ranks = require "spec.support.ranks"

local function zoo(name) return require("spec.support.models." .. name) end

local CASES = {
  { "before the step and the reduction", "module_with_delay",
  given = { delay_after_loss_ms = 20, delay_before_reduction_ms = 20 } },
  { "before an expert is vacated", "mixture_of_experts", given = { delay_before_free_ms = 20 }, save_model = false,
    reference = function(m) return zoo "dummy_ddp".DummyDDP(m) end },
}

for world = 2, 3 do
  ranks.describe(world, ("delays on %d ranks"):format(world), function()
    for _, case in ipairs(CASES) do
      for _, strategy in ipairs { "full_shard", "shard_grad_op" } do
        it(("%s change nothing: %s"):format(case[1], strategy), function()
          require("spec.support.parity").check(zoo(case[2]), {
            strategy = strategy, dtype = "float32", use_orig_params = strategy == "full_shard",
            reference = case.reference,
            save_model = case.save_model, given = case.given,
          })
        end)
      end
    end
  end)
end
