-- SPDX-License-Identifier: MIT
--- Parameters between a forward and its backward with use_orig_params (docs/semantics.md#pieces). Where the strategy
--- reshards after forward, scripts see the pieces, also of the root, which stays in memory; elsewhere they see whole
--- parameters. Gathered memory is not used if the script has changed the parameters since.
local ranks = require "spec.support.ranks"
local raises = require "spec.support.raises"
local load = require("spec.support.wrapped").load

local function options(more)
  local o = { use_orig_params = true, sharding_strategy = "full_shard" }
  for key, value in pairs(more or {}) do o[key] = value end
  return o
end

local function net()
  local ms, nn = load()
  ms.manual_seed(0)
  return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
end

-- The last layer is a unit of its own, the first one belongs to the root.
local function wrapped(more)
  local _, _, fsdp, _, quietly = load()
  return quietly(function()
    local inner = net()
    inner[3] = fsdp.FSDP(inner[3], options(more))
    return fsdp.FSDP(inner, options(more))
  end)
end

local function sizes(m)
  local list = {}
  for name, p in m:named_parameters() do list[#list + 1] = name .. tostring(p.shape) end
  return table.concat(list, " ")
end

local function is_gathered(m)
  return require("moonshard.core.ffi").lib.ms_unit_get_state(require("moonshard.parallel.fsdp.module").unit_of(m).handle).is_gathered == 1
end

local WHOLE = "1.weight[7, 5] 1.bias[7] 3.weight[3, 7] 3.bias[3]"

-- A plain copy that sees every rank's input: compares gradients and, after a step of both, parameters.
local function trains_on(world, rank, model, losses_of)
  local ms, _, fsdp = load()
  local plain = net()
  local a, b = ms.optim.SGD(plain:parameters(), { lr = 0.1 }), ms.optim.SGD(model:parameters(), { lr = 0.1 })
  for step = 1, 2 do
    for r = 0, world - 1 do
      ms.manual_seed(10 * step + r)
      losses_of(plain, ms.rand(2, 5), function() end, 1 / world)
    end
    ms.manual_seed(10 * step + rank)
    losses_of(model, ms.rand(2, 5), function(seen) assert.equal(sizes(model), seen or sizes(model)) end, 1)
    fsdp.check_sharded_parity(plain, model)
    for _, o in ipairs { a, b } do
      o:step()
      o:zero_grad()
    end
  end
  fsdp.check_sharded_parity(plain, model)
end

for world = 1, 4 do
  ranks.describe(world, ("pieces between forward and backward on %d ranks"):format(world), function()
    for _, case in ipairs { { "full_shard", false }, { "shard_grad_op", true }, { "no_shard", true } } do
      it(("are shown by the root as by nested instances, or not: %s"):format(case[1]), function()
        local ms = load()
        local model = wrapped { sharding_strategy = case[1] }
        local resting = sizes(model)
        local seen
        model[1]:register_forward_hook(function() seen = sizes(model[1]) end)
        local loss = model(ms.ones(2, 5)):sum()
        assert.equal("weight[7, 5] bias[7]", seen)
        assert.equal((case[2] or world == 1) and WHOLE or resting, sizes(model))
        assert.equal(world == 1 or case[1] == "no_shard", resting == WHOLE)
        assert.is_true(is_gathered(model))
        loss:backward()
        assert.equal(resting, sizes(model))
        if world > 1 and case[1] ~= "no_shard" then assert.is_false(is_gathered(model)) end
        -- Without a backward to come, no parameters stay gathered.
        ms.no_grad(function() model(ms.ones(2, 5)) end)
        assert.equal(resting, sizes(model))
      end)
    end

    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      it("are shown after a backward of no_sync, whatever stays in memory: " .. strategy, function(rank)
        local ms, _, _, dist = load()
        local model = wrapped { sharding_strategy = strategy }
        local resting = sizes(model)
        trains_on(world, rank, model, function(m, x, pieces, part)
          local function half() return m(x):pow(2):sum() * (part / 2) end
          if m ~= model then return (half() * 2):backward() end
          model:no_sync(function() half():backward() end)
          pieces(resting)
          local stays = world > 1 and strategy == "shard_grad_op"
          if world > 1 and strategy ~= "no_shard" then assert.equal(stays, is_gathered(model)) end
          local gathers = 0
          local seen, loss = dist.record(half)
          for _, c in ipairs(seen) do gathers = gathers + (c.op == "all_gather" and 1 or 0) end
          assert.equal((world == 1 or stays or strategy == "no_shard") and 0 or 2, gathers)
          loss:backward()
          pieces(resting)
          -- A change of the pieces invalidates the gathered parameters.
          ms.no_grad(function()
            for _, p in ipairs(model:parameters()) do p:mul_(2):div_(2) end
          end)
        end)
      end)
    end

    it("train with one forward after the other, and then their backwards", function(rank)
      trains_on(world, rank, wrapped(), function(model, x, pieces, part)
        local seen = sizes(model)
        local one = model(x):pow(2):sum() * part
        pieces(seen)
        local two = model(x * 2):pow(2):sum() * part
        pieces(seen)
        two:backward()
        one:backward()
        pieces(seen)
      end)
    end)

    it("train with a forward for validation, and with summoned parameters, in between", function(rank)
      local ms, _, fsdp = load()
      trains_on(world, rank, wrapped(), function(model, x, pieces, part)
        local seen = sizes(model)
        local loss = model(x):pow(2):sum() * part
        fsdp.summon_full_params(model, { writeback = false }, function() assert.equal(WHOLE, sizes(model)) end)
        pieces(seen)
        fsdp.summon_full_params(model, { writeback = false, rank0_only = true }, function()
          assert.equal(rank == 0 and WHOLE or seen, sizes(model))
        end)
        pieces(seen)
        model:eval()
        ms.no_grad(function() model(x) end)
        model:train()
        pieces(seen)
        loss:backward()
      end)
    end)

    it("train with separate backwards of several outputs, and of an inner result that never was an output",
      function(rank)
      local _, nn, fsdp, _, quietly = load()
      local kept
      local Both = nn.Module:extend "Both"
      function Both:init() self.body = net() end
      function Both:forward(x)
        kept = self.body[1](x):keep()
        return self.body(x), self.body[1](x * 3)
      end
      local plain, model = Both(), Both()
      model = quietly(fsdp.FSDP, model, options())
      local ms = load()
      local function run(m, x, part, pieces)
        local seen = sizes(m)
        local a, b = m(x)
        pieces(seen)
        ;(kept:pow(2):sum() * part):backward { retain_graph = true }
        ;(b:pow(2):sum() * part):backward { retain_graph = true }
        ;(a:pow(2):sum() * part):backward()
        pieces(seen)
      end
      for r = 0, world - 1 do
        ms.manual_seed(r)
        run(plain, ms.rand(2, 5), 1 / world, function() end)
      end
      ms.manual_seed(rank)
      run(model, ms.rand(2, 5), 1, function(seen) assert.equal(seen, sizes(model)) end)
      fsdp.check_sharded_parity(plain, model)
    end)

    it("have the stored dtype where the forward computes in bfloat16", function()
      local ms, _, fsdp = load()
      local model = wrapped { mixed_precision = fsdp.MixedPrecision { param_dtype = "bfloat16" } }
      local seen = sizes(model)
      local loss = model(ms.ones(2, 5)):float():sum()
      assert.equal(seen, sizes(model))
      if world > 1 then
        for _, p in ipairs(model:parameters()) do assert.equal("float32", p.dtype) end
      end
      fsdp.summon_full_params(model, function() assert.equal(WHOLE, sizes(model)) end)
      assert.equal(seen, sizes(model))
      loss:backward()
      for _, p in ipairs(model:parameters()) do assert.equal("float32", p.grad.dtype) end
    end)

    it("cannot be computed with, because their gradient would be a piece", function()
      local ms = load()
      if world == 1 then return end
      local model = wrapped()
      for _, k in ipairs { 1, 3 } do
        local loss = model(ms.ones(2, 5)):sum() + model[k].weight:pow(2):sum()
        local ok, message = pcall(loss.backward, loss)
        assert.is_false(ok)
        assert.truthy(message:find("the script computed with this rank's piece of it", 1, true), message)
      end
      model(ms.ones(2, 5)):sum():backward()
    end)

    for _, what in ipairs { "FSDP", "FSDP, use_orig_params", "FSDP, shard_grad_op", "fully_shard",
      "fully_shard, reshard_after_forward = false" } do
      it("changed after a forward without a backward are used by the next forward: " .. what, function()
        local ms, _, fsdp, _, quietly = load()
        local model, plain = net(), net()
        if what:find "fully" then
          fsdp.fully_shard(model, what:find "false" and { reshard_after_forward = false } or nil)
        else
          model = quietly(fsdp.FSDP, model, { use_orig_params = what:find "orig" ~= nil,
            sharding_strategy = what:find "grad_op" and "shard_grad_op" or nil })
        end
        local x = ms.ones(2, 5)
        local old = model(x):pow(2):sum()
        ms.no_grad(function()
          for _, p in ipairs(model:parameters()) do (p.placements and p:to_local() or p):mul_(2) end
          for _, p in ipairs(plain:parameters()) do p:mul_(2) end
        end)
        local new, want = model(x):pow(2):sum(), plain(x):pow(2):sum()
        ms.testing.assert_close(new:detach(), want:detach())
        -- The backward of the earlier forward is refused: the values with which that forward computed are gone.
        if world > 1 then assert.has_error(function() old:backward() end) end
        model(x):pow(2):sum():backward()
        want:backward()
        fsdp.check_sharded_parity(plain, model)
      end)
    end
  end)
end

-- The layout that PyTorch's suite asserts.
ranks.describe(2, "pieces of two ranks", function()
  for _, when in ipairs { "before", "after forward", "after backward" } do
    it("have the reference's layout, " .. when, function(rank)
      local ms, nn, fsdp, _, quietly = load()
      local square = quietly(fsdp.FSDP, nn.Linear(5, 5, { bias = false }), options())
      local biased = quietly(fsdp.FSDP, nn.Linear(5, 7), options())
      for _, m in ipairs { square, biased } do
        local loss = when ~= "before" and m(ms.ones(2, 5)):sum()
        if when == "after backward" then loss:backward() end
      end
      assert.equal(13, square.params[1]:numel())                        -- (25 + 1 of padding) / 2
      assert.equal("weight[" .. ({ [0] = 13, 12 })[rank] .. "]", sizes(square))
      assert.equal(22, biased.params[1]:numel())                        -- (35 + 1 + 7 + 1) / 2, with padding
      assert.equal(({ [0] = "weight[22] bias[0]", "weight[13] bias[7]" })[rank], sizes(biased))
      if when == "after backward" then
        for _, p in ipairs(biased:parameters()) do assert.equal(tostring(p.shape), tostring(p.grad.shape)) end
      end
    end)
  end

  it("are refused when the script changes them before the backward", function()
    local ms, _, _ = load()
    for _, k in ipairs { 1, 3 } do
      local model = wrapped()
      local loss = model(ms.ones(2, 5)):sum()
      ms.no_grad(function() model[k].weight:mul_(2) end)
      raises("FSDP does not support changing the parameters between forward and backward", loss.backward, loss)
    end
  end)
end)
