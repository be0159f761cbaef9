-- SPDX-License-Identifier: MIT
--- Explicit gathers before the forward that needs them: unshard of fully_shard's modules and _unshard of FSDP
--- instances, blocking or with a handle: equal results and no further collective.
local ranks = require "spec.support.ranks"
local ways = require "spec.support.ways"
local message = require "spec.support.message"
local load = require("spec.support.wrapped").load

-- Two branches whose first layers run during the gathers of their second layers.
local function net()
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init()
    for _, name in ipairs { "in1", "in2" } do self[name] = nn.Linear(3, 5) end
    for _, name in ipairs { "out1", "out2" } do self[name] = nn.Linear(5, 3) end
  end
  function Net:forward(x)
    local handles = {}
    for k, name in ipairs { "out1", "out2" } do
      local m = self[name]
      if self.how and m.unshard then handles[k] = m:unshard { async = self.how == "async" } end
      if self.how and m._unshard then handles[k] = m:_unshard { async = self.how == "async" } end
    end
    local a, b = self.in1(x):relu(), self.in2(x):relu()
    if self.waits then for _, handle in ipairs(handles) do handle:wait() end end
    return self.out1(a) + self.out2(b)
  end
  ms.manual_seed(9)
  return Net()
end

local PARTS = { "in1", "in2", "out1", "out2" }
local KINDS = { fully_shard = ways.fully_shard(PARTS) }
for _, strategy in ipairs { "full_shard", "shard_grad_op" } do
  for _, pieces in ipairs { false, true } do
    KINDS[strategy .. (pieces and ", use_orig_params" or "")] = ways.FSDP(PARTS,
      { sharding_strategy = strategy, use_orig_params = pieces })
  end
end
local NAMES = {}
for name in pairs(KINDS) do NAMES[#NAMES + 1] = name end
table.sort(NAMES)

for world = 1, 4 do
  ranks.describe(world, ("gathering by hand on %d ranks"):format(world), function(rank)
    for _, name in ipairs(NAMES) do
      it("changes neither results nor the number of collectives: " .. name, function()
        local ms, _, fsdp, dist, quietly = load()
        for _, how in ipairs { { "sync" }, { "async" }, { "async", true } } do
          local plain, inner = net(), net()
          local model = quietly(KINDS[name], inner)
          inner.how, inner.waits = how[1], how[2]
          local optimizers = { ms.optim.SGD(plain:parameters(), { lr = 0.05 }),
            ms.optim.SGD(model:parameters(), { lr = 0.05 }) }
          for _ = 1, 2 do
            for r = 0, world - 1 do (plain(ms.ones(2, 3) * (r + 1)):pow(2):mean() / world):backward() end
            local loss
            local gathers = 0
            for _, c in ipairs((dist.record(function() loss = model(ms.ones(2, 3) * (rank + 1)):pow(2):mean() end))) do
              gathers = gathers + (c.op == "all_gather" and 1 or 0)
            end
            if world > 1 then assert.equal(4, gathers) end
            loss:backward()
            fsdp.check_sharded_parity(plain, model)
            for _, o in ipairs(optimizers) do
              o:step()
              o:zero_grad()
            end
          end
        end
      end)
    end

    it("shows whole parameters until the forward that uses them is over", function()
      local ms, nn, fsdp, _, quietly = load()
      local model = quietly(function() return fsdp.FSDP(nn.Sequential(fsdp.FSDP(nn.Linear(3, 5),
        { use_orig_params = true })), { use_orig_params = true }) end)
      model(ms.ones(1, 3)):sum():backward()
      local layer = model[1]
      local resting = tostring(layer.weight.shape)
      assert.is_nil(layer:_unshard())
      assert.equal("[5, 3]", tostring(layer.weight.shape))
      model(ms.ones(1, 3)):sum():backward()
      assert.equal(resting, tostring(layer.weight.shape))
      local handle = layer:_unshard { async = true }
      handle:wait()
      handle:wait()                                     -- a second call has no effect
      assert.equal("[5, 3]", tostring(layer.weight.shape))
      ms.no_grad(function() model(ms.ones(1, 3)) end)
      assert.equal(resting, tostring(layer.weight.shape))
      assert.matches("unknown option 'async_op'", message(layer._unshard, layer, { async_op = true }))
    end)
  end)
end
