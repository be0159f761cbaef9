-- SPDX-License-Identifier: MIT
--- Communication hooks, the script's own and built-in ones: their arguments, and the effect of their results
--- (docs/semantics.md#comm-hooks).
local collected = require "spec.support.collected"
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"

local STRATEGIES = { "full_shard", "shard_grad_op", "no_shard" }
local load = require("spec.support.wrapped").load

local function model_of(options, seed)
  local ms, nn, fsdp, _, quietly = load()
  ms.manual_seed(seed or 0)
  return quietly(function()
    local inner = fsdp.FSDP(nn.Linear(5, 3), options)
    return fsdp.FSDP(nn.Sequential(nn.Linear(4, 5), inner), options)
  end)
end

local function backward(model, rank, seed)
  local ms = load()
  ms.manual_seed(10 * (seed or 1) + rank)
  local loss = model(ms.rand(6, 4)):pow(2):float():sum()
  loss:backward()
end

local function same_grads(a, b)
  local p, q = a:parameters(), b:parameters()
  assert.equal(#p, #q)
  for k = 1, #p do
    assert.is_true(p[k].grad:abs():sum():item() > 0)
    assert.is_true(p[k].grad:equal(q[k].grad))
  end
end

for world = 1, 4 do
  ranks.describe(world, ("communication hooks on %d ranks"):format(world), function()
    it("of the script do not keep a model from being collected", function(rank)
      local ms = load()
      local function held()
        collected()
        return ms.memory_stats("cpu").allocated
      end
      local function train()
        local model = model_of { sharding_strategy = "no_shard" }
        model:register_comm_hook({}, function() return model end)
        backward(model, rank)
      end
      train()
      local before = held()
      for _ = 1, 2 do train() end
      assert.equal(before, held())
    end)

    for _, strategy in ipairs(STRATEGIES) do
      local sharded = strategy ~= "no_shard" and world > 1

      it("give what the built-in reduction gives, bit for bit: " .. strategy, function(rank)
        local _, _, fsdp, dist = load()
        local hooks = fsdp.comm_hooks
        local state = hooks.DefaultState()
        local default, in_engine, by_hand, own = model_of { sharding_strategy = strategy },
          model_of { sharding_strategy = strategy },
          model_of { sharding_strategy = strategy }, model_of { sharding_strategy = strategy }
        local built_in = sharded and hooks.reduce_scatter_hook or hooks.allreduce_hook
        in_engine:register_comm_hook(state, built_in)
        by_hand:register_comm_hook(state, function(...) built_in(...) end)
        own:register_comm_hook(state, function(s, grad, output)
          if s.gradient_predivide_factor > 1 then grad:div_(s.gradient_predivide_factor) end
          if output then
            dist.reduce_scatter(output, grad, { group = s.process_group })
          else
            dist.all_reduce(grad, { group = s.process_group })
            output = grad
          end
          if s.gradient_postdivide_factor > 1 then output:div_(s.gradient_postdivide_factor) end
        end)
        for _, model in ipairs { default, in_engine, by_hand, own } do backward(model, rank) end
        same_grads(default, in_engine)
        same_grads(default, by_hand)
        same_grads(default, own)
      end)

      for _, short in ipairs { "fp16", "bf16" } do
        it(("%s_compress_hook by hand is the registered one, bit for bit: %s"):format(short, strategy), function(rank)
          local _, _, fsdp = load()
          local hook, state = fsdp.comm_hooks[short .. "_compress_hook"], fsdp.comm_hooks.LowPrecisionState()
          local a, b, c = model_of { sharding_strategy = strategy }, model_of { sharding_strategy = strategy },
            model_of { sharding_strategy = strategy }
          a:register_comm_hook(state, hook)
          b:register_comm_hook(state, function(...) hook(...) end)
          for _, model in ipairs { a, b, c } do backward(model, rank) end
          same_grads(a, b)
          local differs = false
          for k, p in ipairs(c:parameters()) do differs = differs or not p.grad:equal(a:parameters()[k].grad) end
          assert.is_true(differs)             -- something was rounded
        end)
      end

      if sharded then
        it("that do not write output are an error: " .. strategy, function(rank)
          local ms, _, fsdp, dist = load()
          local model = model_of { sharding_strategy = strategy }
          local state, fill = fsdp.comm_hooks.DefaultState(), nil
          model:register_comm_hook(state, function(_, grad, output) if fill then fill(grad, output) end end)
          raises("communication hook: nothing was written to output; the hook must fill it with this rank's part of the reduced gradient of unit '2'",
            backward, model, rank)
          for _, how in ipairs {
            function(grad, output) dist.reduce_scatter(output, grad) end,
            function(grad, output) output:copy_(grad:narrow(1, rank * output:numel() + 1, output:numel())) end,
            function(_, output) output:narrow(1, 1, 1):zero_() end,
            function(grad, output) fsdp.comm_hooks.reduce_scatter_hook(state, grad, output) end,
            function(grad, output) fsdp.comm_hooks.bf16_compress_hook(fsdp.comm_hooks.LowPrecisionState(), grad,
              output) end,
            function(grad, output) dist.reduce_scatter(output, grad, { async = true }):wait() end,
          } do
            fill = how
            model:zero_grad()
            backward(model, rank)
            ms.dist.barrier()
          end
        end)
      end

      it("are given the flat gradient and the shard to fill, without gradients: " .. strategy, function(rank)
        local ms, _, fsdp = load()
        local model = model_of { sharding_strategy = strategy }
        local seen = {}
        model:register_comm_hook("the state", function(state, grad, output)
          assert.equal("the state", state)
          assert.is_false(ms.is_grad_enabled())
          assert.equal(1, grad.ndim)
          seen[#seen + 1] = grad:numel()
          local total = #seen == 1 and 18 or 25                       -- the inner unit's gradient is complete first
          if sharded then
            local chunk = math.ceil(total / world)
            assert.equal(world * chunk, grad:numel())
            assert.equal(chunk, output:numel())
            assert.equal(grad.dtype, output.dtype)
            if world * chunk > total then
              assert.equal(0, grad:narrow(1, total + 1, world * chunk - total):abs():sum():item())
            end
            output:copy_(grad:narrow(1, rank * chunk + 1, chunk))
          else
            assert.is_nil(output)
            assert.equal(total, grad:numel())
          end
        end)
        backward(model, rank)
        assert.equal(2, #seen)
        -- Nothing was reduced: each rank keeps its own gradients.
        local plain = model_of { sharding_strategy = "no_shard", process_group = (ms.dist).self_group() }
        backward(plain, rank)
        for k, unit in ipairs(fsdp.fsdp_modules(model)) do
          local mine, whole = unit.params[1].grad, fsdp.fsdp_modules(plain)[k].params[1].grad
          local first = sharded and rank * mine:numel() or 0
          local n = math.max(0, math.min(mine:numel(), whole:numel() - first))
          if n > 0 then assert.is_true(mine:narrow(1, 1, n):equal(whole:narrow(1, first + 1, n))) end
        end
      end)

      it("get gradients in the reduce dtype, and their results become gradients in the parameters' dtype: " .. strategy,
        function(rank)
        local _, _, fsdp = load()
        for _, case in ipairs { { "float16", nil, "float16" }, { "float16", "float32", "float32" },
          { nil, "bfloat16", "bfloat16" } } do
          local model = model_of { sharding_strategy = strategy,
            mixed_precision = fsdp.MixedPrecision { param_dtype = case[1], reduce_dtype = case[2] } }
          local calls = 0
          model:register_comm_hook(nil, function(_, grad, output)
            calls = calls + 1
            assert.equal(case[3], grad.dtype)
            if output then output:fill_(1) else grad:fill_(1) end
          end)
          backward(model, rank)
          assert.equal(2, calls)
          for _, p in ipairs(model:parameters()) do
            assert.equal("float32", p.grad.dtype)
            assert.is_true(p.grad:eq(1):all():item())
          end
        end
      end)

      it("accumulate over backwards: " .. strategy, function(rank)
        local _, _, fsdp = load()
        local hook = sharded and fsdp.comm_hooks.reduce_scatter_hook or fsdp.comm_hooks.allreduce_hook
        local state = fsdp.comm_hooks.DefaultState()
        local with, without = model_of { sharding_strategy = strategy }, model_of { sharding_strategy = strategy }
        with:register_comm_hook(state, function(...) hook(...) end)
        local ms = load()
        for seed = 1, 2 do
          backward(with, rank, seed)
          backward(without, rank, seed)
        end
        local p, q = with:parameters(), without:parameters()
        for k = 1, #p do ms.testing.assert_close(p[k].grad, q[k].grad) end
      end)

      it("that fail keep their message, and the model stays usable: " .. strategy, function(rank)
        local model, other = model_of { sharding_strategy = strategy }, model_of { sharding_strategy = strategy }
        local failing = true
        local _, _, fsdp = load()
        local hook = sharded and fsdp.comm_hooks.reduce_scatter_hook or fsdp.comm_hooks.allreduce_hook
        model:register_comm_hook(fsdp.comm_hooks.DefaultState(), function(...)
          if failing then error("from the hook", 0) end
          hook(...)
        end)
        local ok, message = pcall(backward, model, rank)
        assert.is_false(ok)
        assert.truthy(message:find("from the hook", 1, true))
        failing = false
        for _, p in ipairs(model:parameters()) do p.grad = nil end
        local again = pcall(backward, model, rank)
        if not again then                       -- the error of a peer's hook, which is raised once
          for _, p in ipairs(model:parameters()) do p.grad = nil end
          backward(model, rank)
        end
        backward(other, rank)
        same_grads(model, other)
      end)
    end

    it("take their factors from the state when they run", function(rank)
      local ms, _, fsdp = load()
      local state = fsdp.comm_hooks.DefaultState()
      local strategy = world > 1 and "full_shard" or "no_shard"
      local model, other = model_of { sharding_strategy = strategy }, model_of { sharding_strategy = strategy }
      model:register_comm_hook(state, world > 1 and fsdp.comm_hooks.reduce_scatter_hook
        or fsdp.comm_hooks.allreduce_hook)
      state.gradient_postdivide_factor = state.gradient_postdivide_factor * 4
      backward(model, rank)
      backward(other, rank)
      local p, q = model:parameters(), other:parameters()
      for k = 1, #p do ms.testing.assert_close(p[k].grad * 4, q[k].grad) end
    end)

    it("have messages for wrong use", function()
      local _, _, fsdp = load()
      local model = model_of { sharding_strategy = "full_shard" }
      raises("The communication hook must be callable but got 3", model.register_comm_hook, model, nil, 3)
      for _, m in ipairs(fsdp.fsdp_modules(model)) do assert.is_nil(m.comm_hook) end
      raises("fp16_compress_hook: state is a table, expected an fsdp.comm_hooks.LowPrecisionState",
        model.register_comm_hook, model, { process_group = 3 }, fsdp.comm_hooks.fp16_compress_hook)
      raises("The communication hook must be callable but got 'sum'", function() model.comm_hook = "sum" end)
      model.comm_hook = function() end
      model.comm_hook = nil
      assert.is_nil(model.comm_hook)
    end)
  end)
end

describe("states of communication hooks", function()
  it("divide by a power of two near the root before the sum, and by the rest after it", function()
    local engine = require "moonshard.core.ffi"
    local f = engine.ffi.new "double[2]"
    for n, want in pairs { [1] = { 1, 1 }, [2] = { 2, 1 }, [3] = { 2, 1.5 }, [4] = { 2, 2 }, [6] = { 4, 1.5 },
      [8] = { 4, 2 }, [16] = { 4, 4 } } do
      engine.lib.ms_comm_division(n, f, f + 1)
      assert.same(want, { f[0], f[1] }, n)
    end
  end)
end)
