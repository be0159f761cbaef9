-- SPDX-License-Identifier: MIT
--- Models whose initial values differ between ranks are refused when they are sharded, not made into a mixture.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load
local message = require "spec.support.message"
local ways = require "spec.support.ways"

local function net(seed, dtype)
  local ms, nn = load()
  ms.manual_seed(seed)
  return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)):to(dtype or "float32")
end

local WAYS = {
  { "fully_shard", ways.fully_shard {} },
  { "FSDP", ways.FSDP {} },
  { "FSDP", ways.FSDP({}, { use_orig_params = true, sharding_strategy = "shard_grad_op" }) },
  { "FSDP", ways.FSDP({}, { sharding_strategy = "no_shard" }) },
}

-- Changes one parameter of m, of rank `rank` only.
local function change(m, rank, k, fn)
  local ms, _, _, dist = load()
  if dist.rank() == rank then ms.no_grad(function() fn(m:parameters()[k]) end) end
  return m
end

for world = 2, 4 do
  ranks.describe(world, ("initial values over %d ranks"):format(world), function(rank)
    for k, way in ipairs(WAYS) do
      it(("that differ are refused on every rank, with the parameter: %s %d"):format(way[1], k), function()
        local _, _, _, _, quietly = load()
        local m = change(net(0), world - 1, 3, function(p) p:select(1, 1):add_(1) end)
        local text = message(quietly, way[2], m)
        assert.matches(("^%s: the initial values of parameter '3.weight' of Sequential differ between ranks 0 and %d, "):format(
          way[1], world - 1), text)
        assert.matches("ms.manual_seed", text)
        assert.equal(way[1] == "FSDP", text:find("sync_module_states = true", 1, true) ~= nil)
        assert.matches("check_values = false", text)
      end)

      it(("that differ may be loaded afterwards: %s %d"):format(way[1], k), function()
        local ms, _, fsdp, _, quietly = load()
        local m = quietly(way[2], net(rank), { check_values = false })
        fsdp.load_state_dict(m, net(7):state_dict())
        local want = net(7):state_dict()
        for name, t in ms.sorted_pairs(fsdp.state_dict(m)) do assert.is_true(t:equal(want[name]), name) end
      end)

      it(("are compared by their bits, in every dtype: %s %d"):format(way[1], k), function()
        local _, _, _, _, quietly = load()
        for _, dtype in ipairs { "float32", "float64", "bfloat16", "float16" } do
          local m = net(0, dtype)
          for r = 0, world - 1 do change(m, r, 2, function(p) p:fill_(0 / 0) end) end
          quietly(way[2], m)
          m = net(0, dtype)
          for r = 0, world - 1 do change(m, r, 4, function(p) p:fill_(r == 1 and -0.0 or 0.0) end) end
          assert.matches("parameter '3.bias'", message(quietly, way[2], m))
        end
      end)
    end

    it("are taken from rank 0, on meta not there yet, and free for ignored parameters", function()
      local ms, nn, fsdp, _, quietly = load()
      quietly(WAYS[2][2], net(rank), { sync_module_states = true })
      fsdp.fully_shard(ms.with_device("meta", function() return net(rank) end))
      fsdp.fully_shard(rank == 0 and net(0) or ms.with_device("meta", function() return net(0) end))
      local m = net(0)
      m[3] = net(rank)[3]
      quietly(WAYS[2][2], m, { ignored_modules = { m[3] } })
      m = net(0)
      m[3].bias = nn.Parameter(ms.full({ 2 }, rank))
      fsdp.fully_shard(m, { ignored_params = { m[3].bias } })
    end)

    it("are compared where param_init_fn or reset_parameters made them", function()
      local ms, _, fsdp, _, quietly = load()
      local function meta(seed)
        local m = ms.with_device("meta", function() return net(0) end)
        ms.manual_seed(seed)
        return m
      end
      quietly(fsdp.FSDP, meta(3))
      assert.matches("the initial values of parameter '1.weight'", message(quietly, fsdp.FSDP, meta(rank)))
    end)

    it("of the modules that a policy wraps are compared with each of them", function()
      local _, nn, fsdp, _, quietly = load()
      local options = { auto_wrap_policy = fsdp.wrap.module_wrap_policy { nn.Linear } }
      local m = change(net(0), 1, 3, function(p) p:add_(1) end)
      assert.matches("the initial values of parameter 'weight' of Linear differ between ranks 0 and 1",
        message(quietly, fsdp.FSDP, m, options))
    end)
  end)
end

ranks.describe(4, "initial values over replicas of shards", function(rank)
  local function grid() return load().dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } }) end

  it("are compared between the ranks that shard, when fully_shard is called", function()
    local _, _, fsdp = load()
    local m = change(net(0), 3, 1, function(p) p:add_(1) end)
    assert.matches("parameter '1.weight' of Sequential differ between ranks 2 and 3, so the shards would be a mixture",
      message(fsdp.fully_shard, m, { mesh = grid() }))
  end)

  it("are compared between replicas at the first forward, which may have been broadcast before", function()
    local ms, _, fsdp, dist = load()
    local mesh = grid()
    local function sharded(given)
      given.mesh = mesh
      local m = net(mesh:rank(1))
      fsdp.fully_shard(m[3], given)
      return fsdp.fully_shard(m, given)
    end
    local m = sharded {}
    local text = message(m, ms.ones(1, 3))
    assert.matches("the initial values of the shards of parameter '1.weight' differ between ranks %d and %d", text)
    assert.matches("check_values = false", text)
    assert.is_false(pcall(m, ms.ones(1, 3)))
    ms.no_grad(function()
      local replicas = mesh:get_group(1)
      for _, p in ipairs(m:parameters()) do
        dist.broadcast(p:to_local(), { src = dist.group_ranks(replicas)[1], group = replicas })
      end
    end)
    m(ms.ones(1, 3)):sum():backward()
    sharded { check_values = false }(ms.ones(1, 3)):sum():backward()
    assert.equal(rank, dist.rank())
  end)

  it("are compared over all ranks by the hybrid strategies", function()
    local _, _, fsdp, _, quietly = load()
    for _, strategy in ipairs { "hybrid_shard", "hybrid_shard_zero2" } do
      local mesh = grid()
      assert.matches("parameter '1.weight' of Sequential differ between ranks 0 and 2", message(quietly, fsdp.FSDP,
        net(mesh:rank(1)), { sharding_strategy = strategy, device_mesh = mesh }))
    end
  end)
end)
