-- SPDX-License-Identifier: MIT
--- State dicts of partly sharded models, with activation checkpoints, through files, and with parts sharded by hand.
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local message = require "spec.support.message"

-- Two layers and a tail; tests choose which of its parts to shard.
local function net(seed)
  local ms, nn = load()
  ms.manual_seed(seed)
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first, self.second, self.tail = nn.Linear(5, 6), nn.Linear(6, 3),
      nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    self.tail:register_buffer("scale", ms.full({ 2 }, seed))
  end
  function Net:forward(x, checkpoints)
    local function body(y) return self.second(self.first(y):tanh()) end
    local y = checkpoints and ms.checkpoint(body, x) or body(x)
    return self.tail(y)
  end
  return Net()
end

local function step(model, optim, checkpoints)
  local ms, _, _, dist = load()
  model(ms.ones(2, 5), checkpoints):pow(2):sum():backward()
  for _, p in ipairs(model:parameters()) do
    if p.grad and not rawget(p, "_unit") and not rawget(p, "_flat") then dist.all_reduce(p.grad, { op = "avg" }) end
  end
  optim:step()
  optim:zero_grad()
end

local function adam(model)
  local ms = load()
  return ms.optim.Adam(model:parameters(), { lr = 0.05 })
end

local function keys(t)
  local ms, list = load(), {}
  for key in ms.sorted_pairs(t) do list[#list + 1] = key end
  return list
end

local function whole(v)
  local ms = load()
  return ms.is_tensor(v) and v.placements and v:full_tensor() or v
end

local function assert_model(want, sd)
  local ms = load()
  assert.same(keys(want:state_dict()), keys(sd))
  for name, t in ms.sorted_pairs(want:state_dict()) do ms.testing.assert_close(whole(sd[name]), t) end
end

local function assert_optim(want, osd)
  local ms = load()
  assert.same(keys(want.state), keys(osd.state))
  for name, entry in ms.sorted_pairs(want.state) do
    for key, v in ms.sorted_pairs(entry) do
      if ms.is_tensor(v) then ms.testing.assert_close(whole(osd.state[name][key]), v) else assert.equal(v,
        osd.state[name][key]) end
    end
  end
end

for world = 1, 4 do
  ranks.describe(world, ("state of a model that is sharded in parts, on %d ranks"):format(world), function(rank)
    local ways = {
      { "FSDP", function(m, o)
        local _, _, fsdp, _, quietly = load()
        quietly(function() m.first, m.second = fsdp.FSDP(m.first, o), fsdp.FSDP(m.second, o) end)
        return m
      end },
      { "FSDP, original parameters", function(m)
        local _, _, fsdp, _, quietly = load()
        local o = { use_orig_params = true }
        quietly(function() m.first, m.second = fsdp.FSDP(m.first, o), fsdp.FSDP(m.second, o) end)
        return m
      end },
      { "fully_shard", function(m, o)
        local _, _, fsdp = load()
        fsdp.fully_shard(m.first, o)
        fsdp.fully_shard(m.second, o)
        return m
      end },
    }
    if world == 4 then
      local function mesh()
        return load().dist.init_device_mesh("cpu", { 2, 2 }, { names = { "dp_replicate", "dp_shard" } })
      end
      ways[4] = { "FSDP, hybrid", function(m) return ways[1][2](m,
        { sharding_strategy = "hybrid_shard", device_mesh = mesh() }) end }
      ways[5] = { "fully_shard over a 2-d mesh", function(m) return ways[3][2](m, { mesh = mesh() }) end }
    end

    for k, way in ipairs(ways) do
      it("is the whole model's, its root not sharded: " .. way[1], function()
        local _, _, fsdp = load()
        local want, model = net(1), way[2](net(1))
        local its_optim, optim = adam(want), adam(model)
        for _ = 1, 2 do
          step(want, its_optim)
          step(model, optim)
        end
        for _, kind in ipairs { "full", "sharded" } do
          local sd, osd = fsdp.state_dict(model, { type = kind }), fsdp.optim_state_dict(model, optim, { type = kind })
          assert_model(want, sd)
          assert_optim(fsdp.optim_state_dict(want, its_optim), osd)
          assert.equal(kind == "sharded" and (world > 1 or k == 3), sd["first.weight"].placements ~= nil)
          assert.is_nil(sd["tail.1.weight"].placements)
          local other = ways[k % #ways + 1][2](net(2))
          local other_optim = adam(other)
          fsdp.load_state_dict(other, sd)
          fsdp.load_optim_state_dict(other, other_optim, osd)
          step(other, other_optim)
          local again = net(3)
          again:load_state_dict(want:state_dict())
          local again_optim = adam(again)
          fsdp.load_optim_state_dict(again, again_optim, fsdp.optim_state_dict(want, its_optim))
          step(again, again_optim)
          assert_model(again, fsdp.state_dict(other))
        end
      end)
    end

    it("shares the storage of ignored parameters, under their own names", function()
      local _, _, fsdp, _, quietly = load()
      for _, pieces in ipairs { false, true } do
        local model = net(1)
        local tail = model.tail
        local wrapped = quietly(fsdp.FSDP, model, { ignored_modules = { tail }, use_orig_params = pieces })
        for _, kind in ipairs { "full", "sharded", "local" } do
          local sd = fsdp.state_dict(wrapped, { type = kind })
          for _, name in ipairs { "1.weight", "1.bias", "2.weight", "2.bias", "scale" } do
            local t = name == "scale" and tail.scale or tail:get_parameter(name)
            assert.equal(t:data_ptr(), sd["tail." .. name]:data_ptr(), name)
          end
        end
      end
    end)

    it("of type full is a copy that later steps do not change, also of buffers and of what is not sharded", function()
      local ms, nn, fsdp, _, quietly = load()
      local way_of = { unpack(ways) }
      way_of[#way_of + 1] = { "no_shard", function(m) return ways[1][2](m, { sharding_strategy = "no_shard" }) end, "sharded" }
      for _, way in ipairs(way_of) do
        local model = net(1)
        model.tail:append(nn.BatchNorm1d(1, { affine = false }))
        model.tail:register_buffer("again", model.tail[3].running_mean)
        model = quietly(way[2], model)
        local optim = ms.optim.Adam(model:parameters(), { lr = 0.05, amsgrad = true })
        step(model, optim)
        local sd, osd = fsdp.state_dict(model, { type = way[3] }), fsdp.optim_state_dict(model, optim, { type = way[3] })
        assert.equal(sd["tail.again"], sd["tail.3.running_mean"])
        sd, osd = { model = sd }, osd.state
        local kept = ms.deepcopy { sd.model, osd }
        step(model, optim)
        assert_model({ state_dict = function() return kept[1] end }, sd.model)
        assert_optim({ state = kept[2] }, { state = osd })
        assert.is_false(fsdp.state_dict(model)["tail.again"]:equal(sd.model["tail.again"]))
      end
    end)

    it("has the same names and values with activation checkpoints, and loads with and without them", function()
      local _, _, fsdp = load()
      for _, way in ipairs(ways) do
        local plain, kept = way[2](net(1)), way[2](net(1))
        local optim, its_optim = adam(plain), adam(kept)
        step(plain, optim, false)
        step(kept, its_optim, true)
        local sd, osd = fsdp.state_dict(plain), fsdp.optim_state_dict(plain, optim)
        local other_sd, other_osd = fsdp.state_dict(kept), fsdp.optim_state_dict(kept, its_optim)
        assert.same(keys(sd), keys(other_sd))
        for name, t in pairs(sd) do assert.is_true(t:equal(other_sd[name]), name) end
        assert_optim(osd, other_osd)
        fsdp.load_state_dict(kept, sd)
        fsdp.load_optim_state_dict(kept, its_optim, osd)
      end
    end)

    it("can be saved in files: full by rank 0, local by every rank; sharded is refused", function()
      local ms, _, fsdp, dist = load()
      local folder = dist.broadcast_object(rank == 0 and process.temp_folder() or nil, { src = 0 })
      for k, way in ipairs(ways) do
        local model, other = way[2](net(1)), way[2](net(2))
        local want = fsdp.state_dict(model)
        local function path(r) return ("%s/%d-%d.safetensors"):format(folder, k, r) end
        for _, kind in ipairs { "full", "local" } do
          local sd, mine = fsdp.state_dict(model, { type = kind }), kind == "full" and 0 or rank
          if mine == rank then ms.save(path(mine), sd) end
          dist.barrier()
          fsdp.load_state_dict(other, ms.load(path(mine)))
          for name, t in pairs(fsdp.state_dict(other)) do assert.is_true(t:equal(want[name]), kind .. " " .. name) end
          other = way[2](net(2))
        end
        local sd = fsdp.state_dict(model, { type = "sharded" })
        if sd["first.weight"].placements then
          assert.matches("sharded", message(ms.save, path(100 + rank), sd))
        end
      end
      dist.barrier()
      if rank == 0 then process.remove_folder(folder) end
    end)

    it("agrees on scalars within a flat parameter, and only there", function()
      local ms, nn, fsdp, _, quietly = load()
      local function make()
        local model = net(1)
        model.first = quietly(fsdp.FSDP, nn.Sequential(nn.Linear(5, 5), model.first))
        return model, adam(model)
      end
      local model, optim = make()
      step(model, optim)
      local osd = fsdp.optim_state_dict(model, optim)
      -- No unit contains the tail: its step counts may differ, and its tensors are not sharded.
      osd.state["tail.1.weight"].step, osd.state["tail.2.bias"].step = 3, 4
      local other, its_optim = make()
      fsdp.load_optim_state_dict(other, its_optim, osd)
      local again = fsdp.optim_state_dict(other, its_optim)
      assert.same({ 3, 4, 1 }, { again.state["tail.1.weight"].step, again.state["tail.2.bias"].step,
        again.state["first.1.weight"].step })
      osd.state["first.1.weight"].step = ms.tensor(5)
      local text = message(fsdp.load_optim_state_dict, other, its_optim, osd)
      assert.truthy(text:find(
        "All unflattened parameters comprising a single flat parameter must have scalar state with the same value and dtype",
        1, true), text)
    end)
  end)
end

ranks.describe(4, "local state of 4 ranks", function(rank)
  it("can be divided by hand for 2", function()
    local ms, _, fsdp, dist, quietly = load()
    local model = quietly(fsdp.FSDP, net(1))
    local want, mine = fsdp.state_dict(model), fsdp.state_dict(model, { type = "local" })
    assert.same({ "flat_param", "tail.scale" }, keys(mine))
    local parts = dist.all_gather_object(mine.flat_param)
    local half = dist.new_group { 0, 1 }
    if rank > 1 then return end
    local flat = ms.cat(parts, 1)
    local other = quietly(fsdp.FSDP, net(2), { process_group = half })
    local n = other.flat_param:numel()
    -- If there are too few elements, the last part ends with padding.
    local here = math.max(0, math.min(flat:numel() - rank * n, n))
    local part = ms.cat({ flat:narrow(1, rank * n + 1, here), ms.zeros(n - here) }, 1)
    fsdp.load_state_dict(other, { flat_param = part, ["tail.scale"] = mine["tail.scale"] })
    for name, t in pairs(fsdp.state_dict(other)) do assert.is_true(t:equal(want[name]), name) end
  end)
end)
