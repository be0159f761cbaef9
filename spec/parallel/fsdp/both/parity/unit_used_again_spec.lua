-- SPDX-License-Identifier: MIT
--- A unit that is used several times in a forward, some of them inside of checkpoints, has DDP's bits.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local ways = require "spec.support.ways"

local function again(m, x) return m.a(x):tanh() end

-- What a forward does, of units a and b.
local PLANS = {
  { "twice", function(m, x) return m.a(m.b(again(m, x)):tanh()) end },
  { "first in a checkpoint", function(m, x, keep) return m.a(m.b(keep(again, m, x)):tanh()) end },
  { "first as a checkpoint", function(m, x, keep) return m.a(keep(m.a, x):tanh()) end },
  { "then in a checkpoint", function(m, x, keep) return keep(function(y) return m.a(m.b(y):tanh()) end, again(m, x)) end },
  { "in two checkpoints", function(m, x, keep) return keep(again, m, m.b(keep(again, m, x))) end },
  { "three times", function(m, x, keep) return m.a(m.b(m.a(keep(again, m, x))):tanh()) end },
  { "twice in a checkpoint, and once", function(m, x, keep)
    return m.a(m.b(keep(function(y) return m.a(again(m, y)) end, x)):tanh())
  end },
  { "first in nested checkpoints", function(m, x, keep)
    return m.a(m.b(keep(function(y) return keep(again, m, y) end, x)):tanh())
  end },
}

local function net(plan)
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init() self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2) end
  function Net:forward(x) return self.head(plan(self, x, ms.checkpoint)) end
  ms.manual_seed(3)
  return Net()
end

local WAYS = {
  { "fully_shard", ways.fully_shard { "a", "b" } },
  { "FSDP", ways.FSDP { "a", "b", "head" } },
  { "FSDP, original parameters, shard_grad_op", ways.FSDP({ "a", "b", "head" },
    { use_orig_params = true, sharding_strategy = "shard_grad_op" }) },
}

for world = 1, 4 do
  ranks.describe(world, ("a unit that is used several times, over %d ranks"):format(world), function(rank)
    for _, plan in ipairs(PLANS) do
      it(plan[1] .. ": DDP's bits", function()
        local ms, nn, fsdp, _, quietly = load()
        for _, way in ipairs(WAYS) do
          local want, m = nn.DDP(net(plan[2]), { static_graph = true }), quietly(way[2], net(plan[2]))
          local its_opt, opt = ms.optim.SGD(want:parameters(), { lr = 0.5 }), ms.optim.SGD(m:parameters(), { lr = 0.5 })
          for step = 1, 3 do
            for k, model in ipairs { want, m } do
              ms.manual_seed(10 * step + rank)
              model(ms.randn(5, 6, { requires_grad = step == 2 })):pow(2):mean():backward()
              local o = k == 1 and its_opt or opt
              o:step()
              o:zero_grad()
            end
            local sd = fsdp.state_dict(m)
            for name, t in ms.sorted_pairs(want.module:state_dict()) do
              assert.is_true(t:equal(sd[name]), ("%s, step %d: %s"):format(way[1], step, name))
            end
          end
        end
      end)
    end
  end)
end
