-- SPDX-License-Identifier: MIT
--- The tape and its runs: accumulation, second backwards, versions, hooks, functions, modes, and the state after
--- errors (checkpoints: recompute_spec).
local ms = require "moonshard"
local close = ms.testing.assert_close
local state = require("moonshard.core.ffi").state

local failure = require "spec.support.message"
local function leaf(list, dtype) return ms.tensor(list, { requires_grad = true, dtype = dtype }) end
local collected = require "spec.support.collected"

describe("backward", function()
  it("adds gradients to the leaves", function()
    local w, x = leaf { 1, 2, 3 }, ms.tensor { 4, 5, 6 }
    local loss = (w * x):sum()
    assert.is_true(loss.requires_grad and not loss.is_leaf and w.is_leaf)
    assert.is_nil(w.grad)
    loss:backward()
    assert.are.same({ 4, 5, 6 }, w.grad:tolist());
    (w * x):sum():backward()
    assert.are.same({ 8, 10, 12 }, w.grad:tolist())
    assert.is_nil(x.grad)
  end)

  it("gives the same grad object at every read", function()
    local w = leaf { 1, 2 };
    (w * 2):sum():backward()
    local g = w.grad
    assert.is_true(rawequal(g, w.grad));
    (w * 2):sum():backward()
    assert.is_true(rawequal(g, w.grad))
    w.grad = nil
    assert.is_nil(w.grad)
    assert.are.same({ 4, 4 }, g:tolist())               -- the old gradient stays usable
    local h = ms.ones(2)
    w.grad = h
    assert.is_true(rawequal(h, w.grad))
    assert.matches("shape", failure(function() w.grad = ms.ones(3) end))
    assert.matches("dtype", failure(function() w.grad = ms.ones(2, { dtype = "float64" }) end))
    assert.matches("expected a tensor", failure(function() w.grad = 3 end))
    assert.is_true(rawequal(h, w.grad))
  end)

  it("gives two leaves grads of their own when one gradient serves both", function()
    local a, b = leaf { 1, 1 }, leaf { 2, 2 };
    ((a + b) * 3):sum():backward()
    ms.no_grad(function() a.grad:mul_(10) end)
    assert.are.same({ 30, 30 }, a.grad:tolist())
    assert.are.same({ 3, 3 }, b.grad:tolist())
  end)

  it("does not let a later contribution write into a gradient that another node holds", function()
    local a, b = leaf { 1, 1 }, leaf { 2, 2 }
    local first = a * 5;                    -- older in the tape: contributes to `a` last
    ((a + b) * 2 + first):sum():backward()
    assert.are.same({ 7, 7 }, a.grad:tolist())
    assert.are.same({ 2, 2 }, b.grad:tolist())
  end)

  it("takes a gradient for a root of more than one element, of the right shape only", function()
    local w = leaf { 1, 2 }
    local y = w * 3
    assert.matches("root 1 has shape %[2%]", failure(y.backward, y))
    assert.matches("shape %[3%], expected %[2%]", failure(y.backward, y, ms.ones(3)))
    y:backward(ms.tensor { 1, 10 })
    assert.are.same({ 3, 30 }, w.grad:tolist())
  end)

  it("frees the graph unless it is retained", function()
    local w = leaf { 2 }
    local y = (w * w):sum()
    y:backward(nil, { retain_graph = true })
    y:backward { retain_graph = true }
    y:backward()
    assert.are.same({ 12 }, w.grad:tolist())
    assert.matches("retain_graph", failure(y.backward, y))
    assert.are.same({ 12 }, w.grad:tolist())
  end)

  it("refuses tensors without history", function()
    local t = ms.ones(1)
    assert.matches("does not require grad", failure(t.backward, t))
    failure(function() ms.ones(1, { dtype = "int64", requires_grad = true }) end)
    local y = leaf { 1 } * 2
    failure(function() y.requires_grad = false end)
  end)

  it("goes through a chain of 100,000 operators, and frees one, without recursion", function()
    local w = leaf { 1 }
    local y = w
    for _ = 1, 100000 do
      local next_y = y + 1
      if y ~= w then y:release() end
      y = next_y
    end
    y:backward()
    assert.are.equal(1, w.grad:item())
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
    collected()                                    -- leftovers of earlier tests must not be collected during the test
    local before = ms.memory_stats()
    for _ = 1, 20 do round() end
    assert.are.equal(before.allocated, ms.memory_stats().allocated)
    assert.are.equal(before.live_tensors, ms.memory_stats().live_tensors)
  end)
end)

describe("changes in place", function()
  it("are recorded on results", function()
    local a, b, x = leaf { 1, 1 }, leaf { 2, 2 }, leaf { 3, 4 }
    local c = a * b
    c:mul_(x)
    c:sum():backward()
    assert.are.same({ 6, 8 }, a.grad:tolist())
    assert.are.same({ 2, 2 }, x.grad:tolist())   -- computed with the old value of c
  end)

  it("turn a plain tensor into a result", function()
    local w, buffer = leaf { 1, 2 }, ms.zeros(2)
    buffer:add_(w)
    assert.is_true(buffer.requires_grad)
    buffer:sum():backward()
    assert.are.same({ 1, 1 }, w.grad:tolist())
  end)

  it("are refused on leaves and through views", function()
    local a = leaf { 1, 2, 3, 4 }
    assert.matches("a leaf that requires grad cannot be changed in place", failure(a.add_, a, 1))
    ms.no_grad(function() a:add_(1) end)
    local v = (a * 1):view(2, 2)
    assert.matches("through a view", failure(v.add_, v, 1))
  end)

  it("of a saved tensor are an error at backward that names versions", function()
    local a, b = leaf { 1, 2 }, leaf { 3, 4 }
    for _, change in ipairs { function(d) d:add_(1) end, function(d) ms.no_grad(function() d:add_(1) end) end } do
      local d = a * b
      local e = (d * b):sum()
      change(d)
      assert.matches("input 1 of mul, float32 %[2%] cpu, was changed in place .* it is at version 1, saved at version 0",
        failure(e.backward, e))
      assert.is_nil(a.grad)
    end
  end)
end)

describe("modes", function()
  it("switch the graph off and on, errors or not", function()
    local w = leaf { 1 }
    ms.no_grad(function()
      assert.is_false(ms.is_grad_enabled())
      assert.is_false((w * 2).requires_grad)
      ms.enable_grad(function() assert.is_true((w * 2).requires_grad) end)
      assert.is_false(ms.is_grad_enabled())
    end)
    assert.is_true(ms.is_grad_enabled())
    pcall(ms.no_grad, error)
    assert.is_true(ms.is_grad_enabled())
    assert.are.equal(3, select("#", ms.no_grad(function() return 1, nil, nil end)))
    assert.is_false(w:detach().requires_grad)
    assert.is_true(ms.ones(1):requires_grad_().requires_grad)
    assert.is_false(leaf({ 1 }):requires_grad_(false).requires_grad)
  end)
end)

describe("ms.grad", function()
  it("gives gradients without touching the leaves", function()
    local a, b = leaf { 1, 2 }, leaf { 3, 4 }
    local grads = ms.grad((a * b):sum(), { a, b })
    assert.are.same({ 3, 4 }, grads[1]:tolist())
    assert.are.same({ 1, 2 }, grads[2]:tolist())
    assert.is_nil(a.grad)
    local mid = a * 2
    local g = ms.grad((mid * mid):sum(), mid)[1]
    assert.are.same({ 4, 8 }, g:tolist())
    g = ms.grad({ a * 2 }, { a }, { grad_outputs = { ms.tensor { 1, 3 } } })[1]
    assert.are.same({ 2, 6 }, g:tolist())
  end)
  it("names unused inputs", function()
    local a, b = leaf { 1 }, leaf { 1 }
    assert.matches("input 2 was not used", failure(ms.grad, (a * 2):sum(), { a, b }))
    local grads = ms.grad((a * 2):sum(), { a, b }, { allow_unused = true })
    assert.is_nil(grads[2])
  end)
end)

describe("hooks", function()
  it("on results see and replace the gradient, in the order they were registered", function()
    local w = leaf { 1, 2 }
    local y = w * 3
    local seen = {}
    local first = y:register_hook(function(g)
      seen[#seen + 1] = g:tolist()
      return g * 10
    end)
    local second = y:register_hook(function(g) seen[#seen + 1] = g:tolist() end)
    local loss = y:sum()
    loss:backward { retain_graph = true }
    assert.are.same({ { 1, 1 }, { 10, 10 } }, seen)
    assert.are.same({ 30, 30 }, w.grad:tolist())
    second:remove()
    second:remove()
    loss:backward { retain_graph = true }
    assert.are.equal(3, #seen)
    first:remove()
    w.grad = nil
    loss:backward()
    assert.are.equal(3, #seen)
    assert.are.same({ 3, 3 }, w.grad:tolist())
  end)

  it("on leaves see the whole gradient once, before it lands; post-accumulate hooks run after", function()
    local w = leaf { 1, 2 }
    local log = {}
    local before = w:register_hook(function(g)
      log[#log + 1] = g:tolist()
      assert.is_nil(w.grad)
      return g + 1
    end)
    local after = w:register_post_accumulate_grad_hook(function(p)
      assert.is_true(rawequal(p, w))
      log[#log + 1] = p.grad:tolist()
    end);
    (w * 2 + w * 3):sum():backward()
    assert.are.same({ { 5, 5 }, { 6, 6 } }, log)
    before:remove()
    after:remove();
    (w * 2):sum():backward()
    assert.are.equal(2, #log)
    assert.are.same({ 8, 8 }, w.grad:tolist())
  end)

  it("may run operators and a backward of their own, over the same graph too", function()
    local x, w = leaf { 2, 3 }, leaf { 1, 1 }
    local y = x * x
    local inner
    local loss = (y * 4):sum()
    y:register_hook(function(g)
      if inner then return end
      inner = {}
      inner.same = ms.grad(loss, x, { retain_graph = true })[1]:tolist()
      ms.enable_grad(function() (w * 5):sum():backward() end)
      return g * w:detach()
    end)
    loss:backward()
    assert.are.same({ 16, 24 }, inner.same)
    assert.are.same({ 16, 24 }, x.grad:tolist())
    assert.are.same({ 5, 5 }, w.grad:tolist())
  end)

  it("that use up the graph make the outer backward raise an error", function()
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
    assert.are.equal(0, state.run_depth)
  end)

  it("that raise end the backward with their error, and nothing stays open or leaks", function()
    local e = { "mine" }
    local function round(at)
      local caught
      ms.scope(function()
        local x, w = leaf { 1, 2 }, leaf { 3, 4 }
        local a = x * w
        local b = a * w
        local n = 0
        local function hook()
          n = n + 1
          if n == at then error(e) end
        end
        a:register_hook(hook)
        b:register_hook(hook)
        x:register_hook(hook)
        w:register_post_accumulate_grad_hook(hook)
        local loss = b:sum()
        local ok
        ok, caught = pcall(loss.backward, loss)
        assert.are.equal(at > 4, ok)
        assert.are.equal(0, state.run_depth)
        assert.is_true(ms.is_grad_enabled())
      end)
      return caught
    end
    round(1)
    collected()                                    -- leftovers of earlier tests must not be collected during the test
    local before = ms.memory_stats()
    for at = 1, 5 do
      local caught = round(at)
      if at <= 4 then assert.is_true(rawequal(e, caught)) end
    end
    assert.are.equal(before.allocated, ms.memory_stats().allocated)
    assert.are.equal(before.live_tensors, ms.memory_stats().live_tensors)
  end)

  it("run without gradients, and get tensors that are released after the call, unless kept", function()
    local w = leaf { 1 }
    local loose, kept
    w:register_hook(function(g)
      assert.is_false(ms.is_grad_enabled())
      loose, kept = g * 2, (g * 3):keep()
    end);
    (w * 1):sum():backward()
    assert.is_true(ms.is_grad_enabled())
    assert.is_true(loose:is_released())
    assert.are.equal(3, kept:item())
  end)

  it("left in the middle by a coroutine that was collected are aborted, with a warning", function()
    local w = leaf { 1, 2 }
    do
      local co = coroutine.create(function()
        w:register_hook(function() coroutine.yield() end);
        (w * 3):sum():backward()
      end)
      assert.is_true(coroutine.resume(co))
    end
    collected()
    local v = leaf { 1 }
    local list = ms.catch_warnings(function() (v * 2):sum():backward() end)
    assert.are.equal(1, #list)
    assert.matches("aborted", list[1])
    assert.are.equal(2, v.grad:item())
    assert.are.equal(0, state.run_depth)
  end)

  it("must be functions", function()
    assert.matches("expected a function", failure(function() leaf({ 1 }):register_hook(3) end))
    failure(function() ms.ones(1):register_post_accumulate_grad_hook(print) end)
  end)
end)

describe("ms.Function", function()
  local scaled = ms.Function {
    forward = function(ctx, x, factor)
      ctx:save(x)
      ctx.factor = factor
      return x * x * factor
    end,
    backward = function(ctx, grad)
      local x = ctx:saved()
      return grad * x * (2 * ctx.factor)
    end,
  }

  it("has a backward of its own", function()
    local w = leaf({ 1, 2 }, "float64")
    scaled(w, 5):sum():backward()
    assert.are.same({ 10, 20 }, w.grad:tolist())
    assert.is_true(ms.testing.gradcheck(function(x) return scaled(x, 3) end, { leaf({ 0.5, -1, 2 }, "float64") }))
  end)

  it("knows which arguments need gradients, and takes nil for none", function()
    local needs
    local f = ms.Function {
      forward = function(ctx, a, _, b)
        needs = { ctx.needs_grad[1], ctx.needs_grad[2], ctx.needs_grad[3] }
        return a + b, a - b
      end,
      backward = function(_, g1, g2)
        return g2 and g1 and g1 + g2 or g1 or g2, nil, g1
      end,
    }
    local a, b = leaf { 1 }, ms.tensor { 2 }
    local sum, difference = f(a, "x", b)
    assert.are.same({ true, false, false }, needs)
    assert.are.equal(3, sum:item());
    (sum * 2 + difference):sum():backward()
    assert.are.equal(3, a.grad:item())
    assert.is_nil(b.grad)
  end)

  it("gets zeros for a result without a gradient, unless its forward disables that",
    function()
    for _, zeros in ipairs { true, false } do
      local f = ms.Function {
        forward = function(ctx, x)
          if not zeros then ctx:set_materialize_grads(false) end
          return x * 2, "a", x * 3, x:reshape(2, 1):double()
        end,
        backward = function(_, g1, name, g2, g3)
          assert.is_nil(name)
          if not zeros then
            assert.is_nil(g1)
            assert.is_nil(g3)
            return g2 * 3
          end
          assert.are.same({ { 0 }, { 0 } }, g3:tolist())
          assert.are.equal("float64", g3.dtype)
          return g1 * 2 + g2 * 3
        end,
      }
      local x = leaf { 1, 2 }
      local _, name, b = f(x)
      assert.are.equal("a", name)
      b:sum():backward()
      assert.are.same({ 3, 3 }, x.grad:tolist())
    end
  end)

  it("lets the rest of the graph complete when it gives no gradient", function()
    local stop = ms.Function { forward = function(_, x) return x * 1 end, backward = function() return nil end }
    local x, order = leaf { 1, 2 }, {}
    x:register_post_accumulate_grad_hook(function(p) order[#order + 1] = p.grad:tolist() end);
    (stop(x) + x * 3):sum():backward()
    assert.are.same({ { 3, 3 } }, order)
  end)

  it("is not in a graph if none is recorded", function()
    local before = ms.memory_stats("cpu").live_tensors
    ms.scope(function()
      assert.is_false(scaled(ms.tensor { 1 }, 2).requires_grad)
      ms.no_grad(function() assert.is_false(scaled(leaf { 1 }, 2).requires_grad) end)
    end)
    collected()
    assert.is_true(ms.memory_stats("cpu").live_tensors <= before)
  end)

  it("drops what it saved with the graph", function()
    collected()
    local w = leaf { 1, 2 }
    local before = ms.memory_stats("cpu").live_tensors
    for _ = 1, 5 do
      ms.scope(function() scaled(w, 2):sum():backward() end)
      ms.scope(function() scaled(w, 2):sum() end)       -- its result is never used
    end
    w.grad = nil
    require("moonshard.autograd").drop_dead()
    assert.are.equal(before, ms.memory_stats("cpu").live_tensors)
  end)

  it("notices saved tensors that were changed", function()
    local w = leaf { 1, 2 }
    local x = ms.tensor { 1, 2 }
    local f = ms.Function {
      forward = function(ctx, a, b) ctx:save(b) return a * b end,
      backward = function(ctx, g) return g * ctx:saved() end,
    }
    local y = f(w, x):sum()
    x:add_(1)
    assert.matches("changed in place", failure(y.backward, y))
  end)

  it("raises what backward raises, unchanged", function()
    local e = {}
    local f = ms.Function { forward = function(_, a) return a * 2 end, backward = function() error(e) end }
    local w = leaf { 1 }
    local ok, caught = pcall(function() f(w):sum():backward() end)
    assert.is_false(ok)
    assert.is_true(rawequal(e, caught))
    local g = ms.Function { forward = function(_, a) return a * 2 end, backward = function() return 3 end }
    assert.matches("backward returned a number", failure(function() g(w):sum():backward() end))
    local wide = ms.Function { forward = function(_, a) return a * 2 end, backward = function() return ms.ones(3) end }
    assert.matches("gradient 1 has shape %[3%], expected %[1%]", failure(function() wide(w):sum():backward() end))
    assert.matches("unknown option 'backwards'; did you mean 'backward'",
      failure(ms.Function, { forward = print, backwards = print }))
  end)

  it("may return an input", function()
    local f = ms.Function { forward = function(_, a) return a end, backward = function(_, g) return g * 7 end }
    local w = leaf { 1 }
    local y = f(w)
    assert.is_false(rawequal(y, w))
    y:sum():backward()
    assert.are.equal(7, w.grad:item())
  end)
end)

describe("gradcheck", function()
  it("finds a wrong gradient", function()
    local wrong = ms.Function {
      forward = function(ctx, x) ctx:save(x) return x * x end,
      backward = function(ctx, g) return g * ctx:saved() * -2 end,
    }
    assert.matches("backward gives", failure(ms.testing.gradcheck, function(x) return wrong(x) end,
      { leaf({ 1, 2 }, "float64") }))
    assert.is_true(ms.testing.gradcheck(function(x, y) return x * y, x / y end,
      { leaf({ 1, 2 }, "float64"), leaf({ 3, 4 }, "float64") }))
    assert.matches("expected float64", failure(ms.testing.gradcheck, function(x) return x end, { leaf { 1 } }))
  end)
end)

describe("assert_close", function()
  it("has PyTorch's tolerances and shows the worst element", function()
    close(ms.tensor { 1, 2 }, ms.tensor { 1 + 1e-6, 2 })
    close(nil, nil)
    close({ ms.ones(1), a = 2 }, { ms.ones(1), a = 2 })
    assert.matches("worst at %[2%]: got 2, expected 2%.5", failure(close, ms.tensor { 1, 2 }, ms.tensor { 1, 2.5 }))
    assert.matches("shapes differ: got %[2%], expected %[1, 2%]", failure(close, ms.ones(2), ms.ones(1, 2)))
    assert.matches("dtypes differ", failure(close, ms.ones(2), ms.ones(2, { dtype = "float64" })))
    assert.matches("nil", failure(close, nil, ms.ones(1)))
    failure(close, ms.tensor { 0 / 0 }, ms.tensor { 0 / 0 })
    close(ms.tensor { 0 / 0 }, ms.tensor { 0 / 0 }, { equal_nan = true })
    failure(close, ms.ones(1), ms.tensor { 1.001 })
    close(ms.ones(1), ms.tensor { 1.001 }, { rtol = 0.01 })
    close(ms.tensor({ 1 }, { dtype = "bfloat16" }), ms.tensor({ 1.0078 }, { dtype = "bfloat16" }))
  end)

  it("accepts an infinity only if the same one is expected", function()
    local inf = math.huge
    close(ms.tensor { inf, -inf }, ms.tensor { inf, -inf })
    close(inf, inf)
    for _, pair in ipairs { { inf, -inf }, { 5, inf }, { 5, -inf }, { inf, 5 } } do
      assert.matches("difference inf", failure(close, ms.tensor { 1, pair[1] }, ms.tensor { 1, pair[2] }))
      assert.matches("difference inf", failure(close, pair[1], pair[2]))
      assert.is_false(ms.tensor { pair[1] }:allclose(ms.tensor { pair[2] }))
    end
  end)

  it("refuses invalid tolerances", function()
    assert.matches("option 'rtol' is a number %(%-1%), expected a number from 0",
      failure(close, ms.ones(1), ms.ones(1), { rtol = -1 }))
    assert.matches("option 'atol' is a number %(%-?nan%)", failure(close, 1, 1, { atol = 0 / 0 }))
    local a = ms.ones(1)
    assert.matches("allclose: option 'atol' is a number %(%-1%)", failure(a.allclose, a, a, { atol = -1 }))
  end)
end)
