-- SPDX-License-Identifier: MIT
--- Communication hooks of nn.DDP beyond the mean (docs/semantics.md#ddp-hooks): batched PowerSGD, quantized gradients,
--- post-local SGD with its averagers, an optimizer step after the hook.
local gradients = require "spec.support.ddp_gradients"
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.dist, ms.nn.ddp_hooks
end

-- Matrices 12 x 10 and 3 x 12 with their biases: 171 elements, in several buckets from the second iteration on.
local function wrapped(hook, state, dtype)
  local ms, nn = load()
  ms.manual_seed(5)
  local ddp = nn.DDP(nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 3)):to(dtype or "float64"),
    { bucket_cap_mb = 1e-4 })
  if hook then ddp:register_comm_hook(state, hook) end
  return ddp
end

local function batch(rank, step, dtype) return gradients.batch(rank, step, { dtype = dtype }) end

-- The largest difference of two lists of tensors, relative to the largest element of the second.
local function distance(a, b)
  local far, size = 0, 0
  for k = 1, #a do
    far = math.max(far, (a[k] - b[k]):abs():max():item())
    size = math.max(size, b[k]:abs():max():item())
  end
  return far / size
end

local function same_on_all_ranks(list)
  local _, _, dist = load()
  for _, t in ipairs(list) do
    local first = t:detach():clone()
    dist.broadcast(first, { src = 0 })
    assert.is_true(first:equal(t))
  end
end

for world = 1, 4 do
  ranks.describe(world, ("buckets that DDP gives hooks on %d ranks"):format(world), function()
    it("shows hooks each bucket in order", function()
      local ms, nn = load()
      local m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
      local ddp = nn.DDP(m, { bucket_cap_mb = 1e-6 })
      local state, seen = { name = "state" }, nil
      ddp:register_comm_hook(state, function(given, bucket)
        assert.are.equal(state, given)
        assert.are.equal(1, bucket.flat.ndim)
        local n = 0
        for k, p in ipairs(bucket.parameters) do
          assert.are.equal(tostring(p.shape), tostring(bucket.gradients[k].shape))
          n = n + p:numel()
        end
        assert.are.equal(n, bucket.flat:numel())
        seen[#seen + 1] = bucket.index .. (bucket.last and "!" or "")
      end)
      seen = {}
      ddp(ms.ones(1, 3)):sum():backward()
      assert.are.same({ "1!" }, seen)
      seen = {}
      ddp(ms.ones(1, 3)):sum():backward()
      assert.are.same({ "1", "2", "3", "4!" }, seen)
    end)
  end)
end

for _, world in ipairs { 3, 4 } do
  ranks.describe(world, ("hooks of DDP on %d ranks"):format(world), function()
    it("batched PowerSGD gives the mean at full rank, and feeds its error back later", function(rank)
      local ms, _, dist, hooks = load()
      local plain = wrapped()
      local full = wrapped(hooks.batched_powerSGD_hook,
        hooks.PowerSGDState(nil, { start_powerSGD_iter = 2, matrix_approximation_rank = 20 }))
      for step = 1, 4 do
        local a, b = gradients.of(full, batch(rank, step)), gradients.of(plain, batch(rank, step))
        assert.is_true(distance(a, b) < 1e-9)
        same_on_all_ranks(a)
      end
      local state = hooks.PowerSGDState(nil, { start_powerSGD_iter = 2, matrix_approximation_rank = 1 })
      local coarse, x = wrapped(hooks.batched_powerSGD_hook, state), batch(rank, 1)
      local want = gradients.of(plain, x)
      for _ = 1, 2 do assert.is_true(distance(gradients.of(coarse, x), want) < 1e-12) end
      local sum = {}
      for k, g in ipairs(want) do sum[k] = ms.zeros_like(g) end
      for step = 1, 30 do
        local told, list = dist.record(function() return gradients.of(coarse, x) end)
        if step == 1 then
          assert.is_true(distance(list, want) > 0.01)
          same_on_all_ranks(list)
          local sent = 0
          for _, c in ipairs(told) do
            if c.op == "all_reduce" and c.dtype == "float64" then sent = sent + c.input_numel end
          end
          -- Each bucket is compressed as a square matrix n x n: at rank 1 its two factors have n numbers each.
          local numbers = 0
          for _, bucket in ipairs(rawget(coarse, "_ddp").buckets) do
            numbers = numbers + 2 * math.ceil(math.sqrt(bucket.flat:numel()))
          end
          assert.equal(numbers, sent)
          local rate, before, after = state:compression_stats()
          assert.same({ sent, 171 }, { after, before })
          assert.near(171 / sent, rate, 1e-12)
        end
        for k, g in ipairs(list) do sum[k]:add_(g) end
      end
      for k in ipairs(sum) do sum[k]:div_(30) end
      assert.is_true(distance(sum, want) < 0.2 * distance(gradients.of(coarse, x), want) + 0.05)
      assert.matches("batched_powerSGD_hook: the state is",
        message(function() gradients.of(wrapped(hooks.batched_powerSGD_hook), x) end))
    end)

    for _, name in ipairs { "quantization_pertensor_hook", "quantization_perchannel_hook" } do
      it(name .. " gives the mean within one step of its scale, from one byte per number", function(rank)
        local ms, _, dist, hooks = load()
        for _, dtype in ipairs { "float32", "float64", "bfloat16" } do
          local ddp, plain = wrapped(hooks[name], nil, dtype), wrapped(nil, nil, dtype)
          for step = 1, 3 do
            local x = batch(rank, step, dtype)
            local told, a = dist.record(function() return gradients.of(ddp, x) end)
            local b, own = gradients.of(plain, x), 0
            -- A quantized value is wrong by at most half a step: a rank's range, at most twice the largest magnitude on
            -- any rank, has 255 steps.
            local ms_max = ms.tensor({ 0 }, { dtype = "float64" })
            plain:no_sync(function()
              for _, g in ipairs(gradients.of(plain, x)) do own = math.max(own, g:abs():max():item()) end
            end)
            ms_max:fill_(own)
            dist.all_reduce(ms_max, { op = "max" })
            for k = 1, #a do
              local off = (a[k]:double() - b[k]:double()):abs():max():item()
              local rounding = dtype == "bfloat16" and 2 ^ -7 * ms_max:item() or 1e-6
              assert.is_true(off <= ms_max:item() * 2 / 255 * 0.5 * 1.01 + rounding,
                ("%s: off by %g, the largest is %g"):format(dtype, off, ms_max:item()))
            end
            same_on_all_ranks(a)
            local bytes, numbers = 0, 0
            for _, c in ipairs(told) do
              if c.op == "all_gather" and c.dtype == "uint8" then bytes = bytes + c.input_numel
              elseif c.op == "all_gather" then numbers = numbers + c.input_numel end
              assert.not_equal("all_reduce", c.op)
            end
            local buckets = #rawget(ddp, "_ddp").buckets
            assert.equal(step > 1, buckets > 1)
            if name == "quantization_pertensor_hook" then assert.same({ 171, 2 * buckets }, { bytes, numbers })
            else assert.same({ 512 * buckets, 2 * buckets }, { bytes, numbers }) end
          end
        end
      end)

      it(name .. " keeps non-finite numbers and zeros", function()
        local ms, nn, _, hooks = load()
        local ddp = nn.DDP(nn.Linear(2, 2))
        ddp:register_comm_hook(nil, hooks[name])
        ddp(ms.zeros(1, 2)):sum():backward()
        assert.is_true(ddp.module.weight.grad:eq(0):all():item())
        ddp.module.weight.grad, ddp.module.bias.grad = nil, nil
        ddp(ms.full({ 1, 2 }, math.huge)):sum():backward()
        assert.is_false(ddp.module.weight.grad:isfinite():any():item())
      end)
    end

    it("quantization per channel has one scale for each block: a large number affects its own block only", function(rank)
      local ms, _, dist, hooks = load()
      local function reduce(hook, ...)
        local flat = (ms.arange(1, 101):float() / 100 * (rank + 1)):clone()
        ms.no_grad(function() flat:narrow(1, 3, 1):fill_(1e6) end)
        local value = hook(nil, { flat = flat }, ...)
        value.wait()
        return flat
      end
      local mean = (world + 1) / 2
      local want = ms.arange(1, 101):float() / 100 * mean
      local function off(flat, from, n)
        return (flat:narrow(1, from, n) - want:narrow(1, from, n)):abs():max():item()
      end
      local fine = reduce(hooks.quantization_perchannel_hook, 10)
      -- the error is half a step of each rank's range, which always contains 0
      assert.is_true(off(fine, 11, 90) <= mean / 510 * 1.01 + 1e-6)
      assert.is_true(off(reduce(hooks.quantization_pertensor_hook), 11, 90) > 0.05)
      assert.matches("expected a whole number from 1", message(hooks.quantization_perchannel_hook, nil,
        { flat = ms.ones(3) }, 0.5))
      assert.equal(world, dist.world_size())
    end)

    it("post-local SGD averages over all ranks, then over the subgroup or not at all", function(rank)
      local _, _, dist, hooks = load()
      local pairs_of = {}
      for first = 0, world - 1, 2 do
        local members = { first, first + 1 < world and first + 1 or nil }
        local group = dist.new_group(members)
        if dist.rank(group) then pairs_of.mine, pairs_of.members = group, members end
      end
      for _, case in ipairs { "subgroup", "alone", "machine" } do
        local state = hooks.PostLocalSGDState(nil, case == "subgroup" and pairs_of.mine or nil,
          { start_localSGD_iter = 2,
          post_local_gradient_allreduce = case ~= "alone" })
        local ddp, plain = wrapped(hooks.post_localSGD_hook, state), wrapped()
        for step = 1, 4 do
          local a, all = gradients.of(ddp, batch(rank, step)), gradients.of(plain, batch(rank, step))
          local want = all
          if step > 2 and case ~= "machine" then                -- all ranks of these specs are on one machine
            local members = case == "alone" and { rank } or pairs_of.members
            plain:no_sync(function()
              local sums = {}
              for _, r in ipairs(members) do
                for k, g in ipairs(gradients.of(plain, batch(r, step))) do
                  sums[k] = sums[k] and sums[k] + g / #members or g / #members
                end
              end
              want = sums
            end)
          end
          assert.is_true(distance(a, want) < 1e-12, ("%s, step %d"):format(case, step))
        end
        assert.equal(2, state.iter)
      end
      assert.matches("'start_localSGD_iter'", message(hooks.PostLocalSGDState, nil, nil, { start_localSGD_iter = -1 }))
      assert.matches("expected a PostLocalSGDState", message(function() gradients.of(wrapped(hooks.post_localSGD_hook),
        batch(rank, 1)) end))
    end)

    it("averagers give all ranks the mean, at their period from warmup_steps on; the optimizer around them calls them in every step", function(rank)
      local ms, nn, dist, hooks = load()
      local function steps(averager)
        local model = nn.Linear(1, 1, { bias = false, dtype = "float64" })
        ms.no_grad(function() model.weight:fill_(rank) end)
        local optimizer, seen = hooks.PostLocalSGDOptimizer(ms.optim.SGD(model:parameters(), { lr = 1 }), averager), {}
        for step = 0, 5 do
          model.weight.grad = ms.full({ 1, 1 }, -(step + 1) * (rank + 1), { dtype = "float64" })
          optimizer:step()
          optimizer:zero_grad()
          assert.is_nil(model.weight.grad)
          seen[step] = model.weight:item()
        end
        return seen, optimizer
      end
      -- The expected parameters, computed directly; sizes(step): the number of neighbours that average after this step.
      local function expected(sizes)
        local values, seen = {}, {}
        for r = 0, world - 1 do values[r] = r end
        for step = 0, 5 do
          for r = 0, world - 1 do values[r] = values[r] + (step + 1) * (r + 1) end
          local n, means = sizes(step), {}
          for r = 0, world - 1 do
            local first, sum = math.floor(r / n) * n, 0
            for k = first, first + n - 1 do sum = sum + values[k] end
            means[r] = sum / n
          end
          values = means
          seen[step] = values[rank]
        end
        return seen
      end
      local function check(want, got)
        for step = 0, 5 do assert.near(want[step], got[step], 1e-9) end
      end
      local got, optimizer = steps(hooks.PeriodicModelAverager { period = 2, warmup_steps = 1 })
      check(expected(function(step) return step >= 1 and (step - 1) % 2 == 0 and world or 1 end), got)
      -- The optimizer's state includes the averager's step.
      local sd = optimizer:state_dict()
      assert.equal(6, sd.step)
      local other = hooks.PostLocalSGDOptimizer(ms.optim.SGD(nn.Linear(1, 1,
        { bias = false, dtype = "float64" }):parameters(), { lr = 1 }),
        hooks.PeriodicModelAverager { period = 2 })
      other:load_state_dict(sd)
      assert.equal(6, other.averager.step)
      assert.equal(1, other.param_groups[1].lr)
      sd.step = nil
      assert.same({ "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0." },
        ms.catch_warnings(other.load_state_dict, other, sd))
      local levels = world == 4 and { [1] = 1, [2] = 2, [4] = 4 } or { [1] = 1, [4] = world }
      check(expected(function(step) return step % 4 == 0 and world or world == 4 and step % 2 == 0 and 2 or 1 end),
        (steps(hooks.HierarchicalModelAverager { period_group_size = levels })))
      assert.equal(1, #(ms.catch_warnings(hooks.PeriodicModelAverager, { period = 1 })))
      assert.matches("expected the number of all ranks, " .. world, message(hooks.HierarchicalModelAverager,
        { period_group_size = { [2] = 7 * world } }))
      assert.matches("is empty", message(hooks.HierarchicalModelAverager, { period_group_size = {} }))
      assert.matches("'period'", message(hooks.PeriodicModelAverager, { period = 0 }))
      assert.matches("expected an optimizer", message(hooks.PostLocalSGDOptimizer, {}, {}))
      assert.equal(world, dist.world_size())
    end)

    for _, view in ipairs { false, true } do
      it("an optimizer step inside the hook equals one after backward, gradient_as_bucket_view = "
        .. tostring(view), function(rank)
        local ms, nn, _, hooks = load()
        local function make(params) return ms.optim.SGD(params, { lr = 0.05, momentum = 0.9 }) end
        local function model()
          ms.manual_seed(5)
          return nn.DDP(nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 3)):double(),
            { bucket_cap_mb = 1e-4, gradient_as_bucket_view = view })
        end
        for _, some in ipairs { false, true } do
          local plain, fused = model(), model()
          local chosen = some and fused.module[3]:parameters() or nil
          fused:register_comm_hook(nil, hooks.hook_then_optimizer(hooks.allreduce_hook, make, chosen))
          local optimizer = make(some and plain.module[3]:parameters() or plain:parameters())
          for step = 1, 4 do
            for _, m in ipairs { plain, fused } do
              m:zero_grad()
              m(batch(rank, step)):pow(2):mean():backward()
            end
            optimizer:step()
            for k, p in ipairs(plain:parameters()) do
              assert.is_true(fused:parameters()[k]:equal(p))
              assert.is_true(fused:parameters()[k].grad:equal(p.grad))
            end
          end
        end
        assert.matches("argument 2 is nil", message(hooks.hook_then_optimizer, hooks.allreduce_hook))
        assert.matches("argument 1 is nil", message(hooks.hook_then_optimizer))
      end)
    end

    -- Each returns a hook and its state. Failed backwards must not count as iterations of the state.
    local _, _, _, hooks = load()
    local STATEFUL = {
      powerSGD_hook = function()
        return hooks.powerSGD_hook, hooks.PowerSGDState(nil, { start_powerSGD_iter = 3, min_compression_rate = 1 })
      end,
      batched_powerSGD_hook = function()
        return hooks.batched_powerSGD_hook, hooks.PowerSGDState(nil, { start_powerSGD_iter = 2 })
      end,
      ["powerSGD_hook without its last Q"] = function()
        return hooks.powerSGD_hook, hooks.PowerSGDState(nil,
          { start_powerSGD_iter = 2, min_compression_rate = 1, warm_start = false })
      end,
      ["powerSGD_hook in float16"] = function()
        return hooks.fp16_compress_wrapper(hooks.powerSGD_hook), hooks.PowerSGDState(nil,
          { start_powerSGD_iter = 2, min_compression_rate = 1 })
      end,
      post_localSGD_hook = function()
        return hooks.post_localSGD_hook, hooks.PostLocalSGDState { start_localSGD_iter = 4 }
      end,
      hook_then_optimizer = function()
        return hooks.hook_then_optimizer(hooks.allreduce_hook, function(params)
          return load().optim.SGD(params, { lr = 0.05, momentum = 0.9 })
        end)
      end,
      quantization_pertensor_hook = function() return hooks.quantization_pertensor_hook end,
    }
    for name, make in load().sorted_pairs(STATEFUL) do
      it(("keep nothing of a backward that failed on one rank: %s"):format(name), function(rank)
        local _, _, dist = load()
        local function train(fails, bad)
          local hook, state = make()
          local ddp = wrapped(hook, state)
          local list = {}
          for step = 1, 6 do
            local function backward(x)
              ddp:zero_grad()
              ddp(x):pow(2):sum():backward()
            end
            if fails[step] then
              local x = batch(rank, 50)
              if rank == bad then
                x:requires_grad_(true)
                x:register_hook(function() error("its own", 0) end)
              end
              if world > 1 or rank == bad then
                assert.is_false((pcall(function()
                  backward(x)
                  dist.barrier()
                end)))
              end
              dist.recover()
            end
            backward(batch(rank, step))
            for _, p in ipairs(ddp:parameters()) do
              list[#list + 1] = p:detach():clone()
              list[#list + 1] = p.grad:clone()
            end
          end
          return list
        end
        local want = train {}
        for at = 2, 5 do
          -- The first or the last rank; on 3 ranks at the steps at which it is the other one on 4.
          local got = train({ [at] = true }, (at + world) % 2 == 0 and 0 or world - 1)
          for k = 1, #want do assert.is_true(want[k]:equal(got[k]), ("failed at %d, result %d"):format(at, k)) end
        end
      end)
    end
  end)
end
