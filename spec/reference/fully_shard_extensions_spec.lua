-- SPDX-License-Identifier: MIT
--- The reference suite test_fully_shard_extensions: each test with its whole grid, at 2, 3 and 4 ranks, on the CPU and
--- on a GPU (the emulated one if there is no other).
local ranks = require "spec.support.ranks"

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.fsdp, ms.dist
end

local function strip(message) return (tostring(message):gsub("^[^\n]-:%d+: ", "")) end

-- A tensor class with two inner tensors on which every operation runs, and the suite's hooks, counted in log; without
-- log it has no hooks.
local function two_tensor(log)
  local ms = load()
  local TwoTensor = ms.Tensor:extend "TwoTensor"
  function TwoTensor:init(a, b) self.a, self.b = a, b end
  function TwoTensor:inner_tensors() return { self.a, self.b } end
  if not log then return TwoTensor end

  function TwoTensor:fsdp_pre_all_gather(mesh, outer_shape, outer_stride, module, mp_policy)
    log.pre = (log.pre or 0) + 1
    assert.equal(ms.dist.world_size(), mesh:size())
    assert.equal(#outer_shape, #outer_stride)
    assert.is_true(module:isa(ms.nn.Linear))
    assert.is_truthy(mp_policy)
    return { self.a, self.b }, nil
  end

  function TwoTensor.fsdp_post_all_gather(_, outputs, metadata, param_dtype, out)
    assert.is_nil(metadata)
    assert.equal(2, #outputs)
    local a, b = outputs[1], outputs[2]
    if out then
      log.later = (log.later or 0) + 1
      assert.is_true(out:isa(TwoTensor))
      if a.dtype == param_dtype then
        assert.equal(a:data_ptr(), out.a:data_ptr())
        assert.equal(b:data_ptr(), out.b:data_ptr())
      else
        assert.equal(param_dtype, out.a.dtype)
        assert.equal(param_dtype, out.b.dtype)
        out.a:copy_(a)
        out.b:copy_(b)
      end
      return
    end
    log.first = (log.first or 0) + 1
    return TwoTensor(a, b):to(param_dtype), { a, b }        -- a cast makes new tensors; the unit frees these itself
  end
  return TwoTensor
end

local function two_tensor_mlp(TwoTensor)
  local ms, nn = load()
  local MLP = require("spec.support.models.mlp").MLP
  local model = nn.Sequential()
  for _ = 1, 3 do model:append(MLP(8, { bias = false })) end
  for _, mlp in ipairs(model) do
    for _, name in ipairs { "in_proj", "out_proj" } do
      local weight = mlp[name].weight
      mlp[name].weight = nn.Parameter(TwoTensor(weight:detach(), weight:detach():clone()))
    end
  end
  assert.equal(6, #model:parameters())
  assert.is_truthy(ms)
  return model
end

-- Applies fully_shard to the layers and the model, over a mesh of the device, to which the shards are moved.
local function shard(model, device, more)
  local ms, _, fsdp, dist = load()
  local options = { mesh = dist.init_device_mesh(device:match "^%a+", { dist.world_size() }) }
  for key, value in ms.sorted_pairs(more or {}) do options[key] = value end
  for _, mlp in ipairs(model) do fsdp.fully_shard(mlp, options) end
  return fsdp.fully_shard(model, options)
end

-- A class that pads its rows itself, from the whole parameter's sizes.
local function outer_size_stride(device)
  local ms, nn = load()
  local MLP = require("spec.support.models.mlp").MLP
  local seen = {}
  local HalfGathered = ms.Tensor:extend "HalfGathered"
  function HalfGathered:init(data) self.data = data end
  function HalfGathered:inner_tensors() return { self.data } end
  function HalfGathered:fsdp_pre_all_gather(mesh, outer_shape, outer_stride)
    seen[#seen + 1] = { outer_shape[1], outer_stride[1] }
    local rows = math.ceil(outer_shape[1] / mesh:size())
    local padded = ms.zeros(rows, outer_shape[2], { dtype = "bfloat16", device = device })
    local here = self.data:size(1)
    if here > 0 then padded:narrow(1, 1, here):copy_(self.data) end
    return { padded }, nil
  end
  function HalfGathered.fsdp_post_all_gather(_, outputs, _, dtype, out)
    if out then
      out.data:copy_(outputs[1])
      return
    end
    local whole = outputs[1]:to(dtype)
    return HalfGathered(whole), { outputs[1], whole }
  end
  ms.manual_seed(1)
  local model = nn.Sequential()
  for _ = 1, 3 do model:append(MLP(3, { bias = false, dim_multiplier = 3 })) end
  for _, mlp in ipairs(model) do
    for _, name in ipairs { "in_proj", "out_proj" } do
      mlp[name].weight = nn.Parameter(HalfGathered(mlp[name].weight:detach()))
    end
  end
  shard(model, device, { reshard_after_forward = false })
  local optim = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
  model(ms.ones(2, 3, { device = device })):sum():backward()
  optim:step()
  assert.equal(6, #seen)
  assert.same({ 9, 3 }, seen[1])
  assert.same({ 3, 9 }, seen[2])
end

local function train_parity(rank, device, reshard)
  local ms, _, fsdp, dist = load()
  local log = {}
  local TwoTensor = two_tensor(log)
  ms.manual_seed(42)
  local model = two_tensor_mlp(TwoTensor)
  local reference = ms.deepcopy(model):to(device)
  local reference_optim = ms.optim.Adam(reference:parameters(), { lr = 1e-2 })
  shard(model, device, { reshard_after_forward = reshard })
  local optim = ms.optim.Adam(model:parameters(), { lr = 1e-2 })
  fsdp.check_sharded_parity(reference, model)

  ms.manual_seed(42 + rank + 1)
  local input = ms.randn(2, 8):to(device)
  for iteration = 0, 9 do
    ms.scope(function()
      local losses = {}
      for k, m in ipairs { reference, model } do
        losses[k] = m(input):sum()
        losses[k]:backward()
        if m == reference then
          for _, p in m:named_parameters() do
            dist.all_reduce(p.grad)
            p.grad:detach():div_(dist.world_size())
          end
        end
      end
      assert.is_true(losses[1]:isa(TwoTensor))
      assert.equal(device, losses[2].device)
      ms.testing.assert_close(losses[2], losses[1])
    end)
    fsdp.check_sharded_parity(reference, model)
    for _, o in ipairs { reference_optim, optim } do
      o:step()
      o:zero_grad { set_to_none = iteration % 2 == 0 }
    end
    fsdp.check_sharded_parity(reference, model)
  end
  -- Three units of two parameters: for each parameter the hooks run once per forward and, after a reshard, once per
  -- backward.
  assert.equal(6, log.first)
  assert.equal(6 * (reshard and 20 or 10), log.pre)
  assert.equal(log.pre - 6, log.later)
end

-- fully_shard from meta, with random weights on the device.
local function from_meta(device, build, more)
  local ms, nn = load()
  local model
  ms.with_device("meta", function() model = build() end)
  for _, p in ipairs(model:parameters()) do assert.matches("^meta", p.device) end
  shard(model, device, more)
  model:to_empty(device)
  for _, p in ipairs(model:parameters()) do nn.init.trunc_normal_(p) end
  return model
end

local function three_steps(rank, device, model, dtype)
  local ms = load()
  local optim = ms.optim.Adam(model:parameters(), { lr = 1e-2 })
  ms.manual_seed(42 + rank + 1)
  local input = ms.randn(2, 8):to(device)
  local first, last
  for _ = 1, 3 do
    ms.scope(function()
      local loss = model(input):sum()
      assert.equal(dtype, loss.dtype)
      last = loss:item()
      first = first or last
      loss:backward()
    end)
    optim:step()
    optim:zero_grad()
  end
  assert.is_true(last < first)
end

local function end_to_end(rank, device, reshard)
  local _, _, fsdp = load()
  local log = {}
  local TwoTensor = two_tensor(log)
  local model = from_meta(device, function() return two_tensor_mlp(TwoTensor) end,
    { reshard_after_forward = reshard, mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16" } })
  three_steps(rank, device, model, "bfloat16")
  assert.equal(6 * (reshard and 6 or 3), log.pre)
  for _, p in ipairs(model:parameters()) do
    assert.equal("float32", p:to_local().dtype)
    assert.equal(device, p.device)
  end
end

-- The suite's hooks on every weight's local tensor. inner(t): the plain tensors of a local tensor, gathered one by one;
-- outer(list): the whole tensor made of them.
local function monkey_patch(rank, device, build, inner, outer)
  local model = from_meta(device, build)
  local ran, weights = {}, 0
  for name, p in model:named_parameters() do
    if name:find "weight" then
      weights = weights + 1
      local part = p:to_local()
      function part.fsdp_pre_all_gather(self)
        ran[name] = (ran[name] or 0) + 1
        assert.equal(part, self)
        local inputs = {}
        for k, t in ipairs(inner(self)) do inputs[k] = t:to "bfloat16" end
        return inputs, nil
      end
      function part.fsdp_post_all_gather(self, outputs, metadata, param_dtype, out)
        assert.equal(#inner(self), #outputs)
        assert.is_nil(metadata)
        local wholes = {}
        for k, t in ipairs(outputs) do
          assert.equal("bfloat16", t.dtype)
          if out then inner(out)[k]:copy_(t) else wholes[k] = t:to(param_dtype) end
        end
        if not out then return outer(wholes), outputs end
      end
    end
  end
  assert.is_true(weights > 0)
  three_steps(rank, device, model, "float32")
  local n = 0
  for _, times in pairs(ran) do
    n = n + 1
    assert.equal(6, times)                              -- three forwards, three backwards
  end
  assert.equal(weights, n)
end

local function without_warnings(fn, ...)
  local ms = load()
  assert.same({}, (ms.catch_warnings(fn, ...)))
end

-- The rank's own device of a type.
local function own(kind) return load().empty(1, { device = kind }).device end

for _, kind in ipairs { "cpu", "cuda" } do
  for world = 2, 4 do
    ranks.describe(world, ("fully_shard extensions over %d ranks, %s"):format(world, kind), function()
      for _, reshard in ipairs { true, false } do
        it(("test_all_gather_extensions_train_parity, reshard_after_forward = %s"):format(tostring(reshard)),
          function(rank)
          without_warnings(train_parity, rank, own(kind), reshard)
        end)

        it(("test_all_gather_extensions_end_to_end, reshard_after_forward = %s"):format(tostring(reshard)),
          function(rank)
          without_warnings(end_to_end, rank, own(kind), reshard)
        end)
      end

      it("test_all_gather_extensions_monkey_patch", function(rank)
        local _, nn = load()
        local MLP = require("spec.support.models.mlp").MLP
        without_warnings(monkey_patch, rank, own(kind), function()
          local model = nn.Sequential()
          for _ = 1, 3 do model:append(MLP(8, { bias = false })) end
          return model
        end, function(t) return { t } end, function(wholes) return wholes[1] end)
      end)

      it("test_all_gather_extensions_monkey_patch, on local tensors of a class", function(rank)
        local TwoTensor = two_tensor()
        without_warnings(monkey_patch, rank, own(kind), function() return two_tensor_mlp(TwoTensor) end,
          function(t) return { t.a, t.b } end, function(wholes) return TwoTensor(wholes[1], wholes[2]) end)
      end)

      it("test_all_gather_extension_outer_size_stride", function() outer_size_stride(own(kind)) end)

      it("defining only one of the two hooks", function()
        local ms = load()
        local TwoTensor = two_tensor {}
        TwoTensor.fsdp_post_all_gather = nil
        local model = shard(two_tensor_mlp(TwoTensor), own(kind))
        local ok, message = pcall(model, ms.ones(2, 8, { device = own(kind) }))
        assert.is_false(ok)
        assert.matches("^Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all%-gather extensions: ", strip(message))
      end)
    end)
  end
end

-- The hooks are called only for the shard dimension.
local function hsdp_mesh(rank, world, device)
  local ms, nn, fsdp, dist = load()
  local MLP = require("spec.support.models.mlp").MLP
  local mesh = dist.init_device_mesh(device:match "^%a+", { 2, world / 2 }, { names = { "dp_replicate", "dp_shard" } })
  ms.manual_seed(1)
  local model = nn.Sequential(MLP(8, { bias = false }), MLP(8, { bias = false }))
  for _, mlp in ipairs(model) do fsdp.fully_shard(mlp, { mesh = mesh }) end
  fsdp.fully_shard(model, { mesh = mesh })
  local seen = 0
  for _, p in ipairs(model:parameters()) do
    local part = p:to_local()
    function part.fsdp_pre_all_gather(self, shard_mesh)
      seen = seen + 1
      assert.equal(1, shard_mesh.ndim)
      assert.same({ "dp_shard" }, shard_mesh.names)
      assert.equal(world / 2, shard_mesh:size())
      assert.equal(rank % (world / 2), shard_mesh:rank())
      return { self:to "bfloat16" }, nil
    end
    function part.fsdp_post_all_gather(_, outputs, _, dtype, out)
      if out then
        out:copy_(outputs[1])
        return
      end
      local whole = outputs[1]:to(dtype)
      return whole, { outputs[1], whole }
    end
  end
  for _ = 1, 2 do model(ms.ones(2, 8, { device = device }) * (rank + 1)):sum():backward() end
  assert.equal(4 * 4, seen)
end

for _, case in ipairs { { 4, "cpu" }, { 8, "cpu" }, { 4, "cuda" } } do
  local world, kind = case[1], case[2]
  ranks.describe(world, ("fully_shard extensions on a mesh of %d ranks, %s"):format(world, kind), function()
    it("test_all_gather_extension_hsdp_mesh", function(rank) hsdp_mesh(rank, world, own(kind)) end)
    -- The suite runs this test on 8 ranks; with 9 and 3 rows, some ranks have none.
    if world == 8 then it("test_all_gather_extension_outer_size_stride", function() outer_size_stride(own(kind)) end) end
  end)
end
