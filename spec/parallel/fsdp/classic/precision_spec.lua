-- SPDX-License-Identifier: MIT
--- Mixed precision of FSDP instances: the dtypes at each moment (docs/semantics.md#mixed-precision).
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

-- A layer that records what it sees: input, its own weight, its buffer.
local function probe_class()
  local ms, nn = load()
  local Probe = nn.Module:extend "Probe"
  function Probe:init(dtype)
    self.weight = nn.Parameter(ms.randn(6, 6, { dtype = dtype }) * 0.3)
    self:register_buffer("scale", ms.ones(6, { dtype = "float64" }))
    self:register_buffer("steps", ms.zeros(1, { dtype = "int64" }))
    self.saw = {}
  end
  function Probe:forward(x)
    self.saw = { input = x.dtype, weight = self.weight.dtype, buffer = self.scale.dtype, integers = self.steps.dtype }
    return (x:matmul(self.weight) * self.scale:to(x.dtype)):tanh()
  end
  return Probe
end

local CONFIGS = {
  { "all float16", { param_dtype = "float16", reduce_dtype = "float16", buffer_dtype = "float16" } },
  { "reduce only", { reduce_dtype = "float16" } },
  { "param and buffer", { param_dtype = "float16", buffer_dtype = "float16" } },
  { "nothing", {} },
  { "all different", { param_dtype = "float16", buffer_dtype = "bfloat16", reduce_dtype = "float32" } },
}

for world = 1, 4 do
  ranks.describe(world, ("mixed precision of FSDP on %d ranks"):format(world), function()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      for _, config in ipairs(CONFIGS) do
        for _, full in ipairs { "float32", "float64" } do
          it(("%s, %s, stored in %s"):format(config[1], strategy, full), function(rank)
            local ms, nn, fsdp, dist, quietly = load()
            ms.manual_seed(0)
            local Probe = probe_class()
            local policy = fsdp.MixedPrecision(config[2])
            local options = { sharding_strategy = strategy, mixed_precision = policy }
            local inner, outer = Probe(full), Probe(full)
            local model = quietly(function()
              return fsdp.FSDP(nn.Sequential(outer, nn.ReLU(), fsdp.FSDP(inner, options)), options)
            end)
            local low = config[2].param_dtype
            local optim = ms.optim.SGD(model:parameters(), { lr = 0.01 })
            for _ = 1, 3 do
              ms.manual_seed(rank)
              local loss = model(ms.rand(3, 6, { dtype = full })):sum()
              for _, probe in ipairs { inner, outer } do
                assert.same({ input = low or full, weight = low or full, buffer = config[2].buffer_dtype or "float64",
                  integers = "int64" }, probe.saw)
              end
              local reduced = dist.record(function() loss:backward() end)
              for _, c in ipairs(reduced) do
                if c.op == "reduce_scatter" or c.op == "all_reduce" then
                  assert.equal(config[2].reduce_dtype or low or full, c.dtype)
                elseif c.op == "all_gather" then
                  assert.equal(low or full, c.dtype)
                end
              end
              for _, p in ipairs(model:parameters()) do
                assert.equal(full, p.dtype)
                assert.equal(full, p.grad.dtype)
              end
              optim:step()
              optim:zero_grad()
            end
            fsdp.summon_full_params(model, function()
              assert.equal(full, inner.weight.dtype)
              assert.same({ 6, 6 }, { unpack(inner.weight.shape) })
            end)
            -- State dicts have parameters and buffers in their original dtypes.
            local sd = fsdp.state_dict(model)
            assert.equal(full, sd["1.weight"].dtype)
            assert.equal("float64", sd["3.scale"].dtype)
            assert.equal(config[2].buffer_dtype or "float64", inner.scale.dtype)
          end)
        end
      end

      for _, pieces in ipairs { false, true } do
        it(("keeps low-precision gradients when asked, %s, use_orig_params = %s"):format(strategy, tostring(pieces)),
          function(rank)
          local ms, nn, fsdp, _, quietly = load()
          local model = quietly(fsdp.FSDP, nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2)),
            { sharding_strategy = strategy, use_orig_params = pieces,
            mixed_precision = fsdp.MixedPrecision { param_dtype = "float16", keep_low_precision_grads = true } })
          for _ = 1, 3 do
            model(ms.rand(2, 5) + rank):sum():backward()
            for _, p in ipairs(model:parameters()) do
              assert.equal("float32", p.dtype)
              if p.grad then assert.equal("float16", p.grad.dtype) end
            end
          end
        end)
      end
    end

    it("casts the inputs of the root, and of other units on request", function()
      local ms, nn, fsdp, _, quietly = load()
      local Probe = probe_class()
      local function run(root_options, inner_options)
        local inner = Probe "float32"
        local Outer = nn.Module:extend "Outer"
        function Outer:init(m) self.inner = m end
        function Outer:forward(x)
          self.saw = x.dtype
          return self.inner(x:float())
        end
        local model = quietly(function()
          local wrapped = fsdp.FSDP(inner, { mixed_precision = fsdp.MixedPrecision(inner_options) })
          return fsdp.FSDP(Outer(wrapped), { mixed_precision = fsdp.MixedPrecision(root_options) })
        end)
        local ok, message = pcall(model, ms.rand(2, 6))
        return ok, ok and inner.saw.input or message, model.module.saw
      end
      local _, seen, root = run({ param_dtype = "float16" }, { param_dtype = "float16", cast_forward_inputs = true })
      assert.equal("float16", seen)
      assert.equal("float16", root)
      local ok = run({ param_dtype = "float16" }, { param_dtype = "float16" })
      assert.is_false(ok)                       -- float32 times float16: the script chose to cast itself
      local _, _, uncast = run({ param_dtype = "float16", cast_root_forward_inputs = false },
        { param_dtype = "float16", cast_forward_inputs = true })
      assert.equal("float32", uncast)
    end)

    it("casts only the inputs of low-precision units; modules that cast themselves may be excluded", function()
      local ms, _, fsdp, _, quietly = load()
      local Model = require("spec.support.models.save_forward_inputs").SaveForwardInputsModel
      local function run(policy, self_cast, sharded)
        local seen = {}
        local model = Model(seen, { cast_forward_inputs = self_cast })
        local c1, c2 = model.c1, model.c2
        quietly(sharded, model, policy)(ms.zeros(2, 100)):float():sum():backward()
        return { seen[model], seen[c1], seen[c2] }
      end
      local function classic(model, policy)
        model.c2 = fsdp.FSDP(model.c2, { mixed_precision = fsdp.MixedPrecision(policy) })
        return fsdp.FSDP(model)
      end
      local function composable(model, policy)
        fsdp.fully_shard(model.c2, { mp_policy = fsdp.MixedPrecisionPolicy(policy) })
        return fsdp.fully_shard(model)
      end
      local function low(casts) return { param_dtype = "float16", cast_forward_inputs = casts } end
      for _, sharded in ipairs { classic, composable } do
        assert.same({ "float32", "float32", "float16" }, run(low(true), false, sharded))
        assert.same({ "float32", "float32", "float32" }, run(low(false), true, sharded))
      end
    end)

    it("gives inputs gradients in the dtype they have", function()
      local ms, nn, fsdp, _, quietly = load()
      local fronts = {
        function(m, low) return fsdp.FSDP(m, { mixed_precision = fsdp.MixedPrecision { param_dtype = low } }) end,
        function(m, low) return fsdp.fully_shard(m, { mp_policy = fsdp.MixedPrecisionPolicy {
          param_dtype = low } }) end,
      }
      for _, front in ipairs(fronts) do
        for _, low in ipairs { "float16", "bfloat16" } do
          local model = quietly(front, nn.Linear(5, 5), low)
          for _, dtype in ipairs { "float32", low } do
            local x = ms.ones(1, 5, { dtype = dtype, requires_grad = true })
            local y = model(x)
            assert.equal(low, y.dtype)
            y:float():sum():backward()
            assert.equal(dtype, x.grad.dtype)
          end
        end
      end
    end)

    it("refuses inputs of a dtype other than the unit's, unless they are cast", function()
      local ms, nn, fsdp, _, quietly = load()
      local Two = nn.Module:extend "Two"
      function Two:init() self.c1, self.c2 = nn.Linear(4, 4), nn.Linear(4, 4) end
      function Two:forward(x) return self.c2(self.c1(x)) end
      local function run(first, second)
        local m = Two()
        if first then m.c1 = fsdp.FSDP(m.c1, { mixed_precision = fsdp.MixedPrecision(first) }) end
        if second then m.c2 = fsdp.FSDP(m.c2, { mixed_precision = fsdp.MixedPrecision(second) }) end
        return pcall(fsdp.FSDP(m), ms.ones(1, 4))
      end
      for _, case in ipairs {
        -- the first layer is float16, its input float32
        { { param_dtype = "float16", cast_forward_inputs = false }, nil },
        -- the second layer is float16, its input float32
        { nil, { param_dtype = "float16", cast_forward_inputs = false } },
        { { param_dtype = "float16", cast_forward_inputs = true },
        { param_dtype = "float32", cast_forward_inputs = false } },
      } do
        local ok, text = quietly(run, unpack(case, 1, 2))
        assert.is_false(ok)
        assert.truthy(tostring(text):find("linear: all arguments must have the same dtype", 1, true), text)
      end
      assert.is_true((quietly(run, { param_dtype = "float16", cast_forward_inputs = true },
        { param_dtype = "float32", cast_forward_inputs = true })))
    end)

    it("does not cast integers", function()
      local ms, nn, fsdp, _, quietly = load()
      local model = quietly(fsdp.FSDP, nn.Embedding(7, 4),
        { mixed_precision = fsdp.MixedPrecision { param_dtype = "bfloat16" } })
      local out = model(ms.tensor({ 1, 5 }, { dtype = "int64" }))
      assert.equal("bfloat16", out.dtype)
    end)
  end)
end
