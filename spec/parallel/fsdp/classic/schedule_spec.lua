-- SPDX-License-Identifier: MIT
--- The collectives of FSDP instances and their order: counts, prefetching, no_sync, hybrid strategies; clipping
--- (docs/semantics.md#clipping, #prefetch, #strategies).
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

-- Three layers in units of their own, and a root with another one.
local function model_of(options)
  local ms, nn, fsdp, _, quietly = load()
  ms.manual_seed(0)
  return quietly(function()
    local layers = {}
    for k = 1, 3 do layers[k] = fsdp.FSDP(nn.Linear(4, 4), options) end
    return fsdp.FSDP(nn.Sequential(nn.Linear(4, 4), layers[1], layers[2], layers[3]), options)
  end)
end

local function plain_model()
  local ms, nn = load()
  ms.manual_seed(0)
  local layers = {}
  for k = 1, 3 do layers[k] = nn.Linear(4, 4) end
  local root = nn.Linear(4, 4)
  return nn.Sequential(root, layers[1], layers[2], layers[3])
end

local function counts(fn)
  local _, _, _, dist = load()
  local n = { all_gather = 0, reduce_scatter = 0, all_reduce = 0 }
  for _, c in ipairs((dist.record(fn))) do n[c.op] = (n[c.op] or 0) + 1 end
  return n
end

local function input(rank, seed)
  local ms = load()
  ms.manual_seed(100 * (seed or 0) + rank)
  return ms.rand(6, 4)
end

for world = 2, 4 do
  ranks.describe(world, ("the schedule of FSDP on %d ranks"):format(world), function()
    for _, pieces in ipairs { false, true } do
      it(("gathers and reduces as often as documented, use_orig_params = %s"):format(tostring(pieces)), function(rank)
        local expected = { full_shard = { 4, 3, 4, 0 }, shard_grad_op = { 4, 0, 4, 0 }, no_shard = { 0, 0, 0, 4 } }
        for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
          local want = expected[strategy]
          local model = model_of { sharding_strategy = strategy, use_orig_params = pieces }
          for _ = 1, 3 do
            local loss
            local forward = counts(function() loss = model(input(rank)):sum() end)
            assert.equal(want[1], forward.all_gather)
            local backward = counts(function() loss:backward() end)
            assert.equal(want[2], backward.all_gather)
            assert.equal(want[3], backward.reduce_scatter)
            assert.equal(want[4], backward.all_reduce)
          end
          -- no_sync: no reductions; with shard_grad_op, parameters stay gathered until the backward that reduces.
          local loss
          model:no_sync(function()
            local forward = counts(function() loss = model(input(rank)):sum() end)
            assert.equal(want[1], forward.all_gather)
            local backward = counts(function() loss:backward() end)
            assert.equal(want[2], backward.all_gather)
            assert.equal(0, backward.reduce_scatter + backward.all_reduce)
          end)
          local after = counts(function() loss = model(input(rank)):sum() end)
          -- With full_shard, the root is gathered after its forward, but not after its backward.
          assert.equal(strategy == "full_shard" and 4 or 0, after.all_gather)
          local backward = counts(function() loss:backward() end)
          assert.equal(want[3], backward.reduce_scatter)
        end
      end)
    end

    for _, mode in ipairs { "pre", "post", "none" } do
      it("prefetches in backward: " .. mode, function(rank)
        local _, _, fsdp = load()
        local model = model_of { backward_prefetch = mode }
        model(input(rank)):sum():backward()
        local loss = model(input(rank)):sum()
        local told = {}
        for _, e in ipairs((fsdp.record(function() loss:backward() end))) do
          if e.event == "unshard" then told[#told + 1] = e.unit .. (e.prefetched and "+" or "") end
          if e.event == "post_backward" then told[#told + 1] = "post " .. e.unit end
        end
        local want = { pre = "4 3+ post 4 2+ post 3 post 2 post ", post = "4 post 4 3+ post 3 2+ post 2 post ",
          none = "4 post 4 3 post 3 2 post 2 post " }
        assert.equal(want[mode], table.concat(told, " "))
      end)
    end

    it("prefetches in backward through an encoder and a decoder of six layers each, in the reference's order",
      function(rank)
      local ms, nn, fsdp, _, quietly = load()
      local list = {}
      for _, stack in ipairs { "decoder", "encoder" } do
        for k = 6, 1, -1 do list[#list + 1] = ("%s.layers.%d"):format(stack, k) end
      end
      for _, case in ipairs { { "pre", 12 }, { "post", 11 }, { "none", 0 } } do
        ms.manual_seed(0)
        local model = quietly(fsdp.FSDP, nn.Transformer { d_model = 8, nhead = 2, num_encoder_layers = 6,
          num_decoder_layers = 6, dim_feedforward = 8,
          dropout = 0 }, { backward_prefetch = case[1],
          auto_wrap_policy = fsdp.wrap.transformer_auto_wrap_policy { nn.TransformerEncoderLayer,
            nn.TransformerDecoderLayer } })
        for _ = 1, 2 do
          local loss = model(ms.randn(3, 2, 8) + rank, ms.randn(4, 2, 8)):sum()
          local told, prefetched = {}, 0
          for _, e in ipairs((fsdp.record(function() loss:backward() end))) do
            if e.event == "unshard" then
              told[#told + 1] = e.unit
              if e.prefetched then prefetched = prefetched + 1 end
            end
          end
          assert.same(list, told)
          assert.equal(case[2], prefetched)
        end
      end
    end)

    -- The order of gathers and forwards in the record of collectives: each forward issues a small all-reduce.
    local function ledger(model, fn)
      local ms, _, fsdp, dist = load()
      local handles, told = {}, {}
      for _, m in ipairs(fsdp.fsdp_modules(model.module)) do
        handles[#handles + 1] = m.module:register_forward_pre_hook(function() dist.all_reduce(ms.zeros(1)) end)
      end
      for _, c in ipairs((dist.record(fn))) do
        if c.op == "all_gather" then told[#told + 1] = c.unit == "" and "root" or c.unit
        elseif c.op == "all_reduce" then told[#told + 1] = "forward" end
      end
      for _, handle in ipairs(handles) do handle:remove() end
      return table.concat(told, " ")
    end

    -- The largest number of units, besides the root, that were gathered at a time.
    local function most_at_once(events)
      local now, most = 0, 0
      for _, e in ipairs(events) do
        if e.unit ~= "" and e.event == "unshard" then now = now + 1 elseif e.unit ~= "" and e.event == "reshard" then
          now = now - 1 end
        most = math.max(most, now)
      end
      assert.equal(0, now)
      return most
    end

    local limited, at_entry = "root 2 3 forward 4 forward forward", "root 2 forward 3 forward 4 forward"
    local two, all = "4 3+ post 4 2+ post 3 post 2 post ", "4 3+ 2+ post 4 post 3 post 2 post "
    for _, case in ipairs {
      { forward = limited, backward = two, most = 2 },
      { prefetch = true, forward = limited, backward = two, most = 2 },
      { prefetch = false, forward = at_entry, backward = two, most = 2 },
      { prefetch = false, limit = false, forward = at_entry, backward = all, most = 3 },
      { prefetch = true, limit = false, forward = "root 2 3 4 forward forward forward", backward = all, most = 3 },
      { limit = false, forward = "root 2 3 4 forward forward forward", backward = all, most = 3 },
    } do
      it(("gathers ahead with forward_prefetch = %s, limit_all_gathers = %s"):format(tostring(case.prefetch),
        tostring(case.limit)), function(rank)
        local ms, _, fsdp = load()
        for _, pieces in ipairs { false, true } do
          local model = model_of { forward_prefetch = case.prefetch, limit_all_gathers = case.limit,
            use_orig_params = pieces }
          local reference = plain_model()
          -- In the first forward the order is not known yet.
          assert.equal(at_entry, ledger(model, function() ms.no_grad(function() model(input(rank)) end) end))
          local loss
          assert.equal(case.forward, ledger(model, function() loss = model(input(rank)):sum() end))
          local told = {}
          for _, e in ipairs((fsdp.record(function() loss:backward() end))) do
            if e.event == "unshard" then told[#told + 1] = e.unit .. (e.prefetched and "+" or "") end
            if e.event == "post_backward" then told[#told + 1] = "post " .. e.unit end
          end
          assert.equal(case.backward, table.concat(told, " "))
          assert.equal(case.most, most_at_once((fsdp.record(function() model(input(rank)):sum():backward() end))))
          for r = 0, world - 1 do (2 * reference(input(r)):sum() / world):backward() end
          fsdp.check_sharded_parity(reference, model)
          assert.is_true(ms.is_grad_enabled())
        end
      end)
    end

    it("accumulates without reducing, in every order of the two", function(rank)
      local ms, _, fsdp = load()
      for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
        for _, pieces in ipairs { false, true } do
          for _, prefetch in ipairs(strategy == "full_shard" and { "pre", "post", "none" } or { "pre" }) do
            local model = model_of { sharding_strategy = strategy, use_orig_params = pieces,
              backward_prefetch = prefetch }
            local reference = plain_model()
            local step = 0
            local function run(n)
              for _ = 1, n do
                step = step + 1
                for r = 0, world - 1 do (reference(input(r, step)):pow(2):sum() / world):backward() end
                model(input(rank, step)):pow(2):sum():backward()
              end
            end
            model:no_sync(run, 3)
            run(3)
            model:no_sync(run, 3)
            run(2)
            fsdp.check_sharded_parity(reference, model)
          end
        end
      end
      assert.is_true(ms.is_grad_enabled())
    end)

    it("passes results and errors of no_sync through, and is for roots", function(rank)
      local model = model_of {}
      assert.same({ 1, nil, 3 }, { model:no_sync(function() return 1, nil, 3 end) })
      raises("mine", model.no_sync, model, function() error("mine", 0) end)
      assert.equal(4, counts(function() model(input(rank)):sum():backward() end).reduce_scatter)
      raises("`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module.",
        model.module[2].no_sync, model.module[2], function() end)
    end)

    it("clips by the norm over all ranks, also where strategies are mixed and modules ignored", function(rank)
      local ms, nn, fsdp, dist, quietly = load()
      -- The strategies of a layer and of the root; without these, the first layer is ignored.
      local cases = { { "full_shard", "full_shard" }, { "no_shard", "no_shard" }, { "shard_grad_op", "shard_grad_op" },
        { "no_shard", "full_shard" }, { "shard_grad_op", "full_shard" }, { "full_shard", "no_shard" }, {} }
      local function check(case, pieces, max_norm, norm_type)
        local inner, reference = plain_model(), plain_model()
        local function wrap(m, strategy)
          return quietly(fsdp.FSDP, m, { sharding_strategy = strategy, use_orig_params = pieces,
            ignored_modules = not strategy and { inner[1] } or nil })
        end
        if case[1] then inner[2] = wrap(inner[2], case[1]) end
        local model = wrap(inner, case[2])
        for r = 0, world - 1 do (reference(input(r)):pow(2):sum() * 100 / world):backward() end
        ;(model(input(rank)):pow(2):sum() * 100):backward()
        if not case[1] then
          for _, p in ipairs(inner[1]:parameters()) do dist.all_reduce(p.grad, { op = "avg" }) end
        end
        local want = nn.utils.clip_grad_norm_(reference:parameters(), max_norm, { norm_type = norm_type })
        local got = model:clip_grad_norm_(max_norm, { norm_type = norm_type })
        ms.testing.assert_close(got, want)
        assert.equal("float32", got.dtype)
        if case[1] then fsdp.check_sharded_parity(reference, model) end
      end
      for _, norm_type in ipairs { 1, 2, math.huge } do
        for _, case in ipairs(cases) do
          check(case, false, 1, norm_type)
          check(case, true, 2.5, norm_type)
        end
      end
    end)

    it("clips roots only, in the gradients' dtype, and warns if there are no gradients", function(rank)
      local ms, _, fsdp = load()
      local model = model_of {}
      assert.is_true(model:check_is_root())
      raises("`clip_grad_norm_()` should only be called on the root FSDP instance", model.module[2].clip_grad_norm_,
        model.module[2], 1)
      local warnings, norm = ms.catch_warnings(function() return model:clip_grad_norm_(1) end)
      assert.equal(("Called FSDP.clip_grad_norm_() on rank %d with no gradients -- returning the total norm in the default dtype float32"):format(rank),
        warnings[1])
      assert.equal("float32", norm.dtype)
      assert.equal(0, norm:item())
      local low = model_of { mixed_precision = fsdp.MixedPrecision { param_dtype = "float16",
        keep_low_precision_grads = true } }
      low(input(rank)):sum():backward()
      assert.equal("float16", low:clip_grad_norm_(1).dtype)
    end)
  end)
end

ranks.describe(1, "FSDP on one rank", function()
  it("communicates nothing, under every strategy", function(rank)
    local _, _, _, dist = load()
    for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
      local model = model_of { sharding_strategy = strategy }
      assert.equal(0, #dist.record(function()
        for _ = 1, 2 do model(input(rank)):sum():backward() end
        model:clip_grad_norm_(1)
      end))
    end
  end)
end)

ranks.describe(4, "hybrid strategies", function()
  local function pair(dist)
    -- Two nodes of two ranks each, for this spec.
    local shards, replicas
    for _, list in ipairs { { 0, 1 }, { 2, 3 } } do
      local g = dist.new_group(list)
      if dist.rank(g) then shards = g end
    end
    for _, list in ipairs { { 0, 2 }, { 1, 3 } } do
      local g = dist.new_group(list)
      if dist.rank(g) then replicas = g end
    end
    return { shards, replicas }
  end

  for _, strategy in ipairs { "hybrid_shard", "hybrid_shard_zero2" } do
    for _, how in ipairs { "groups", "mesh" } do
      it(("%s trains as full_shard does, by %s"):format(strategy, how), function(rank)
        local ms, _, fsdp, dist = load()
        local options = { sharding_strategy = strategy }
        if how == "groups" then options.process_group = pair(dist)
        else options.device_mesh = dist.init_device_mesh("cpu", { 2, 2 },
          { names = { "dp_replicate", "dp_shard" } }) end
        local model, reference = model_of(options), plain_model()
        local optim, reference_optim = ms.optim.Adam(model:parameters(), { lr = 0.01 }),
          ms.optim.Adam(reference:parameters(), { lr = 0.01 })
        for step = 1, 5 do
          for r = 0, 3 do (reference(input(r, step)):pow(2):sum() / 4):backward() end
          local loss
          local forward = counts(function() loss = model(input(rank, step)):pow(2):sum() end)
          local backward = counts(function() loss:backward() end)
          assert.equal(4, forward.all_gather)
          assert.equal(strategy == "hybrid_shard" and 3 or 0, backward.all_gather)
          assert.equal(4, backward.reduce_scatter)
          assert.equal(4, backward.all_reduce)
          fsdp.check_sharded_parity(reference, model)
          reference_optim:step()
          optim:step()
          reference_optim:zero_grad()
          optim:zero_grad()
        end
        fsdp.check_sharded_parity(reference, model)
        assert.equal(10, model.params[1]:numel())              -- 20 elements over 2 ranks
      end)
    end
  end

  it("clip by the norm over all shards, once for all replicas, mixed with other strategies too", function(rank)
    local ms, nn, fsdp, dist, quietly = load()
    local hybrid = { sharding_strategy = "hybrid_shard", device_mesh = dist.init_device_mesh("cpu", { 2, 2 },
      { names = { "dp_replicate", "dp_shard" } }) }
    for _, norm_type in ipairs { 1, 2, math.huge } do
      for _, inner in ipairs { hybrid, { sharding_strategy = "full_shard" }, { sharding_strategy = "no_shard" } } do
        local plain, reference = plain_model(), plain_model()
        local model = quietly(function()
          plain[2] = fsdp.FSDP(plain[2], inner)
          return fsdp.FSDP(plain, hybrid)
        end)
        for r = 0, 3 do (reference(input(r)):pow(2):sum() * 100 / 4):backward() end
        ;(model(input(rank)):pow(2):sum() * 100):backward()
        local want = nn.utils.clip_grad_norm_(reference:parameters(), 1, { norm_type = norm_type })
        ms.testing.assert_close(model:clip_grad_norm_(1, { norm_type = norm_type }), want)
        fsdp.check_sharded_parity(reference, model)
      end
    end
  end)

  it("reduce over replicas what is hybrid, and nothing else; inside no_sync nothing", function(rank)
    local ms, nn, fsdp, dist, quietly = load()
    local groups = pair(dist)
    local hybrid = { sharding_strategy = "hybrid_shard", process_group = groups }
    local model = quietly(function()
      local layers = {}
      for k = 1, 3 do
        layers[k] = fsdp.FSDP(nn.Linear(4, 4), k == 2 and { sharding_strategy = "full_shard" } or hybrid)
      end
      return fsdp.FSDP(nn.Sequential(unpack(layers)), hybrid)         -- the root has no parameters of its own
    end)
    for _ = 1, 2 do
      local loss
      local forward = counts(function() loss = model(input(rank)):sum() end)
      local backward = counts(function() loss:backward() end)
      assert.same({ 3, 0, 0 }, { forward.all_gather, forward.reduce_scatter, forward.all_reduce })
      assert.same({ 3, 3, 2 }, { backward.all_gather, backward.reduce_scatter, backward.all_reduce })
    end
    model:no_sync(function()
      local all = counts(function() ms.scope(function() model(input(rank)):sum():backward() end) end)
      assert.same({ 6, 0, 0 }, { all.all_gather, all.reduce_scatter, all.all_reduce })
    end)
    local after = counts(function() ms.scope(function() model(input(rank)):sum():backward() end) end)
    assert.same({ 6, 3, 2 }, { after.all_gather, after.reduce_scatter, after.all_reduce })
  end)

  it("have messages for wrong use", function()
    local _, nn, fsdp, dist = load()
    raises("Manual wrapping with hybrid_shard requires explicit specification of process group or device_mesh.",
      fsdp.FSDP, nn.Linear(2, 2),
      { sharding_strategy = "hybrid_shard" })
    raises("Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] but got Group", fsdp.FSDP,
      nn.Linear(2, 2), { sharding_strategy = "hybrid_shard", process_group = dist.default_group() })
    raises("Expected device_mesh to have ndim=2 but got 1", fsdp.FSDP, nn.Linear(2, 2),
      { sharding_strategy = "hybrid_shard", device_mesh = dist.init_device_mesh("cpu", { 4 }) })
    local a, b = pair(dist), pair(dist)
    local inner = fsdp.FSDP(nn.Linear(4, 4), { sharding_strategy = "hybrid_shard", process_group = b })
    local model = fsdp.FSDP(nn.Sequential(inner), { sharding_strategy = "hybrid_shard", process_group = a })
    raises("Some instances use a hybrid sharding strategy, but intra-node process groups do not match", model,
      require "moonshard".ones(1, 4))
  end)
end)
