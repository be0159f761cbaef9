-- SPDX-License-Identifier: MIT
--- All-gather extensions (docs/semantics.md#extensions): arguments and results of the hooks, when they run, what they
--- save. Uses plain tensors with patched hooks; the reference suite (spec/reference) has tensor classes.
local ranks = require "spec.support.ranks"

local function load() return require "moonshard" end
local collected = require "spec.support.collected"

local failure = require "spec.support.message"

-- Gives a parameter extensions that gather it as dtype. log: where they count their calls and keep their arguments.
local function patch(p, dtype, log)
  local part = p:to_local()
  function part.fsdp_pre_all_gather(self, mesh, outer_shape, outer_stride, module, policy)
    log.pre = (log.pre or 0) + 1
    log.mesh, log.shape, log.stride, log.module, log.policy, log.self = mesh, outer_shape, outer_stride, module, policy,
      self
    return { self:to(dtype) }, "meta"
  end
  function part.fsdp_post_all_gather(self, outputs, metadata, param_dtype, out)
    log.post = (log.post or 0) + 1
    assert.is_true(rawequal(self, log.self))
    assert.equal("meta", metadata)
    assert.equal(1, #outputs)
    assert.equal(dtype, outputs[1].dtype)
    if out then
      log.out = out
      out:copy_(outputs[1])
      return
    end
    local whole = outputs[1]:to(param_dtype)
    log.whole = whole
    return whole, { outputs[1], whole }
  end
end

local function chain()
  local ms = load()
  ms.manual_seed(1)
  return ms.nn.Sequential(ms.nn.Linear(6, 7), ms.nn.Tanh(), ms.nn.Linear(7, 5), ms.nn.Tanh(), ms.nn.Linear(5, 3))
end

local function shard(model, options)
  local ms = load()
  for k = 1, #model, 2 do ms.fsdp.fully_shard(model[k], options) end
  return ms.fsdp.fully_shard(model, options)
end

for world = 1, 4 do
  ranks.describe(world, ("all-gather extensions over %d ranks"):format(world), function()
    for _, reshard in ipairs { true, false } do
      it(("of an identity train as no extension does, reshard_after_forward = %s"):format(tostring(reshard)),
        function(rank)
        local ms = load()
        local want, model = shard(chain(), { reshard_after_forward = reshard }),
          shard(chain(), { reshard_after_forward = reshard })
        local logs = {}
        for name, p in model:named_parameters() do
          if name:find "weight" then
            logs[name] = {}
            patch(p, "float32", logs[name])
          end
        end
        local optims = { ms.optim.AdamW(want:parameters(), { lr = 0.1 }),
          ms.optim.AdamW(model:parameters(), { lr = 0.1 }) }
        for step = 1, 4 do
          ms.scope(function()
            local x = ms.ones(2, 6, { requires_grad = true }) * (rank + step)
            local a, b = want(x):sum(), model(x):sum()
            assert.equal(a:item(), b:item())
            a:backward()
            b:backward()
          end)
          for k, p in ipairs(want:parameters()) do
            local q = model:parameters()[k]
            assert.is_true(p.grad:to_local():equal(q.grad:to_local()))
          end
          for _, optim in ipairs(optims) do
            optim:step()
            optim:zero_grad()
          end
          for k, p in ipairs(want:parameters()) do assert.is_true(p:equal(model:parameters()[k])) end
        end
        for _, log in pairs(logs) do
          assert.equal(reshard and 8 or 4, log.pre)
          assert.equal(log.pre, log.post)
          assert.is_true(rawequal(log.whole, log.out))
        end
      end)
    end

    it("round what is gathered, in place at every gather after the first", function()
      local ms = load()
      local model = shard(chain(), { reshard_after_forward = true })
      local weight, log = model[3].weight, {}
      patch(weight, "bfloat16", log)
      local x = ms.ones(2, 6)
      model(x):sum():backward()
      local function check()
        model[3]:unshard()
        local seen = weight:detach():clone()
        local pointer = weight:data_ptr()
        assert.equal("float32", seen.dtype)
        assert.equal(pointer, log.whole:data_ptr())
        model[3]:reshard()
        assert.is_true(seen:equal(weight:full_tensor():bfloat16():float()))
      end
      check()
      ms.no_grad(function() weight:mul_(3) end)
      check()
      assert.has_error(function() return log.whole + 1 end)         -- vacated, because its module does not run
      assert.equal("float32", weight.grad.dtype)
    end)

    it("get the mesh, the whole shape, the module and the policy", function(rank)
      local ms = load()
      local policy = ms.fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16" }
      local model = shard(chain(), { mp_policy = policy })
      local log = {}
      patch(model[1].weight, "bfloat16", log)
      model(ms.ones(2, 6)):sum():backward()
      assert.equal(world, log.mesh:size())
      assert.equal(rank, log.mesh:rank())
      assert.same({ 7, 6 }, { unpack(log.shape) })
      assert.same({ 6, 1 }, { unpack(log.stride) })
      assert.is_true(rawequal(model[1], log.module))
      assert.is_true(rawequal(policy, log.policy))
      assert.is_true(rawequal(model[1].weight:to_local(), log.self))
      assert.equal("bfloat16", log.whole.dtype)                      -- param_dtype
    end)

    it("alias what was gathered when nothing is cast, and hold no memory beside it", function()
      local ms = load()
      local model = ms.fsdp.fully_shard(ms.nn.Linear(64, 64 * world, { bias = false }),
        { reshard_after_forward = true })
      local part = model.weight:to_local()
      local pointers = {}
      function part:fsdp_pre_all_gather() return { self }, nil end
      function part:fsdp_post_all_gather(outputs, _, _, out)
        pointers[#pointers + 1] = outputs[1]:data_ptr()
        if out then
          assert.equal(out:data_ptr(), outputs[1]:data_ptr())
          return
        end
        assert.is_table(self)
        return outputs[1], { outputs[1] }
      end
      local x = ms.ones(1, 64)
      ms.scope(function() model(x):sum():backward() end)
      model:zero_grad()
      collected()
      local before = ms.memory_stats("cpu").allocated
      for _ = 1, 3 do
        ms.scope(function() model(x):sum():backward() end)
        model:zero_grad()
      end
      assert.equal(8, #pointers)
      collected()
      assert.equal(before, ms.memory_stats("cpu").allocated)
    end)

    it("go through checkpoints, unshard by hand and forward without gradients", function()
      local ms = load()
      local Net = ms.nn.Module:extend "Net"
      function Net:init() self.a, self.b = ms.nn.Linear(4, 4), ms.nn.Linear(4, 4) end
      function Net:forward(x)
        return ms.checkpoint(function(y) return self.b(self.a(y):tanh()) end, x)
      end
      local function make()
        ms.manual_seed(3)
        local m = Net()
        ms.fsdp.fully_shard(m.a)
        ms.fsdp.fully_shard(m.b)
        return ms.fsdp.fully_shard(m)
      end
      local want, model, log = make(), make(), {}
      for _, m in ipairs { model.a, model.b } do patch(m.weight, "float32", log) end
      local x = ms.ones(2, 4, { requires_grad = true })
      for _ = 1, 2 do
        ms.no_grad(function() assert.is_true(want(x):equal(model(x))) end)
        want(x):sum():backward()
        model(x):sum():backward()
      end
      for name, p in want:named_parameters() do
        assert.is_true(p.grad:to_local():equal(model:get_parameter(name).grad:to_local()))
      end
      local full = model.a.weight:full_tensor()
      local handle = model.a:unshard { async = true }
      handle:wait()
      assert.is_true(model.a.weight:detach():equal(full))
      model.a:reshard()
      assert.is_true(log.pre > 4)
    end)
  end)
end

ranks.describe(2, "all-gather extensions", function()
  it("halve the bytes sent", function()
    local ms = load()
    local function gathered(extended)
      local model = ms.fsdp.fully_shard(ms.nn.Linear(32, 64, { bias = false }))
      if extended then patch(model.weight, "bfloat16", {}) end
      local bytes = 0
      for _, e in ipairs(ms.dist.record(function() model(ms.ones(1, 32)) end)) do
        if e.op == "all_gather" then bytes = bytes + e.bytes end
      end
      return bytes
    end
    assert.equal(64 * 32 * 4, gathered(false))
    assert.equal(64 * 32 * 2, gathered(true))
  end)

  it("of several inputs, of mixed dtypes and of any shape, are gathered in one collective with the rest", function()
    local ms = load()
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 8))
    local part = model.weight:to_local()
    function part:fsdp_pre_all_gather()
      return { self:detach():reshape(-1), ms.ones(1, 2, { dtype = "int64" }) * 7,
        ms.full({ 1 }, ms.dist.rank(), { dtype = "uint8" }) }, nil
    end
    function part.fsdp_post_all_gather(_, outputs, _, _, out)
      assert.same({ 32 }, { unpack(outputs[1].shape) })
      assert.same({ { 7, 7 }, { 7, 7 } }, outputs[2]:tolist())
      assert.same({ 0, 1 }, outputs[3]:tolist())
      if not out then return outputs[1]:reshape(8, 4), { outputs[1] } end
    end
    local full, bias = model.weight:full_tensor(), model.bias:full_tensor()
    local ledger = ms.dist.record(function()
      local y = model(ms.ones(1, 4))
      ms.testing.assert_close(y:detach():reshape(-1), full:sum(2) + bias)
    end)
    assert.equal(1, #ledger)
    assert.equal("uint8", ledger[1].dtype)
  end)

  it("warn of a returned tensor that will not be freed, because others hold its memory", function()
    local ms = load()
    local kept = {}
    for _, case in ipairs {
      { 0, function(whole) return whole end }, { 0, function(whole) return whole, {} end },
      { 0, function(whole) return whole, { whole } end },
      { 1, function(whole)
        kept[#kept + 1] = whole:detach()
        return whole
      end },
      { 0, function(whole)
        kept[#kept + 1] = whole:detach()
        return whole, { whole }
      end },
    } do
      local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 4))
      local part = model.weight:to_local()
      function part:fsdp_pre_all_gather() return { self:bfloat16() }, nil end
      function part.fsdp_post_all_gather(_, outputs, _, dtype, out)
        if out then out:copy_(outputs[1]) else return case[2](outputs[1]:to(dtype)) end
      end
      local whole
      local warnings = ms.catch_warnings(function()
        for _ = 1, 2 do model(ms.ones(1, 4)):sum():backward() end
        model:unshard()
        whole = model.weight:detach()
        model:reshard()
      end)
      assert.same(case[1] == 1
        and { "fsdp_post_all_gather of 'weight' returned a tensor that shares memory with other tensors and is not among the tensors to free: "
        .. "reshard will not free it" } or {}, warnings)
      assert.equal(case[1] == 1, (pcall(whole.sum, whole)))
    end
    assert.equal(2, #kept)
  end)

  it("need both hooks, found on the instance or its class", function()
    local ms = load()
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 4))
    model.weight:to_local().fsdp_pre_all_gather = function(self) return { self }, nil end
    local message = failure(model, ms.ones(1, 4))
    assert.equal("Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
      .. tostring(model.weight:to_local()), message)
  end)

  it("that raise do so on the other ranks too", function(rank)
    local ms = load()
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 4))
    local part = model.weight:to_local()
    function part:fsdp_pre_all_gather()
      if rank == 1 then error("my own", 0) end
      return { self }, nil
    end
    function part.fsdp_post_all_gather(_, outputs, _, _, out)
      if not out then return outputs[1], {} end
    end
    assert.matches("my own", failure(model, ms.ones(1, 4)))
  end)
end)

ranks.describe(1, "all-gather extensions", function()
  it("refuse what does not fit", function()
    local ms = load()
    local function try(pre, post, options)
      local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 3, { bias = false }), options)
      local part = model.weight:to_local()
      part.fsdp_pre_all_gather = pre
      part.fsdp_post_all_gather = post or function() end
      local message = failure(model, ms.ones(1, 4))
      part.fsdp_pre_all_gather, part.fsdp_post_all_gather = nil, nil
      model:to "cpu"                            -- after a move, extensions are looked up again: there are none now
      model(ms.ones(1, 4)):sum():backward()
      return message
    end
    local function same(self) return { self }, nil end
    local function narrow() return ms.ones(2, 2), {} end
    assert.equal("fsdp_post_all_gather of 'weight' returned nil at the first gather, expected the whole tensor and a list of tensors to free", try(same))
    assert.matches("^fsdp_pre_all_gather of 'weight' returned a number", try(function() return 3 end))
    assert.matches("returned tensor 1 is a number %(3%), expected a tensor", try(function() return { 3 } end))
    assert.matches("returned float32 %[2, 2%] cpu, expected a contiguous tensor of shape %[3, 4%]", try(same, narrow))
    assert.matches("a tensor to free is a view of the shard, which must stay",
      try(same, function(self, outputs) return outputs[1], { self } end))
    assert.matches("returned tensor 1 has no dimension to gather along", try(function() return { ms.tensor(1) } end))
    assert.matches("sharded along dimension 2", try(same, nil,
      { shard_placement_fn = function() return ms.fsdp.Shard(2) end }))
    local n = 0
    local model = ms.fsdp.fully_shard(ms.nn.Linear(4, 3, { bias = false }))
    local part = model.weight:to_local()
    function part:fsdp_pre_all_gather()
      n = n + 1
      return { n > 1 and self:double() or self }, nil
    end
    function part.fsdp_post_all_gather(_, outputs, _, _, out)
      if not out then return outputs[1], {} end
    end
    model(ms.ones(1, 4)):sum():backward()
    assert.equal("fsdp_pre_all_gather of 'weight': returned tensor 1 is float64 [3, 4] cpu, but was float32 [3, 4] at its first gather", failure(model, ms.ones(1, 4)))
  end)
end)

for _, world in ipairs { 2, 3, 4 } do
  ranks.describe(world, ("unevenly sharded parameters with extensions over %d ranks"):format(world), function()
    local rows = world * 2 + 1
    local function make(pre, post)
      local ms = load()
      ms.manual_seed(9)
      local model = ms.fsdp.fully_shard(ms.nn.Linear(3, rows, { bias = false }))
      local part = model.weight:to_local()
      part.fsdp_pre_all_gather, part.fsdp_post_all_gather = pre, post
      return model, ms
    end
    local function post(_, outputs, _, dtype, out)
      if out then
        out:copy_(outputs[1])
        return
      end
      local whole = outputs[1]:to(dtype)
      return whole, { outputs[1], whole }
    end
    local chunk = math.ceil(rows / world)

    it("are padded by the runtime when inputs have the local size", function()
      local model, ms = make(function(self) return { self:bfloat16() }, nil end, post)
      for _ = 1, 3 do
        local y = model(ms.ones(1, 3))
        ms.testing.assert_close(y:detach():reshape(-1), model.weight:full_tensor():bfloat16():float():sum(2))
        y:sum():backward()
      end
    end)

    it("may pad their inputs themselves", function()
      local ms = load()
      local model = make(function(self)
        local padded = ms.zeros(chunk, 3, { dtype = "bfloat16" })
        if self:size(1) > 0 then padded:narrow(1, 1, self:size(1)):copy_(self) end
        return { padded }, nil
      end, post)
      for _ = 1, 2 do
        local y = model(ms.ones(1, 3))
        ms.testing.assert_close(y:detach():reshape(-1), model.weight:full_tensor():bfloat16():float():sum(2))
        y:sum():backward()
      end
    end)

    it("raise on every rank when an input has another size", function()
      local ms = load()
      local model = make(function(self) return { self:detach():reshape(-1) }, nil end, post)
      local message = failure(model, ms.ones(1, 3))
      assert.matches(("When a parameter is unevenly sharded by FSDP (orig size=[%d, 3], FSDP world size=%d), fsdp_pre_all_gather must return "
        .. "all-gather inputs with the padded sharded size [%d, 3] but got ["):format(rows, world, chunk), message, 1,
        true)
    end)
  end)
end
