-- SPDX-License-Identifier: MIT
--- ms.detect_anomaly: which line it names, and what it leaves alone.
local ms = require "moonshard"

-- Runs fn under detect_anomaly; returns the error's text, and the number of this file's lines in it.
local function anomaly(fn)
  local ok, text = pcall(ms.detect_anomaly, fn)
  assert.is_false(ok, "no error was raised")
  return text
end
local function has(text, part) assert(text:find(part, 1, true), ("'%s' lacks '%s'"):format(text, part)) end
local function line() return "anomaly_spec.lua:" .. debug.getinfo(2, "l").currentline end

describe("detect_anomaly", function()
  it("fails at the line of the first nan in forward, and says whether an argument has it", function()
    local at
    local text = anomaly(function()
      local x = ms.tensor { 1, -1, 4 } * 2
      at = line(); local y = x:log()
      return y + 1
    end)
    has(text, at .. ": log: the result, float32 [3] cpu, has nan, first at [2]; its arguments do not have it")
    has(anomaly(function() return ms.tensor({ { 1, 0 / 0 } }):exp() end),
      "exp: the result, float32 [1, 2] cpu, has nan, first at [1, 2]; one of its arguments (number 1) has it, too")
  end)

  it("fails at an inf that arguments do not explain", function()
    has(anomaly(function() return ms.tensor { 1, 0 }:reciprocal() end), "reciprocal: the result, float32 [2] cpu, has inf, first at [2]")
    ms.detect_anomaly(function()
      local mask = ms.full({ 2 }, -math.huge)
      assert.are.equal(0, (ms.ones(2) + mask):exp():sum():item())
      assert.are.equal(0, ms.ones(2):masked_fill(ms.tensor { true, true }, -math.huge):exp():sum():item())
    end)
    local was = ms.set_detect_anomaly(true, { inf = false })
    ms.tensor { 0 }:log()
    assert.is_true(ms.set_detect_anomaly(was))
  end)

  it("names the forward's line of a gradient that is not finite", function()
    local w = ms.tensor({ 4, 0 }, { requires_grad = true })
    local at
    local text = anomaly(function()
      local x = w * 1
      at = line(); local y = x:sqrt()
      local z = y * 3
      z:sum():backward()
    end)
    has(text, "backward of sqrt: the gradient of its argument, float32 [2] cpu, has inf, first at [2]; the gradients of its results do not have it; its forward ran at ")
    has(text, at)
    assert.is_nil(w.grad)
  end)

  it("names the line of an operator that changes its tensor in place, and of one inside a module", function()
    local w, at = ms.zeros(2, { requires_grad = true })
    local text = anomaly(function()
      local x = w * 1
      at = line(); x:sqrt_()
      x:sum():backward()
    end)
    has(text, at)
    local layer = ms.nn.Linear(2, 2)
    ms.no_grad(function() layer.weight:fill_(0 / 0) end)
    has(anomaly(function() at = line(); local y = layer(ms.ones(1, 2))
      return y
    end), at)
  end)

  it("names the line inside of the backward of a script's function", function()
    local at
    local broken = ms.Function { forward = function(_, x) return x * 1 end, backward = function(_, g)
      at = line(); local out = g / 0
      return out
    end }
    local w = ms.ones(2, { requires_grad = true })
    local text = anomaly(function() broken(w):sum():backward() end)
    has(text, at)
  end)

  it("works in half types, and on views", function()
    has(anomaly(function() return ms.tensor({ { 1, 2 }, { 3, -1 } }):t():to("bfloat16"):log() end), "first at [2, 2]")
    has(anomaly(function() return ms.tensor({ 60000 }):half() * 2 end), "float16 [1] cpu, has inf")
  end)

  it("changes nothing in values, and is off afterwards", function()
    ms.manual_seed(3)
    local function run()
      local w = ms.ones(3, { requires_grad = true })
      local out = (w * ms.tensor { 1, 2, 3 }):tanh():sum()
      out:backward()
      return w.grad:tolist(), out:item()
    end
    local grad, out = ms.detect_anomaly(run)
    assert.are.same({ grad, out }, { run() })
    assert.is_false(ms.set_detect_anomaly(false))
    assert.are.equal(-math.huge, ms.tensor({ 0 }):log():item())
  end)

  it("restores the mode when fn fails, and refuses what is not a function", function()
    assert.has.error(function() ms.detect_anomaly(function() error "x" end) end)
    assert.is_false(ms.set_detect_anomaly(false))
    assert.has.error(function() ms.detect_anomaly(5) end)
    assert.has.error(function() ms.set_detect_anomaly(true, { nan = true }) end)
  end)
end)
