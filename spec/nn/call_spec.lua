-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn = ms.nn

local function module(fn, name)
  local M = nn.Module:extend(name or "M")
  function M:forward(...) return fn(self, ...) end
  return M()
end

local message = require "spec.support.message"

describe("a module call", function()
  it("passes every argument and result, also nil", function()
    local seen
    local m = module(function(_, ...)
      seen = select("#", ...)
      return nil, 2, nil
    end)
    assert.are.equal(3, select("#", m(nil, nil, nil)))
    assert.are.equal(3, seen)
    assert.are.equal(3, select("#", m()))
    assert.are.equal(0, seen)
  end)

  it("releases tensors made inside, except those it returns", function()
    local inner
    local m = module(function(_, x)
      inner = x + 1
      local out = inner * 2
      return out, { deep = { out + 1 } }
    end)
    local y, t = m(ms.ones(2))
    assert.is_true(inner:is_released())
    assert.are.same({ 4, 4 }, y:tolist())
    assert.are.same({ 5, 5 }, t.deep[1]:tolist())
    assert.truthy(message(function() return inner + 1 end):find(
      "tensor was released with its scope; return it, or keep() it", 1, true))
  end)

  it("gives its results to the enclosing scope", function()
    local m = module(function(_, x) return x + 1 end)
    local outer = module(function(_, x)
      local a = m(x)
      local b = m(a)
      assert(not a:is_released())
      return b, a
    end)
    local b, a = outer(ms.ones(1))
    assert.are.equal(3, b:item())
    assert.are.equal(2, a:item())
  end)

  it("keeps what a field owns, until the field is cleared", function()
    local m = module(function(self, x)
      self.last = x * 2
      return x + 1
    end)
    ms.scope(function()
      m(ms.ones(2))
      local first = m.last
      assert.are.same({ 2, 2 }, first:tolist())
      assert.is_false(first:is_released())
      m(ms.ones(2))
      assert.is_true(first:is_released())
    end)
    local second = m.last
    assert.are.same({ 2, 2 }, second:tolist())
    ms.scope(function() m.last = nil end)
    assert.is_true(second:is_released())
  end)

  it("keeps native memory flat without the collector when a field is replaced at every step", function()
    local m = module(function(self, x)
      self.state = (self.state or x) * 0.5
      return self.state + x
    end)
    local x = ms.ones(100)
    collectgarbage()
    collectgarbage("stop")
    local live = {}
    for step in ms.steps(50) do
      m(x)
      live[step] = ms.memory_stats().allocated
    end
    collectgarbage("restart")
    assert.are.equal(live[10], live[50])
  end)

  it("names its path in an operator's error, once", function()
    local Attn = nn.Module:extend("Attn")
    function Attn.forward(_, x) return x:matmul(ms.ones(7, 7)) end
    local Block = nn.Module:extend("Block")
    function Block:init() self.attn = Attn() end
    function Block:forward(x) return self.attn(x) end
    local GPT = nn.Module:extend("GPT")
    function GPT:init() self.blocks = nn.ModuleList { nn.Identity(), Block() } end
    function GPT:forward(x)
      for _, b in ipairs(self.blocks) do x = b(x) end
      return x
    end
    local gpt = GPT()
    assert.are.equal("gpt.blocks.2.attn: matmul: ", message(gpt, ms.ones(2, 3)):sub(1, 27))
    assert.are.equal("attn: matmul: ", message(gpt.blocks[2].attn, ms.ones(2, 3)):sub(1, 14))
  end)

  it("passes other errors on unchanged and closes its scope", function()
    local thrown, made = {}, nil
    local m = module(function(_, x)
      made = x + 1
      error(thrown, 0)
    end)
    local ok, e = pcall(m, ms.ones(1))
    assert.is_false(ok)
    assert.are.equal(thrown, e)
    assert.is_true(made:is_released())
    assert.are.equal("plain words", message(module(function() error("plain words", 0) end)))
  end)
end)

describe("a Sequential", function()
  it("releases a layer's input after its output is made", function()
    local seen = {}
    local function record(_, x)
      seen[#seen + 1] = x
      return x + 1
    end
    local last = module(function(_, x)
      assert(seen[2]:is_released() == true, "the second layer's input lives still")
      return record(nil, x)
    end)
    local given = ms.ones(1)
    local y = nn.Sequential(module(record), module(record), module(record), last)(given)
    assert.are.equal(5, y:item())
    assert.is_false(given:is_released())
  end)

  it("does not release a tensor that is the next output", function()
    local s = nn.Sequential(module(function(_, x) return x + 1 end), nn.Identity(), nn.Dropout(0), nn.ReLU())
    assert.are.same({ 2 }, s(ms.ones(1)):tolist())
  end)

  it("trains the same", function()
    local s = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    s(ms.ones(4, 2)):sum():backward()
    assert.are.same({ 3, 2 }, { unpack(s[1].weight.grad.shape) })
  end)
end)

describe("forward hooks", function()
  it("see arguments and output, and replace them", function()
    local m = module(function(_, a, b) return a + b end)
    local seen
    local pre = m:register_forward_pre_hook(function(self, args)
      assert.are.equal(m, self)
      assert.are.equal(2, args.n)
      return { args[1] * 10, args[2] }
    end)
    local post = m:register_forward_hook(function(_, args, out)
      seen = { args[1]:item(), out:item() }
      return out + 0.5
    end)
    assert.are.equal(12.5, m(ms.ones(1), ms.full({ 1 }, 2)):item())
    assert.are.same({ 10, 12 }, seen)
    pre:remove()
    post:remove()
    post:remove()
    assert.are.equal(3, m(ms.ones(1), ms.full({ 1 }, 2)):item())
  end)

  it("run in order of registration, prepended ones first", function()
    local order = {}
    local m = nn.Identity()
    for _, name in ipairs { "a", "b" } do m:register_forward_pre_hook(function() order[#order + 1] = name end) end
    m:register_forward_pre_hook(function() order[#order + 1] = "first" end, { prepend = true })
    m(1)
    assert.are.equal("first a b", table.concat(order, " "))
  end)

  it("get several outputs as an array with n", function()
    local m = module(function() return 1, nil, 3 end)
    m:register_forward_hook(function(_, _, out)
      assert.are.equal(3, out.n)
      return { 4, 5 }
    end)
    assert.are.same({ 4, 5 }, { m() })
  end)

  it("may remove themselves while they run", function()
    local m, calls, handle = nn.Identity(), 0, nil
    handle = m:register_forward_pre_hook(function()
      calls = calls + 1
      handle:remove()
    end)
    m(1)
    m(1)
    assert.are.equal(1, calls)
  end)
end)

describe("a full backward hook", function()
  it("gets gradients of inputs and outputs, and may replace grad_in", function()
    local m = nn.Linear(3, 2, { bias = false })
    ms.no_grad(function() m.weight:fill_(1) end)
    local seen
    local handle = m:register_full_backward_hook(function(self, grad_in, grad_out)
      assert.are.equal(m, self)
      seen = { grad_in.n, grad_out.n, grad_in[1]:tolist(), grad_out[1]:tolist() }
      return { grad_in[1] * 10 }
    end)
    local x = ms.ones(1, 3, { requires_grad = true })
    m(x):sum():backward()
    assert.are.same({ 1, 1, { { 2, 2, 2 } }, { { 1, 1 } } }, seen)
    assert.are.same({ { 20, 20, 20 } }, x.grad:tolist())
    handle:remove()
    x.grad = nil
    m(x):sum():backward()
    assert.are.same({ { 2, 2, 2 } }, x.grad:tolist())
  end)

  it("has nil where an argument takes no gradient", function()
    local m = module(function(_, x, k) return x * k end)
    local seen
    m:register_full_backward_hook(function(_, grad_in) seen = { grad_in.n, grad_in[1] ~= nil, grad_in[2] } end)
    m(ms.ones(1, { requires_grad = true }), 3):sum():backward()
    assert.are.same({ 2, true, nil }, seen)
  end)

  it("serves every call of the module", function()
    local m, calls = nn.Linear(1, 1), 0
    m:register_full_backward_hook(function() calls = calls + 1 end)
    local x = ms.ones(1, 1, { requires_grad = true })
    m(m(x)):sum():backward()
    assert.are.equal(2, calls)
  end)

  it("fails the backward with its own error", function()
    local m = nn.Linear(1, 1)
    m:register_full_backward_hook(function() error("no further", 0) end)
    local y = m(ms.ones(1, 1, { requires_grad = true })):sum()
    assert.are.equal("no further", message(function() y:backward() end))
  end)
end)
