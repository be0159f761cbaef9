-- SPDX-License-Identifier: MIT
--- Sharded backwards interrupted by the script: an error at every event in turn, on all ranks or on one, and hooks that
--- run operators, collectives and a sharded forward and backward of their own.
local ranks = require "spec.support.ranks"
local collected = require "spec.support.collected"

-- Units, and an event of every kind that a backward has; event(kind) is called in each.
local function make(event)
  local ms = require "moonshard"
  local nn, fsdp = ms.nn, ms.fsdp
  local double = ms.Function {
    forward = function(_, x) return x * 2 end,
    backward = function(_, g)
      event "function"
      return g * 2
    end,
  }
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first = nn.Linear(4, 6)
    self.middle = nn.Linear(6, 6)
    self.last = nn.Linear(6, 3)
    self.gain = nn.Parameter(ms.ones(3))          -- belongs to the root: gathered from its forward to its backward
  end
  function Net:forward(x)
    x = self.first(x):tanh()
    if x.requires_grad then x:register_hook(function() event "tensor hook" end) end
    x = ms.checkpoint(function(y)
      if event.backward then event "checkpoint" end
      return self.middle(y):tanh()
    end, x)
    return double(self.last(x)) * self.gain
  end
  ms.manual_seed(11)
  local model = Net()
  for _, m in ipairs { model.first, model.middle, model.last } do
    fsdp.fully_shard(m, { reshard_after_forward = true })
  end
  fsdp.fully_shard(model)
  model.last:register_full_backward_hook(function() event "module hook" end)
  for _, p in ipairs(model:parameters()) do p:register_post_accumulate_grad_hook(function() event "leaf hook" end) end
  return model, ms
end

-- An event that counts, and raises `what` when the count is `at`.
local function counter()
  local e = { n = 0, kinds = {} }
  return setmetatable(e, { __call = function(_, kind)
    if not e.backward then return end
    e.n = e.n + 1
    e.kinds[kind] = true
    if e.n == e.at then
      if e.together then e.together() end
      error(e.what, 0)
    end
  end })
end

-- Waits for all ranks without a collective: a rank that is still inside one would get another rank's error before
-- raising its own.
local function meeting(rank, world)
  local ms = require "moonshard"
  local folder = ms.dist.broadcast_object(rank == 0 and os.tmpname() or nil, { src = 0 })
  local n = 0
  return function()
    n = n + 1
    for r = 0, world - 1 do
      local name = ("%s.%d.%d"):format(folder, n, r)
      if r == rank then io.open(name, "w"):close() end
    end
    for r = 0, world - 1 do
      local file
      repeat file = io.open(("%s.%d.%d"):format(folder, n, r)) until file
      file:close()
    end
  end, function()
    for k = 1, n do os.remove(("%s.%d.%d"):format(folder, k, rank)) end
    if rank == 0 then os.remove(folder) end
  end
end

local function step(model, ms, event, rank)
  event.n = 0
  local ok, message = true, nil
  ms.scope(function()
    event.backward = false
    local loss = model(ms.ones(2, 4) * (rank + 1)):sum()
    event.backward = true
    ok, message = pcall(loss.backward, loss)
    event.backward = false
  end)
  return ok, message
end

-- The memory in use after dead graphs (the arguments of a checkpoint) are freed, as the next backward frees them.
local function live(ms)
  require("moonshard.autograd").drop_dead()
  return ms.memory_stats()
end

-- Copies this rank's gradients and clears the model's own (in a scope, so that garbage collection is not involved).
local function take_gradients(model)
  local out = {}
  require("moonshard").scope(function()
    for name, p in model:named_parameters() do out[name] = p.grad:to_local():clone():keep() end
    model:zero_grad()
  end)
  return out
end

local function check_sharded_and_idle(model, ms)
  for name, p in model:named_parameters() do
    assert.matches("is sharded", select(2, pcall(function() return p + 1 end)), nil, name)
  end
  for _, m in ipairs(model:modules()) do
    if m:isa(ms.fsdp.FSDPModule) then m:reshard() end       -- refused while the unit is in use
  end
  assert.equal(0, require("moonshard.core.ffi").state.run_depth)
end

ranks.describe(2, "an error in a backward", function()
  -- Frees leftovers of earlier tests; nothing is freed while bytes are counted.
  before_each(function()
    collected()
    collectgarbage "stop"
  end)
  after_each(function() collectgarbage "restart" end)

  it("at each event in turn changes nothing", function(rank, world)
    local event = counter()
    local model, ms = make(event)
    for _ = 1, 2 do
      assert.is_true((step(model, ms, event, rank)))
      model:zero_grad()
    end
    assert.is_true((step(model, ms, event, rank)))
    local total, want = event.n, take_gradients(model)
    local clean
    event.together, clean = meeting(rank, world)
    finally(function() clean() end)
    for _, kind in ipairs { "tensor hook", "function", "checkpoint", "module hook", "leaf hook" } do
      assert.is_true(event.kinds[kind], kind)
    end
    local before = live(ms)
    for at = 1, total do
      event.at, event.what = at, setmetatable({}, { __tostring = function() return "thrown at " .. at end })
      local ok, message = step(model, ms, event, rank)
      assert.is_false(ok)
      assert.is_true(rawequal(event.what, message), tostring(message))
      check_sharded_and_idle(model, ms)
      model:zero_grad()
      assert.equal(before.allocated, live(ms).allocated, "live bytes after an error at event " .. at)
      event.at = nil
      ok, message = step(model, ms, event, rank)
      assert.is_true(ok, message)
      assert.equal(total, event.n)
      local got = take_gradients(model)
      for name, g in pairs(want) do
        assert.is_true(g:equal(got[name]), ("%s after an error at event %d"):format(name, at))
        got[name]:release()
      end
    end
    local after = live(ms)
    assert.equal(before.allocated, after.allocated)
    assert.equal(before.live_tensors, after.live_tensors)
  end)

  it("in a forward changes nothing", function(rank)
    local event = counter()
    local model, ms = make(event)
    step(model, ms, event, rank)
    local want = take_gradients(model)
    local before = live(ms).allocated
    local handle = model.middle:register_forward_hook(function() error({ "in forward" }) end)
    for _ = 1, 3 do
      ms.scope(function()
        local ok, message = pcall(model, ms.ones(2, 4))
        assert.is_false(ok)
        assert.same({ "in forward" }, message)
      end)
      check_sharded_and_idle(model, ms)
      assert.equal(before, live(ms).allocated)
    end
    handle:remove()
    assert.is_true((step(model, ms, event, rank)))
    for name, g in pairs(take_gradients(model)) do assert.is_true(g:equal(want[name]), name) end
  end)

  it("on one rank is raised on the others with its message, and the next step is undisturbed", function(rank)
    local event = counter()
    local model, ms = make(event)
    for _ = 1, 2 do
      step(model, ms, event, rank)
      model:zero_grad()
    end
    step(model, ms, event, rank)
    local total, want = event.n, take_gradients(model)
    local before = live(ms).allocated
    -- The last leaf hooks run after the last collective, where no peer waits.
    for at = 1, total - 5, 2 do
      event.at, event.what = rank == 1 and at or nil, "rank 1 stumbles"
      local ok, message = step(model, ms, event, rank)
      assert.is_false(ok)
      assert.matches("rank 1 stumbles", tostring(message))
      event.at = nil
      check_sharded_and_idle(model, ms)
      model:zero_grad()
      assert.equal(before, live(ms).allocated)
      ms.dist.recover()
      ms.no_grad(function()                             -- as an optimizer would
        for _, p in ipairs(model:parameters()) do p:mul_(1) end
      end)
      ok, message = step(model, ms, event, rank)
      assert.is_true(ok, message)
      local got = take_gradients(model)
      for name, g in pairs(want) do
        assert.is_true(g:equal(got[name]), name)
        got[name]:release()
      end
    end
  end)
end)

-- Two roots in one script, as a generator and a critic: one loss through both, and roots that stay gathered after
-- forward.
local function several_roots()
  local function setup()
    local event = counter()
    local first, ms = make(event)
    local second = make(event)
    local third = make(counter())
    return event, first, second, third, ms
  end

  local function both(first, second, third, ms, event, rank, at_forward)
    event.n = 0
    local ok, message = true, nil
    ms.scope(function()
      event.backward = at_forward
      ok, message = pcall(function()
        local x = ms.ones(2, 4) * (rank + 1)
        local loss = first(x):sum() * 2 + second(x):sum() + third(x):sum()
        event.backward = true
        loss:backward()
      end)
      event.backward = false
    end)
    return ok, message
  end

  local function all_gradients(...)
    local out = {}
    for k, model in ipairs { ... } do
      for name, g in pairs(take_gradients(model)) do out[k .. "." .. name] = g end
    end
    return out
  end

  local function sweep(rank, event, first, second, third, ms, total, want, stop)
    for at = 1, total do
      event.at, event.what = rank == 1 and at or nil, "rank 1 stumbles"
      if stop then stop(at) end
      local ok, message = both(first, second, third, ms, event, rank, stop ~= nil)
      if rank == 1 then assert.is_false(ok) end
      if not ok then assert.matches("rank 1 stumbles", tostring(message)) end
      event.at = nil
      if stop then stop(nil) end
      ms.dist.recover()
      for _, m in ipairs { first, second, third } do
        m:zero_grad()
        ms.no_grad(function()                           -- as an optimizer would
          for _, p in ipairs(m:parameters()) do p:mul_(1) end
        end)
      end
      for _ = 1, 2 do
        ok, message = both(first, second, third, ms, event, rank)
        assert.is_true(ok, ("after an error at %d: %s"):format(at, tostring(message)))
        local got = all_gradients(first, second, third)
        for name, g in pairs(want) do
          assert.is_true(g:equal(got[name]), ("%s after an error at %d"):format(name, at))
          got[name]:release()
        end
      end
    end
  end

  it("leaves the same units whole on all ranks, at every event", function(rank)
    local event, first, second, third, ms = setup()
    both(first, second, third, ms, event, rank)
    all_gradients(first, second, third)
    assert.is_true((both(first, second, third, ms, event, rank)))
    sweep(rank, event, first, second, third, ms, event.n, all_gradients(first, second, third))
  end)

  it("in a forward leaves the same units whole on all ranks, where units stay whole by request", function(rank)
    local event, first, second, third, ms = setup()
    first:set_reshard_after_forward(false)
    second.last:set_reshard_after_forward(false)
    local at
    local modules = { first.first, first.last, first, second.middle, second, third.first, third }
    for k, m in ipairs(modules) do
      m:register_forward_hook(function()
        if rank == 1 and at == k then error("rank 1 stumbles", 0) end
      end)
    end
    both(first, second, third, ms, event, rank)
    local want = all_gradients(first, second, third)
    sweep(rank, event, first, second, third, ms, #modules, want, function(k)
      at, event.at = k, nil
    end)
  end)

  it("forgets, on all ranks, the gradients of earlier backwards that waited to be reduced with it", function(rank)
    local event, first, second, third, ms = setup()
    local models = { first, second, third }
    both(first, second, third, ms, event, rank)
    all_gradients(first, second, third)
    both(first, second, third, ms, event, rank)
    local total, want = event.n, all_gradients(first, second, third)
    for at = 1, total, 3 do
      for _, m in ipairs(models) do m:set_requires_gradient_sync(false) end
      assert.is_true((both(first, second, third, ms, event, rank)))
      for _, m in ipairs(models) do m:set_requires_gradient_sync(true) end
      event.at, event.what = rank == 1 and at or nil, "rank 1 stumbles"
      both(first, second, third, ms, event, rank)
      event.at = nil
      ms.dist.recover()
      for _, m in ipairs(models) do m:zero_grad() end
      assert.is_true((both(first, second, third, ms, event, rank)))
      for name, g in pairs(all_gradients(first, second, third)) do
        assert.is_true(g:equal(want[name]), ("%s after an error at %d"):format(name, at))
      end
    end
  end)
end
ranks.describe(2, "an error on one rank, with several roots,", several_roots)
-- Between nodes small gathers are queued, too.
ranks.describe(2, "an error on one rank of two nodes, with several roots,", { env = { MOONSHARD_COMM_NODES = "2" } },
  several_roots)

ranks.describe(2, "a hook", function()
  it("may run operators, a collective, and a sharded forward and backward", function(rank)
    local event = counter()
    local model, ms = make(event)
    local other = make(counter())
    local reference, reference_other = make(counter()), make(counter())
    local sum
    ms.scope(function() reference(ms.ones(2, 4) * (rank + 1)):sum():backward() end)
    ms.scope(function() reference_other(ms.ones(2, 4) * (rank + 3)):sum():backward() end)
    local ran = 0
    ms.scope(function()
      local x = ms.ones(2, 4, { requires_grad = true })
      local out = model(x * (rank + 1))
      out:register_hook(function(g)
        ran = ran + 1
        local t = g * 0 + (rank + 1)
        ms.dist.all_reduce(t)
        sum = t:sum():item()
        ms.enable_grad(function() other(ms.ones(2, 4) * (rank + 3)):sum():backward() end)
      end)
      model.first.weight:register_post_accumulate_grad_hook(function()
        ran = ran + 1
        -- Runs the model again, during its own backward.
        ms.no_grad(function() assert.equal(2, model(ms.ones(2, 4)):size(1)) end)
      end)
      out:sum():backward()
    end)
    assert.equal(2, ran)
    assert.equal(3 * 6, sum)
    check_sharded_and_idle(model, ms)
    check_sharded_and_idle(other, ms)
    local want = take_gradients(reference)
    for name, g in pairs(take_gradients(model)) do assert.is_true(g:equal(want[name]), name) end
    want = take_gradients(reference_other)
    for name, g in pairs(take_gradients(other)) do assert.is_true(g:equal(want[name]), name) end
  end)
end)
