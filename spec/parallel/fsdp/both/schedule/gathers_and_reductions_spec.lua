-- SPDX-License-Identifier: MIT
--- When units gather, reshard and reduce: counts and bytes by dist.record, order by fsdp.record
--- (docs/semantics.md#lifecycle), switches for accumulation (docs/semantics.md#accumulation), prefetch lists.
local ranks = require "spec.support.ranks"

-- A chain of blocks whose input requires a gradient, as an embedding's output does; whole: not sharded.
local function chain(n, options, whole)
  local ms = require "moonshard"
  local nn, fsdp = ms.nn, ms.fsdp
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first = nn.Linear(4, 6)
    self.layers = nn.ModuleList {}
    for _ = 1, n do self.layers:append(nn.Linear(6, 6)) end
    self.last = nn.Linear(6, 2, { bias = false })
  end
  function Net:forward(x)
    x = self.first(x):tanh()
    for _, layer in ipairs(self.layers) do x = layer(x):tanh() end
    return self.last(x)
  end
  ms.manual_seed(1)
  local model = Net()
  if whole then return model end
  for _, layer in ipairs(model.layers) do fsdp.fully_shard(layer, options) end
  return fsdp.fully_shard(model, options), ms
end

local function count(list, op)
  local n, bytes = 0, 0
  for _, e in ipairs(list) do
    if e.op == op then n, bytes = n + 1, bytes + e.bytes end
  end
  return n, bytes
end

local function names(events, kind)
  local out = {}
  for _, e in ipairs(events) do
    if not kind or e.event == kind then
      out[#out + 1] = (kind and "" or e.event .. " ") .. (e.unit == "" and "root" or e.unit)
    end
  end
  return out
end

ranks.describe(2, "collectives of a step", function()
  for _, reshard in ipairs { true, false } do
    it(("are one gather and one reduction a unit and use, reshard_after_forward = %s"):format(tostring(reshard)),
      function()
      local model, ms = chain(3, { reshard_after_forward = reshard })
      local dist = ms.dist
      for _ = 1, 3 do
        local loss
        local forward = dist.record(function() loss = model(ms.ones(2, 4)):sum() end)
        local backward = dist.record(function() loss:backward() end)
        assert.equal(4, (count(forward, "all_gather")))
        assert.equal(reshard and 4 or 0, (count(backward, "all_gather")))
        assert.equal(0, (count(forward, "reduce_scatter")))
        local n, bytes = count(backward, "reduce_scatter")
        assert.equal(4, n)
        -- 2 ranks divide 6 rows evenly: every reduction moves exactly its unit's gradients.
        assert.equal(4 * (4 * 6 + 6 + 3 * (36 + 6) + 12), bytes)
        for _, e in ipairs(backward) do assert.equal("string", type(e.unit)) end
        assert.equal(#forward + #backward, (count(forward, "all_gather") + count(backward,
          "all_gather") + count(backward, "reduce_scatter")))
        for _, p in ipairs(model:parameters()) do p.grad = nil end
      end
    end)
  end

  it("with the root rule need one gather less in backward: the root stays gathered", function()
    local model, ms = chain(3)
    local loss
    ms.dist.record(function() loss = model(ms.ones(2, 4)):sum() end)
    local backward = ms.dist.record(function() loss:backward() end)
    assert.equal(3, (count(backward, "all_gather")))
    assert.equal(4, (count(backward, "reduce_scatter")))
  end)

  it("after a reshard by hand are a gather of each unit in backward", function()
    local model, ms = chain(3, { reshard_after_forward = false })
    local loss
    local forward = ms.dist.record(function() loss = model(ms.ones(2, 4)):sum() end)
    for _, m in ipairs(model:modules()) do
      if m:isa(ms.fsdp.FSDPModule) then m:reshard() end
    end
    local backward = ms.dist.record(function() loss:backward() end)
    assert.equal(4, (count(forward, "all_gather")))
    assert.equal(4, (count(backward, "all_gather")))
    assert.equal(4, (count(backward, "reduce_scatter")))
  end)

  it("while gradients are not synchronised are gathers only, and the last pass reduces the sum", function()
    local model, ms = chain(2)
    local reference = chain(2)
    local function backward(m, k)
      return ms.dist.record(function() ms.scope(function() (m(ms.ones(2, 4) * k):sum()):backward() end) end)
    end
    for k = 1, 3 do
      backward(reference, k)                    -- the reference reduces in each pass
      model:set_requires_gradient_sync(k == 3)
      local n = count(backward(model, k), "reduce_scatter")
      assert.equal(k == 3 and 3 or 0, n)
      if k < 3 then
        for _, p in ipairs(model:parameters()) do assert.is_nil(p.grad) end
      end
    end
    local want = {}
    for name, p in reference:named_parameters() do want[name] = p.grad:full_tensor() end
    for name, p in model:named_parameters() do ms.testing.assert_close(p.grad:full_tensor(), want[name]) end
  end)

  it("without resharding after backward gather once for several passes", function()
    local model, ms = chain(2, { reshard_after_forward = false })
    model:set_reshard_after_backward(false)
    model:set_requires_gradient_sync(false)
    local gathers = 0
    for k = 1, 3 do
      if k == 3 then
        model:set_reshard_after_backward(true)
        model:set_requires_gradient_sync(true)
      end
      gathers = gathers + count(ms.dist.record(function() ms.scope(function() model(ms.ones(2,
        4)):sum():backward() end) end), "all_gather")
    end
    assert.equal(3, gathers)
    assert.has_error(function() return model.first.weight + 1 end)      -- sharded again
  end)

  it("divide by another factor on request", function()
    local model, ms = chain(1)
    local reference = chain(1)
    for _, m in ipairs(model:modules()) do
      if m:isa(ms.fsdp.FSDPModule) then m:set_gradient_divide_factor(1) end
    end
    model(ms.ones(2, 4)):sum():backward()
    reference(ms.ones(2, 4)):sum():backward()
    local want = {}
    for name, p in reference:named_parameters() do want[name] = p.grad:to_local() * 2 end
    for name, p in model:named_parameters() do ms.testing.assert_close(p.grad:to_local(), want[name]) end
  end)

  it("divide by W and 2 W after the sum, for 10 steps of AdamW, also set by the deprecated name", function(rank, world)
    local ms = require "moonshard"
    for _, factor in ipairs { world, 2 * world } do
      local reference, model = chain(2, nil, true), chain(2)
      local warned = ms.catch_warnings(function()
        for _, m in ipairs(model:modules()) do
          if m:isa(ms.fsdp.FSDPModule) then
            m:set_reduce_scatter_divide_factor(factor)
            m:set_force_sum_reduction_for_comms(true)
            m:set_allocate_memory_from_process_group_for_comm(true)
          end
        end
      end)
      assert.matches("use set_gradient_divide_factor", warned[1])
      assert.error_matches(function() model:set_force_sum_reduction_for_comms(1) end,
        "argument is a number %(1%), expected a boolean")
      local optims = {}
      for k, m in ipairs { reference, model } do optims[k] = ms.optim.AdamW(m:parameters(), { lr = 0.01 }) end
      for step = 1, 10 do
        for r = 0, world - 1 do ms.scope(function() (reference(ms.ones(2,
          4) * (r + step)):sum() / factor):backward() end) end
        ms.scope(function() model(ms.ones(2, 4) * (rank + step)):sum():backward() end)
        ms.fsdp.check_sharded_parity(reference, model)
        for _, o in ipairs(optims) do
          o:step()
          o:zero_grad()
        end
      end
    end
  end)
end)

ranks.describe(2, "the order of a step", function()
  it("gathers each unit before its forward, and the one before it while a unit runs backward", function()
    local model, ms = chain(3, { reshard_after_forward = true })
    for step = 1, 3 do
      local loss
      local forward = ms.fsdp.record(function() loss = model(ms.ones(2, 4)):sum() end)
      assert.same({ "root", "layers.1", "layers.2", "layers.3" }, names(forward, "unshard"))
      if step > 1 then                          -- the order of the first forward is known
        for k, e in ipairs(forward) do
          if e.event == "unshard" then assert.equal(k > 1, e.prefetched) end
        end
      end
      local backward = ms.fsdp.record(function() loss:backward() end)
      local short = {}
      for _, e in ipairs(backward) do
        if e.event ~= "reshard" then
          short[#short + 1] = (e.event == "unshard" and "unshard " or "post ") .. (e.unit == "" and "root" or e.unit)
        end
      end
      assert.same({ "unshard root", "unshard layers.3", "unshard layers.2", "post layers.3", "unshard layers.1",
        "post layers.2",
        "post layers.1", "post root" }, short)
    end
  end)

  it("repeats the backward sequence for two forwards, the root's post_backward at the end", function()
    local model, ms = chain(2)
    local events = ms.fsdp.record(function()
      local loss = model(ms.ones(2, 4)):sum() + model(ms.ones(2, 4) * 2):sum()
      loss:backward()
    end)
    local posts = names(events, "post_backward")
    assert.same({ "layers.2", "layers.1", "layers.2", "layers.1", "root" }, posts)
  end)

  it("has at most two units besides the root gathered at a time", function()
    local model, ms = chain(5)
    for _ = 1, 3 do
      local events = ms.fsdp.record(function() ms.scope(function() model(ms.ones(2, 4)):sum():backward() end) end)
      local open, most = 0, 0
      for _, e in ipairs(events) do
        if e.unit ~= "" then
          if e.event == "unshard" then open = open + 1 elseif e.event == "reshard" then open = open - 1 end
          most = math.max(most, open)
        end
      end
      assert.equal(2, most)
      assert.equal(0, open)
    end
  end)

  it("follows explicit prefetch lists", function()
    local model, ms = chain(4)
    local l = model.layers
    for k = 1, 3 do l[k]:set_modules_to_forward_prefetch { l[k + 1], l[k + 2] } end
    for k = 2, 4 do l[k]:set_modules_to_backward_prefetch { l[k - 1], l[k - 2] } end
    local loss
    local forward = ms.fsdp.record(function() loss = model(ms.ones(2, 4)):sum() end)
    assert.same({ "unshard root", "unshard layers.1", "unshard layers.2", "unshard layers.3", "reshard layers.1",
      "unshard layers.4" },
      { unpack(names(forward), 1, 6) })
    local backward = ms.fsdp.record(function() loss:backward() end)
    local all = names(backward)
    local first = {}
    for k = 1, #all do
      if all[k]:find "layers" then first[#first + 1] = all[k] end
    end
    assert.same({ "unshard layers.4", "unshard layers.3", "unshard layers.2" }, { unpack(first, 1, 3) })
    for k, text in ipairs(all) do                -- each unit reshards before its post_backward
      if text:find "^post_backward" then assert.equal("reshard" .. text:sub(#"post_backward" + 1), all[k - 1]) end
    end
  end)

  it("vacates parameters prefetched for a module that did not run", function()
    local ms = require "moonshard"
    local Net = ms.nn.Module:extend "Net"
    function Net:init()
      for _, name in ipairs { "a", "b", "c" } do self[name] = ms.nn.Linear(4, 4) end
    end
    function Net:forward(x, skip)
      x = self.a(x)
      if not skip then x = self.b(x) end
      return self.c(x)
    end
    local model = Net()
    for _, m in ipairs { model.a, model.b, model.c } do ms.fsdp.fully_shard(m) end
    ms.fsdp.fully_shard(model)
    for _, skip in ipairs { false, true, false, true } do
      ms.scope(function() model(ms.ones(2, 4), skip):sum():backward() end)
      for _, p in ipairs(model:parameters()) do assert.has_error(function() return p + 1 end) end
    end
  end)
end)

ranks.describe(2, "backwards of other kinds", function()
  local function gradients(model)
    local out = {}
    for name, p in model:named_parameters() do out[name] = p.grad and p.grad:full_tensor() end
    return out
  end

  local function check(model, want, factor)
    local ms = require "moonshard"
    for name, g in pairs(gradients(model)) do ms.testing.assert_close(g, want[name] * factor) end
    for _, p in ipairs(model:parameters()) do assert.has_error(function() return p + 1 end) end
  end

  local function reference()
    local model, ms = chain(3)
    model(ms.ones(2, 4)):sum():backward()
    return gradients(model), ms
  end

  it("of several forwards leave nothing out if set_is_last_backward marks the last one", function()
    local want, ms = reference()
    local model = chain(3)
    local losses = {}
    for k = 1, 3 do losses[k] = model(ms.ones(2, 4)):sum() end
    for k = 1, 3 do
      model:set_is_last_backward(k == 3)
      losses[k]:backward()
    end
    check(model, want, 3)
  end)

  it("go through a retained graph again", function()
    local want, ms = reference()
    local model = chain(3)
    local loss = model(ms.ones(2, 4)):sum()
    loss:backward { retain_graph = true }
    check(model, want, 1)
    loss:backward()
    check(model, want, 2)
  end)

  it("for an input's gradient alone change no grad, and reshard", function()
    local want, ms = reference()
    local model, plain = chain(3), chain(3)
    local x, y = ms.ones(2, 4, { requires_grad = true }), ms.ones(2, 4, { requires_grad = true })
    plain(y):sum():backward()
    local g = ms.grad(model(x):sum(), x)[1]
    ms.testing.assert_close(g, y.grad)
    assert.is_nil(next(gradients(model)))
    for _, p in ipairs(model:parameters()) do assert.has_error(function() return p + 1 end) end
    model(x):sum():backward()
    check(model, want, 1)
  end)

  it("that never run do no harm", function()
    local want, ms = reference()
    local model = chain(3)
    for _ = 1, 3 do
      ms.scope(function() model(ms.ones(2, 4)) end)
      ms.no_grad(function() model(ms.ones(2, 4)) end)
    end
    model(ms.ones(2, 4)):sum():backward()
    check(model, want, 1)
  end)

  it("of two models at once keep to their own units", function()
    local want, ms = reference()
    local a, b = chain(3), chain(3)
    local loss = a(ms.ones(2, 4)):sum() + b(ms.ones(2, 4)):sum() * 2
    loss:backward()
    check(a, want, 1)
    check(b, want, 2)
  end)
end)

ranks.describe(2, "parameters", function()
  it("are sharded before, whole inside forward, and afterwards as reshard_after_forward says", function()
    local model, ms = chain(1)
    local layer, inside = model.layers[1], {}
    layer:register_forward_hook(function(m) inside[#inside + 1] = m.weight:sum():item() end)
    assert.equal(3, layer.weight:to_local():size(1))
    assert.same({ 6, 6 }, { unpack(layer.weight.shape) })
    local loss = model(ms.ones(2, 4)):sum()
    assert.equal(1, #inside)
    assert.has_error(function() return layer.weight:sum() end)
    assert.equal("number", type(model.first.weight:sum():item()))        -- the root is not resharded
    loss:backward()
    assert.has_error(function() return model.first.weight:sum() end)
    assert.is_true(rawequal(layer.weight:to_local(), layer.weight:to_local()))
    assert.is_true(rawequal(layer.weight.grad, layer.weight.grad))
    assert.equal(layer.weight.grad:to_local():size(1), 3)
    assert.matches("rows %d%-%d of 6", tostring(layer.weight))
  end)

  it("of the root are vacated after a forward without gradients, so that none is stale after a step", function()
    local model, ms = chain(1)
    local optim = ms.optim.SGD(model:parameters(), { lr = 0.1 })
    local x = ms.ones(2, 4)
    ms.scope(function() model(x):sum():backward() end)
    local before = ms.no_grad(function() return model(x):sum():item() end)
    assert.has_error(function() return model.first.weight:sum() end)
    optim:step()
    assert.is_true(ms.no_grad(function() return model(x):sum():item() end) < before)
    local gathers = count(ms.dist.record(function()
      model:set_reshard_after_forward(false)
      for _ = 1, 3 do ms.no_grad(function() model(x) end) end
    end), "all_gather")
    assert.equal(2, gathers)                                              -- units stay gathered, as the script set
    ms.scope(function() model(x):sum():backward() end)
  end)

  it("can be gathered and vacated by hand, before the first forward, too", function()
    local model, ms = chain(1)
    local layer = model.layers[1]
    local full = layer.weight:full_tensor()
    assert.is_nil(layer:unshard())
    ms.testing.assert_close(layer.weight:detach(), full)
    layer:reshard()
    assert.has_error(function() return layer.weight:sum() end)
    local handle = layer:unshard { async = true }
    handle:wait()
    ms.testing.assert_close(layer.weight:detach(), full)
    layer:reshard()
    model(ms.ones(2, 4)):sum():backward()
  end)

  it("can be changed in place by numbers, and copied from tensors sharded alike", function()
    local model = chain(1)
    local ms = require "moonshard"
    local w = model.layers[1].weight
    ms.no_grad(function()
      w:fill_(2):mul_(3)
      local other = w:clone()
      assert.is_true(w:equal(other))
      other:add_(1)
      w:copy_(other)
      assert.same(7, w:full_tensor():sum():item() / 36)
      assert.has_error(function() w:copy_(ms.ones(6, 6)) end)
    end)
  end)

  it("have leaf hooks that run once, when the reduced gradient has landed", function()
    local model, ms = chain(2)
    local seen = {}
    for name, p in model:named_parameters() do
      p:register_post_accumulate_grad_hook(function(q)
        assert.is_true(rawequal(p, q))
        seen[name] = (seen[name] or 0) + 1
        assert.same({ unpack(q:to_local().shape) }, { unpack(q.grad:to_local().shape) })
      end)
    end
    for step = 1, 2 do
      ms.scope(function() model(ms.ones(2, 4)):sum():backward() end)
      for name in model:named_parameters() do assert.equal(step, seen[name]) end
    end
  end)
end)
