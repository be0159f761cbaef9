-- SPDX-License-Identifier: MIT
--- Losses of features that a hook keeps from inside of a unit, whose output may be unused: trained as in one process.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local ways = require "spec.support.ways"

-- output: what the loss uses of the model's output: "unused", "used", or "detached": it needs no gradient.
local function net(output)
  local ms, nn = load()
  ms.manual_seed(1)
  local Block = nn.Module:extend "Block"
  function Block:init() self.first, self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4) end
  function Block:forward(x)
    local y = self.outer(self.inner(self.first(x):tanh()):tanh())
    return output == "detached" and y:detach() or y
  end
  local Net = nn.Module:extend "Net"
  function Net:init() self.before, self.block, self.after = nn.Linear(4, 4), Block(), nn.Linear(4, 2) end
  function Net:forward(x)
    local y = self.after(self.block(self.before(x)))
    return output == "used" and y:sum() * 0.1 + self.seen:pow(2):sum() or self.seen
  end
  local m = Net()
  m.block.inner:register_forward_hook(function(_, _, out)
    m.seen = out:tanh()
    m.calls = 0
    m.seen:register_hook(function() m.calls = m.calls + 1 end)
    return out
  end)
  return m
end

local WAYS = {
  { "fully_shard of the block", ways.fully_shard { "block", "after" } },
  { "fully_shard of every child", ways.fully_shard { "before", "block", "after" } },
  { "fully_shard of a child of the block", ways.fully_shard { "block.first", "block", "after" } },
  { "fully_shard of the root", ways.fully_shard {} },
  { "FSDP of the block", ways.FSDP { "block" } },
  { "FSDP of the block, original parameters", ways.FSDP({ "block" }, { use_orig_params = true }) },
  { "FSDP without prefetching", ways.FSDP({ "block" }, { backward_prefetch = "none" }) },
  { "FSDP of every layer", ways.FSDP({ "before", "block.first", "block.inner", "block.outer", "block", "after" },
    { sharding_strategy = "shard_grad_op" }) },
}

for world = 1, 4 do
  ranks.describe(world, ("losses of inner features over %d ranks"):format(world), function(rank)
    for _, way in ipairs(WAYS) do
      for _, output in ipairs { "unused", "used", "detached" } do
        it(("%s, the output %s"):format(way[1], output), function()
          local ms, _, fsdp, _, quietly = load()
          local function data(step, r)
            ms.manual_seed(10 * step + r)
            return ms.randn(3, 4)
          end
          local want, m = net(output), quietly(way[2], net(output))
          local its_opt, opt = ms.optim.SGD(want:parameters(), { lr = 0.1 }), ms.optim.SGD(m:parameters(), { lr = 0.1 })
          for step = 1, 3 do
            for r = 0, world - 1 do (want(data(step, r)):pow(2):mean() / world):backward() end
            m(data(step, rank)):pow(2):mean():backward()
            for _, o in ipairs { its_opt, opt } do
              o:step()
              o:zero_grad()
            end
          end
          for name, t in ms.sorted_pairs(fsdp.state_dict(m)) do
            ms.testing.assert_close(t, want:state_dict()[name])
          end
        end)
      end
    end

    it("gather the unit once, and call the features' hooks once", function()
      local _, _, fsdp = load()
      local ms = load()
      local m = ways.fully_shard { "block", "after" }(net "unused")
      for _ = 1, 2 do
        local loss = m(ms.ones(3, 4)):sum()
        local events = fsdp.record(function() loss:backward() end)
        local gathers = 0
        for _, e in ipairs(events) do
          gathers = gathers + (e.event == "unshard" and e.unit == "block" and 1 or 0)
        end
        assert.same({ world == 1 and gathers or 1, 1 }, { gathers, m.calls })
      end
    end)
  end)
end
