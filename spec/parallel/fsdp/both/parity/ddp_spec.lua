-- SPDX-License-Identifier: MIT
--- FSDP, converted to another dtype after wrapping, trains the models of spec/support/models as DDP does: losses in
--- every step, whole parameters at the end. Every rank has its own input.
local ranks = require "spec.support.ranks"

local MODELS = { "nested_wrapped_module", "always_wrap_nested_wrapped_module", "non_uniform_req_grad",
  "mixture_of_experts", "transformer_with_shared_params" }
local STRATEGIES = { "full_shard", "shard_grad_op", "no_shard" }
local CONVERTED = { float64 = { rtol = 1e-12, atol = 1e-12 }, bfloat16 = { rtol = 5e-2, atol = 5e-2 },
  float16 = { rtol = 1e-2, atol = 1e-2 } }

local load = require "spec.support.load"
local function zoo(name) return require("spec.support.models." .. name) end

for world = 2, 3 do
  ranks.describe(world, ("FSDP moved to another dtype, beside DDP over %d ranks #mpi"):format(world), function()
    for _, name in ipairs(MODELS) do
      for _, strategy in ipairs(STRATEGIES) do
        for _, orig in ipairs { true, false } do
          -- Frozen and trained parameters can share a unit only with use_orig_params.
          if orig or name ~= "non_uniform_req_grad" then
            local title = ("%s, %s%s"):format(name, strategy, orig and ", original parameters" or "")
            for dtype, tolerance in require("moonshard").sorted_pairs(CONVERTED) do
              it(dtype .. ": " .. title, function()
                require("spec.support.parity").check(zoo(name), { strategy = strategy, dtype = "float32",
                  use_orig_params = orig, convert = dtype, tolerance = tolerance,
                  save_model = dtype == "float64" and name ~= "mixture_of_experts",
                  reference = name == "mixture_of_experts" and zoo "dummy_ddp".DummyDDP or nil })
              end)
            end
          end
        end
      end
    end
  end)
end

for _, world in ipairs { 3, 5 } do
  ranks.describe(world, ("sharded training beside DDP over %d ranks #mpi"):format(world), function(rank)
    local fronts = {
      fully_shard = function(m, fsdp) return fsdp.fully_shard(m) end,
      FSDP = function(m, fsdp) return fsdp.FSDP(m) end,
    }
    for front, wrap in require("moonshard").sorted_pairs(fronts) do
      for _, dtype in ipairs { "float32", "float64" } do
        it(("%s in %s has the same bits, though the mean over ranks rounds"):format(front, dtype), function()
          local ms, nn, _, fsdp = load()
          local weights = {}
          for k = 1, 2 do
            ms.manual_seed(1)
            local m = nn.Sequential(nn.Linear(37, 53, { dtype = dtype }), nn.Tanh(),
              nn.Linear(53, 29, { dtype = dtype }))
            local wrapped = k == 1 and nn.DDP(m) or wrap(m, fsdp)
            local optimizer = ms.optim.AdamW(wrapped:parameters(), { lr = 0.01 })
            for step = 1, 4 do
              ms.manual_seed(100 * step + rank)
              wrapped(ms.randn(8, 37, { dtype = dtype })):pow(2):mean():backward()
              optimizer:step()
              optimizer:zero_grad()
            end
            weights[k] = k == 1 and m:state_dict() or fsdp.state_dict(wrapped)
          end
          for name, t in ms.sorted_pairs(weights[1]) do assert.is_true(t:equal(weights[2][name]), name) end
        end)
      end
    end
  end)
end
