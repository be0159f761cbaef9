-- SPDX-License-Identifier: MIT
--- Frozen parameters, unused outputs, switches for pipelines, optimizers that step inside backward
--- (docs/semantics.md#ignored, #lifecycle).
local ranks = require "spec.support.ranks"

local function load() return require "moonshard" end

local function count(list, op)
  local n, numel = 0, 0
  for _, e in ipairs(list) do
    if e.op == op then n, numel = n + 1, numel + e.output_numel end
  end
  return n, numel
end

local function chain(n, options, seed)
  local ms = load()
  ms.manual_seed(seed or 1)
  local model = ms.nn.Sequential()
  for _ = 1, n do model:append(ms.nn.Sequential(ms.nn.Linear(6, 8), ms.nn.Tanh(), ms.nn.Linear(8, 6))) end
  if options == nil then return model end
  for _, m in ipairs(model) do ms.fsdp.fully_shard(m, options) end
  return ms.fsdp.fully_shard(model, options)
end

-- Gradients of the mean over ranks, computed by one process on every rank's input.
local function reference(change, input, world)
  local model = chain(3)
  if change then change(model) end
  for r = 0, world - 1 do (model(input(r)):sum() / world):backward() end
  return model
end

local function input(r) return load().ones(2, 6, { requires_grad = true }) * (r + 1) end

for _, world in ipairs { 2, 3, 4 } do
  ranks.describe(world, ("fully_shard over %d ranks:"):format(world), function(rank)
    for _, reshard in ipairs { true, false } do
      it(("frozen parameters are not reduced: only biases are sent, reshard_after_forward = %s"):format(tostring(reshard)), function()
        local ms = load()
        local function freeze(m)
          for name, p in m:named_parameters() do p.requires_grad = name:find "bias" ~= nil end
        end
        local want = reference(freeze, input, world)
        local model = chain(3, { reshard_after_forward = reshard })
        freeze(model)
        local ledger = ms.dist.record(function() model(input(rank)):sum():backward() end)
        local n, numel = count(ledger, "reduce_scatter")
        assert.equal(3, n)
        assert.equal(3 * (math.ceil(8 / world) + math.ceil(6 / world)), numel)
        ms.fsdp.check_sharded_parity(want, model)
      end)
    end

    it("frozen parameters may change from step to step", function()
      local ms = load()
      local model = chain(3, {})
      for step = 1, 4 do
        local function freeze(m)
          for k, p in ipairs(m:parameters()) do p.requires_grad = (k + step) % 3 ~= 0 end
        end
        local want = reference(freeze, input, world)
        freeze(model)
        model(input(rank)):sum():backward()
        ms.fsdp.check_sharded_parity(want, model)
        ms.no_grad(function() model(input(rank)) end)
        model:zero_grad()
      end
    end)

    it("set_requires_gradient_sync with recurse = false is for one unit alone", function()
      local ms = load()
      local want, model = chain(3), chain(3, {})
      local function backward()
        local n = count(ms.dist.record(function() model(input(rank)):sum():backward() end), "reduce_scatter")
        for r = 0, world - 1 do (want(input(r)):sum() / world):backward() end
        return n
      end
      model:set_requires_gradient_sync(false, { recurse = false })      -- the root has no parameters of its own
      assert.equal(3, backward())
      model[2]:set_requires_gradient_sync(false, { recurse = false })
      assert.equal(2, backward())
      local k = 0
      for _, p in ipairs(model[2]:parameters()) do
        k = k + 1
        assert.is_truthy(p.grad, "of the first backward")
      end
      assert.equal(4, k)
      model[2]:set_requires_gradient_sync(true, { recurse = false })
      assert.equal(3, backward())
      ms.fsdp.check_sharded_parity(want, model)
      model:set_requires_gradient_sync(false)
      assert.equal(0, backward())
      model:set_requires_gradient_sync(true)
      assert.equal(3, backward())
      ms.fsdp.check_sharded_parity(want, model)
    end)

    -- As in PyTorch, unreduced gradients are not in any parameter's grad.
    for _, by in ipairs { "module", "optimizer" } do
      for _, to_none in ipairs { true, false } do
        it(("zero_grad of the %s, set_to_none = %s, clears reduced gradients, not those that a later backward reduces")
          :format(by, tostring(to_none)), function()
          local ms = load()
          local want, model = chain(3), chain(3, {})
          local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
          model(input(rank)):sum():backward()
          model:set_requires_gradient_sync(false)
          model(input(rank) * 2):sum():backward()
          ;(by == "module" and model or optim):zero_grad { set_to_none = to_none }
          for _, p in ipairs(model:parameters()) do
            local g = p.grad
            if to_none then assert.is_nil(g) else assert.equal(0, g:to_local():abs():sum():item()) end
          end
          model:set_requires_gradient_sync(true)
          model(input(rank) * 3):sum():backward()
          for r = 0, world - 1 do
            for k = 2, 3 do (want(input(r) * k):sum() / world):backward() end
          end
          ms.fsdp.check_sharded_parity(want, model)
        end)
      end
    end

    it("outputs that the loss does not use leave their parameters without gradients", function()
      local ms = load()
      local Two = ms.nn.Module:extend "Two"
      function Two:init() self.a, self.b, self.c = ms.nn.Linear(6, 6), ms.nn.Linear(6, 6), ms.nn.Linear(6, 6) end
      function Two:forward(x) return { first = self.a(x), second = { self.b(x) } } end
      for _, nested in ipairs { true, false } do
        local function make(sharded)
          ms.manual_seed(2)
          local m = Two()
          if not sharded then return m end
          if nested then for _, name in ipairs { "a", "b", "c" } do ms.fsdp.fully_shard(m[name]) end end
          return ms.fsdp.fully_shard(m)
        end
        local want, model = make(false), make(true)
        for step = 1, 2 do
          for r = 0, world - 1 do
            local out = want(input(r))
            ;((step == 1 and out.first or out.second[1]):sum() / world):backward()
          end
          local out = model(input(rank))
          ;(step == 1 and out.first or out.second[1]):sum():backward()
          ms.fsdp.check_sharded_parity(want, model)
          assert.is_nil(model.c.weight.grad)
          for _, p in ipairs(model:parameters()) do assert.has_error(function() return p + 1 end) end
          want:zero_grad()
          model:zero_grad()
        end
      end
    end)

    for _, upfront in ipairs { false, true } do
      it(("a 1F1B pipeline reduces at its last backward only%s"):format(upfront and ", gathered up front" or ""), function()
        local ms = load()
        local want = chain(3)
        for k = 1, 4 do
          for r = 0, world - 1 do (want(input(r) * k):sum() / world):backward() end
        end
        local model = chain(3, { reshard_after_forward = false })
        local losses, scattered, gathered = {}, 0, 0
        model:set_reshard_after_backward(false)
        if upfront then
          local ledger = ms.dist.record(function()
            for _, m in ipairs(model) do m:unshard { async = true } end
          end)
          gathered = count(ledger, "all_gather")
          assert.equal(3, gathered)
        end
        local function backward(k)
          local last = k == 4
          model:set_is_last_backward(last)
          model:set_requires_gradient_sync(last)
          model:set_reshard_after_backward(last)
          local ledger = ms.dist.record(function() losses[k]:backward() end)
          losses[k] = nil
          local n = count(ledger, "reduce_scatter")
          assert.equal(last and 3 or 0, n)
          scattered, gathered = scattered + n, gathered + count(ledger, "all_gather")
        end
        for k = 1, 4 do
          gathered = gathered + count(ms.dist.record(function() losses[k] = model(input(rank) * k):sum() end),
            "all_gather")
          if k > 1 then backward(k - 1) end
        end
        backward(4)
        assert.equal(3, scattered)
        -- One per unit. The last backward also prefetches the unit with which the pass before it ended, and vacates it
        -- unused.
        assert.equal(3 + 1, gathered)
        ms.fsdp.check_sharded_parity(want, model)
        for _, p in ipairs(model:parameters()) do assert.has_error(function() return p + 1 end) end
      end)
    end

    it("an optimizer inside backward steps as one after it does, to the bit", function()
      local ms = load()
      local after, inside = chain(3, {}), chain(3, {})
      local optim = ms.optim.AdamW(after:parameters(), { lr = 0.01 })
      local hooks = 0
      for _, p in ipairs(inside:parameters()) do
        local own = ms.optim.AdamW({ p }, { lr = 0.01 })
        p:register_post_accumulate_grad_hook(function(q)
          hooks = hooks + 1
          assert.is_true(rawequal(p, q))
          own:step()
          own:zero_grad()
        end)
      end
      for step = 1, 3 do
        after(input(rank) * step):sum():backward()
        optim:step()
        optim:zero_grad()
        inside(input(rank) * step):sum():backward()
        for k, p in ipairs(inside:parameters()) do
          assert.is_nil(p.grad)
          assert.is_true(p:equal(after:parameters()[k]))
        end
      end
      assert.equal(3 * #inside:parameters(), hooks)
    end)
  end)
end
