-- SPDX-License-Identifier: MIT
--- MixedPrecisionPolicy (docs/semantics.md#mixed-precision, #reduction), meta initialisation and state dicts of sharded
--- models.
local ranks = require "spec.support.ranks"

-- Layers 1 and 3 are units, and the root, which takes root_options if given.
local function make(options, root_options)
  local ms = require "moonshard"
  local nn, fsdp = ms.nn, ms.fsdp
  ms.manual_seed(5)
  local model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
  if options then
    for _, k in ipairs { 1, 3 } do fsdp.fully_shard(model[k], options) end
    fsdp.fully_shard(model, root_options or options)
  end
  return model, ms
end

ranks.describe(2, "mixed precision", function()
  it("computes in param_dtype, keeps shards and gradients in the stored one", function(rank)
    local _, ms = make()
    local Policy = ms.fsdp.MixedPrecisionPolicy
    local model = make({ mp_policy = Policy { param_dtype = "bfloat16", reduce_dtype = "float32" } },
      { mp_policy = Policy { param_dtype = "bfloat16", reduce_dtype = "float32", output_dtype = "float32" } })
    local seen = {}
    for _, k in ipairs { 1, 3, 5 } do
      model[k]:register_forward_hook(function(m, args, out) seen[k] = { m.weight.dtype, args[1].dtype, out.dtype } end)
    end
    local out = model(ms.ones(2, 6) * (rank + 1))
    assert.equal("float32", out.dtype)
    assert.same({ "bfloat16", "bfloat16", "bfloat16" }, seen[5])
    assert.same({ "bfloat16", "bfloat16" }, { seen[1][1], seen[1][2] })
    out:sum():backward()
    for name, p in model:named_parameters() do
      assert.equal("float32", p.dtype, name)
      assert.equal("float32", p.grad.dtype, name)
      assert.equal("float32", p:to_local().dtype)
    end
  end)

  it("reduces in the reduce dtype: the float32 mean of bfloat16 gradients, rounded nowhere between",
    function(rank, world)
    local reference, ms = make()
    local policy = ms.fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16", reduce_dtype = "float32" }
    local model = make { mp_policy = policy }
    local function input(r) return ms.arange(0, 12):reshape(2, 6):to "float32" * 0.1 + r end
    model(input(rank)):sum():backward()
    -- Computes the same directly: bfloat16 copies of the weights, and every rank's gradients, summed in float32 in
    -- rank order.
    reference:to "bfloat16"
    local sums = {}
    for r = 0, world - 1 do
      reference(input(r):to "bfloat16"):sum():backward()
      for name, p in reference:named_parameters() do
        local g = p.grad:to "float32"
        sums[name] = sums[name] and sums[name] + g or g
        p.grad = nil
      end
    end
    for name, p in model:named_parameters() do
      assert.is_true(p.grad:full_tensor():equal(sums[name] / world), name)
    end
  end)

  it("keeps the reduce dtype when the model moves to another one", function(rank, world)
    local reference, ms = make()
    local policy = ms.fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16", reduce_dtype = "bfloat16" }
    local nn, model = ms.nn, make()
    model:to "bfloat16"                                          -- the dtype of the policy already
    for _, k in ipairs { 1, 3 } do ms.fsdp.fully_shard(model[k], { mp_policy = policy }) end
    ms.fsdp.fully_shard(model, { mp_policy = policy })
    assert.equal("bfloat16", policy.reduce_dtype)
    for _, dtype in ipairs { "bfloat16", "float32" } do
      model:to(dtype)
      local seen = {}
      for _, c in ipairs(ms.dist.record(function() nn.F.mse_loss(model(ms.ones(2, 6) * (rank + 1)):float(),
        ms.zeros(2, 3)):backward() end)) do
        seen[c.op .. " " .. c.dtype] = (seen[c.op .. " " .. c.dtype] or 0) + 1
      end
      assert.equal(3, seen["reduce_scatter bfloat16"])
      assert.is_nil(seen["reduce_scatter float32"])
      assert.is_nil(seen["all_gather float32"])
      reference:zero_grad()
      for r = 0, world - 1 do (nn.F.mse_loss(reference(ms.ones(2, 6) * (r + 1)), ms.zeros(2, 3)) / world):backward() end
      for name, p in model:named_parameters() do
        assert.equal(dtype, p.grad.dtype, name)
        ms.testing.assert_close(p.grad:full_tensor():float(), reference:get_parameter(name).grad,
          { rtol = 0.1, atol = 0.05 })
      end
      model:zero_grad()
    end
  end)

  it("trains together with frozen parameters of other dtypes in one unit", function(rank, world)
    local ms = require "moonshard"
    local nn, fsdp = ms.nn, ms.fsdp
    local Scaled = nn.Module:extend "Scaled"
    function Scaled:init(dtype)
      self.linear = nn.Linear(6, 5)
      self.scale = nn.Parameter(ms.arange(0, 5):to(dtype), { requires_grad = false })
    end
    function Scaled:forward(x) return self.linear(x) * self.scale:float() end
    for _, dtype in ipairs { "bfloat16", "uint8", "int64", "float64" } do
      for _, reshard in ipairs { true, false } do
        ms.manual_seed(1)
        local whole = nn.Sequential(Scaled(dtype), nn.Linear(5, 2))
        local model = ms.deepcopy(whole)
        fsdp.fully_shard(model[1], { reshard_after_forward = reshard })
        fsdp.fully_shard(model)
        local a, b = ms.optim.Adam(whole:parameters(), { lr = 0.1 }), ms.optim.Adam(model:parameters(), { lr = 0.1 })
        for step = 1, 3 do
          for r = 0, world - 1 do (whole(ms.ones(2, 6) * (r + step)):pow(2):sum() / world):backward() end
          model(ms.ones(2, 6) * (rank + step)):pow(2):sum():backward()
          fsdp.check_sharded_parity(whole, model)
          for _, optim in ipairs { a, b } do
            optim:step()
            optim:zero_grad()
          end
        end
        assert.equal(dtype, model[1].scale.dtype)
        assert.is_true(fsdp.state_dict(model)["1.scale"]:equal(whole[1].scale:detach()))
      end
    end
  end)

  it("does not cast inputs if the policy says so, and casts them otherwise", function()
    local _, ms = make()
    local keep = ms.fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16", cast_forward_inputs = false }
    local layer = ms.fsdp.fully_shard(ms.nn.Linear(4, 4), { mp_policy = keep })
    local dtype
    layer:register_forward_pre_hook(function(_, args)
      dtype = args[1].dtype
      return args[1]:to "bfloat16"
    end)
    layer(ms.ones(1, 4))
    assert.equal("float32", dtype)
    local integers = ms.fsdp.fully_shard(ms.nn.Embedding(5, 4),
      { mp_policy = ms.fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16" } })
    assert.equal("bfloat16", integers(ms.tensor({ 1, 2 }, { dtype = "int64" })).dtype)
  end)

  it("trains nearly as in float32", function(rank)
    local full, ms = make {}
    local Policy = ms.fsdp.MixedPrecisionPolicy
    local model = make({ mp_policy = Policy { param_dtype = "bfloat16", reduce_dtype = "float32" } },
      { mp_policy = Policy { param_dtype = "bfloat16", reduce_dtype = "float32", output_dtype = "float32" } })
    local losses = {}
    for k, m in ipairs { full, model } do
      local optim = ms.optim.AdamW(m:parameters(), { lr = 1e-2 })
      for _ = 1, 30 do
        ms.scope(function()
          local loss = (m(ms.ones(2, 6) * (rank + 1)) - 0.3):pow(2):mean()
          loss:backward()
          losses[k] = loss:item()
        end)
        optim:step()
        optim:zero_grad()
      end
    end
    assert.is_true(losses[1] < 0.02)
    assert.near(losses[1], losses[2], 0.01)
  end)
end)

for world = 1, 4 do
  ranks.describe(world, "initialisation on meta", function()
    it("gives the results of the unsharded model for any number of ranks", function()
      local ms = require "moonshard"
      local nn, fsdp = ms.nn, ms.fsdp
      local function build(device)
        local kind = { device = device }
        return nn.Sequential(nn.Embedding(7, 6, kind), nn.Linear(6, 5, kind), nn.LayerNorm(5, kind),
          nn.Linear(5, 3, kind))
      end
      local function reset(m)
        ms.manual_seed(42)
        for _, sub in ipairs(m:modules()) do
          if sub.reset_parameters then sub:reset_parameters() end
        end
      end
      local reference, model = build "cpu", build "meta"
      reset(reference)
      fsdp.fully_shard(model[2])
      fsdp.fully_shard(model)
      assert.matches("FSDP parameters should be materialized from meta device before training, but the following were still on meta device: ",
        select(2, pcall(model, ms.tensor({ 1 }, { dtype = "int64" }))), 1, true)
      assert.equal("meta", model[1].weight.device)
      model:to_empty "cpu"
      reset(model)
      fsdp.check_sharded_parity(reference, model)
      ms.no_grad(function()
        nn.init.normal_(reference[1].weight, 0, 0.02)
        nn.init.trunc_normal_(reference[2].weight)
        ms.manual_seed(3)
        nn.init.normal_(reference[1].weight, 0, 0.02)
        nn.init.trunc_normal_(reference[2].weight)
        ms.manual_seed(3)
        nn.init.normal_(model[1].weight, 0, 0.02)
        nn.init.trunc_normal_(model[2].weight)
      end)
      fsdp.check_sharded_parity(reference, model)
      model(ms.tensor({ 1, 2 }, { dtype = "int64" })):sum():backward()
    end)
  end)
end

ranks.describe(3, "state dicts", function()
  local function trained()
    local model, ms = make {}
    local optim = ms.optim.AdamW(model:parameters(), { lr = 1e-2 })
    local function steps(n)
      for _ = 1, n do
        ms.scope(function() model(ms.ones(2, 6)):pow(2):sum():backward() end)
        optim:step()
        optim:zero_grad()
      end
    end
    return model, ms, optim, steps
  end

  local function weights(model)
    local out = {}
    for name, p in model:named_parameters() do out[name] = p:full_tensor() end
    return out
  end

  it("of the module itself have sharded tensors under the original names", function()
    local model, ms = trained()
    local sd = model:state_dict()
    for name, p in model:named_parameters() do
      assert.is_true(sd[name]:isa(ms.Tensor))
      assert.equal("Shard(1)", tostring(sd[name].placements[1]))
      assert.is_true(sd[name]:equal(p))
    end
    assert.matches("load_state_dict: parameter '1.weight' is sharded over ranks", (select(2,
      pcall(model.load_state_dict, model, { ["1.weight"] = ms.ones(9, 6) }, { strict = false }))))
  end)

  it("load with assign, too, which keeps the parameters; on meta there is no memory to load into",
    function()
    local model, ms, _, steps = trained()
    local sd, before = {}, model:parameters()
    for name, t in pairs(model:state_dict()) do sd[name] = t:clone() end
    local want = weights(model)
    steps(2)
    model:load_state_dict(sd, { assign = true })
    for name, t in pairs(weights(model)) do assert.is_true(t:equal(want[name]), name) end
    for k, p in ipairs(model:parameters()) do assert.equal(before[k], p) end
    steps(1)
    local empty = ms.fsdp.fully_shard(ms.nn.Sequential(ms.nn.Linear(6, 9, { device = "meta" })))
    for _, load in ipairs { empty.load_state_dict, ms.fsdp.load_state_dict } do
      for _, options in ipairs { {}, { strict = false } } do
        local ok, message = pcall(load, empty, sd, options)
        assert.is_false(ok)
        assert.matches("load_state_dict: parameter '1.weight' is on meta and has no memory to load into; call to_empty%(device%) first", message)
      end
    end
  end)
end)
