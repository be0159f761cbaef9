-- SPDX-License-Identifier: MIT
--- DDP's mixed precision (docs/semantics.md#ddp-construction): the dtypes at each moment, and results equal to those of
--- FSDP without sharding and of one process that computes in a half type.
local gradients = require "spec.support.ddp_gradients"
local load = require("spec.support.wrapped").load
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local CONFIGS = {
  { "all float16", { param_dtype = "float16", reduce_dtype = "float16", buffer_dtype = "float16" } },
  { "reduce only", { reduce_dtype = "float16" } },
  { "param and buffer", { param_dtype = "float16", buffer_dtype = "float16" } },
  { "nothing", {} },
  { "all different", { param_dtype = "bfloat16", buffer_dtype = "float16", reduce_dtype = "float32" } },
}

-- A layer that records the dtypes it sees, with a buffer and a frozen parameter.
local function probe_class()
  local ms, nn = load()
  local Probe = nn.Module:extend "Probe"
  function Probe:init(dtype)
    self.weight = nn.Parameter(ms.randn(6, 6, { dtype = dtype }) * 0.3)
    self.shift = nn.Parameter(ms.randn(6, { dtype = dtype }), { requires_grad = false })
    self:register_buffer("scale", ms.ones(6, { dtype = "float64" }))
    self:register_buffer("steps", ms.zeros(1, { dtype = "int64" }))
    self.saw = {}
  end
  function Probe:forward(x, more)
    self.saw = { x.dtype, self.weight.dtype, self.shift.dtype, self.scale.dtype, self.steps.dtype, more
      and more.deep[1].dtype, more and more.ids.dtype }
    return (x:matmul(self.weight) * self.scale:to(x.dtype) + self.shift):tanh()
  end
  return Probe
end

-- Two layers that share a weight, read twice, and one other layer.
local function tied_class()
  local _, nn = load()
  local Tied = nn.Module:extend "Tied"
  function Tied:init(dtype)
    self.embed = nn.Embedding(11, 8, { dtype = dtype })
    self.mix = nn.Linear(8, 8, { dtype = dtype })
    self.norm = nn.LayerNorm(8, { dtype = dtype })
  end
  function Tied:forward(ids) return nn.F.linear(self.norm(self.mix(self.embed(ids)):tanh()), self.embed.weight) end
  return Tied
end

local function ids_of(rank, step)
  local ms = load()
  ms.manual_seed(100 * step + rank)
  return ms.randint(0, 11, { 7 })
end

local function tied(dtype)
  local ms = load()
  ms.manual_seed(7)
  return tied_class()(dtype)
end

local function loss_of(model, ids)
  local _, nn = load()
  return nn.F.cross_entropy(model(ids):float(), ids)
end

local function same(expected, got)
  assert.equal(#expected, #got)
  for k = 1, #expected do
    assert.equal(expected[k].dtype, got[k].dtype)
    assert.is_true(expected[k]:equal(got[k]), "parameter " .. k)
  end
end

for world = 1, 4 do
  ranks.describe(world, ("mixed precision of DDP on %d ranks #mpi"):format(world), function()
    for _, config in ipairs(CONFIGS) do
      for _, full in ipairs { "float32", "float64" } do
        it(("%s, stored in %s"):format(config[1], full), function(rank)
          local ms, nn, _, dist = load()
          ms.manual_seed(0)
          local probe, o = probe_class()(full), config[2]
          local seen = {}
          local ddp = nn.DDP(nn.Sequential(nn.Linear(6, 6, { dtype = full }), probe),
            { mixed_precision = o, bucket_cap_mb = 1e-6 })
          probe.weight:register_hook(function(g) seen[#seen + 1] = g.dtype end)
          local optim = ms.optim.SGD(ddp:parameters(), { lr = 0.01 })
          for _ = 1, 3 do
            ms.manual_seed(rank)
            local x = ms.rand(3, 6, { dtype = full })
            local out = ddp(x)
            local low = o.param_dtype or full
            assert.same({ low, low, low, o.buffer_dtype or "float64", "int64" }, { unpack(probe.saw, 1, 5) })
            assert.equal(low, out.dtype)
            assert.equal(full, probe.weight.dtype)
            local reduced = 0
            for _, c in ipairs(dist.record(function() out:sum():backward() end)) do
              if c.op == "all_reduce" then
                reduced = reduced + 1
                assert.equal(o.reduce_dtype or low, c.dtype)
              end
            end
            assert.is_true(reduced > 0)
            for _, p in ipairs(ddp:parameters()) do
              assert.equal(full, p.dtype)
              if p.requires_grad then assert.equal(full, p.grad.dtype) else assert.is_nil(p.grad) end
            end
            optim:step()
            optim:zero_grad()
          end
          assert.same({ full, full, full }, seen)
          assert.equal(full, ddp:state_dict()["2.weight"].dtype)
          assert.equal(o.buffer_dtype or "float64", probe.scale.dtype)
        end)
      end
    end

    it("casts floating inputs, those in tables too, unless told not to", function()
      local ms, nn, fsdp = load()
      local probe = probe_class()("float32")
      local given = { deep = { ms.rand(2) }, ids = ms.zeros(2, { dtype = "int64" }) }
      nn.DDP(probe, { mixed_precision = fsdp.MixedPrecision { param_dtype = "bfloat16" } })(ms.rand(3, 6), given)
      assert.same({ "bfloat16", "int64" }, { probe.saw[6], probe.saw[7] })
      assert.equal("float32", given.deep[1].dtype)
      local uncast = nn.DDP(probe, { mixed_precision = { param_dtype = "bfloat16", cast_root_forward_inputs = false } })
      pcall(uncast, ms.rand(3, 6), given)
      assert.same({ "float32", "bfloat16", "float32" }, { probe.saw[1], probe.saw[2], probe.saw[6] })
    end)

    for _, reduce in ipairs { "bfloat16", "float32", "float16" } do
      it("gives the results of FSDP without sharding, reducing in " .. reduce, function(rank)
        local ms, nn, fsdp, _, quietly = load()
        local policy = fsdp.MixedPrecision { param_dtype = "bfloat16", reduce_dtype = reduce }
        local sharded = quietly(fsdp.FSDP, tied "float32", { sharding_strategy = "no_shard", mixed_precision = policy,
          use_orig_params = true })
        local ddp = nn.DDP(tied "float32", { mixed_precision = policy, bucket_cap_mb = 1e-4 })
        local a, b = ms.optim.AdamW(sharded:parameters(), { lr = 0.01 }),
          ms.optim.AdamW(ddp:parameters(), { lr = 0.01 })
        for step = 1, 4 do
          ms.scope(function()
            local ids = ids_of(rank, step)
            local first, second = loss_of(sharded, ids), loss_of(ddp, ids)
            first:backward()
            second:backward()
            a:step()
            b:step()
            local expected, got = {}, {}
            for k, p in ipairs(sharded:parameters()) do expected[2 * k - 1], expected[2 * k] = p, p.grad end
            for k, p in ipairs(ddp:parameters()) do got[2 * k - 1], got[2 * k] = p, p.grad end
            -- FSDP divides by 3 in two steps: by 2 before the sum and by 1.5 after it.
            local exact = world ~= 3
            if exact then assert.equal(first:item(), second:item()) end
            for k = 1, #expected do
              if exact then
                assert.is_true(expected[k]:reshape(-1):equal(got[k]:reshape(-1)),
                  ("step %d, tensor %d"):format(step, k))
              elseif step == 1 and k % 2 == 0 then
                ms.testing.assert_close(got[k]:reshape(-1), expected[k]:reshape(-1), { rtol = 2e-2, atol = 1e-3 })
              end
            end
            a:zero_grad()
            b:zero_grad()
          end)
        end
      end)
    end

    it("gives the results of one process that computes in a half dtype and averages", function(rank)
      local ms, nn = load()
      local m = tied "float32"
      local ddp = nn.DDP(m, { mixed_precision = { param_dtype = "bfloat16", reduce_dtype = "float32" } })
      local optim = ms.optim.SGD(ddp:parameters(), { lr = 0.1 })
      for step = 1, 3 do
        local half = ms.deepcopy(m):to "bfloat16"
        local mean
        for r = 0, world - 1 do
          half:zero_grad()
          loss_of(half, ids_of(r, step)):backward()
          local part = gradients.now(half)
          for k, g in ipairs(part) do part[k] = g:float() / world end
          for k, g in ipairs(mean or {}) do part[k] = g + part[k] end
          mean = part
        end
        optim:zero_grad()
        loss_of(ddp, ids_of(rank, step)):backward()
        for k, g in ipairs(gradients.now(ddp)) do ms.testing.assert_close(g, mean[k], { rtol = 1e-6, atol = 1e-8 }) end
        optim:step()
      end
    end)

    it("runs checkpointed regions again in low precision", function(rank)
      local ms, nn = load()
      local Deep = nn.Module:extend "Deep"
      function Deep:init(checkpointed)
        self.checkpointed = checkpointed
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.gain = nn.Parameter(ms.ones(5))
      end
      function Deep:forward(x)
        local function region(v)
          assert.equal("bfloat16", self.gain.dtype)
          return self.first(v):tanh() * self.gain
        end
        x = self.checkpointed and ms.checkpoint(region, x) or region(x)
        return self.checkpointed and ms.checkpoint(self.second, x) or self.second(x)
      end
      local got = {}
      for _, checkpointed in ipairs { false, true } do
        ms.manual_seed(3)
        local ddp = nn.DDP(Deep(checkpointed), { mixed_precision = { param_dtype = "bfloat16" } })
        for _ = 1, 2 do
          ms.manual_seed(rank)
          ddp(ms.randn(4, 5)):sum():backward()
        end
        assert.equal("float32", ddp.gain.dtype)
        got[#got + 1] = gradients.now(ddp)
      end
      same(got[1], got[2])
    end)

    it("adds up in the parameter's dtype inside no_sync, and reduces the sum", function(rank)
      local _, nn, _, dist = load()
      local ddp = nn.DDP(tied "float32", { mixed_precision = { param_dtype = "bfloat16", reduce_dtype = "float32" } })
      local parts = {}
      for step = 1, 2 do
        local alone = nn.DDP(tied "float32", { mixed_precision = { param_dtype = "bfloat16" } })
        alone:no_sync(function() loss_of(alone, ids_of(rank, step)):backward() end)
        parts[step] = gradients.now(alone)
      end
      ddp:no_sync(function() loss_of(ddp, ids_of(rank, 1)):backward() end)
      same(parts[1], gradients.now(ddp))
      loss_of(ddp, ids_of(rank, 2)):backward()
      for k, g in ipairs(gradients.now(ddp)) do
        local mean = parts[1][k] + parts[2][k]
        dist.all_reduce(mean, { op = "avg" })
        assert.is_true(mean:equal(g), "parameter " .. k)
      end
    end)

    for _, case in ipairs {
      { "gradients in buckets", { gradient_as_bucket_view = true } },
      { "looking for unused parameters", { find_unused_parameters = true } },
      { "a static graph", { static_graph = true } }, { "a bucket a parameter", { bucket_cap_mb = 1e-6 } },
    } do
      for _, reduce in ipairs { "float32", "bfloat16" } do
        it(("gives the same numbers with %s, reducing in %s"):format(case[1], reduce), function(rank)
          local _, nn, _, _, quietly = load()
          local policy = { param_dtype = "bfloat16", reduce_dtype = reduce }
          local options = { mixed_precision = policy }
          for name, value in pairs(case[2]) do options[name] = value end
          local plain, ddp = nn.DDP(tied "float32", { mixed_precision = policy }), nn.DDP(tied "float32", options)
          for step = 1, 3 do
            quietly(function()
              plain:zero_grad()
              ddp:zero_grad()
              loss_of(plain, ids_of(rank, step)):backward()
              loss_of(ddp, ids_of(rank, step)):backward()
            end)
            same(gradients.now(plain), gradients.now(ddp))
          end
        end)
      end
    end

    it("gives communication hooks buckets in the dtype to reduce in, and an optimizer after them full gradients",
      function(rank)
      local ms, nn = load()
      local hooks, policy = nn.ddp_hooks, { param_dtype = "bfloat16", reduce_dtype = "float16" }
      local plain, ddp = nn.DDP(tied "float32", { mixed_precision = policy }),
        nn.DDP(tied "float32", { mixed_precision = policy })
      local seen = {}
      ddp:register_comm_hook(nil, hooks.hook_then_optimizer(function(state, bucket)
        seen[bucket.flat.dtype] = true
        return hooks.allreduce_hook(state, bucket)
      end, function(params) return ms.optim.Adam(params, { lr = 0.01 }) end))
      local optim = ms.optim.Adam(plain:parameters(), { lr = 0.01 })
      for step = 1, 3 do
        plain:zero_grad()
        ddp:zero_grad()
        loss_of(plain, ids_of(rank, step)):backward()
        optim:step()
        loss_of(ddp, ids_of(rank, step)):backward()
        same(plain:parameters(), ddp:parameters())
        same(gradients.now(plain), gradients.now(ddp))
      end
      assert.same({ float16 = true }, seen)
    end)

    it("joins ranks with unequally many inputs", function(rank)
      local _, nn, _, dist = load()
      local ddp = nn.DDP(tied "float32", { mixed_precision = { param_dtype = "bfloat16", reduce_dtype = "float32" } })
      ddp:join(function()
        for step = 1, rank + 1 do
          ddp:zero_grad()
          loss_of(ddp, ids_of(rank, step)):backward()
        end
      end)
      local all = dist.all_gather_object(ddp.mix.weight:detach():tolist())
      for r = 2, world do assert.same(all[1], all[r]) end
    end)

    it("does not cast ignored parameters and buffers", function()
      local ms, nn = load()
      local probe = probe_class()("float32")
      probe._ddp_params_and_buffers_to_ignore = { "shift", "scale" }
      local ddp = nn.DDP(probe, { mixed_precision = { param_dtype = "bfloat16", buffer_dtype = "float16" } })
      ddp(ms.rand(2, 6))
      assert.same({ "bfloat16", "bfloat16", "float32", "float64" }, { unpack(probe.saw, 1, 4) })
    end)
  end)
end

describe("mixed precision of DDP", function()
  local function wrap(forward)
    local ms, nn = load()
    local Net = nn.Module:extend "Net"
    function Net:init()
      self.weight = nn.Parameter(ms.ones(3))
      self.inner = nn.Linear(3, 3)
    end
    Net.forward = forward
    return nn.DDP(Net(), { mixed_precision = { param_dtype = "bfloat16" } })
  end

  it("has the parameters back after an error in forward", function()
    local ms = load()
    local ddp = wrap(function(self, x)
      self.inner(x)
      error "no more"
    end)
    assert.matches("no more", message(ddp, ms.ones(3)))
    assert.equal("float32", ddp.inner.weight.dtype)
    assert.is_nil(getmetatable(rawget(ddp.module.inner, "_slots")))
    assert.equal(3, #ddp:parameters())
  end)

  it("gives a gradient to a parameter that forward reads first under no_grad", function()
    local ms = load()
    local ddp = wrap(function(self, x)
      local size = ms.no_grad(function() return self.weight:abs():sum():item() end)
      return self.inner(x) * self.weight / size
    end)
    ddp(ms.ones(3)):sum():backward()
    assert.is_true(ddp.weight.grad:abs():sum():item() > 0)
  end)

  it("may return a copy, list its parameters and replace them inside forward", function()
    local ms, nn = load()
    local names, put
    local ddp = wrap(function(self)
      names = {}
      for name, p in self:named_parameters() do names[#names + 1] = name .. " " .. p.dtype end
      put = nn.Parameter(ms.zeros(2))
      self.inner.bias = put
      return self.weight
    end)
    local out = ddp()
    assert.same({ "weight bfloat16", "inner.weight bfloat16", "inner.bias bfloat16" }, names)
    assert.equal("bfloat16", out.dtype)
    assert.same({ 1, 1, 1 }, out:tolist())
    assert.equal(put, ddp.inner.bias)
    out:sum():backward()
    assert.same({ 1, 1, 1 }, ddp.weight.grad:tolist())
    ms.no_grad(function() assert.equal("bfloat16", ddp().dtype) end)
  end)

  it("releases the copies when forward is over, those of a region that runs again too", function()
    local ms = load()
    local seen = {}
    local ddp = wrap(function(self, x)
      return ms.checkpoint(function(v)
        seen[#seen + 1] = self.weight
        return (self.inner(v) * self.weight):sum()
      end, x)
    end)
    ms.scope(function()
      local loss = ddp(ms.ones(3))
      assert.is_true(seen[1]:is_released())
      loss:backward()
    end)
    assert.equal(2, #seen)
    assert.is_true(seen[2]:is_released())
    assert.is_not_nil(ddp.weight.grad)
  end)

  it("refuses unknown options", function()
    local _, nn, fsdp = load()
    local function try(value) return message(nn.DDP, nn.Linear(2, 2), { mixed_precision = value }) end
    assert.equal("DDP: option 'mixed_precision' is a string ('bfloat16'), expected an fsdp.MixedPrecision or a table of its options", try "bfloat16")
    assert.matches("MixedPrecision: option 'param_dtype' is 'int64', expected a floating point dtype",
      try { param_dtype = "int64" }, 1, true)
    assert.matches("unknown option 'param'", try { param = "bfloat16" }, 1, true)
    assert.equal("DDP: mixed_precision: DDP does not support option 'keep_low_precision_grads', expected param_dtype, reduce_dtype or buffer_dtype",
      try(fsdp.MixedPrecision { keep_low_precision_grads = true }))
    assert.matches("DDP does not support option 'module_classes_to_ignore'", try { module_classes_to_ignore = { nn.Linear } }, 1,
      true)
    assert.matches("expected an fsdp.MixedPrecision", try(fsdp.MixedPrecisionPolicy()), 1, true)
  end)
end)
