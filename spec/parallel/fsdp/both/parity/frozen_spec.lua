-- SPDX-License-Identifier: MIT
--- Training with a frozen trunk under FSDP: frozen by requires_grad or by dropping its gradients, before or after
--- wrapping, the trunk one unit or nested units; parameters equal those under DDP. Also frozen units between others,
--- and units that run several times.
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
          it(("trains its head as DDP does, by %s: %s, use_orig_params = %s"):format(how, strategy, tostring(pieces)),
            function(rank)
            local ms, nn, fsdp = load()
            for _, nested in ipairs { false, true } do
              local reference, model = plain_model(), plain_model()
              if how ~= "dropped gradients" then freeze(reference.trunk) end
              if how:find "before" then freeze(model.trunk) end
              reference = nn.DDP(reference)
              model = wrap(model, { sharding_strategy = strategy, use_orig_params = pieces }, nested)
              if how:find "after" then freeze(model.module.trunk) end
              local optims = {}
              for k, m in ipairs { reference, model } do
                optims[k] = ms.optim.SGD(m:parameters(), { lr = 0.1, momentum = 0.9 })
              end
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
              for name, t in pairs(fsdp.state_dict(model)) do
                assert.equal(name:find "^trunk" ~= nil, t:equal(before[name]), name)
              end
            end
          end)
        end
      end
    end
  end)
end

-- Layers, of which every second one is frozen, each a unit.
local function striped(kind, options)
  local ms, nn, fsdp, _, quietly = load()
  ms.manual_seed(5)
  local layers = {}
  for k = 1, 5 do
    layers[k] = nn.Linear(5, 5)
    if k % 2 == 0 then freeze(layers[k]) end
  end
  local net = nn.Sequential(layers)
  if kind == "plain" then return net end
  return quietly(function()
    for k = 1, 5 do
      if kind == "FSDP" then net[k] = fsdp.FSDP(net[k], options) else fsdp.fully_shard(net[k]) end
    end
    return kind == "FSDP" and fsdp.FSDP(net, options) or fsdp.fully_shard(net)
  end)
end

for world = 2, 3 do
  ranks.describe(world, ("frozen units on %d ranks"):format(world), function(rank)
    for _, kind in ipairs { "FSDP", "fully_shard" } do
      for _, pieces in ipairs(kind == "FSDP" and { false, true } or { false }) do
        it(("reshard as soon as backward is through them, and reduce nothing: %s, use_orig_params = %s"):format(kind,
          tostring(pieces)), function()
          local ms, _, fsdp, dist = load()
          local model = striped(kind, { use_orig_params = pieces })
          local loss = model(ms.ones(2, 5)):sum()
          local order, seen = {}, nil
          local events = fsdp.record(function() seen = dist.record(function() loss:backward() end) end)
          for _, e in ipairs(events) do
            if e.event == "reshard" and e.unit ~= "" then order[#order + 1] = e.unit end
          end
          assert.same({ "5", "4", "3", "2", "1" }, order)
          local reductions = 0
          for _, c in ipairs(seen) do reductions = reductions + (c.op == "reduce_scatter" and 1 or 0) end
          assert.equal(3, reductions)
        end)
      end
    end

    it("are not gathered for a backward that does not reach them", function()
      local ms, _, fsdp = load()
      for _, pieces in ipairs { false, true } do
        local net = plain_model()
        freeze(net.trunk)
        local model = wrap(net, { use_orig_params = pieces }, true)
        local loss = model(ms.ones(2, 5)):sum()
        for _, e in ipairs((fsdp.record(function() loss:backward() end))) do
          assert.is_nil(e.unit:find "^trunk", e.event .. " " .. e.unit)
        end
      end
    end)

    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      it("that one rank alone has frozen after wrapping is an error on all: " .. strategy, function()
        local ms, nn, fsdp, _, quietly = load()
        local model = quietly(fsdp.FSDP, nn.Linear(3, 2), { use_orig_params = true, sharding_strategy = strategy })
        if rank == 1 then model.module.bias:requires_grad_(false) end
        local ok, why = pcall(function()
          model(ms.ones(2, 3)):sum():backward()
          ms.dist.barrier()
        end)
        assert.is_false(ok)
        assert.matches("rank 1: [%w_]+ of %d+ float32, sum, unit 'root', frozen: 'bias'", why)
        ms.dist.recover()
      end)
    end

    for _, kind in ipairs { "fully_shard", "full_shard", "shard_grad_op" } do
      it("that run several times, with and without gradients, train as the plain model: " .. kind, function()
        local ms, nn, fsdp, _, quietly = load()
        local Net = nn.Module:extend "Net"
        function Net:init()
          self.first, self.frozen, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)
          freeze(self.frozen)
        end
        function Net:forward(x)
          x = self.frozen(self.first(x)):tanh()
          local probe = ms.no_grad(function() return self.frozen(x) end)
          x = self.frozen(x + probe):tanh()
          ms.no_grad(function() self.last(x) end)
          return self.last(self.frozen(x))
        end
        local function make()
          ms.manual_seed(8)
          return Net()
        end
        for _, pieces in ipairs(kind == "fully_shard" and { false } or { false, true }) do
          local plain, net = make(), make()
          local model = quietly(function()
            local options = { sharding_strategy = kind, use_orig_params = pieces }
            for _, name in ipairs { "first", "frozen", "last" } do
              if kind == "fully_shard" then fsdp.fully_shard(net[name]) else net[name] = fsdp.FSDP(net[name],
                options) end
            end
            return kind == "fully_shard" and fsdp.fully_shard(net) or fsdp.FSDP(net, options)
          end)
          local optims = {}
          for k, m in ipairs { plain, model } do optims[k] = ms.optim.SGD(m:parameters(), { lr = 0.05 }) end
          for _ = 1, 3 do
            for r = 0, world - 1 do (plain(ms.ones(2, 3) * (r + 1)):pow(2):mean() / world):backward() end
            model(ms.ones(2, 3) * (rank + 1)):pow(2):mean():backward()
            fsdp.check_sharded_parity(plain, model)
            for _, optim in ipairs(optims) do
              optim:step()
              optim:zero_grad()
            end
          end
          assert.is_true(fsdp.state_dict(model)["frozen.weight"]:equal(plain.frozen.weight:detach()))
        end
      end)
    end
  end)
end
