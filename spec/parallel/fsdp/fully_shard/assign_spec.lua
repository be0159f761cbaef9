-- SPDX-License-Identifier: MIT
--- load_state_dict with `assign` into sharded models on meta: the state dict decides the device of the new memory
--- (docs/semantics.md#state-dicts).
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net(device)
  local ms, nn = load()
  ms.manual_seed(0)
  local model = nn.Sequential(nn.Linear(5, 7, { device = device }), nn.Tanh(), nn.Linear(7, 3, { device = device }))
  model:register_buffer("count", ms.full({ 2 }, 4, { device = device }))
  return model
end

local function sharded(device)
  local _, _, fsdp = load()
  local model = net(device)
  fsdp.fully_shard(model[1])
  return fsdp.fully_shard(model)
end

local function whole()
  local sd = {}
  for name, t in pairs(net():state_dict()) do sd[name] = t:clone() end
  return sd
end

local function is_net(model)
  local ms, _, fsdp = load()
  local want = net()
  assert.equal("cpu", model.count.device)
  assert.same({ 4, 4 }, { model.count[1]:item(), model.count[2]:item() })
  fsdp.check_sharded_parity(want, model)
  local rank, world = ms.dist.rank(), ms.dist.world_size()
  for r = 0, world - 1 do (want(ms.ones(2, 5) * (r + 1)):pow(2):sum() / world):backward() end
  model(ms.ones(2, 5) * (rank + 1)):pow(2):sum():backward()
  fsdp.check_sharded_parity(want, model)
end

for world = 1, 3 do
  ranks.describe(world, ("assign onto meta on %d ranks"):format(world), function(rank)
    it("has whole tensors on meta, too", function()
      local weight = sharded("meta")[1].weight
      local t = weight:full_tensor()
      assert.equal("meta [7, 5]", t.device .. " " .. tostring(t.shape))
    end)

    it("loads whole tensors, of every rank or of rank 0, and sharded ones", function()
      local _, _, fsdp = load()
      for _, type_ in ipairs { "full", "rank 0", "sharded", "local" } do
        local model, sd, given = sharded "meta", whole(), { assign = true }
        if type_ == "rank 0" then
          sd, given.broadcast_from_rank0 = rank == 0 and sd or {}, true
        elseif type_ ~= "full" then
          sd = fsdp.state_dict(sharded(), { type = type_ })
        end
        local before = model:parameters()
        local missing = fsdp.load_state_dict(model, sd, given)
        assert.same({}, missing)
        for k, p in ipairs(model:parameters()) do assert.equal(before[k], p) end
        is_net(model)
      end
      local model = sharded "meta"
      model:load_state_dict(sharded():state_dict(), { assign = true })
      is_net(model)
    end)

    it("loads one unit at a time if not strict; the others stay on meta until they are loaded", function()
      local ms, _, fsdp = load()
      local model, sd = sharded "meta", whole()
      local first, rest = {}, {}
      for name, t in pairs(sd) do (name:find "^1" and first or rest)[name] = t end
      fsdp.load_state_dict(model, first, { assign = true, strict = false })
      assert.equal("cpu", model[1].weight.device)
      assert.equal("meta", model[3].weight.device)
      local ok, message = pcall(model, ms.ones(2, 5))
      assert.is_false(ok)
      assert.truthy(message:find("the following were still on meta device: ['3.weight', '3.bias']", 1, true), message)
      fsdp.load_state_dict(model, rest, { assign = true, strict = false })
      is_net(model)
    end)

    it("names missing parameters, and changes nothing", function()
      local _, _, fsdp = load()
      local model, sd = sharded "meta", whole()
      sd["3.bias"] = nil
      local ok, message = pcall(fsdp.load_state_dict, model, sd, { assign = true, strict = false })
      assert.is_false(ok)
      assert.truthy(message:find(
        "load_state_dict: with assign, all parameters of a unit on meta must be loaded together; the state has '3.weight', but not "
        .. "'3.bias' of the same unit; add it, or call to_empty(device) first", 1, true), message)
      for _, options in ipairs { { assign = true }, {} } do
        ok, message = pcall(fsdp.load_state_dict, model, sd, options)
        assert.is_false(ok)
        assert.truthy(message:find("is on meta and has no memory to load into", 1, true), message)
      end
      for _, p in ipairs(model:parameters()) do assert.equal("meta", p.device) end
      assert.equal("meta", model.count.device)
    end)

    it("copies into tensors that have memory", function()
      local ms, _, fsdp = load()
      local model = sharded()
      ms.no_grad(function() for _, p in ipairs(model:parameters()) do p:to_local():mul_(3) end end)
      local before = model[1].weight:to_local():data_ptr()
      fsdp.load_state_dict(model, whole(), { assign = true })
      assert.equal(before, model[1].weight:to_local():data_ptr())
      is_net(model)
    end)
  end)
end
