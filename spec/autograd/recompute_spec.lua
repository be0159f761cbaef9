-- SPDX-License-Identifier: MIT
--- Results that backward computes again instead of keeping: GELU's option `recompute`, and ms.checkpoint.
local ms = require "moonshard"
local collected = require "spec.support.collected"
local message = require "spec.support.message"
local close, lib = ms.testing.assert_close, require("moonshard.core.ffi").lib
local nn = ms.nn
local F = nn.F

local function leaf(list) return ms.tensor(list, { requires_grad = true }) end

local devices = ms.cuda.is_available() and { "cpu", "cuda" } or { "cpu" }

--- An MLP's gradients with or without recompute, and the bytes that its graph holds.
local function mlp(device, approximate, recompute)
  ms.manual_seed(1)
  local net = nn.Sequential(nn.Linear(64, 256, { device = device }),
    nn.GELU { approximate = approximate, recompute = recompute }, nn.Linear(256, 64, { device = device }))
  local x = ms.randn(128, 64):to(device):requires_grad_()
  local before = ms.memory_stats(device).allocated
  local y = net(x)
  local held = ms.memory_stats(device).allocated - before
  y:sum():backward()
  return held, { x.grad, net[1].weight.grad, net[1].bias.grad, net[3].weight.grad, net[3].bias.grad }
end

describe("a result that backward computes again", function()
  for _, device in ipairs(devices) do
    for _, approximate in ipairs { "none", "tanh" } do
      it(("is not held, and changes no bit: %s, on %s"):format(approximate, device), function()
        local kept, want = mlp(device, approximate, false)
        local held, got = mlp(device, approximate, true)
        assert.are.equal(128 * 256 * 4, kept - held)
        for k, t in ipairs(want) do assert.is_true(got[k]:equal(t), "gradient " .. k) end
      end)
    end
  end

  it("serves several users, a chain, a repeated backward and a checkpoint", function()
    local x, w = ms.randn(5, 6):requires_grad_(), ms.randn(6, 6):requires_grad_()
    local function loss(recompute)
      local y = F.gelu(F.gelu(x, { recompute = recompute }), { recompute = recompute })
      return (y:matmul(w) * y:matmul(w:t()) + y * y):sum()
    end
    local want = ms.grad(loss(false), { x, w })
    local l = loss(true)
    for _, got in ipairs { ms.grad(l, { x, w }, { retain_graph = true }), ms.grad(l, { x, w }),
      ms.grad(ms.checkpoint(loss, true), { x, w }) } do
      assert.is_true(got[1]:equal(want[1]) and got[2]:equal(want[2]))
    end
    assert.is_true(ms.testing.gradcheck(function(t) return F.gelu(t, { recompute = true }) * t end,
      { ms.randn(4, { dtype = "float64" }):requires_grad_() }))
  end)

  it("is the old one after a change in place; a change of its input is an error", function()
    local x, w = ms.randn(5, 6):requires_grad_(), ms.randn(6, 6):requires_grad_()
    local h = x * 2
    local y = F.gelu(h, { recompute = true })
    local l = y:matmul(w):sum()
    local want = y:detach():t():matmul(ms.ones(5, 6))
    ms.no_grad(function() y:mul_(3) end)
    assert.is_true(ms.grad(l, { w }, { retain_graph = true })[1]:equal(want))
    ms.no_grad(function() h:add_(1) end)
    local text = message(function() l:backward() end)
    assert.is_truthy(text:find("input 1 of gelu, float32 [5, 6] cpu, was changed in place after it was saved", 1, true), text)
  end)

  it("is kept where its operator's input is not, and without gradients", function()
    local ops = require "moonshard.nn.ops"
    local text = message(function() ops.recompute(ms.randn(3):requires_grad_():tanh()) end)
    assert.is_truthy(text:find("recompute: float32 [3] cpu was made by tanh, expected an operator with one output that keeps all of its inputs", 1,
      true), text)
    local y = F.gelu(ms.ones(3), { recompute = true })
    assert.is_true(y:equal(F.gelu(ms.ones(3))))
  end)

  it("does not change the losses of a GPT", function()
    local function losses(recompute)
      ms.manual_seed(4)
      local gpt = require "moonshard.models.gpt" { vocab = 20, context = 8, layers = 2, heads = 2, dim = 16,
        recompute = recompute }
      local optimizer, ids, list = ms.optim.AdamW(gpt:parameters(), { lr = 0.01 }), ms.randint(0, 20, { 3, 8 }), {}
      for k = 1, 3 do
        local loss = gpt(ids, ids)
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
        list[k] = loss:item()
      end
      return list
    end
    assert.are.same(losses(false), losses(true))
  end)
end)

describe("ms.checkpoint", function()
  it("counts as one use: hooks of a parameter that several regions share run once, with the whole gradient", function()
    local function run(region)
      local w, b, x = leaf { 2, 3 }, leaf { 1, 1 }, ms.tensor { 1, 2 }
      local seen, landed = {}, {}
      w:register_hook(function(g) seen[#seen + 1] = g:tolist() end)
      w:register_post_accumulate_grad_hook(function(p) landed[#landed + 1] = p.grad:tolist() end)
      local h = region(function(t) return t * w + b end, x * w)
      h = region(function(t) return (t * w):tanh() * w end, h)
      local kept = region(function(t) return t * w end, h)                -- no gradient reaches this tensor
      h:sum():backward()
      assert.is_false(kept:is_released())
      assert.are.equal(1, #seen)
      assert.are.equal(1, #landed)
      return { seen[1], landed[1], w.grad:tolist(), b.grad:tolist() }
    end
    assert.are.same(run(function(fn, ...) return fn(...) end), run(ms.checkpoint))
  end)

  it("gives ms.grad the whole gradient of what several regions share", function()
    local function run(region)
      local w = leaf { 2, 3 }
      local h = region(function(t) return t * w end, ms.tensor { 1, 2 })
      h = region(function(t) return t * w * w end, h)
      return ms.grad({ h:sum() }, { w })[1]:tolist()
    end
    assert.are.same({ 12, 54 }, run(ms.checkpoint))
    assert.are.same(run(function(fn, ...) return fn(...) end), run(ms.checkpoint))
  end)

  it("that fails in its forward leaves nothing behind", function()
    local w = leaf { 2 }
    assert.is_false(pcall(ms.checkpoint, function(t) local y = t * w error("no" .. y:item()) end, ms.ones(1)))
    local n = 0
    w:register_post_accumulate_grad_hook(function() n = n + 1 end)
    ms.checkpoint(function(t) return t * w end, ms.ones(1)):sum():backward()
    assert.are.equal(1, n)
    assert.are.equal(1, w.grad:item())
  end)

  local function region(x, w) return (x:matmul(w)):relu():matmul(w):tanh() end

  it("gives the gradients of the plain region", function()
    ms.manual_seed(3)
    local x, w = ms.randn(4, 4, { requires_grad = true }), ms.randn(4, 4, { requires_grad = true })
    region(x, w):sum():backward()
    local gx, gw = x.grad:clone(), w.grad:clone()
    x.grad, w.grad = nil, nil
    local runs = 0
    local y = ms.checkpoint(function(a, b)
      runs = runs + 1
      return region(a, b)
    end, x, w)
    y:sum():backward()
    assert.are.equal(2, runs)
    close(x.grad, gx)
    close(w.grad, gw)
  end)

  it("reaches parameters that are no arguments, also when no argument requires grad", function()
    local x, w = ms.ones(2, 2), ms.ones(2, 2, { requires_grad = true })
    ms.checkpoint(function(a) return a:matmul(w) end, x):sum():backward()
    assert.are.same({ { 2, 2 }, { 2, 2 } }, w.grad:tolist())
  end)

  it("draws the same random numbers again, nested too, and does not change the generator's state", function()
    for _, nested in ipairs { false, true } do
      local w = ms.ones(50, { requires_grad = true })
      local masks = {}
      local function noisy(a)
        local m = ms.rand(50)
        masks[#masks + 1] = m:tolist()
        return a * m
      end
      ms.manual_seed(11)
      local y = ms.checkpoint(nested and function(a) return ms.checkpoint(noisy, a) end or noisy, w)
      local after = ms.rand(3):tolist()
      y:sum():backward()
      assert.are.same(masks[1], masks[#masks])
      assert.are.same(masks[1], w.grad:tolist())
      assert.is_true(#masks >= 2)
      ms.manual_seed(11)
      ms.rand(50)
      assert.are.same(after, ms.rand(3):tolist())
    end
  end)

  it("whose region raises in the recomputation aborts the backward", function()
    local x, times = leaf { 1 }, 0
    local out = ms.checkpoint(function(t)
      times = times + 1
      if times == 2 then error("again", 0) end
      return t * t
    end, x)
    assert.are.equal("again", message(out.backward, out))
    assert.is_true(lib.ms_run_top() == nil)
  end)

  it("nests, and passes other arguments through", function()
    local w = leaf { 2 }
    local y, note = ms.checkpoint(function(a, k)
      return ms.checkpoint(function(b) return b * b end, a) * k, "note"
    end, w, 3)
    assert.are.equal("note", note)
    y:sum():backward()
    assert.are.equal(12, w.grad:item())
  end)

  it("is refused if the recomputation gives a result without a graph, or of another kind", function()
    local w = leaf { 2 }
    local function changing(second)
      local ran = 0
      return function(a)
        ran = ran + 1
        return ran == 1 and a * w or second(a)
      end
    end
    local function gone(second) return message(function() ms.checkpoint(changing(second),
      ms.ones(1)):sum():backward() end) end
    for name, second in pairs {
      detached = function(a) return (a * w):detach() end,
      constant = function(a) return a + 1 end,
      no_grad = function(a) return ms.no_grad(function() return a * w end) end,
    } do
      assert.matches("checkpoint: no result of the recomputed function has a graph, so no gradient passes through it; the function must do the same as in the forward",
        gone(second), name)
    end
    assert.matches("checkpoint: result 1 was float32 %[2%] when the function was recomputed, but float32 %[1%] in the forward",
      gone(function(a) return ms.cat { a, a } * w end))
    assert.matches("checkpoint: result 1 was float64 %[1%] when the function was recomputed",
      gone(function(a) return (a * w):double() end))
    assert.is_nil(w.grad)
    -- A region of several results, of which one requires no gradient in either run, is no error.
    local y, aux = ms.checkpoint(function(a) return a * w, ms.ones(1) end, ms.ones(1))
    ;(y + aux):sum():backward()
    assert.are.equal(1, w.grad:item())
  end)

  it("keeps less than the plain region", function()
    local x = ms.randn(64, 64, { requires_grad = true })
    local function chain(a)
      for _ = 1, 10 do a = a:tanh() end
      return a
    end
    local function held(fn)
      collected()
      local before = ms.memory_stats("cpu").allocated
      return ms.scope(function()
        local y = fn()
        return ms.memory_stats("cpu").allocated - before, y
      end)
    end
    local plain = held(function() return chain(x) end)
    local less = held(function() return ms.checkpoint(chain, x) end)
    assert.is_true(less < plain / 4, less .. " against " .. plain)
  end)
end)
