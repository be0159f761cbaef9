-- SPDX-License-Identifier: MIT
--- Parameters that change between a forward and its backward: an error, never a gradient computed with the new values
--- (docs/semantics.md#pieces).
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net()
  local ms, nn = load()
  ms.manual_seed(0)
  return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))
end

local function doubled(sd)
  local copy = {}
  for name, t in pairs(sd) do copy[name] = t:clone() * 2 end
  return copy
end

-- Changes of the first layer, or of all layers, before the backward of a loss.
local CHANGES = {
  { "load_state_dict", function(model) require("moonshard").fsdp.load_state_dict(model,
  doubled(require("moonshard").fsdp.state_dict(model))) end },
  { "an optimizer's step", function(model, optim)
    for _, p in ipairs(model:parameters()) do
      p.grad = load().zeros_like(p.to_local and p.placements and p:to_local() or p)
    end
    optim:step()
  end },
  { "to_local():mul_", function(model)
    local ms = load()
    ms.no_grad(function() for _, p in ipairs(model:parameters()) do (p.placements and p:to_local()
      or p):mul_(2) end end)
  end },
}

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("between forward and backward on %d ranks"):format(world), function()
    for _, change in ipairs(CHANGES) do
      for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
        it(("%s is refused: FSDP, %s"):format(change[1], strategy), function()
          local ms, _, fsdp, _, quietly = load()
          local inner = net()
          local model = quietly(function()
            inner[1] = fsdp.FSDP(inner[1], { sharding_strategy = strategy })
            return fsdp.FSDP(inner, { sharding_strategy = strategy })
          end)
          local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
          local loss = model(ms.ones(2, 4)):pow(2):sum()
          change[2](model, optim)
          raises("FSDP does not support changing the parameters between forward and backward", loss.backward, loss)
          model:zero_grad()
          -- Training continues with the new values.
          local want = net()
          want:load_state_dict(model:state_dict())
          want(ms.ones(2, 4)):pow(2):sum():backward()
          model(ms.ones(2, 4)):pow(2):sum():backward()
          fsdp.check_sharded_parity(want, model)
        end)
      end

      it(change[1] .. " is refused: FSDP, use_orig_params = true", function()
        local ms, _, fsdp, _, quietly = load()
        local model = quietly(fsdp.FSDP, net(), { use_orig_params = true })
        local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
        local loss = model(ms.ones(2, 4)):pow(2):sum()
        if change[1] == "an optimizer's step" then
          for _, p in ipairs(model:parameters()) do p.grad = ms.zeros_like(p:to_local()) end
          optim:step()
        else
          change[2](model, optim)
        end
        assert.has_error(function() loss:backward() end)
        for _, p in ipairs(model:parameters()) do
          if change[1] ~= "an optimizer's step" then assert.is_nil(p.grad) end
        end
      end)

      it(change[1] .. " is refused where fully_shard gathers again", function()
        local ms, _, fsdp = load()
        local model = net()
        fsdp.fully_shard(model[1], { reshard_after_forward = true })
        fsdp.fully_shard(model, { reshard_after_forward = true })
        local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
        local loss = model(ms.ones(2, 4)):pow(2):sum()
        change[2](model, optim)
        local ok, message = pcall(loss.backward, loss)
        assert.is_false(ok)
        assert.truthy(message:find("were changed between its forward and its backward", 1, true)
          or message:find("changed in place", 1, true), message)
      end)
    end
  end)
end
