-- SPDX-License-Identifier: MIT
--- Parameters of several dtypes in one unit of fully_shard: gradients are reduced together, in the reduce dtype or the
--- widest of their own, and each parameter gets its gradient in its own dtype.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local DTYPES = { "float32", "bfloat16", "float64" }

-- Layers of three dtypes, whose sizes no number of ranks divides evenly; skip leaves one out.
local function net()
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.layers = nn.ModuleList { nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 3) }
    for k, layer in ipairs(self.layers) do layer:to(DTYPES[k]) end
  end
  function Net:forward(x, skip)
    for k, layer in ipairs(self.layers) do
      if k ~= skip then x = layer(x:to(self.computes or DTYPES[k])):tanh() else x = ms.cat({ x, x }, 2):narrow(2, 1,
        7) end
    end
    return x:float()
  end
  ms.manual_seed(6)
  return Net()
end

local function input(r, step)
  local ms = load()
  ms.manual_seed(10 * step + r)
  return ms.randn(2, 3)
end

-- The expected gradient of every parameter: the ranks' gradients cast to `reduce`, summed in rank order (half types in
-- float32), divided, and cast to the parameter's dtype.
local function expected(world, reduce, step, skip)
  local ms = load()
  local sums = {}
  for r = 0, world - 1 do
    local plain = net()
    plain(input(r, step), skip):pow(2):sum():backward()
    for name, p in plain:named_parameters() do
      if p.grad then
        local g = p.grad:to(reduce):to(reduce == "float64" and "float64" or "float32")
        sums[name] = sums[name] and sums[name] + g or g
      end
    end
  end
  return ms.no_grad(function()
    local out = {}
    for name, sum in pairs(sums) do out[name] = (sum / world):to(reduce) end
    return out
  end)
end

for _, world in ipairs { 1, 2, 3, 4 } do
  ranks.describe(world, ("parameters of several dtypes in one unit on %d ranks"):format(world), function(rank)
    for _, reduce in ipairs(world == 1 and { false } or { false, "float32", "bfloat16" }) do
      it("have the mean of the ranks' gradients, reduced in " .. (reduce or "the widest dtype"), function()
        local ms, _, fsdp, dist = load()
        local policy = fsdp.MixedPrecisionPolicy { reduce_dtype = reduce or nil }
        for _, skip in ipairs { 0, 2 } do
          local model = fsdp.fully_shard(net(), { mp_policy = policy })
          local seen = dist.record(function() model(input(rank, 1), skip):pow(2):sum():backward() end)
          local reductions = 0
          for _, c in ipairs(seen) do reductions = reductions + (c.op == "reduce_scatter" and 1 or 0) end
          assert.equal(world > 1 and 1 or 0, reductions)
          local want = expected(world, reduce or "float64", 1, skip)
          for name, p in model:named_parameters() do
            if want[name] then
              assert.equal(p.dtype, p.grad.dtype)
              assert.is_true(p.grad:full_tensor():equal(want[name]:to(p.dtype)), name)
            else
              assert.is_nil(p.grad, name)
            end
          end
          -- The model trains, accumulates and clips.
          local optimizer = ms.optim.AdamW(model:parameters(), { lr = 1e-2 })
          model:set_requires_gradient_sync(false)
          model(input(rank, 2), skip):pow(2):sum():backward()
          model:set_requires_gradient_sync(true)
          model(input(rank, 3), skip):pow(2):sum():backward()
          ms.nn.utils.clip_grad_norm_(model:parameters(), 1)
          optimizer:step()
          for k, layer in ipairs(model.layers) do
            assert.equal(DTYPES[k], layer.weight:to_local().dtype)
            assert.is_true(layer.weight:full_tensor():isfinite():all():item())
          end
        end
      end)
    end

    it("are gathered in one dtype by a policy, and keep theirs", function()
      local _, _, fsdp = load()
      local model = net()
      model.computes = "float32"
      fsdp.fully_shard(model, { mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "float32" } })
      local seen = {}
      for k, layer in ipairs(model.layers) do layer:register_forward_hook(function(m) seen[k] = m.weight.dtype end) end
      model(input(rank, 1)):sum():backward()
      assert.same({ "float32", "float32", "float32" }, seen)
      for k, layer in ipairs(model.layers) do assert.equal(DTYPES[k], layer.weight.grad.dtype) end
    end)
  end)
end

ranks.describe(4, "parameters of several dtypes over a mesh of two dimensions", function(rank)
  it("have the mean over all ranks, all-reduced at once or later", function()
    local ms, _, fsdp, dist = load()
    local mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "replicas", "shards" } })
    local model = fsdp.fully_shard(net(), { mesh = mesh })
    local steps = { 1, 2 }
    local want = {}
    for _, step in ipairs(steps) do
      for name, g in pairs(expected(4, "float64", step)) do want[name] = want[name] and want[name] + g or g end
    end
    model:set_requires_all_reduce(false)
    model(input(rank, 1)):pow(2):sum():backward()
    model:set_requires_all_reduce(true)
    model(input(rank, 2)):pow(2):sum():backward()
    for name, p in model:named_parameters() do
      local tolerance = p.dtype == "bfloat16" and { rtol = 1e-2, atol = 1e-3 } or { rtol = 1e-6, atol = 1e-6 }
      ms.testing.assert_close(p.grad:full_tensor(), want[name]:to(p.dtype), tolerance)
    end
  end)
end)
