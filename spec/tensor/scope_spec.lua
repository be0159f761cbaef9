-- SPDX-License-Identifier: MIT
--- Lifetimes: what a scope releases, what survives it, and the errors about both.
-- luacheck: ignore 512 (loops that break on purpose)
local ms = require "moonshard"
local collected = require "spec.support.collected"

local failure = require "spec.support.message"
local function live() return ms.memory_stats("cpu").live_tensors end

describe("a scope", function()
  it("releases tensors made inside, except those it returns", function()
    local inside
    local out, list = ms.scope(function()
      inside = ms.ones(3)
      return inside + 1, { ms.ones(1), deep = { ms.ones(2) } }
    end)
    assert.is_true(inside:is_released())
    assert.are.same({ 2, 2, 2 }, out:tolist())
    assert.are.same({ 1 }, list[1]:tolist())
    assert.are.same({ 1, 1 }, list.deep[1]:tolist())
  end)

  it("returns all results, also nil", function()
    local n = select("#", ms.scope(function() return nil, 1, nil end))
    assert.are.equal(3, n)
    assert.are.equal(0, select("#", ms.scope(function() end)))
    assert.are.equal(7, ms.scope(function(x) return x end, 7))
  end)

  it("takes its results into the enclosing scope", function()
    local a
    ms.scope(function()
      a = ms.scope(function() return ms.ones(2) end)
      assert.is_false(a:is_released())
    end)
    assert.is_true(a:is_released())
  end)

  it("does not release tensors from outside", function()
    local a = ms.ones(2)
    ms.scope(function()
      local b = ms.scope(function() return a end)
      assert.is_true(rawequal(a, b))
    end)
    assert.is_false(a:is_released())
  end)

  it("does not release kept tensors", function()
    local a
    ms.scope(function() a = ms.ones(2):keep() end)
    assert.are.same({ 1, 1 }, a:tolist())
    a:release()
    assert.is_true(a:is_released())
    a:release()
  end)

  it("releases on an error, which is raised unchanged", function()
    local inside
    local e = { code = 1 }
    local ok, caught = pcall(ms.scope, function()
      inside = ms.ones(1)
      error(e)
    end)
    assert.is_false(ok)
    assert.is_true(rawequal(e, caught))
    assert.is_true(inside:is_released())
    local outside = ms.ones(1)                          -- outside every scope again
    ms.scope(function() end)
    assert.is_false(outside:is_released())
  end)

  it("never takes memory that a view or the graph needs", function()
    local view
    ms.scope(function()
      local base = ms.arange(6)
      view = base:view(2, 3):keep()
    end)
    assert.are.same({ { 0, 1, 2 }, { 3, 4, 5 } }, view:tolist())
    local w = ms.ones(3, { requires_grad = true })
    local loss = ms.scope(function()
      local x = ms.tensor { 1, 2, 3 }
      return (w * x):sum()
    end)
    loss:backward()
    assert.are.same({ 1, 2, 3 }, w.grad:tolist())
  end)

  it("leaves grads to their leaves", function()
    local w = ms.ones(2, { requires_grad = true })
    local g
    ms.scope(function()
      (w * 3):sum():backward()
      g = w.grad
    end)
    assert.is_true(rawequal(g, w.grad))
    assert.are.same({ 3, 3 }, g:tolist())
  end)
end)

describe("ms.keep", function()
  it("takes all tensors of a table out of their scopes", function()
    local model, kept, dropped = ms.nn.Linear(2, 1)
    local distribution, packed, both
    for step in ms.steps(2) do
      if step == 1 then
        dropped = ms.deepcopy(model:state_dict())
        kept = ms.keep { weights = ms.deepcopy(model:state_dict()), list = { { ms.ones(1) } }, n = 3, name = "best" }
        distribution = ms.keep(ms.distributions.Normal(ms.zeros(2), ms.ones(2)))
        packed = ms.keep(ms.nn.utils.rnn.pack_sequence { ms.ones(2) })
        both = ms.keep(ms.ones(2))
      end
    end
    assert.is_true(dropped.weight:is_released())
    assert.are.same({ false, false, false }, { kept.weights.weight:is_released(), kept.weights.bias:is_released(),
      kept.list[1][1]:is_released() })
    assert.are.same({ "best", 3 }, { kept.name, kept.n })
    assert.are.same({ 0, 0 }, distribution.mean:tolist())
    assert.are.same({ 1, 1 }, packed.data:tolist())
    assert.are.same({ 1, 1 }, both:tolist())
  end)

  it("refuses what has no tensors to keep", function()
    for text, wrong in pairs { ["a number (3)"] = 3, ["nil"] = false, ["a Linear"] = ms.nn.Linear(1, 1) } do
      local ok, message = pcall(ms.keep, wrong or nil)
      assert.is_false(ok)
      assert.are.equal(("keep: argument 1 is %s, expected a tensor or a table of tensors"):format(text),
        (message:gsub("^[^\n]-:%d+: ", "")))
    end
  end)
end)

describe("an object with a metatable that a scope returns", function()
  local Output, Known = {}, { __tensors = true }
  local advice = "it is in an object with a metatable: scopes and ms.keep find tensors in plain tables, and in objects whose metatable "
    .. "has __tensors = true"

  local Net = ms.nn.Module:extend "ScopeSpecNet"
  function Net:init(class) self.class = class end
  function Net:forward(x) return setmetatable({ y = x * 2, list = { x * 3 } }, self.class) end
  local ways = {
    ["a scope"] = function(class)
      return ms.scope(function() return setmetatable({ y = ms.ones(1) * 2, list = { ms.ones(1) * 3 } }, class) end)
    end,
    ["a table of a scope"] = function(class) return ms.scope(function() return { 1, Net(class)(ms.ones(1)) } end)[2] end,
    ["a forward"] = function(class) return Net(class)(ms.ones(1)) end,
    ["a sharded forward"] = function(class)
      return ms.fsdp.fully_shard(ms.nn.Sequential(ms.nn.Identity(), Net(class)))(ms.ones(1))
    end,
    ["a checkpoint"] = function(class) return ms.checkpoint(function(x) return Net(class)(x) end, ms.ones(1)) end,
  }
  for way, make in ms.sorted_pairs(ways) do
    it("loses its tensors, and errors about them say so: " .. way, function()
      local out = make(Output)
      for _, t in ipairs { out.y, out.list[1] } do
        for _, use in ipairs { function() return t:item() end, function() return t + 1 end,
          function() return t.shape end, function() return ms.cat({ ms.ones(1), t }) end } do
          local message = failure(use)
          assert.matches("tensor was released with its scope; return it, or keep%(%) it", message)
          assert.truthy(message:find(advice, 1, true), message)
        end
      end
    end)

    it("keeps them if the metatable has __tensors: " .. way, function()
      local out = make(Known)
      assert.are.same({ 2, 3 }, { out.y:item(), out.list[1]:item() })
    end)
  end

  it("is not mentioned where a tensor was not in it, or was released by release()", function()
    local lost, out
    ms.scope(function()
      lost = ms.ones(1)
      out = setmetatable({ ms.ones(1):keep() }, Output)
      return out
    end)
    out[1]:release()
    assert.is_nil(failure(function() return lost:item() end):find("metatable", 1, true))
    assert.is_nil(failure(function() return out[1]:item() end):find("metatable", 1, true))
  end)

  it("is refused by ms.keep, and inside of a table its tensors are lost", function()
    assert.matches("keep: argument 1 is a table, expected a tensor or a table of tensors, whose metatable has __tensors = true, if it has one",
      failure(function() ms.keep(setmetatable({}, Output)) end))
    local kept
    ms.scope(function()
      kept = ms.keep { a = setmetatable({ ms.ones(1) }, Output), b = setmetatable({ ms.ones(1) }, Known) }
    end)
    assert.are.equal(1, kept.b[1]:item())
    assert.truthy(failure(function() return kept.a[1]:item() end):find(advice, 1, true))
  end)
end)

describe("use after release", function()
  it("names a remedy and where the tensor was made", function()
    require("moonshard.tensor").record_sites(true)        -- other spec files may have used up the budget
    finally(function() require("moonshard.tensor").record_sites(false) end)
    local a
    ms.scope(function() a = ms.ones(2) end)
    local line = debug.getinfo(1, "l").currentline - 1
    local message = failure(function() return a + 1 end)
    assert.matches(
      "^tensor was released with its scope; return it, or keep%(%) it %(made at [^\n]*scope_spec%.lua:" .. line
      .. "; its scope: ms%.scope%)$",
      message)
    for _, use in ipairs {
      function() return a.shape end, function() return a:item() end, function() return ms.ones(2) * a end,
        function() return a:tolist() end,
      function() return a:keep() end, function() return a.grad end, function() return a[1] end,
        function() return a:view(2) end,
      function() return a:backward() end, function() return ms.cat { ms.ones(1), a } end,
    } do
      assert.matches("^tensor was released with its scope", failure(use))
    end
    assert.are.equal("Tensor (released)", tostring(a))
  end)

  it("always names the operator that made the tensor and the scope that released it, however long ago that began",
    function()
    local Twice = ms.nn.Module:extend "Twice"
    function Twice:forward(x)
      self.inner.t = x * 2
      return x + 1
    end
    local m, a, b = Twice(), nil, nil
    m.inner = {}
    for step in ms.steps(500) do
      local x = ms.ones(4)
      for _ = 1, 20 do x = x:add(1) end
      m(x)
      if step == 400 then a, b = x:sqrt(), m.inner.t end
    end
    assert.matches("^tensor was released with its scope; return it, or keep%(%) it %(made .*by sqrt; its scope: ms%.steps%)$",
      failure(function() return a + 1 end))
    assert.matches("%(made .*by mul; its scope: Twice%)$", failure(function() return b + 1 end))
    local c = ms.ones(2) + 1
    c:release()
    assert.matches("^tensor was released by release%(%) %(made .*by add%)$", failure(function() return c + 1 end))
  end)

  it("records lines for a limited number of tensors, and again after such an error", function()
    local function known()
      local n = 0
      ms.scope(function()
        for _ = 1, 2000 do
          if rawget(ms.ones(1), "_site") then n = n + 1 end
        end
      end)
      return n
    end
    for _ = 1, 5 do known() end                         -- uses up the 512 sites that a process begins with
    assert.is_true(known() <= 16)
    local a
    ms.scope(function() a = ms.ones(1) end)
    failure(function() return a + 1 end)
    assert.is_string(rawget(ms.ones(1), "_site"))
  end)

  it("keeps the script's names apart: a new tensor in the same slot is another one", function()
    local old
    ms.scope(function() old = ms.ones(1) end)
    local new = {}
    for k = 1, 100 do new[k] = ms.ones(1) end
    assert.is_true(old:is_released())
    for k = 1, 100 do new[k]:release() end
  end)
end)

describe("ms.steps", function()
  it("counts, and each iteration is a scope", function()
    local seen, kept = {}, {}
    for step in ms.steps(3) do
      seen[#seen + 1] = step
      kept[step] = ms.ones(1)
      if step > 1 then assert.is_true(kept[step - 1]:is_released()) end
    end
    assert.are.same({ 1, 2, 3 }, seen)
    assert.is_true(kept[3]:is_released())
    seen = {}
    for step in ms.steps(5, { from = 4 }) do seen[#seen + 1] = step end
    assert.are.same({ 4, 5 }, seen)
    for _ in ms.steps(0) do error "no step" end
  end)

  it("closes a step left by break when the next loop begins", function()
    local a
    for _ in ms.steps(3) do
      a = ms.ones(1)
      break
    end
    local b = ms.ones(1)                                  -- made after the loop, but still owned by its last step
    assert.is_false(a:is_released())
    for _ in ms.steps(1) do
      assert.is_true(a:is_released())
      local _, text = pcall(b.item, b)
      assert.matches("; its scope: the last step of a loop that break or an error left%)$", text)
      a = ms.ones(1)
    end
    assert.matches("; its scope: ms%.steps%)$", select(2, pcall(a.item, a)))
  end)

  it("closes a step left by break when an enclosing scope ends", function()
    local a
    ms.scope(function()
      for _ in ms.steps(3) do
        a = ms.ones(1)
        break
      end
    end)
    assert.is_true(a:is_released())
    local b = ms.ones(1)
    ms.scope(function() end)
    assert.is_false(b:is_released())
  end)

  it("closes a step left by an error", function()
    local a
    pcall(function()
      for _ in ms.steps(3) do
        a = ms.ones(1)
        error "stop"
      end
    end)
    for _ in ms.steps(1) do assert.is_true(a:is_released()) end
  end)

  it("does not end enclosing loops", function()
    for _ in ms.steps(2) do
      local outer = ms.ones(1)
      for _ in ms.steps(2) do
        ms.ones(1)
        break
      end
      for _ in ms.steps(2) do assert.is_false(outer:is_released()) end
      local function inner()
        for _ in ms.steps(2) do return 1 end
      end
      inner()
      for _ in ms.steps(1) do assert.is_false(outer:is_released()) end
      assert.is_false(outer:is_released())
    end
  end)

  it("has a form that always closes", function()
    local a
    ms.steps(2, function(step) a = ms.ones(step) end)
    assert.is_true(a:is_released())
    local ok = pcall(ms.steps, 2, function()
      a = ms.ones(1)
      error "stop"
    end)
    assert.is_false(ok)
    assert.is_true(a:is_released())
  end)
end)

describe("coroutines", function()
  it("have scopes of their own", function()
    local inside
    local next_value = coroutine.wrap(function()
      ms.scope(function()
        inside = ms.ones(1)
        coroutine.yield(1)
        assert.is_false(inside:is_released())
      end)
      return 2
    end)
    local a
    ms.scope(function()
      assert.are.equal(1, next_value())
      a = ms.ones(1)                                    -- in this scope, not in the coroutine's
    end)
    assert.is_true(a:is_released())
    local b = ms.ones(1)
    assert.are.equal(2, next_value())
    assert.is_true(inside:is_released())
    assert.is_false(b:is_released())
  end)

  it("release what their scopes hold when they end or are collected", function()
    local a, b
    local co = coroutine.create(function()
      ms.scope(function()
        a = ms.ones(1)
        coroutine.yield()
        error "stop"
      end)
    end)
    assert.is_true(coroutine.resume(co))
    assert.is_false(a:is_released())
    assert.is_false((coroutine.resume(co)))
    assert.is_true(a:is_released())
    do
      local dropped = coroutine.create(function()
        ms.scope(function()
          b = ms.ones(1)
          coroutine.yield()
        end)
      end)
      coroutine.resume(dropped)
    end
    collected()
    assert.is_true(b:is_released())
  end)

  it("have modes of their own", function()
    local co = coroutine.wrap(function()
      ms.no_grad(function()
        coroutine.yield()
        assert.is_false(ms.is_grad_enabled())
      end)
      assert.is_true(ms.is_grad_enabled())
    end)
    co()
    assert.is_true(ms.is_grad_enabled())
    co()
    assert.is_true(ms.is_grad_enabled())
  end)

  -- Blocks that set a mode of the code inside them, and how to see whether it is set.
  local function half() return ms.ones(2, 2):matmul(ms.ones(2, 2)).dtype == "bfloat16" end
  local blocks = {
    no_grad = { function(fn) ms.no_grad(fn) end, function() return not ms.is_grad_enabled() end },
    enable_grad = { function(fn) ms.enable_grad(fn) end, ms.is_grad_enabled, ms.no_grad },
    autocast = { function(fn) ms.amp.autocast("bfloat16", fn) end, half },
    with_device = { function(fn) ms.with_device("meta", fn) end, function() return ms.ones(1).device == "meta" end },
    catch_warnings = { function(fn) ms.catch_warnings(fn) end,
    function() return require("moonshard.core.context").now.warnings ~= nil end },
    enable_wrap = { function(fn) ms.fsdp.wrap.enable_wrap({}, fn) end,
    function() return require("moonshard.core.context").now.wrap ~= nil end },
  }
  for name, block in ms.sorted_pairs(blocks) do
    it("keep " .. name .. " open across a yield, but not for other code", function()
      local run, is_set, around = block[1], block[2], block[3] or function(fn) return fn() end
      around(function()
        local function body()
          assert.is_false(is_set())
          run(function()
            coroutine.yield()
            assert.is_true(is_set())
            coroutine.yield()
          end)
          assert.is_false(is_set())
        end
        local a, b = coroutine.wrap(body), coroutine.wrap(body)
        a()
        assert.is_false(is_set())
        b()
        a()
        run(a)                                          -- continues inside another block
        assert.is_false(is_set())
        b()
        local left = coroutine.wrap(body)               -- never finishes
        left()
        left = nil                                      -- luacheck: ignore
        collectgarbage()
        assert.is_false(is_set())
        local failed = coroutine.create(function() run(function() coroutine.yield() error "stop" end) end)
        coroutine.resume(failed)
        assert.is_false((coroutine.resume(failed)))
        assert.is_false(is_set())
      end)
    end)
  end

  local m = ms.fsdp.FSDP(ms.nn.Linear(2, 2), { sharding_strategy = "no_shard" })
  local ddp = ms.nn.DDP(ms.nn.Linear(2, 2))
  local stops = {
    ["dist.record"] = ms.dist.record, ["fsdp.record"] = ms.fsdp.record,
    ["summon_full_params"] = function(fn) ms.fsdp.summon_full_params(m, fn) end,
    ["FSDP:no_sync"] = function(fn) m:no_sync(fn) end,
    ["DDP:no_sync"] = function(fn) ddp:no_sync(fn) end,
    join = function(fn) ddp:join(fn) end,
    ["the forward of a sharded module"] = function(fn)
      local Yields = ms.nn.Module:extend "Yields"
      function Yields:init() self.a = ms.nn.Linear(2, 2) end
      function Yields:forward(x) fn() return self.a(x) end
      ms.fsdp.fully_shard(Yields())(ms.ones(1, 2))
    end,
  }
  for name, block in ms.sorted_pairs(stops) do
    it("cannot yield out of " .. name .. ", but others may be resumed inside", function()
      local co = coroutine.create(function() block(function() coroutine.yield() end) end)
      local ok, why = coroutine.resume(co)
      assert.is_false(ok)
      assert.matches("^spec/tensor/scope_spec.lua:%d+: coroutine.yield inside .*" .. name:match "[%w ._]+$"
        .. ": the function passed to it must return without a yield", why)
      assert.are.equal("dead", coroutine.status(co))
      local n = 0
      block(function()
        for k in coroutine.wrap(function() coroutine.yield(1) coroutine.yield(2) end) do n = n + k end
      end)
      assert.are.equal(3, n)
      local after = coroutine.wrap(function() coroutine.yield(7) end)
      assert.are.equal(7, after())
    end)
  end

  it("pass values and errors as before", function()
    local co = coroutine.create(function(x) return coroutine.yield(x + 1) end)
    assert.are.same({ true, 2 }, { coroutine.resume(co, 1) })
    assert.are.same({ true, "x" }, { coroutine.resume(co, "x") })
    assert.are.same({ false, "cannot resume dead coroutine" }, { coroutine.resume(co) })
    local e = {}
    local ok, caught = pcall(coroutine.wrap(function() error(e) end))
    assert.is_false(ok)
    assert.is_true(rawequal(e, caught))
  end)
end)

describe("memory", function()
  -- Memcheck examines every element, so under it tensors and limits are a sixteenth.
  local scale = os.getenv "MOONSHARD_TOOL" == "valgrind" and 16 or 1
  local MiB = 2 ^ 20 / scale
  local engine = require "moonshard.core.ffi"
  local lib, state = engine.lib, engine.state
  before_each(function() state.gc_limit = 64 * MiB end)
  after_each(function() state.gc_limit = 64 * 2 ^ 20 end)

  it("of unscoped tensors follows the collector", function()
    collected()
    local before = live()
    for _ = 1, 100 do ms.ones(10) end
    collected()
    assert.is_true(live() <= before)
  end)

  it("stays bounded in a loop at top level", function()
    ms.reset_peak_memory_stats "cpu"
    local t = ms.zeros(256 / scale, 1024)
    for k = 1, 600 do local _ = t + k end
    t:release()
    assert.is_true(ms.memory_stats("cpu").peak_allocated < 400 * MiB)
  end)

  it("that a graph behind a small unscoped result holds stays bounded too", function()
    collected()
    ms.reset_peak_memory_stats "cpu"
    local before = ms.memory_stats("cpu").allocated
    local w = ms.ones(512 / scale, 512, { requires_grad = true })
    for _ = 1, 200 do
      -- 3 MiB of temporaries for a result of 4 bytes.
      local _ = ms.scope(function() return w:tanh():exp():tanh():sum() end)
    end
    assert.is_true(ms.memory_stats("cpu").peak_allocated < before * 2 + 200 * MiB)
  end)

  it("that dead tensors hold is reclaimed when memory is short", function()
    collected()
    lib.ms_empty_cache()
    local used = ms.memory_stats("cpu").allocated
    state.gc_limit = 2 ^ 40                         -- disables automatic collections
    state.memory_limit = used + 50 * MiB
    local ok, message = pcall(function()
      local t = ms.zeros(256 / scale, 1024)
      for _ = 1, 200 do t = t + 1 end
      assert.are.equal(200, t[1][1]:item())
      return ms.zeros(100, 2 ^ 20)
    end)
    state.memory_limit = 0
    assert.is_false(ok)                                 -- only the last tensor fails: it exceeds the limit
    assert.matches("100, 1048576", message:gsub("419430400", "100, 1048576"))
  end)

  it("is flat in a training loop without the collector", function()
    local w = ms.randn(16, 16, { requires_grad = true })
    local function step()
      local x = ms.randn(8, 16)
      local loss = x:matmul(w):relu():sum()
      loss:backward()
      w.grad = nil
    end
    collectgarbage "stop"
    local before
    for k in ms.steps(60) do
      step()
      if k == 10 then before = ms.memory_stats("cpu") end
      if k > 10 then assert.are.equal(before.allocated, ms.memory_stats("cpu").allocated) end
    end
    collectgarbage "restart"
  end)
end)
