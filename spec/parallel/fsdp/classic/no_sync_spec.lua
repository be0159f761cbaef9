-- SPDX-License-Identifier: MIT
--- Gradients of backwards inside no_sync, of fsdp.FSDP: they are in the parameters' grad, whole and unreduced, until a
--- backward outside reduces them (docs/semantics.md#pieces).
local numel = require "spec.support.numel"
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local function plain_model()
  local ms, nn = load()
  ms.manual_seed(0)
  local Net = nn.Module:extend "Net"
  function Net:init() self.a, self.b, self.unused = nn.Linear(5, 3), nn.Linear(3, 5), nn.Linear(1, 3) end
  function Net:forward(x) return self.b(self.a(x):tanh()) end
  return Net()
end

local function model_of(options)
  local _, _, fsdp, _, quietly = load()
  local net = plain_model()
  return quietly(function()
    net.b = fsdp.FSDP(net.b, options)
    return fsdp.FSDP(net, options)
  end)
end

local function loss_of(model, rank, step)
  local ms = load()
  ms.manual_seed(100 * step + rank)
  return model(ms.rand(4, 5)):pow(2):sum()
end

local function alone(model, rank, step) model:no_sync(function() loss_of(model, rank, step):backward() end) end

-- One process on all ranks' batches of these steps.
local function reference(world, steps)
  local model = plain_model()
  for _, step in ipairs(steps) do
    for r = 0, world - 1 do (loss_of(model, r, step) / world):backward() end
  end
  return model
end

-- The gradients of one rank, by original name; zeros for unused parameters.
local function own_gradients(rank, steps)
  local ms = load()
  local model, grads = plain_model(), {}
  for _, step in ipairs(steps) do loss_of(model, rank, step):backward() end
  for name, p in model:named_parameters() do grads[name] = p.grad or ms.zeros_like(p) end
  return grads
end

-- The contents of the parameters' grad, by original name, in whole shapes.
local function shown(model)
  local flat = require "moonshard.parallel.fsdp.flat"
  local all = {}
  for p, name in pairs(flat.names_below(model)) do
    local unit = flat.unit_of(p)
    if unit.options.use_orig_params then
      all[name] = p.grad
    else
      local at, g = 0, rawget(unit.modules[1], "_slots").flat_param.grad
      for _, other in ipairs(unit.originals) do
        if other == p then break end
        at = at + numel(rawget(other, "_whole_shape"))
      end
      local shape = rawget(p, "_whole_shape")
      all[name] = g and g:narrow(1, at + 1, numel(shape)):reshape(shape)
    end
  end
  return all
end

local function same(want, got, what)
  local ms = load()
  for name, g in pairs(want) do
    assert.is_truthy(got[name], what .. ": no gradient of " .. name)
    assert.same({ unpack(g.shape) }, { unpack(got[name].shape) }, name)
    ms.testing.assert_close(got[name], g)
  end
end

-- check_sharded_parity accepts zeros for the unused layer, which the reference has as well.
local function parity(want, model)
  local ms, _, fsdp = load()
  for _, p in ipairs(want:parameters()) do p.grad = p.grad or ms.zeros_like(p) end
  fsdp.check_sharded_parity(want, model)
end

local CLEAR = {
  ["module:zero_grad()"] = function(model) model:zero_grad() end,
  ["module:zero_grad { set_to_none = false }"] = function(model) model:zero_grad { set_to_none = false } end,
  ["optimizer:zero_grad()"] = function(_, optim) optim:zero_grad() end,
  ["optimizer:zero_grad { set_to_none = false }"] = function(_, optim) optim:zero_grad { set_to_none = false } end,
  ["grad = nil"] = function(model) for _, p in ipairs(model:parameters()) do p.grad = nil end end,
}
local HOW = {}
for how in pairs(CLEAR) do HOW[#HOW + 1] = how end
table.sort(HOW)

local function specs(world, strategy, pieces, options_of)
  local what = ("%s, use_orig_params = %s"):format(strategy, tostring(pieces))
  local sharded = strategy ~= "no_shard" and world > 1

  it("are this rank's, whole, and those of several are summed: " .. what, function(rank)
    local model = model_of(options_of())
    for n = 1, 2 do
      local steps = n == 1 and { 1 } or { 1, 2 }
      alone(model, rank, n)
      same(own_gradients(rank, steps), shown(model), n .. " backwards")
    end
    loss_of(model, rank, 3):backward()
    parity(reference(world, { 1, 2, 3 }), model)
  end)

  for _, how in ipairs(HOW) do
    it(("are dropped by %s: %s"):format(how, what), function(rank)
      local ms = load()
      local model = model_of(options_of())
      local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
      for before = 0, 2 do                      -- backwards outside no_sync: none, one before it, or also one after it
        if before >= 1 then loss_of(model, rank, 1):backward() end
        alone(model, rank, 2)
        if before == 2 then
          loss_of(model, rank, 3):backward()
          alone(model, rank, 4)
        end
        CLEAR[how](model, optim)
        for name, g in pairs(shown(model)) do assert.equal(0, g:abs():sum():item(), name) end
        loss_of(model, rank, 5):backward()
        parity(reference(world, { 5 }), model)
        model:zero_grad()
      end
    end)
  end

  it("join what was reduced before and after: " .. what, function(rank)
    local model = model_of(options_of())
    loss_of(model, rank, 1):backward()
    alone(model, rank, 2)
    alone(model, rank, 3)
    loss_of(model, rank, 4):backward()
    parity(reference(world, { 1, 2, 3, 4 }), model)
    alone(model, rank, 5)
    loss_of(model, rank, 6):backward()
    parity(reference(world, { 1, 2, 3, 4, 5, 6 }), model)
  end)

  it("are reduced as the script left them, changed in place or replaced: " .. what, function(rank)
    local model, want = model_of(options_of()), reference(world, { 1 })
    for _, p in ipairs(want:parameters()) do if p.grad then p.grad:mul_(1.5) end end
    for r = 0, world - 1 do (loss_of(want, r, 2) / world):backward() end
    alone(model, rank, 1)
    for _, p in ipairs(model:parameters()) do
      p.grad:mul_(3)
      p.grad = p.grad * 0.5
    end
    loss_of(model, rank, 2):backward()
    parity(want, model)
  end)

  it("are for the optimizer and clipping in a world of one only: " .. what, function(rank)
    local ms, _, _, dist = load()
    local model = model_of(options_of())
    local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
    local before = model:state_dict()["a.weight"]:clone()
    alone(model, rank, 1)
    local readers = { function() optim:step() end, function() model:clip_grad_norm_(0.1) end }
    for _, fn in ipairs(world > 1 and readers or {}) do
      local ok, message = pcall(fn)
      assert.is_false(ok)
      assert.truthy(message:find(
        "has not been reduced: it comes from a backward inside no_sync; run a backward outside of no_sync first", 1, true), message)
    end
    assert.is_true(model:state_dict()["a.weight"]:equal(before))
    if sharded then return end
    for _, p in ipairs(model:parameters()) do dist.all_reduce(p.grad, { op = "avg" }) end      -- the script reduces
    optim:step()
    local want = reference(world, { 1 })
    ms.optim.SGD(want:parameters(), { lr = 0.1 }):step()
    for name, t in pairs(model:state_dict()) do ms.testing.assert_close(t, want:state_dict()[name]) end
    alone(model, rank, 2)
    assert.equal(world == 1, (pcall(optim.step, optim)))
  end)

  if pieces then
    it("are summoned, and changes to them are kept: " .. what, function(rank)
      local ms, _, fsdp = load()
      local model = model_of(options_of())
      local want = own_gradients(rank, { 1 })
      alone(model, rank, 1)
      fsdp.summon_full_params(model, { with_grads = true }, function()
        local got = {}
        for name, p in model:named_parameters() do got[name] = p.grad end
        same(want, got, "summoned")
        ms.no_grad(function() for _, g in pairs(got) do g:mul_(2) end end)
      end)
      for _, g in pairs(want) do g:mul_(2) end
      same(want, shown(model), "afterwards")
    end)
  end

  it("have the dtype of the computation, what is reduced the parameters': " .. what, function(rank)
    local _, _, fsdp = load()
    local options = options_of()
    options.mixed_precision = fsdp.MixedPrecision { param_dtype = "bfloat16", reduce_dtype = "float32" }
    local model = model_of(options)
    alone(model, rank, 1)
    for name, g in pairs(shown(model)) do assert.equal("bfloat16", g.dtype, name) end
    loss_of(model, rank, 2):backward()
    for _, p in ipairs(model:parameters()) do assert.equal("float32", p.grad.dtype) end
  end)

  it("are converted when the module is moved to another dtype: " .. what, function(rank)
    local ms = load()
    local model, want = model_of(options_of()), reference(world, { 1, 2 })
    loss_of(model, rank, 1):backward()
    alone(model, rank, 2)
    model:to "float64"
    want:to "float64"
    model:no_sync(function() (model(ms.zeros(1, 5, { dtype = "float64" })) * 0):sum():backward() end)
    ;(model(ms.zeros(1, 5, { dtype = "float64" })) * 0):sum():backward()
    for _, p in ipairs(want:parameters()) do p.grad = p.grad or ms.zeros_like(p) end
    for name, p in want:named_parameters() do
      local got
      for q, other in pairs(require("moonshard.parallel.fsdp.flat").names_below(model)) do if other == name then got = q end end
      if pieces then
        local g = require("moonshard.parallel.fsdp.sharded").part_of(got, p.grad)
        ms.testing.assert_close(got.grad:reshape(-1), g:reshape(-1), { rtol = 1e-5, atol = 1e-6 })
      end
    end
  end)
end

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("gradients of no_sync on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, pieces in ipairs { false, true } do
        specs(world, strategy, pieces, function() return { sharding_strategy = strategy, use_orig_params = pieces } end)
      end

      for _, short in ipairs { "fp16", "bf16" } do
        it(("are compressed by %s_compress_hook as by reduce_dtype, bit for bit: %s"):format(short, strategy),
          function(rank)
          local _, _, fsdp = load()
          local low = short == "fp16" and "float16" or "bfloat16"
          for _, pieces in ipairs { false, true } do
            local a = model_of { sharding_strategy = strategy, use_orig_params = pieces }
            local b = model_of { sharding_strategy = strategy, use_orig_params = pieces,
              mixed_precision = fsdp.MixedPrecision { reduce_dtype = low } }
            a:register_comm_hook(fsdp.comm_hooks.LowPrecisionState(), fsdp.comm_hooks[short .. "_compress_hook"])
            for round = 1, 2 do
              for _, model in ipairs { a, b } do
                alone(model, rank, 4 * round + 1)
                alone(model, rank, 4 * round + 2)
                loss_of(model, rank, 4 * round + 3):backward()
              end
              for k, p in ipairs(a:parameters()) do assert.is_true(p.grad:equal(b:parameters()[k].grad)) end
            end
          end
        end)
      end
    end
  end)
end

ranks.describe(4, "gradients of no_sync under hybrid strategies", function()
  for _, strategy in ipairs { "hybrid_shard", "hybrid_shard_zero2" } do
    for _, pieces in ipairs { false, true } do
      specs(4, strategy, pieces, function()
        local _, _, _, dist = load()
        local mesh = dist.init_device_mesh("cpu", { 2, 2 }, { names = { "dp_replicate", "dp_shard" } })
        return { sharding_strategy = strategy, use_orig_params = pieces, device_mesh = mesh }
      end)
    end
  end
end)

describe("gradients of no_sync", function()
  it("are no error if nothing was computed", function()
    local ms, _, _, _, quietly = load()
    local model = quietly(model_of, {})
    model:no_sync(function() end)
    ms.optim.SGD(model:parameters(), { lr = 0.1 }):step()
    raises("no_sync: argument is nil, expected a function", model.no_sync, model)
  end)
end)
