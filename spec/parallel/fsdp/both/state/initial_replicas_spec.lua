-- SPDX-License-Identifier: MIT
--- Equal models at the start of hybrid sharding: FSDP broadcasts rank 0's to all ranks on request; with fully_shard, a
--- script broadcasts shards over the replicas.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function net(seed)
  local ms, nn = load()
  ms.manual_seed(seed)
  local model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
  model[3]:register_buffer("noise", ms.rand(4))
  model[3]:register_buffer("count", ms.full({ 1 }, seed, { dtype = "int64" }))
  return model
end

-- Three steps of the unsharded model with rank 0's seed.
local function assert_trains(model, rank, world)
  local ms, _, fsdp = load()
  local whole = net(0)
  local a, b = ms.optim.Adam(whole:parameters(), { lr = 0.05 }), ms.optim.Adam(model:parameters(), { lr = 0.05 })
  local function input(step, r)
    ms.manual_seed(10 * step + r)
    return ms.rand(4, 5)
  end
  for step = 1, 3 do
    for r = 0, world - 1 do (whole(input(step, r)):pow(2):sum() / world):backward() end
    model(input(step, rank)):pow(2):sum():backward()
    for _, optim in ipairs { a, b } do
      optim:step()
      optim:zero_grad()
    end
  end
  local want = whole:state_dict()
  for name, t in ms.sorted_pairs(fsdp.state_dict(model)) do ms.testing.assert_close(t, want[name]) end
end

ranks.describe(4, "replicas of shards", function(rank, world)
  for _, shape in ipairs { { 2, 2 }, { 4, 1 }, { 1, 4 } } do
    local text = ("%d replicas by %d shards"):format(shape[1], shape[2])
    local function mesh() return load().dist.init_device_mesh("cpu", shape, { names = { "replicate", "shard" } }) end

    for _, strategy in ipairs { "hybrid_shard", "hybrid_shard_zero2" } do
      for _, pieces in ipairs { false, true } do
        it(("take rank 0's parameters and buffers: %s, %s, use_orig_params = %s"):format(text, strategy,
          tostring(pieces)), function()
          local ms, _, fsdp, _, quietly = load()
          local model, options = net(rank), { sharding_strategy = strategy, device_mesh = mesh(),
            sync_module_states = true, use_orig_params = pieces }
          quietly(function()
            model[3] = fsdp.FSDP(model[3], options)
            model = fsdp.FSDP(model, options)
          end)
          local want = net(0):state_dict()
          for name, t in ms.sorted_pairs(fsdp.state_dict(model)) do assert.is_true(t:equal(want[name]), name) end
          assert_trains(model, rank, world)
        end)
      end
    end

    it("take the first replica's shards, broadcast by hand: " .. text, function()
      local ms, _, fsdp, dist = load()
      local grid = mesh()
      local replicas = grid:get_group(1)
      local model = net(grid:rank(1))                       -- each replica has a model of its own
      fsdp.fully_shard(model[3], { mesh = grid })
      fsdp.fully_shard(model, { mesh = grid })
      local src = dist.group_ranks(replicas)[1]
      ms.no_grad(function()
        for _, p in ipairs(model:parameters()) do dist.broadcast(p:to_local(), { src = src, group = replicas }) end
        for _, b in ipairs(model:buffers()) do dist.broadcast(b, { src = src, group = replicas }) end
      end)
      fsdp.check_sharded_parity(net(0), model)
      assert_trains(model, rank, world)
    end)
  end
end)
