-- SPDX-License-Identifier: MIT
--- Placements and meshes of fully_shard: another dimension than the first, fewer ranks after forward, replicas
--- (docs/semantics.md#strategies, #fully-shard, #reduction): results equal those of one process, and the record of
--- collectives has the expected bytes.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"
local parity = require "spec.support.sharded_parity"

local function load() return require "moonshard" end
local collected = require "spec.support.collected"

local function count(list, op, group)
  local n = 0
  for _, e in ipairs(list) do
    if e.op == op and (not group or e.group == group) then n = n + 1 end
  end
  return n
end

-- The largest dimension that the number of ranks divides.
local function largest(world)
  return function(_, p)
    local best
    for d, size in ipairs(p.shape) do
      if size % world == 0 and (not best or size > p.shape[best]) then best = d end
    end
    return best and load().fsdp.Shard(best) or nil
  end
end

local function wide(kind)
  local ms = load()
  local Wide = ms.nn.Module:extend "Wide"
  function Wide:init()
    self.inner = ms.nn.Linear(24, 12, kind)
    self.outer = ms.nn.Linear(12, 5, kind)
    self.cube = ms.nn.Parameter(ms.ones(3, 12, 2, kind))
  end
  function Wide:forward(x) return self.outer(self.inner(x):tanh()):sum() + (self.cube * self.cube):sum() * x:mean() end
  return Wide()
end

local DEF = {
  make = wide,
  units = function(m) return { m.inner } end,
  optim = function(params) return load().optim.AdamW(params, { lr = 1e-2 }) end,
  loss = function(m, r, step, golden) return m(golden.x_of({ 3, 24 }, r, step)) end,
}

for world = 1, 4 do
  ranks.describe(world, ("shard_placement_fn over %d ranks"):format(world), function()
    for _, reshard in ipairs { true, false } do
      it(("cuts along later dimensions and trains as one process does, reshard_after_forward = %s"):format(
        tostring(reshard)), function(rank)
        local model = parity.compare(DEF, rank, world,
          { shard_placement_fn = largest(world), reshard_after_forward = reshard }, 3)
        assert.equal("Shard(2)", tostring(model.inner.weight.placements[1]))
        assert.equal("Shard(2)", tostring(model.cube.placements[1]))
        assert.equal(24 / world, model.inner.weight:to_local():size(2))
        assert.same({ 3, 12, 2 }, { unpack(model.cube:full_tensor().shape) })
      end)
    end

    it("gathers in another dtype than the stored one", function()
      local ms = load()
      local policy = ms.fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16", reduce_dtype = "float32" }
      local function make(options)
        ms.manual_seed(3)
        return ms.fsdp.fully_shard(ms.nn.Linear(24, 12), options)
      end
      local rows, columns = make { mp_policy = policy },
        make { mp_policy = policy, shard_placement_fn = largest(world) }
      local x = ms.randn(4, 24)
      local a, b = rows(x), columns(x)
      assert.is_true(a:equal(b))
      a:float():sum():backward()
      b:float():sum():backward()
      assert.is_true(rows.weight.grad:full_tensor():equal(columns.weight.grad:full_tensor()))
    end)

    it("fills shards with the random numbers of the whole parameter", function()
      local ms = load()
      local function filled(fn)
        ms.manual_seed(5)
        return fn(ms.nn.Linear(24, 12))
      end
      local whole = filled(function(m)
        ms.nn.init.normal_(m.weight, 0, 1)
        ms.nn.init.uniform_(m.bias)
        return m
      end)
      local model = filled(function(m)
        ms.fsdp.fully_shard(m, { shard_placement_fn = largest(world) })
        ms.nn.init.normal_(m.weight, 0, 1)
        ms.nn.init.uniform_(m.bias)
        return m
      end)
      assert.is_true(model.weight:full_tensor():equal(whole.weight:detach()))
      assert.is_true(model.bias:full_tensor():equal(whole.bias:detach()))
      local sd = ms.fsdp.state_dict(whole)
      ms.no_grad(function() model.weight:zero_() end)
      ms.fsdp.load_state_dict(model, sd)
      assert.is_true(model.weight:full_tensor():equal(whole.weight:detach()))
    end)
  end)
end

ranks.describe(4, "shard_placement_fn", function()
  it("refuses dimensions that the ranks do not divide, or that a parameter lacks", function()
    local ms = load()
    local function failure(shape, d)
      local m = ms.nn.Linear(3, 3)
      m.p = ms.nn.Parameter(ms.ones(unpack(shape)))
      local text = message(ms.fsdp.fully_shard, m,
        { shard_placement_fn = function(name) return name == "p" and ms.fsdp.Shard(d) or nil end })
      assert.equal("Linear", m:class_name())
      return text
    end
    assert.equal("FSDP does not support uneven sharding on dim 2: [4, 6] (world size: 4)", failure({ 4, 6 }, 2))
    assert.equal("FSDP does not support uneven sharding on dim 2: [4, 6] (world size: 4)", failure({ 4, 6 }, -1))
    assert.matches("^Shard dim 2 is invalid for 1D tensor: %[4%]", failure({ 4 }, 2))
  end)
end)

ranks.describe(4, "reshard_after_forward = 2", function()
  it("trains as one process does", function(rank, world)
    for _, name in ipairs { "mlp_stack", "transformer_lm", "nested_wrapped_module" } do
      parity.compare(require("spec.support.models." .. name), rank, world, { reshard_after_forward = 2 }, 3)
    end
    parity.compare(DEF, rank, world, { reshard_after_forward = 2, shard_placement_fn = largest(world) }, 3)
  end)

  it("gathers over two ranks in backward, with as many collectives as true", function(rank)
    local ms = load()
    local model = ms.nn.Sequential(ms.nn.Linear(4, 6), ms.nn.Linear(6, 6), ms.nn.Linear(6, 2))
    for _, m in ipairs(model) do ms.fsdp.fully_shard(m, { reshard_after_forward = 2 }) end
    ms.fsdp.fully_shard(model, { reshard_after_forward = 2 })
    local x = ms.ones(2, 4, { requires_grad = true })
    for _ = 1, 2 do
      local loss
      local forward = ms.dist.record(function() loss = model(x):sum() end)
      local backward = ms.dist.record(function() loss:backward() end)
      assert.equal(3, count(forward, "all_gather"))
      assert.equal(3, count(backward, "all_gather"))
      assert.equal(3, count(backward, "reduce_scatter"))
      for _, e in ipairs(forward) do assert.equal(4, ms.dist.world_size(e.group)) end
      for _, e in ipairs(backward) do
        assert.equal(e.op == "all_gather" and 2 or 4, ms.dist.world_size(e.group))
        if e.op == "all_gather" then assert.equal(rank % 2, ms.dist.rank(e.group)) end
      end
    end
  end)

  it("keeps half of the parameters until backward, and no more", function()
    local ms = load()
    local function held(reshard)
      local model = ms.fsdp.fully_shard(ms.nn.Linear(512, 512, { bias = false }), { reshard_after_forward = reshard })
      local x = ms.ones(1, 512)
      ms.scope(function() model(x):sum():backward() end)
      collected()
      local before = ms.memory_stats("cpu").allocated
      local loss = model(x):sum()
      local after = ms.memory_stats("cpu").allocated - before
      loss:backward()
      return after
    end
    local bytes = 512 * 512 * 4
    assert.is_true(held(true) < bytes / 8)
    local half = held(2)
    assert.is_true(half >= bytes / 2 and half < bytes * 5 / 8)
    assert.is_true(held(false) >= bytes)
  end)

  it("acts as true if no backward follows, and is vacated after the optimizer's step", function()
    local ms = load()
    ms.manual_seed(2)
    local model = ms.fsdp.fully_shard(ms.nn.Linear(8, 8), { reshard_after_forward = 2 })
    local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
    local x = ms.ones(1, 8)
    local before = ms.no_grad(function() return model(x):sum():item() end)
    ms.scope(function() model(x):sum():backward() end)
    local left = model(x):sum()                            -- its backward never runs
    optim:step()
    local after = ms.no_grad(function() return model(x):sum():item() end)
    assert.is_true(after < before)
    local want = ms.no_grad(function() return (x:matmul(
      model.weight:full_tensor():t()) + model.bias:full_tensor()):sum():item() end)
    assert.near(want, after, 1e-5)
    assert.is_truthy(left)
  end)

  it("must be a factor", function()
    local ms = load()
    local function failure(value)
      return message(ms.fsdp.fully_shard, ms.nn.Linear(4, 4), { reshard_after_forward = value })
    end
    assert.equal("If passing reshard_after_forward as an int, it should be a factor of 4, not 3", failure(3))
    assert.equal("If passing reshard_after_forward as an int, it should be a factor of 4, not 8", failure(8))
  end)
end)

ranks.describe(4, "a 2-d mesh", function()
  local function mesh(shape)
    return load().dist.init_device_mesh("cpu", shape or { 2, 2 }, { names = { "dp_replicate", "dp_shard" } })
  end

  for _, shape in ipairs { { 2, 2 }, { 4, 1 }, { 1, 4 } } do
    it(("of %d replicas by %d shards trains as one process does"):format(shape[1], shape[2]), function(rank, world)
      local m = mesh(shape)
      for _, reshard in ipairs { true, false } do
        for _, name in ipairs { "mlp_stack", "transformer_lm" } do
          parity.compare(require("spec.support.models." .. name), rank, world,
            { mesh = m, reshard_after_forward = reshard }, 3)
        end
      end
      parity.compare(DEF, rank, world, { mesh = m, shard_placement_fn = largest(shape[2]) }, 2)
    end)
  end

  it("reduces over the shard group and all-reduces over the replicas, once a unit", function()
    local ms = load()
    local m = mesh()
    local model = ms.nn.Sequential(ms.nn.Linear(4, 6), ms.nn.Linear(6, 6), ms.nn.Linear(6, 2))
    for _, layer in ipairs(model) do ms.fsdp.fully_shard(layer, { mesh = m }) end
    ms.fsdp.fully_shard(model, { mesh = m })
    assert.equal("Replicate() Shard(1)", tostring(model[1].weight.placements[1]) .. " "
      .. tostring(model[1].weight.placements[2]))
    assert.is_true(rawequal(m, model[1].weight.device_mesh))
    local all = ms.dist.record(function() model(ms.ones(2, 4)):sum():backward() end)
    assert.equal(3, count(all, "reduce_scatter", m:get_group "dp_shard"))
    assert.equal(3, count(all, "all_reduce", m:get_group "dp_replicate"))
    assert.equal(0, count(all, "all_gather", ms.dist.default_group()))
    assert.equal(3, count(all, "reduce_scatter"))
    assert.equal(3, count(all, "all_reduce"))
  end)

  it("accumulates reduced gradients while the all-reduce is switched off", function(rank, world)
    local ms = load()
    ms.manual_seed(1)
    local function make(options)
      ms.manual_seed(1)
      local model = ms.nn.Sequential(ms.nn.Linear(4, 6, { dtype = "float64" }), ms.nn.Tanh(),
        ms.nn.Linear(6, 3, { dtype = "float64" }))
      ms.fsdp.fully_shard(model[1], options)
      return ms.fsdp.fully_shard(model, options)
    end
    local want, model = make(), make { mesh = mesh() }
    assert.equal(4, world)
    local function x(k) return ms.ones(2, 4, { dtype = "float64" }) * (rank + k) end
    for k = 1, 3 do want(x(k)):sum():backward() end
    local scattered, reduced = 0, 0
    for k = 1, 3 do
      model:set_requires_all_reduce(k == 3)
      local ledger = ms.dist.record(function() model(x(k)):sum():backward() end)
      scattered, reduced = scattered + count(ledger, "reduce_scatter"), reduced + count(ledger, "all_reduce")
      if k < 3 then
        for _, p in ipairs(model:parameters()) do assert.is_nil(p.grad) end
      end
    end
    assert.equal(6, scattered)
    assert.equal(2, reduced)
    local grads = {}
    for name, p in want:named_parameters() do grads[name] = p.grad:full_tensor() end
    for name, p in model:named_parameters() do ms.testing.assert_close(p.grad:full_tensor(), grads[name]) end
  end)

  it("needs names, two dimensions at most, and clips by the norm of one replica", function()
    local ms = load()
    local function failure(m) return message(ms.fsdp.fully_shard, ms.nn.Linear(4, 4), { mesh = m }) end
    assert.equal("Please init the 2D mesh for HSDP with mesh_dim_names specified",
      failure(ms.dist.init_device_mesh("cpu", { 2, 2 })))
    assert.matches("^fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh",
      failure(ms.dist.init_device_mesh("cpu", { 2, 2, 1 })))
    ms.manual_seed(1)
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 4), { mesh = mesh() })
    model(ms.ones(1, 4)):sum():backward()
    assert.near(math.sqrt(16 + 4), ms.nn.utils.clip_grad_norm_(model:parameters(), math.huge):item(), 1e-5)
  end)

  it("can be made of existing groups, and of one of its dimensions", function(rank, world)
    local ms = load()
    local dist = ms.dist
    local rows, columns = {}, {}
    for k = 0, 1 do
      rows[k] = dist.new_group { 2 * k, 2 * k + 1 }
      columns[k] = dist.new_group { k, k + 2 }
    end
    local m = dist.mesh_from_group({ columns[rank % 2], rows[math.floor(rank / 2)] },
      { names = { "replicate", "shard" } })
    assert.equal(4, world)
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 4), { mesh = m })
    assert.equal(2, model.weight:to_local():size(1))
    local single = mesh()["dp_shard"]
    local one = ms.fsdp.fully_shard(ms.nn.Linear(4, 4), { mesh = single })
    local ledger = dist.record(function() one(ms.ones(1, 4)):sum():backward() end)
    assert.equal(0, count(ledger, "all_reduce"))
    assert.equal("Shard(1)", tostring(one.weight.placements[1]))
    assert.is_nil(one.weight.placements[2])
  end)
end)

for _, world in ipairs { 1, 2, 4 } do
  ranks.describe(world, ("set_all_reduce_hook over %d ranks"):format(world), function()
    it("is given the reduced gradients of a unit and may change them", function()
      local ms = load()
      local function make()
        ms.manual_seed(4)
        local model = ms.nn.Sequential(ms.nn.Linear(4, 5), ms.nn.Linear(5, 3))
        ms.fsdp.fully_shard(model[1])
        return ms.fsdp.fully_shard(model)
      end
      local want, model = make(), make()
      local sizes = {}
      model[1]:set_all_reduce_hook(function(t)
        sizes[#sizes + 1] = t:numel()
        assert.equal(1, t.ndim)
        t:mul_(3)
      end)
      for _ = 1, 2 do
        want(ms.ones(2, 4)):sum():backward()
        model(ms.ones(2, 4)):sum():backward()
      end
      assert.equal(2, #sizes)
      assert.is_true(sizes[1] >= math.ceil(5 / world) * 5)
      ms.testing.assert_close(model[1].weight.grad:full_tensor(), want[1].weight.grad:full_tensor() * 3)
      ms.testing.assert_close(model[2].weight.grad:full_tensor(), want[2].weight.grad:full_tensor())
      model[1]:set_all_reduce_hook(nil)
      want:zero_grad()
      model:zero_grad()
      want(ms.ones(2, 4)):sum():backward()
      model(ms.ones(2, 4)):sum():backward()
      ms.testing.assert_close(model[1].weight.grad:full_tensor(), want[1].weight.grad:full_tensor())
      assert.error_matches(function() model[1]:set_all_reduce_hook(3) end,
        "set_all_reduce_hook: hook is a number %(3%), expected a function")
    end)
  end)
end

ranks.describe(4, "set_all_reduce_hook", function()
  it("emulates replicas: each half of the ranks shards, the hook sums over the other", function(rank)
    local ms = load()
    local dist = ms.dist
    local m = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicate", "shard" } })
    ms.manual_seed(4)
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 4, { bias = false }), { mesh = m["shard"] })
    model:set_all_reduce_hook(function(t) dist.all_reduce(t, { group = m:get_group "replicate", op = "avg" }) end)
    model(ms.ones(1, 4) * (rank + 1)):sum():backward()
    ms.testing.assert_close(model.weight.grad:full_tensor(), ms.full({ 4, 4 }, 2.5))
  end)

  it("that raises ends the backward on every rank", function(rank)
    local ms = load()
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 4))
    model:set_all_reduce_hook(function() if rank == 1 then error("no thanks", 0) end end)
    local ok, text = pcall(function()
      model(ms.ones(1, 4)):sum():backward()
      ms.dist.barrier()
    end)
    assert.is_false(ok)
    assert.matches("no thanks", text)
    ms.dist.recover()
    model:set_all_reduce_hook(nil)
    model:zero_grad()
    model(ms.ones(1, 4)):sum():backward()
    ms.testing.assert_close(model.weight.grad:full_tensor(), ms.ones(4, 4))
  end)
end)

ranks.describe(4, "dp_mesh_dims", function()
  local function mesh_of(shape)
    return load().dist.init_device_mesh("cpu", shape, { names = { "replica", "tensor", "shard" } })
  end

  it("trains over the named dimensions of a mesh as one process does", function(rank, world)
    local ms = load()
    local dims = ms.fsdp.DataParallelMeshDims { replicate = "replica", shard = "shard" }
    assert.equal("DataParallelMeshDims(shard = 'shard', replicate = 'replica')", tostring(dims))
    local model = parity.compare(DEF, rank, world, { mesh = mesh_of { 2, 1, 2 }, dp_mesh_dims = dims }, 3)
    assert.equal(2, ms.dist.world_size(model.inner._fsdp.group))
    dims = ms.fsdp.DataParallelMeshDims { shard = "shard" }
    parity.compare(DEF, rank, world, { mesh = mesh_of { 1, 1, 4 }, dp_mesh_dims = dims }, 3)
  end)

  it("shards apart on the lines of another dimension", function(rank)
    local ms = load()
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 6), { mesh = mesh_of { 1, 2, 2 },
      dp_mesh_dims = ms.fsdp.DataParallelMeshDims { shard = "shard" } })
    assert.same({ rank - rank % 2, rank - rank % 2 + 1 }, ms.dist.group_ranks(model._fsdp.group))
    assert.equal(3, model.weight:to_local():size(1))
  end)

  it("refuses other values", function()
    local ms = load()
    local function failure(options) return message(ms.fsdp.fully_shard, ms.nn.Linear(4, 4), options) end
    local mesh, dims = mesh_of { 1, 1, 4 }, ms.fsdp.DataParallelMeshDims
    assert.equal("fully_shard: option 'dp_mesh_dims' is a string ('shard'), expected fsdp.DataParallelMeshDims",
      failure { mesh = mesh, dp_mesh_dims = "shard" })
    assert.equal("fully_shard: option 'mesh', which 'dp_mesh_dims' needs, is nil, expected a DeviceMesh as dist.init_device_mesh makes",
      failure { dp_mesh_dims = dims { shard = "shard" } })
    assert.equal("fully_shard: dp_mesh_dims names 'shard' twice",
      failure { mesh = mesh, dp_mesh_dims = dims { shard = "shard", replicate = "shard" } })
    assert.matches("unknown", failure { mesh = mesh, dp_mesh_dims = dims { shard = "columns" } })
    local ok, said = pcall(dims, {})
    assert.is_false(ok)
    assert.matches("option 'shard' is missing", said)
  end)
end)

describe("PyTorch's switches that have no effect here", function()
  it("check their arguments", function()
    local ms = load()
    local m = ms.fsdp.fully_shard(ms.nn.Linear(4, 4))
    m:set_symm_mem_for_comm()
    m:set_symm_mem_for_comm "NVSHMEM"
    m:set_separate_reduce_scatter_group(true)
    ms.fsdp.share_comm_ctx { m }
    assert.is_true(m:unshard { async = true }:isa(ms.fsdp.UnshardHandle))
    assert.is_false(pcall(m.set_separate_reduce_scatter_group, m, 1))
    assert.is_false(pcall(ms.fsdp.share_comm_ctx, { ms.nn.Linear(1, 1) }))
    assert.is_false(pcall(ms.fsdp.share_comm_ctx, m))
  end)
end)
