-- SPDX-License-Identifier: MIT
--- The tape and its runs: accumulation, second backwards, versions, hooks, nesting, aborts, checkpoints, freeing.
local ms = require "moonshard"
local engine = require "moonshard.core.ffi"
local lib = engine.lib

local function leaf(list) return ms.tensor(list, { requires_grad = true }) end
local function values(t) return t and t:tolist() end
local function stats() return ms.memory_stats() end

local failure = require "spec.support.message"

describe("backward", function()
  it("adds up what reaches a leaf over several paths", function()
    ms.scope(function()
      local x, y = leaf { 2, 3 }, leaf { 5, 7 }
      local z = x * y + x
      ;(z * z):sum():backward()
      assert.same({ 2 * 12 * 6, 2 * 24 * 8 }, values(x.grad))
      assert.same({ 2 * 12 * 2, 2 * 24 * 3 }, values(y.grad))
    end)
  end)

  it("accumulates into an existing grad in place", function()
    ms.scope(function()
      local x = leaf { 1, 2 }
      ;(x * 3):sum():backward()
      local first = x.grad
      ;(x * x):sum():backward()
      assert.equal(first, x.grad)
      assert.same({ 5, 7 }, values(first))
    end)
  end)

  it("gives two leaves grads of their own when one gradient serves both", function()
    ms.scope(function()
      local a, b = leaf { 1, 1 }, leaf { 2, 2 }
      ;((a + b) * 3):sum():backward()
      ms.no_grad(function() a.grad:mul_(10) end)
      assert.same({ 30, 30 }, values(a.grad))
      assert.same({ 3, 3 }, values(b.grad))
    end)
  end)

  it("does not let a later contribution write into a gradient that another node holds", function()
    ms.scope(function()
      local a, b = leaf { 1, 1 }, leaf { 2, 2 }
      local first = a * 5                   -- older in the tape: contributes to `a` last
      ;((a + b) * 2 + first):sum():backward()
      assert.same({ 7, 7 }, values(a.grad))
      assert.same({ 2, 2 }, values(b.grad))
    end)
  end)

  it("takes a gradient for roots of more than one element, of the right shape only", function()
    ms.scope(function()
      local x = leaf { 1, 2 }
      local y = x * 2
      assert.matches("root 1 has shape %[2%]", failure(y.backward, y))
      assert.matches("shape %[3%], expected %[2%]", failure(y.backward, y, ms.ones(3)))
      y:backward(ms.tensor { 1, 10 })
      assert.same({ 2, 20 }, values(x.grad))
    end)
  end)

  it("refuses roots without a graph", function()
    ms.scope(function()
      local t = ms.ones(1)
      assert.matches("does not require grad", failure(t.backward, t))
    end)
  end)

  it("refuses a second time through a freed graph, and allows it with retain_graph", function()
    ms.scope(function()
      local x = leaf { 1, 2 }
      local y = (x * x):sum()
      y:backward()
      assert.matches("retain_graph", failure(y.backward, y))
      assert.same({ 2, 4 }, values(x.grad))
      local z = (x * x):sum()
      z:backward { retain_graph = true }
      z:backward()
      assert.same({ 6, 12 }, values(x.grad))
    end)
  end)

  it("goes through a chain of 100,000 operators, and frees one, without recursion", function()
    ms.scope(function()
      local x = leaf { 1 }
      local y = x
      for _ = 1, 100000 do
        local next_y = y + 1
        if y ~= x then y:release() end
        y = next_y
      end
      y:backward()
      assert.same({ 1 }, values(x.grad))
    end)
  end)

  it("leaks no bytes and no tensors", function()
    local function round()
      ms.scope(function()
        local x = leaf { 1, 2, 3 }
        local y = (x * x + x):sum()
        y:backward()
        pcall(y.backward, y)
        local z = (x * x):sum()                                          -- luacheck: ignore 211
      end)
    end
    round()
    local before = stats()
    for _ = 1, 20 do round() end
    assert.equal(before.allocated, stats().allocated)
    assert.equal(before.live_tensors, stats().live_tensors)
  end)
end)

describe("changes in place", function()
  it("are recorded on results", function()
    ms.scope(function()
      local a, b, x = leaf { 1, 1 }, leaf { 2, 2 }, leaf { 3, 4 }
      local c = a * b
      c:mul_(x)
      c:sum():backward()
      assert.same({ 6, 8 }, values(a.grad))
      assert.same({ 2, 2 }, values(x.grad))      -- computed with the old value of c
    end)
  end)

  it("turn a plain tensor into a result", function()
    ms.scope(function()
      local w, buffer = leaf { 1, 2 }, ms.zeros(2)
      buffer:add_(w)
      assert.is_true(buffer.requires_grad)
      buffer:sum():backward()
      assert.same({ 1, 1 }, values(w.grad))
    end)
  end)

  it("are refused on leaves and through views", function()
    ms.scope(function()
      local a = leaf { 1, 2, 3, 4 }
      assert.matches("a leaf that requires grad cannot be changed in place", failure(a.add_, a, 1))
      ms.no_grad(function() a:add_(1) end)
      local b = a * 1
      local v = b:view(2, 2)
      assert.matches("through a view", failure(v.add_, v, 1))
    end)
  end)

  it("of a saved tensor are an error at backward that names versions", function()
    ms.scope(function()
      local a, b = leaf { 1, 2 }, leaf { 3, 4 }
      local d = a * b
      local e = (d * b):sum()
      d:add_(1)
      assert.matches("input 1 of mul, float32 %[2%] cpu, was changed in place .* it is at version 1, saved at version 0", failure(e.backward, e))
      assert.is_nil(a.grad)
    end)
  end)
end)

describe("hooks", function()
  it("on a result see and replace the gradient, in the order they were registered", function()
    ms.scope(function()
      local x = leaf { 1, 2 }
      local y = x * 3
      local seen = {}
      y:register_hook(function(g)
        seen[#seen + 1] = values(g)
        return g * 10
      end)
      local second = y:register_hook(function(g) seen[#seen + 1] = values(g) end)
      local loss = y:sum()
      loss:backward { retain_graph = true }
      assert.same({ { 1, 1 }, { 10, 10 } }, seen)
      assert.same({ 30, 30 }, values(x.grad))
      second:remove()
      loss:backward()
      assert.equal(3, #seen)
    end)
  end)

  it("on a leaf see the whole gradient once, before it lands; leaf hooks run after", function()
    ms.scope(function()
      local x = leaf { 1, 2 }
      local log = {}
      x:register_hook(function(g)
        log[#log + 1] = values(g)
        assert.is_nil(x.grad)
        return g + 1
      end)
      x:register_post_accumulate_grad_hook(function(p)
        assert.equal(x, p)
        log[#log + 1] = values(p.grad)
      end)
      ;(x * 2 + x * 3):sum():backward()
      assert.same({ { 5, 5 }, { 6, 6 } }, log)
    end)
  end)

  it("run without gradients, in a scope of their own", function()
    ms.scope(function()
      local x = leaf { 1 }
      local kept, dropped
      local y = x * 2
      y:register_hook(function(g)
        assert.is_false(ms.is_grad_enabled())
        dropped = g * 1
        kept = (g * 7):keep()
      end)
      y:backward()
      assert.is_true(ms.is_grad_enabled())
      assert.is_true(dropped:is_released())
      assert.same({ 7 }, values(kept))
      kept:release()
    end)
  end)

  it("may run a backward of their own, over the same graph too", function()
    ms.scope(function()
      local x, w = leaf { 2, 3 }, leaf { 1, 1 }
      local y = x * x
      local inner
      local loss = (y * 4):sum()
      y:register_hook(function()
        if inner then return end
        inner = {}
        inner.same = values(ms.grad(loss, x, { retain_graph = true })[1])
        ms.enable_grad(function() (w * 5):sum():backward() end)
      end)
      loss:backward()
      assert.same({ 16, 24 }, inner.same)
      assert.same({ 16, 24 }, values(x.grad))
      assert.same({ 5, 5 }, values(w.grad))
    end)
  end)

  it("that use up the graph make the outer backward raise an error", function()
    ms.scope(function()
      local x = leaf { 2, 3 }
      local y = x * x
      local loss = (y * 4):sum()
      local once
      y:register_hook(function()
        if once then return end
        once = true
        ms.grad(loss, x, { retain_graph = false })
      end)
      -- The outer backward has already freed a part of the graph.
      assert.matches("retain_graph", failure(loss.backward, loss))
      assert.equal(0, engine.state.run_depth)
    end)
  end)

  it("that raise keep their message, close the run and leak nothing", function()
    local function round(at)
      local message
      ms.scope(function()
        local x, w = leaf { 1, 2 }, leaf { 3, 4 }
        local a = x * w
        local b = a * w
        local n = 0
        local function hook()
          n = n + 1
          if n == at then error({ "a table, unchanged" }) end
        end
        a:register_hook(hook)
        b:register_hook(hook)
        x:register_hook(hook)
        w:register_post_accumulate_grad_hook(hook)
        local loss = b:sum()
        local ok
        ok, message = pcall(loss.backward, loss)
        assert.equal(at > 4, ok)
        assert.equal(0, engine.state.run_depth)
        assert.is_true(ms.is_grad_enabled())
      end)
      return message
    end
    round(1)
    local before = stats()
    for at = 1, 5 do
      local message = round(at)
      if at <= 4 then assert.same({ "a table, unchanged" }, message) end
    end
    assert.equal(before.allocated, stats().allocated)
    assert.equal(before.live_tensors, stats().live_tensors)
  end)
end)

describe("grad", function()
  it("gives gradients of results and leaves and touches no grad", function()
    ms.scope(function()
      local x, w = leaf { 2, 3 }, leaf { 5, 6 }
      local y = x * x
      local g = ms.grad((y * w):sum(), { y, w, x })
      assert.same({ 5, 6 }, values(g[1]))
      assert.same({ 4, 9 }, values(g[2]))
      assert.same({ 20, 36 }, values(g[3]))
      assert.is_nil(x.grad)
      assert.is_nil(w.grad)
    end)
  end)

  it("names an unused input, or gives nil for it", function()
    ms.scope(function()
      local x, u = leaf { 1, 2 }, leaf { 1, 1 }
      local loss = (x * 2):sum()
      assert.matches("input 2 was not used", failure(ms.grad, loss, { x, u }, { retain_graph = true }))
      local g = ms.grad(loss, { x, u }, { allow_unused = true })
      assert.same({ 2, 2 }, values(g[1]))
      assert.is_nil(g[2])
    end)
  end)
end)

describe("Function", function()
  it("lets the rest of the graph complete when it gives no gradient", function()
    ms.scope(function()
      local stop = ms.Function { forward = function(_, x) return x * 1 end, backward = function() return nil end }
      local x, order = leaf { 1, 2 }, {}
      x:register_post_accumulate_grad_hook(function(p) order[#order + 1] = values(p.grad) end)
      ;(stop(x) + x * 3):sum():backward()
      assert.same({ { 3, 3 } }, order)
    end)
  end)

  it("raises if its gradient has the wrong shape", function()
    ms.scope(function()
      local bad = ms.Function { forward = function(_, x) return x * 1 end, backward = function() return ms.ones(3) end }
      local x = leaf { 1, 2 }
      local y = bad(x):sum()
      assert.matches("gradient 1 has shape %[3%], expected %[2%]", failure(y.backward, y))
    end)
  end)
end)

describe("checkpoint", function()
  it("gives the gradients of the plain graph, also of captured tensors", function()
    ms.scope(function()
      local function run(wrap)
        local c, w = leaf { 2, 3 }, leaf { 5, 6 }
        local pre = c * c
        local out = wrap(function(x) return x * w * pre end, pre)
        out:sum():backward()
        return { values(c.grad), values(w.grad) }
      end
      assert.same(run(function(fn, ...) return fn(...) end), run(ms.checkpoint))
    end)
  end)

  it("nests, and draws the random numbers of the first time", function()
    ms.scope(function()
      local x, runs = leaf { 1, 2, 3, 4 }, 0
      local function noisy(t)
        runs = runs + 1
        local mask = ms.rand(4)
        return t * mask * t
      end
      ms.manual_seed(7)
      local out = ms.checkpoint(function(t) return ms.checkpoint(noisy, t) * 2 end, x)
      local offset = ms.get_rng_state()[2]
      local forward = values(out)
      out:sum():backward()
      assert.equal(offset, ms.get_rng_state()[2])
      assert.is_true(runs >= 2)
      for k, g in ipairs(values(x.grad)) do assert.near(2 * forward[k] / k, g, 1e-6) end
    end)
  end)

  it("whose region raises in the recomputation aborts the backward", function()
    ms.scope(function()
      local x, times = leaf { 1 }, 0
      local out = ms.checkpoint(function(t)
        times = times + 1
        if times == 2 then error("again", 0) end
        return t * t
      end, x)
      assert.equal("again", failure(out.backward, out))
      assert.equal(0, lib.ms_run_top() == nil and 0 or 1)
    end)
  end)
end)
