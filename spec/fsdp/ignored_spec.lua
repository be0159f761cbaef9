--- Ignored modules where ranks have different ones, or where they are not below the module that is wrapped.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

-- Two layers, a stack that ranks may have of different lengths, and a layer listed after it.
local function net(stack)
  local ms, nn = load()
  ms.manual_seed(0)
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first = nn.Linear(3, 5)
    self.stack = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    self.last = nn.Linear(4, 2)
    for k = 1, stack do
      self.stack:append(nn.Linear(4, 4, { bias = false }))
      ms.no_grad(function() self.stack[2 + k].weight:fill_(0.1 * k) end)
    end
  end
  function Net:forward(x) return self.last(self.stack(self.first(x):tanh())) end
  return Net()
end

local function input(step, r)
  local ms = load()
  ms.manual_seed(10 * step + r)
  return ms.rand(4, 3)
end

-- Every rank's model in one process: what is managed is one for all of them, what is ignored each rank's own, with its own gradients.
local function references(world, lengths)
  local models, params = {}, {}
  for r = 0, world - 1 do
    local m = net(lengths(r))
    models[r] = m
    if r > 0 then m.first, m.last, m.stack[1], m.stack[2] = models[0].first, models[0].last, models[0].stack[1], models[0].stack[2] end
  end
  local seen = {}
  for r = 0, world - 1 do
    for _, p in ipairs(models[r]:parameters()) do
      if not seen[p] then
        seen[p] = true
        params[#params + 1] = p
      end
    end
  end
  return models, params
end

for world = 1, 4 do
  ranks.describe(world, ("ignored modules on %d ranks"):format(world), function()
    for _, case in ipairs {
      { "another number on each rank, told to the root too", function(r) return r + 1 end, true },
      { "another number on each rank, told to the inner instance only", function(r) return r + 1 end, false },
      { "given to instances that they are not below", function() return 2 end, "everywhere" },
    } do
      for _, pieces in ipairs { false, true } do
        it(("train as whole models do: %s, use_orig_params = %s"):format(case[1], tostring(pieces)), function(rank)
          local ms, _, fsdp, dist, quietly = load()
          local level = dist.debug_level()
          finally(function() dist.set_debug_level(level) end)
          dist.set_debug_level "detail"                         -- the order of units is compared by their numbers and names
          local models, params = references(world, case[2])
          local model, ignored = net(case[2](rank)), {}
          for k = 3, #model.stack do ignored[k - 2] = model.stack[k] end
          local function options(with) return { use_orig_params = pieces, ignored_modules = with and ignored or nil } end
          quietly(function()
            model.stack = fsdp.FSDP(model.stack, options(true))
            model.last = fsdp.FSDP(model.last, options(case[3] == "everywhere"))
            model = fsdp.FSDP(model, options(case[3]))
          end)
          local optim, its_optim = ms.optim.SGD(params, { lr = 0.1 }), ms.optim.SGD(model:parameters(), { lr = 0.1 })
          for step = 1, 3 do
            for r = 0, world - 1 do (models[r](input(step, r)):pow(2):sum() / world):backward() end
            for r = 0, world - 1 do
              for k = 3, #models[r].stack do models[r].stack[k].weight.grad:mul_(world) end
            end
            optim:step()
            optim:zero_grad()
            model(input(step, rank)):pow(2):sum():backward()
            its_optim:step()
            its_optim:zero_grad()
          end
          local want = models[rank]:state_dict()
          for name, t in ms.sorted_pairs(model:state_dict()) do ms.testing.assert_close(t, want[name]) end
          for k, m in ipairs(ignored) do
            assert.is_nil(rawget(m.weight, "_unit"))
            assert.equal(m.weight, model.stack[2 + k].weight)
          end
        end)
      end
    end
  end)
end
