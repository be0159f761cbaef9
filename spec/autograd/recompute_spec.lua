-- SPDX-License-Identifier: MIT
--- Results that backward computes again instead of keeping (GELU's option `recompute`).
local ms = require "moonshard"
local message = require "spec.support.message"
local nn = ms.nn
local F = nn.F

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
