-- SPDX-License-Identifier: MIT
--- nn.DDP with static_graph: the first iteration records which parameters are used, and how often; later iterations
--- rely on it (docs/semantics.md#ddp-unused).
local ranks = require "spec.support.ranks"

local load = require "spec.support.load"

-- `first` is called three times, once inside a checkpoint; then `left` or `right`, as the field `way` says; `spare` is
-- never called.
local function make()
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.spare = nn.Linear(3, 3)
    self.first = nn.Linear(4, 4)
    self.left = nn.Linear(4, 2)
    self.right = nn.Linear(4, 2)
    self.way = "left"
  end
  function Net:forward(x)
    x = self.first(self.first(x):tanh()):tanh()
    x = ms.checkpoint(function(y) return self.first(y):tanh() end, x)
    if self.way == "none" then return x end
    return self[self.way](x)
  end
  ms.manual_seed(3)
  return Net():double()
end

local function input(rank, step)
  local ms = load()
  ms.manual_seed(10 * step + rank)
  return ms.rand(5, 4, { dtype = "float64" })
end

local message = require "spec.support.message"

local CHANGED = "Your training graph has changed in this iteration, e.g., one parameter is %s in first iteration, but then got %s in the second "
  .. "iteration. this is not compatible with static_graph set to true."

for world = 1, 4 do
  ranks.describe(world, ("DDP of a static graph on %d ranks"):format(world), function()
    for _, view in ipairs { false, true } do
      it("averages gradients of parameters used several times, on some ranks, on none; gradient_as_bucket_view = "
        .. tostring(view), function(rank)
        local ms, nn, dist = load()
        local reference, model = make(), make()
        local function way(r) return r == 0 and "left" or "right" end
        model.way = way(rank)
        local ddp = nn.DDP(model, { static_graph = true, bucket_cap_mb = 1e-6, gradient_as_bucket_view = view })
        local a, b = ms.optim.SGD(reference:parameters(), { lr = 0.1 }), ms.optim.SGD(ddp:parameters(), { lr = 0.1 })
        for step = 1, 4 do
          for r = 0, world - 1 do
            reference.way = way(r)
            ;(reference(input(r, step)):pow(2):sum() / world):backward()
          end
          local told = dist.record(function() ddp(input(rank, step)):pow(2):sum():backward() end)
          local reductions, maps = 0, 0
          for _, c in ipairs(told) do
            if c.op == "all_reduce" and c.dtype == "int32" then maps = maps + 1 elseif c.op == "all_reduce" then
              reductions = reductions + 1 end
          end
          -- The first step reduces one bucket and the map of used parameters; later steps, one bucket per parameter.
          assert.equal(step == 1 and 1 or 8, reductions)
          assert.equal(step == 1 and 1 or 0, maps)
          for name, p in reference:named_parameters() do
            local g = ddp:get_parameter(name).grad
            if name:find "^spare" or world == 1 and name:find "^right" then
              assert.is_nil(g, name) else ms.testing.assert_close(g, p.grad) end
          end
          a:step()
          b:step()
          a:zero_grad()
          b:zero_grad()
        end
      end)
    end

    it("reduces buckets during backward from the second iteration on", function(rank)
      local _, nn = load()
      local model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
      local ddp = nn.DDP(model, { static_graph = true, bucket_cap_mb = 1e-6 })
      local told = {}
      ddp:register_comm_hook(nil, function(_, bucket) told[#told + 1] = "bucket " .. bucket.index end)
      model[1].weight:register_post_accumulate_grad_hook(function() told[#told + 1] = "first layer" end)
      for step = 1, 3 do
        told = {}
        ddp(input(rank, step):float()):sum():backward()
        assert.equal(step == 1 and "first layer" or "bucket 1", told[1])
        assert.equal(step == 1 and 2 or 7, #told)
      end
    end)

    it("raises if a used parameter becomes unused, or an unused one used", function(rank)
      local _, nn = load()
      local model = make()
      local ddp = nn.DDP(model, { static_graph = true })
      for step = 1, 2 do ddp(input(rank, step)):sum():backward() end
      model.way = "none"
      ddp(input(rank, 3)):sum():backward()
      assert.equal(CHANGED:format("used", "unused") .. (
        " Parameter indices which did not receive grad for rank %d: 5 6"):format(rank),
        message(ddp, input(rank, 4)))

      model = make()
      ddp = nn.DDP(model, { static_graph = true })
      for step = 1, 2 do ddp(input(rank, step)):sum():backward() end
      model.way = "right"
      local loss = ddp(input(rank, 3)):sum()
      local text = message(loss.backward, loss)
      assert.equal(CHANGED:format("unused", "used"), text:sub(1, #CHANGED:format("unused", "used")))
      assert.matches("Parameter %d %('right%.%a+'%) is used now%.$", text)
    end)

    it("adds up without reducing inside no_sync", function(rank)
      local ms, nn = load()
      local reference, model = make(), make()
      local ddp = nn.DDP(model, { static_graph = true })
      for round = 1, 2 do
        for part = 1, 3 do
          for r = 0, world - 1 do (reference(input(r, 3 * round + part)):sum() / world):backward() end
          local function run() ddp(input(rank, 3 * round + part)):sum():backward() end
          if part < 3 then ddp:no_sync(run) else run() end
        end
        for name, p in reference:named_parameters() do
          if p.grad then ms.testing.assert_close(ddp:get_parameter(name).grad,
            p.grad) else assert.is_nil(ddp:get_parameter(name).grad) end
          p.grad = nil
        end
        ddp:zero_grad()
      end
    end)
  end)
end
