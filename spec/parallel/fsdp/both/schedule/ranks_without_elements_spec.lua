-- SPDX-License-Identifier: MIT
--- Ranks without elements of a unit's parameters follow the same steps as the others: all ranks decide alike whether
--- parameters that stayed gathered after a forward without a backward must be gathered again.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

-- A module whose own parameter is one number, so that all ranks but one hold nothing of it.
local function make()
  local ms, nn = load()
  ms.manual_seed(4)
  local Scaled = nn.Module:extend "Scaled"
  function Scaled:init()
    self.gain = nn.Parameter(ms.ones(1, { dtype = "float64" }))
    self.layer = nn.Linear(4, 4, { dtype = "float64" })
  end
  function Scaled:forward(x) return self.layer(x):tanh() * self.gain end
  return Scaled()
end

local function wrapped(kind)
  local _, _, fsdp, _, quietly = load()
  return quietly(function()
    local m = make()
    if kind == "fully_shard" then
      fsdp.fully_shard(m.layer)
      return fsdp.fully_shard(m)
    end
    local o = { use_orig_params = true, sharding_strategy = kind }
    m.layer = fsdp.FSDP(m.layer, o)
    return fsdp.FSDP(m, o)
  end)
end

for world = 2, 4 do
  ranks.describe(world, ("empty parts on %d ranks"):format(world), function(rank)
    for _, kind in ipairs { "fully_shard", "full_shard", "shard_grad_op" } do
      for _, class in ipairs { "SGD", "Adam" } do
        it(("a forward whose backward never runs, and then %s's step: %s"):format(class, kind), function()
          local ms, _, fsdp = load()
          local plain, model = make(), wrapped(kind)
          local a, b = ms.optim[class](plain:parameters(), { lr = 0.1 }),
            ms.optim[class](model:parameters(), { lr = 0.1 })
          for step = 1, 3 do
            local function input(r)
              ms.manual_seed(10 * step + r)
              return ms.randn(3, 4, { dtype = "float64" })
            end
            for r = 0, world - 1 do (plain(input(r)):pow(2):sum() / world):backward() end
            model(input(rank)):pow(2):sum():backward()
            model(input(rank))
            a:step()
            b:step()
            assert.is_true((model(input(rank)) - plain(input(rank))):abs():max():item() < 1e-12)
            a:zero_grad()
            b:zero_grad()
          end
          local whole = fsdp.state_dict(model)
          for name, p in plain:named_parameters() do
            assert.is_true((whole[name] - p):abs():max():item() < 1e-12, name)
          end
        end)
      end
    end
  end)
end
