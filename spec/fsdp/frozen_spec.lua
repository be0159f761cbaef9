--- Training with a frozen trunk under FSDP (behaviour.md 3.4, FSDP1): frozen by requires_grad or by dropping its gradients, before or
--- after wrapping, the trunk one unit or units inside one another; the same parameters as under DDP.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function plain_model()
  local ms, nn = load()
  ms.manual_seed(4)
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.trunk = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 6), nn.Tanh()))
    self.head = nn.Linear(6, 3)
  end
  function Net:forward(x) return self.head(self.trunk(x)) end
  return Net()
end

local function freeze(trunk)
  for _, p in ipairs(trunk:parameters()) do p.requires_grad = false end
end

local function wrap(net, options, nested)
  local _, _, fsdp, _, quietly = load()
  return quietly(function()
    if nested then net.trunk[3] = fsdp.FSDP(net.trunk[3], options) end
    net.trunk, net.head = fsdp.FSDP(net.trunk, options), fsdp.FSDP(net.head, options)
    return fsdp.FSDP(net, options)
  end)
end

for world = 2, 4 do
  ranks.describe(world, ("a frozen trunk on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        for _, how in ipairs { "requires_grad before wrapping", "requires_grad after wrapping", "dropped gradients" } do
          it(("trains its head as DDP does, by %s: %s, use_orig_params = %s"):format(how, strategy, tostring(pieces)), function(rank)
            local ms, nn, fsdp = load()
            for _, nested in ipairs { false, true } do
              local reference, model = plain_model(), plain_model()
              if how ~= "dropped gradients" then freeze(reference.trunk) end
              if how:find "before" then freeze(model.trunk) end
              reference = nn.DDP(reference)
              model = wrap(model, { sharding_strategy = strategy, use_orig_params = pieces }, nested)
              if how:find "after" then freeze(model.module.trunk) end
              local optims = {}
              for k, m in ipairs { reference, model } do optims[k] = ms.optim.SGD(m:parameters(), { lr = 0.1, momentum = 0.9 }) end
              local before = {}
              for name, t in pairs(fsdp.state_dict(model)) do before[name] = t:clone() end
              for step = 1, 3 do
                for _, m in ipairs { reference, model } do
                  ms.manual_seed(10 * step + rank)
                  ms.scope(function() m(ms.rand(4, 5)):pow(2):sum():backward() end)
                end
                for _, m in ipairs { reference, model } do
                  for _, p in ipairs(m.module.trunk:parameters()) do
                    if how == "dropped gradients" then p.grad = nil else assert.is_nil(p.grad) end
                  end
                end
                for _, optim in ipairs(optims) do
                  optim:step()
                  optim:zero_grad()
                end
              end
              fsdp.check_sharded_parity(reference.module, model)
              for name, t in pairs(fsdp.state_dict(model)) do assert.equal(name:find "^trunk" ~= nil, t:equal(before[name]), name) end
            end
          end)
        end
      end
    end
  end)
end
