-- SPDX-License-Identifier: MIT
--- set_custom_reduce_scatter: a function of the script in place of the reduce-scatter of gradients.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local function load() return require "moonshard" end

-- Trains for four backwards. Returns the parameters, and what the custom function was told. how: mesh, divide, partial
-- (all-reduce over replicas in every second backward), hook (also counts calls of an all-reduce hook).
local function train(custom, how)
  local ms = load()
  local nn, fsdp, dist = ms.nn, ms.fsdp, ms.dist
  ms.manual_seed(1)
  local model, told, hooked = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), {}, 0
  for _, m in ipairs { model[1], model } do
    fsdp.fully_shard(m, { mesh = how.mesh })
    if how.divide then m:set_gradient_divide_factor(how.divide) end
    if how.hook then m:set_all_reduce_hook(function() hooked = hooked + 1 end) end
    if custom then
      m:set_custom_reduce_scatter(function(output, input, options)
        told[#told + 1] = { output:numel(), input:numel(), options.op }
        dist.reduce_scatter(output, input, options)
      end)
    end
  end
  local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.01 })
  for k = 1, 4 do
    local last = not how.partial or k % 2 == 0
    model:set_requires_all_reduce(last)
    model(ms.randn(4, 5) + dist.rank()):pow(2):mean():backward()
    if last then
      optimizer:step()
      optimizer:zero_grad()
    end
  end
  return fsdp.state_dict(model), told, hooked
end

for world = 1, 4 do
  ranks.describe(world, ("a custom reduce-scatter over %d ranks"):format(world), function()
    local function mesh()
      return world % 2 == 0 and load().dist.init_device_mesh("cpu", { 2, world / 2 }, { names = { "replicate", "shard" } })
        or nil
    end

    for name, how in pairs { ["of every backward"] = {}, ["with a divide factor"] = { divide = 3 },
      ["before an all-reduce hook"] = { hook = true }, ["on a mesh with replicas"] = { on_mesh = true },
      ["on a mesh, accumulating without all-reduce"] = { on_mesh = true, partial = true } } do
      it(name .. " that calls dist.reduce_scatter gives the bits of the engine's", function()
        how.mesh = how.on_mesh and mesh() or nil
        local want, _, hooks = train(false, how)
        local got, told, hooks_too = train(true, how)
        for key, t in pairs(want) do assert.is_true(t:equal(got[key]), key) end
        assert.equal(hooks, hooks_too)
        assert.equal(8, #told)                            -- two units, four backwards
        local shards = how.mesh and world / 2 or world
        for _, call in ipairs(told) do
          assert.equal(shards * call[1], call[2])
          assert.equal(how.divide and "sum" or "avg", call[3])
        end
      end)
    end

    it("must fill its output, and ends with nil", function()
      local ms = load()
      local m = ms.fsdp.fully_shard(ms.nn.Linear(3, 3))
      m:set_custom_reduce_scatter(function() end)
      assert.matches("set_custom_reduce_scatter: nothing was written to output",
        message(function() m(ms.ones(1, 3)):sum():backward() end))
      m:set_custom_reduce_scatter(function() error "in the function" end)
      assert.matches("in the function", message(function() m(ms.ones(1, 3)):sum():backward() end))
      m:set_custom_reduce_scatter(nil)
      m(ms.ones(1, 3)):sum():backward()
      assert.same({ 1, 1, 1 }, m.bias.grad:full_tensor():tolist())
      assert.equal("set_custom_reduce_scatter: argument is a number (1), expected a function",
        message(function() m:set_custom_reduce_scatter(1) end))
    end)
  end)
end
