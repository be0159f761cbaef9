-- SPDX-License-Identifier: MIT
--- Functions that take a function take anything that can be called: a module, or an object whose class has `__call`.
local ms = require "moonshard"
local message = require "spec.support.message"
local nn, fsdp = ms.nn, ms.fsdp

local Doubler = { __call = function(_, x) return x * 2 end }
local doubler = setmetatable({}, Doubler)

describe("a function that takes a function", function()
  local x = ms.ones(1, 2)
  local identity, linear = nn.Identity(), nn.Linear(2, 1)
  local calls = {
    no_grad = function(fn) return ms.no_grad(fn, x) end,
    enable_grad = function(fn) return ms.enable_grad(fn, x) end,
    inference_mode = function(fn) return ms.inference_mode(fn, x) end,
    scope = function(fn) return ms.scope(fn, x) end,
    with_device = function(fn) return ms.with_device("cpu", fn, x) end,
    detect_anomaly = function(fn) return ms.detect_anomaly(fn, x) end,
    autocast = function(fn) return ms.amp.autocast("bfloat16", fn, x) end,
    checkpoint = function(fn) return ms.checkpoint(fn, x) end,
    no_sync = function(fn) return nn.DDP(linear):no_sync(fn, x) end,
    summon_full_params = function(fn) return fsdp.summon_full_params(nn.Linear(1, 1), fn, x) end,
    record_function = function(fn) return ms.profiler.record_function("name", fn, x) end,
    capture = function(fn)
      local step = ms.capture(fn)
      step(x)
      return step(x)
    end,
  }
  for name, call in ms.sorted_pairs(calls) do
    it("takes a module and a callable table: " .. name, function()
      assert.are.same({ { 1, 1 } }, call(identity):tolist())
      assert.are.same({ { 2, 2 } }, call(doubler):tolist())
    end)
    it("refuses what cannot be called: " .. name, function()
      for _, wrong in ipairs { 3, x, linear:parameters(), "name" } do
        assert.matches("expected a function", message(call, wrong))
      end
    end)
  end

  it("calls a callable hook", function()
    local seen = 0
    local hook = setmetatable({}, { __call = function() seen = seen + 1 end })
    local layer = nn.Linear(2, 1)
    layer:register_forward_hook(hook)
    layer.weight:register_hook(hook)
    layer(x):sum():backward()
    assert.are.equal(2, seen)
  end)

  it("takes a step of ms.steps", function()
    local steps = {}
    ms.steps(3, setmetatable({}, { __call = function(_, step) steps[#steps + 1] = step end }))
    assert.are.same({ 1, 2, 3 }, steps)
  end)
end)
