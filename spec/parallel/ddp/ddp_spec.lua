-- SPDX-License-Identifier: MIT
--- nn.DDP (docs/semantics.md#ddp): gradients equal those of one process on all ranks' inputs; the collectives and their
--- order. module_spec.lua: its construction and its errors.
local ranks = require "spec.support.ranks"

local function load()
  local ms = require "moonshard"
  local golden = require "spec.support.golden"
  golden.phase = 0
  return ms, ms.nn, ms.dist, golden
end

local function count(list, op)
  local n = 0
  for _, e in ipairs(list) do
    if e.op == op then n = n + 1 end
  end
  return n
end

local function sizes(list)
  local out = {}
  for _, e in ipairs(list) do
    if e.op == "all_reduce" then out[#out + 1] = e.output_numel end
  end
  return table.concat(out, " ")
end

local message = require "spec.support.message"

local function step(model, optimizer, loss)
  optimizer:zero_grad()
  loss:backward()
  optimizer:step()
  return model
end

-- Trains def's model in DDP on this rank's inputs, and a copy in this process on all ranks' inputs.
local function compare(def, rank, world, options, steps)
  local ms, nn, _, golden = load()
  local reference, model = golden.fill(def.make { dtype = "float64" }), golden.fill(def.make { dtype = "float64" })
  local ddp = nn.DDP(model, options)
  local of_reference, of_ddp = def.optim(golden.trainable(reference)), def.optim(golden.trainable(model))
  for s = 0, steps - 1 do
    ms.scope(function()
      local total
      for r = 0, world - 1 do
        local part = def.loss(reference, r, s, golden) / world
        total = total and total + part or part
      end
      step(reference, of_reference, total)
      step(ddp, of_ddp, def.loss(ddp, rank, s, golden))
      for name, p in reference:named_parameters() do
        local q = ddp:get_parameter(name)
        if name:find "in_proj_bias$" then
          -- The gradient of a key's bias is 0 except for rounding errors, which Adam scales to full steps.
          local d = p:size(1) / 3
          ms.testing.assert_close(q:narrow(1, d + 1, d), p:narrow(1, d + 1, d), { rtol = 0, atol = 5e-9 })
          q, p = ms.cat({ q:narrow(1, 1, d), q:narrow(1, 2 * d + 1, d) }, 1),
            ms.cat({ p:narrow(1, 1, d), p:narrow(1, 2 * d + 1, d) }, 1)
        end
        ms.testing.assert_close(q, p, { rtol = 1e-11, atol = 1e-12 })
        q, p = ddp:get_parameter(name), reference:get_parameter(name)
        if p.grad then ms.testing.assert_close(q.grad, p.grad,
          { rtol = 1e-11, atol = 1e-12 }) else assert.is_nil(q.grad) end
      end
    end)
  end
  return ddp
end

for world = 1, 4 do
  ranks.describe(world, ("DDP over %d ranks #mpi"):format(world), function()
    for _, name in ipairs { "mlp_stack", "nested_wrapped_module", "non_uniform_req_grad", "transformer_lm",
      "transformer_with_shared_params" } do
      for _, case in ipairs {
        { "one bucket", {} }, { "a bucket a parameter", { bucket_cap_mb = 1e-6 } },
        { "small buckets", { bucket_cap_mb = 1e-3 } },
        { "gradients in buckets", { bucket_cap_mb = 1e-3, gradient_as_bucket_view = true } },
        { "looking for unused parameters", { bucket_cap_mb = 1e-3, find_unused_parameters = true } },
      } do
        it(("trains %s as one process does: %s"):format(name, case[1]), function(rank)
          local ms = load()
          ms.catch_warnings(function() compare(require("spec.support.models." .. name), rank, world, case[2], 4) end)
        end)
      end
    end

    it("starts every rank with the first one's parameters and buffers", function(rank)
      local ms, nn, dist = load()
      ms.manual_seed(rank + 1)
      local m = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
      m[2].num_batches_tracked:fill_(rank + 5)
      local frozen = m[1].bias
      frozen.requires_grad = false
      nn.DDP(m)
      for _, state in ipairs { m[1].weight, frozen, m[2].running_mean, m[2].num_batches_tracked } do
        local all = dist.all_gather_object(state:detach():tolist())
        for r = 2, world do assert.are.same(all[1], all[r]) end
      end
      assert.are.equal(5, m[2].num_batches_tracked:item())
    end)

    it("gives buffers the first rank's values before each synced forward", function(rank)
      local ms, nn = load()
      local ddp = nn.DDP(nn.BatchNorm1d(2, { dtype = "float64" }))
      local function run(x) return ddp(ms.tensor({ { x, 1 }, { x + 1, 3 } }, { dtype = "float64" })) end
      run(rank):sum():backward()
      local mine = ddp.running_mean:tolist()
      assert.near(0.1 * (rank + 0.5), mine[1], 1e-12)                 -- updated by this rank's batch
      run(0)
      -- Every rank starts from the first rank's mean, 0.05, and updates it with its batch's mean, 0.5.
      assert.near(0.9 * 0.05 + 0.1 * 0.5, ddp.running_mean:tolist()[1], 1e-12)
      ddp:no_sync(function() run(rank) end)
      assert.near(0.9 * 0.095 + 0.1 * (rank + 0.5), ddp.running_mean:tolist()[1], 1e-12)
      assert.are.equal(3, ddp.num_batches_tracked:item())
    end)

    it("adds up without reducing inside no_sync, and reduces the sum after it", function(rank)
      local ms, nn, dist, golden = load()
      local def = require "spec.support.models.mlp_stack"
      local reference, model = golden.fill(def.make { dtype = "float64" }), golden.fill(def.make { dtype = "float64" })
      local ddp = nn.DDP(model, { bucket_cap_mb = 1e-6 })
      for _ = 1, 2 do                            -- before and after buckets are rebuilt
        reference:zero_grad()
        ddp:zero_grad()
        for s = 0, 2 do
          for r = 0, world - 1 do (def.loss(reference, r, s, golden) / world):backward() end
        end
        local inside = dist.record(function()
          ddp:no_sync(function()
            for s = 0, 1 do def.loss(ddp, rank, s, golden):backward() end
          end)
        end)
        assert.are.equal(0, #inside)
        local alone = golden.fill(def.make { dtype = "float64" })
        for s = 0, 1 do def.loss(alone, rank, s, golden):backward() end
        for name, p in alone:named_parameters() do
          ms.testing.assert_close(ddp:get_parameter(name).grad, p.grad, { rtol = 1e-11, atol = 1e-12 })
        end
        def.loss(ddp, rank, 2, golden):backward()
        for name, p in reference:named_parameters() do
          ms.testing.assert_close(ddp:get_parameter(name).grad, p.grad, { rtol = 1e-11, atol = 1e-12 })
        end
      end
      local a, b, c = ddp:no_sync(function(...) return ..., nil, 3 end, 1)
      assert.are.same({ 1, nil, 3 }, { a, b, c })
      assert.are.equal("oops", select(2, pcall(ddp.no_sync, ddp, function() error("oops", 0) end)))
    end)

    it("reduces in order, one bucket first, then those of the order of arrival", function(rank)
      local ms, nn, dist = load()
      local m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
      local ddp = nn.DDP(m, { bucket_cap_mb = 1e-6 })
      local x = ms.rand(2, 3)
      assert.are.equal("53", sizes((dist.record(function() ddp(x):sum():backward() end))))
      local list = dist.record(function() ddp(x):sum():backward() end)
      assert.are.equal(1, count(list, "broadcast"))                   -- the order of rank 0's buckets
      local second = sizes(list)
      list = dist.record(function() ddp(x):sum():backward() end)
      assert.are.equal(second, sizes(list))
      assert.are.equal(6, count(list, "all_reduce"))
      assert.are.equal(6, #list)
      local arrived = {}
      for name, p in m:named_parameters() do
        p:register_post_accumulate_grad_hook(function() arrived[#arrived + 1] = p:numel() end)
        assert.is_string(name)
      end
      ddp:no_sync(function() ddp(x):sum():backward() end)
      assert.are.equal(table.concat(arrived, " "), second)
      assert.are.equal(rank, dist.rank())
    end)

    it("uses the first rank's order if the ranks' orders differ", function(rank)
      local ms, nn, dist = load()
      local Either = nn.Module:extend "Either"
      function Either:init()
        for _, name in ipairs { "a", "b", "c" } do self[name] = nn.Parameter(ms.ones(#name + 1)) end
        self.d = nn.Parameter(ms.ones(5))
      end
      function Either:forward(x, forwards)
        local names = forwards and { "a", "b", "c", "d" } or { "d", "c", "b", "a" }
        for _, name in ipairs(names) do x = x * self[name]:sum() end
        return x
      end
      local m = Either()
      local ddp = nn.DDP(m, { bucket_cap_mb = 1e-6 })
      local mine, second
      for k = 1, 3 do
        ddp:zero_grad()
        local seen = {}
        local list = dist.record(function() ddp(ms.ones(1), rank == 0):sum():backward() end)
        local loss = ddp:no_sync(function() return ddp(ms.ones(1), rank == 0):sum() end)
        local handles = {}
        for name, p in m:named_parameters() do
          handles[name] = p:register_post_accumulate_grad_hook(function() seen[#seen + 1] = p:numel() end)
        end
        loss:backward()
        for _, h in pairs(handles) do h:remove() end
        mine = table.concat(seen, " ")
        if k > 1 then second = sizes(list) end
      end
      assert.are.equal(dist.all_gather_object(mine)[1], second)
      if world > 1 and rank > 0 then assert.are_not.equal(mine, second) end
    end)

    it("keeps the reverse order of registration if parameters may be unused", function()
      local ms, nn, dist = load()
      local m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
      local ddp = nn.DDP(m, { bucket_cap_mb = 1e-6, find_unused_parameters = true })
      ms.catch_warnings(function()
        for _ = 1, 2 do
          local list = dist.record(function() ddp(ms.rand(2, 3)):sum():backward() end)
          assert.are.equal("5 20 4 12 4", sizes(list))                -- the last 4: the map of used parameters
        end
      end)
    end)

    it("skips parameters that no rank used, and averages those that some used", function(rank)
      local ms, nn = load()
      local Part = nn.Module:extend "Part"
      function Part:init()
        self.all = nn.Linear(2, 2, { bias = false })
        self.first = nn.Linear(2, 2, { bias = false })
        self.none = nn.Linear(2, 2, { bias = false })
      end
      function Part:forward(x, use_first) return use_first and self.first(self.all(x)) or self.all(x) end
      local m = Part()
      nn.init.ones_(m.all.weight)
      nn.init.ones_(m.first.weight)
      for _, view in ipairs { false, true } do
        local ddp = nn.DDP(m, { find_unused_parameters = true, gradient_as_bucket_view = view })
        for _ = 1, 2 do
          ddp:zero_grad()
          ddp(ms.ones(1, 2), rank == 0):sum():backward()
          assert.is_nil(m.none.weight.grad)
          assert.near(2 / world, m.first.weight.grad:tolist()[1][1], 1e-6)
          assert.near((2 + (world - 1)) / world, m.all.weight.grad:tolist()[1][1], 1e-6)
        end
        m.none.weight.grad = ms.full({ 2, 2 }, 7)
        ddp(ms.ones(1, 2), false):sum():backward()
        assert.are.same({ { 7, 7 }, { 7, 7 } }, m.none.weight.grad:tolist())
        ddp:zero_grad()
      end
    end)

    it("runs if one rank used no parameter at all, and if an output is not used", function(rank)
      local ms, nn = load()
      local double = require("spec.support.models.double_linear").DoubleLinear(3)
      local ddp = nn.DDP(double, { find_unused_parameters = true })
      local first = ddp(ms.ones(1, 3))
      first:sum():backward()
      assert.is_nil(double.lin2.weight.grad)
      assert.is_not_nil(double.lin1.weight.grad)
      local Skip = nn.Module:extend "Skip"
      function Skip:init() self.lin = nn.Linear(3, 1, { bias = false }) end
      function Skip:forward(x, skip) return { out = skip and x:sum() or self.lin(x):sum() } end
      local m = Skip()
      local skip = nn.DDP(m, { find_unused_parameters = true })
      local out = skip(ms.ones(1, 3), rank == world - 1).out
      if out.requires_grad then out:backward() end
      if world > 1 then assert.near((world - 1) / world, m.lin.weight.grad:tolist()[1][1],
        1e-6) else assert.is_nil(m.lin.weight.grad) end
    end)

    it("holds gradients in its buckets on request", function()
      local ms, nn = load()
      local m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
      local ddp = nn.DDP(m, { gradient_as_bucket_view = true })
      local function run() ddp(ms.ones(1, 3)):sum():backward() end
      run()
      ddp:zero_grad()
      run()
      local before = m[1].weight.grad:data_ptr()
      -- One bucket contains all, in the order of arrival.
      local first, last = math.huge, 0
      for _, p in ipairs(m:parameters()) do
        first, last = math.min(first, p.grad:data_ptr()), math.max(last, p.grad:data_ptr() + 4 * p:numel())
      end
      assert.are.equal(4 * 41, last - first)
      local once = m[1].weight.grad:tolist()
      ddp:zero_grad { set_to_none = false }
      run()
      assert.are.equal(before, m[1].weight.grad:data_ptr())
      assert.are.same(once, m[1].weight.grad:tolist())
      ddp:zero_grad()
      run()
      assert.are.equal(before, m[1].weight.grad:data_ptr())
      assert.are.same(once, m[1].weight.grad:tolist())
      run()                                                           -- accumulates
      assert.near(2 * once[1][1], m[1].weight.grad:tolist()[1][1], 1e-5)
    end)

    it("reduces checkpointed regions", function(rank)
      local ms, nn, _, golden = load()
      local zoo = require "spec.support.models.transformer"
      local function make(checkpoint)
        golden.dtype = "float64"
        return golden.fill(zoo.Transformer { dtype = "float64", dropout_p = 0, checkpoint_activations = checkpoint })
      end
      local plain, ddp = make(false), nn.DDP(make(true), { bucket_cap_mb = 1e-3 })
      local function loss(m, r, s) return m(ms.tensor({ { r, s, 3, 1 } }, { dtype = "int64" })):sin():sum() end
      for s = 0, 2 do
        plain:zero_grad()
        ddp:zero_grad()
        for r = 0, world - 1 do (loss(plain, r, s) / world):backward() end
        loss(ddp, rank, s):backward()
        for name, p in plain:named_parameters() do
          ms.testing.assert_close(ddp:get_parameter(name).grad, p.grad, { rtol = 1e-10, atol = 1e-11 })
        end
      end
    end)

    it("lets hooks reduce: built-in ones, and any function", function(rank)
      local ms, nn, dist, golden = load()
      local hooks = nn.ddp_hooks
      local def = require "spec.support.models.mlp_stack"
      local function grads(hook, state, options)
        golden.dtype = "float32"
        local m = golden.fill(def.make())
        local ddp = nn.DDP(m, options or { bucket_cap_mb = 1e-3 })
        if hook then ddp:register_comm_hook(state, hook) end
        local first
        for s = 0, 1 do
          ddp:zero_grad()
          local list = dist.record(function() def.loss(ddp, rank, s, golden):backward() end)
          first = first or list
        end
        golden.dtype = "float64"
        return m:parameters(), first
      end
      local expected = grads()
      local function check(hook, state, rtol, atol)
        for k, p in ipairs((grads(hook, state))) do
          ms.testing.assert_close(p.grad, expected[k].grad, { rtol = rtol, atol = atol })
        end
      end
      check(hooks.allreduce_hook, nil, 0, 0)
      check(hooks.allreduce_hook, dist.default_group(), 0, 0)
      check(hooks.fp16_compress_hook, nil, 2e-3, 1e-5)
      check(hooks.bf16_compress_hook, nil, 2e-2, 1e-4)
      check(hooks.fp16_compress_wrapper(hooks.allreduce_hook), nil, 2e-3, 1e-5)
      check(hooks.bf16_compress_wrapper(hooks.allreduce_hook), nil, 2e-2, 1e-4)
      -- FSDP's hooks also accept buckets.
      local fsdp_hooks = ms.fsdp.comm_hooks
      check(fsdp_hooks.allreduce_hook, fsdp_hooks.DefaultState(), 1e-6, 1e-7)
      check(fsdp_hooks.fp16_compress_hook, fsdp_hooks.LowPrecisionState(), 2e-3, 1e-5)
      check(fsdp_hooks.bf16_compress_hook, fsdp_hooks.LowPrecisionState(), 2e-2, 1e-4)
      local _, list = grads(hooks.fp16_compress_hook)
      assert.are.equal("float16", list[#list].dtype)
      -- DDP does not divide for a hook; it may return nothing, a tensor, or an object to wait for.
      local double = function(_, bucket) bucket.flat:mul_(2) end
      local local_grads = grads(hooks.noop_hook)
      for k, p in ipairs((grads(double))) do ms.testing.assert_close(p.grad, local_grads[k].grad * 2) end
      for k, p in ipairs((grads(function(_, bucket) return bucket.flat * 2 end))) do
        ms.testing.assert_close(p.grad, local_grads[k].grad * 2)
      end
      for k, p in ipairs((grads(function(_, bucket) return { wait = function() return bucket.flat * 2 end } end, nil,
        { gradient_as_bucket_view = true }))) do
        ms.testing.assert_close(p.grad, local_grads[k].grad * 2)
      end
    end)

    it("averages sparse gradients, as dense ones", function(rank)
      local ms, nn = load()
      local m = nn.Embedding(6, 2, { sparse = true })
      for _, view in ipairs { false, true } do
        local ddp = nn.DDP(m, { gradient_as_bucket_view = view })
        for _ = 1, 2 do
          ddp:zero_grad()
          ddp(ms.tensor({ rank, rank, 5 }, { dtype = "int64" })):sum():backward()
          local expected = {}
          for row = 0, 5 do
            local v = (row < world and 2 / world or 0) + (row == 5 and 1 or 0)
            expected[row + 1] = { v, v }
          end
          ms.testing.assert_close(m.weight.grad, ms.tensor(expected))
        end
        ddp:zero_grad()
      end
    end)

    it("recovers from a backward that failed", function(rank)
      local ms, nn, dist = load()
      local m = nn.Sequential(nn.Linear(3, 4, { bias = false }), nn.Linear(4, 5, { bias = false }))
      local ddp = nn.DDP(m)
      local handle = m[1].weight:register_hook(function() error("stop here", 0) end)
      assert.are.equal("stop here", message(function() ddp(ms.ones(1, 3)):sum():backward() end))
      handle:remove()
      dist.barrier()
      ddp:zero_grad()
      ddp(ms.ones(1, 3) * (rank + 1)):sum():backward()
      local all = dist.all_gather_object(m[1].weight.grad:tolist())
      for r = 2, world do assert.are.same(all[1], all[r]) end
    end)
  end)
end
