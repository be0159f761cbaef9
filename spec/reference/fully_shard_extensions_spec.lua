--- The reference suite test_fully_shard_extensions (behaviour.md 1.2, 1.5): each test with its whole grid, at 2, 3 and 4 ranks.
local ranks = require "spec.support.ranks"

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.fsdp, ms.dist
end

local function strip(message) return (tostring(message):gsub("^[^\n]-:%d+: ", "")) end

-- A tensor class of two tensors that every operation runs on, and the suite's hooks, counted in log.
local function two_tensor(log)
  local ms = load()
  local TwoTensor = ms.Tensor:extend "TwoTensor"
  function TwoTensor:init(a, b) self.a, self.b = a, b end
  function TwoTensor:inner_tensors() return { self.a, self.b } end

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
    local whole = TwoTensor(a, b):to(param_dtype)
    return whole, { a, b, whole.a, whole.b }
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

local function shard(model, options)
  local _, _, fsdp = load()
  for _, mlp in ipairs(model) do fsdp.fully_shard(mlp, options) end
  return fsdp.fully_shard(model, options)
end

-- A class that pads its rows itself, by the whole parameter's sizes.
local function outer_size_stride()
  local ms, nn = load()
  local MLP = require("spec.support.models.mlp").MLP
  local seen = {}
  local HalfGathered = ms.Tensor:extend "HalfGathered"
  function HalfGathered:init(data) self.data = data end
  function HalfGathered:inner_tensors() return { self.data } end
  function HalfGathered:fsdp_pre_all_gather(mesh, outer_shape, outer_stride)
    seen[#seen + 1] = { outer_shape[1], outer_stride[1] }
    local rows = math.ceil(outer_shape[1] / mesh:size())
    local padded = ms.zeros(rows, outer_shape[2], { dtype = "bfloat16" })
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
    for _, name in ipairs { "in_proj", "out_proj" } do mlp[name].weight = nn.Parameter(HalfGathered(mlp[name].weight:detach())) end
  end
  shard(model, { reshard_after_forward = false })
  local optim = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
  model(ms.ones(2, 3)):sum():backward()
  optim:step()
  assert.equal(6, #seen)
  assert.same({ 9, 3 }, seen[1])
  assert.same({ 3, 9 }, seen[2])
end

for world = 2, 4 do
  ranks.describe(world, ("fully_shard extensions over %d ranks"):format(world), function()
    for _, reshard in ipairs { true, false } do
      it(("test_all_gather_extensions_train_parity, reshard_after_forward = %s"):format(tostring(reshard)), function(rank)
        local ms, _, fsdp, dist = load()
        local log = {}
        local TwoTensor = two_tensor(log)
        ms.manual_seed(42)
        local model = two_tensor_mlp(TwoTensor)
        local reference = ms.deepcopy(model)
        local reference_optim = ms.optim.Adam(reference:parameters(), { lr = 1e-2 })
        shard(model, { reshard_after_forward = reshard })
        local optim = ms.optim.Adam(model:parameters(), { lr = 1e-2 })
        fsdp.check_sharded_parity(reference, model)

        ms.manual_seed(42 + rank + 1)
        local input = ms.randn(2, 8)
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
            ms.testing.assert_close(losses[2], losses[1])
          end)
          fsdp.check_sharded_parity(reference, model)
          for _, o in ipairs { reference_optim, optim } do
            o:step()
            o:zero_grad { set_to_none = iteration % 2 == 0 }
          end
          fsdp.check_sharded_parity(reference, model)
        end
        -- Two parameters a unit; once a forward and, where it was resharded, once a backward.
        assert.equal(6, log.first)
        assert.equal(6 * (reshard and 20 or 10), log.pre)
        assert.equal(log.pre - 6, log.later)
      end)

      it(("test_all_gather_extensions_end_to_end, reshard_after_forward = %s"):format(tostring(reshard)), function(rank)
        local ms, nn, fsdp = load()
        local log = {}
        local TwoTensor = two_tensor(log)
        local model
        ms.with_device("meta", function() model = two_tensor_mlp(TwoTensor) end)
        for _, p in ipairs(model:parameters()) do assert.matches("^meta", p.device) end
        shard(model, { reshard_after_forward = reshard, mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16" } })
        model:to_empty "cpu"
        for _, p in ipairs(model:parameters()) do nn.init.trunc_normal_(p) end
        local optim = ms.optim.Adam(model:parameters(), { lr = 1e-2 })
        ms.manual_seed(42 + rank + 1)
        local input = ms.randn(2, 8)
        local first, last
        for _ = 1, 3 do
          ms.scope(function()
            local loss = model(input):sum()
            assert.equal("bfloat16", loss.dtype)
            last = loss:item()
            first = first or last
            loss:backward()
          end)
          optim:step()
          optim:zero_grad()
        end
        assert.is_true(last < first)
        assert.equal(6 * (reshard and 6 or 3), log.pre)
        for _, p in ipairs(model:parameters()) do assert.equal("float32", p:to_local().dtype) end
      end)
    end

    it("test_all_gather_extensions_monkey_patch", function(rank)
      local ms, nn = load()
      local MLP = require("spec.support.models.mlp").MLP
      local model
      ms.with_device("meta", function()
        model = nn.Sequential()
        for _ = 1, 3 do model:append(MLP(8, { bias = false })) end
      end)
      shard(model)
      model:to_empty "cpu"
      for _, p in ipairs(model:parameters()) do nn.init.trunc_normal_(p) end
      local ran, weights = {}, 0
      for name, p in model:named_parameters() do
        if name:find "weight" then
          weights = weights + 1
          local part = p:to_local()
          function part.fsdp_pre_all_gather(self)
            ran[name] = (ran[name] or 0) + 1
            return { self:to "bfloat16" }, nil
          end
          function part.fsdp_post_all_gather(_, outputs, metadata, param_dtype, out)
            assert.equal(1, #outputs)
            assert.is_nil(metadata)
            assert.equal("bfloat16", outputs[1].dtype)
            if out then
              out:copy_(outputs[1])
              return
            end
            local whole = outputs[1]:to(param_dtype)
            return whole, { outputs[1], whole }
          end
        end
      end
      assert.is_true(weights > 0)
      local optim = ms.optim.Adam(model:parameters(), { lr = 1e-2 })
      ms.manual_seed(42 + rank + 1)
      local input = ms.randn(2, 8)
      for _ = 1, 3 do
        ms.scope(function() model(input):sum():backward() end)
        optim:step()
        optim:zero_grad()
      end
      local n = 0
      for _, times in pairs(ran) do
        n = n + 1
        assert.equal(6, times)                              -- three forwards, three backwards
      end
      assert.equal(weights, n)
    end)

    it("test_all_gather_extension_outer_size_stride", outer_size_stride)

    it("defining only one of the two hooks", function()
      local ms = load()
      local TwoTensor = two_tensor {}
      TwoTensor.fsdp_post_all_gather = nil
      local model = shard(two_tensor_mlp(TwoTensor))
      local ok, message = pcall(model, ms.ones(2, 8))
      assert.is_false(ok)
      assert.matches("^Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all%-gather extensions: ", strip(message))
    end)
  end)
end

-- The hooks see the shard dimension only.
local function hsdp_mesh(rank, world)
  local ms, nn, fsdp, dist = load()
  local MLP = require("spec.support.models.mlp").MLP
  local mesh = dist.init_device_mesh("cpu", { 2, world / 2 }, { names = { "dp_replicate", "dp_shard" } })
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
  for _ = 1, 2 do model(ms.ones(2, 8) * (rank + 1)):sum():backward() end
  assert.equal(4 * 4, seen)
end

for _, world in ipairs { 4, 8 } do
  ranks.describe(world, ("fully_shard extensions on a mesh of %d ranks"):format(world), function()
    it("test_all_gather_extension_hsdp_mesh", hsdp_mesh)
    -- As many ranks as the suite has: 9 and 3 rows leave some without any.
    if world == 8 then it("test_all_gather_extension_outer_size_stride", outer_size_stride) end
  end)
end
