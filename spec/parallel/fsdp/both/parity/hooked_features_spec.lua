-- SPDX-License-Identifier: MIT
--- Losses of features that a hook keeps from inside of a unit, whose output may be unused: trained as in one process.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

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
  return m, Block
end

local function sharded(...)
  local names = { ... }
  return function(m)
    local _, _, fsdp = load()
    for _, name in ipairs(names) do
      local target = m
      for part in name:gmatch "[^.]+" do target = target[part] end
      fsdp.fully_shard(target)
    end
    return fsdp.fully_shard(m)
  end
end

local function classic(options, linear)
  return function(m, Block)
    local _, nn, fsdp = load()
    local o = { auto_wrap_policy = fsdp.wrap.module_wrap_policy { Block, linear and nn.Linear or Block } }
    for name, value in pairs(options) do o[name] = value end
    return fsdp.FSDP(m, o)
  end
end

local WAYS = {
  { "fully_shard of the block", sharded("block", "after") },
  { "fully_shard of every child", sharded("before", "block", "after") },
  { "fully_shard of a child of the block", sharded("block.first", "block", "after") },
  { "fully_shard of the root", sharded() },
  { "FSDP of the block", classic {} },
  { "FSDP of the block, original parameters", classic { use_orig_params = true } },
  { "FSDP without prefetching", classic { backward_prefetch = "none" } },
  { "FSDP of every layer", classic({ sharding_strategy = "shard_grad_op" }, true) },
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
      local m = sharded("block", "after")(net "unused")
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
