-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim
local lr_scheduler = optim.lr_scheduler

local function rates(make, n, ...)
  local opt = optim.SGD({ nn.Parameter(ms.zeros(1)) }, { lr = 2 })
  local schedule = make(opt, ...)
  local list = {}
  for k = 1, n do
    assert.are.equal(opt.param_groups[1].lr, schedule.last_lr[1])
    list[k] = math.floor(schedule.last_lr[1] * 1e6 + 0.5) / 1e6
    schedule:step()
  end
  return list
end

describe("lr_scheduler", function()
  it("warms up, decays, stays constant", function()
    assert.are.same({ 0.5, 1, 1.5, 2, 2, 2 }, rates(lr_scheduler.linear_warmup, 6, { steps = 4 }))
    assert.are.same({ 0, 1, 2, 2 }, rates(lr_scheduler.linear_warmup, 4, { steps = 2, start_factor = 0 }))
    assert.are.same({ 2, 1.707107, 1, 0.292893, 0, 0 }, rates(lr_scheduler.cosine, 6, { steps = 4 }))
    assert.are.same({ 1, 2, 2, 1.1, 0.2, 0.2 }, rates(lr_scheduler.cosine, 6,
      { steps = 4, warmup = 2, min_factor = 0.1 }))
    assert.are.same({ 2, 1.5, 1, 0.5, 0, 0 }, rates(lr_scheduler.linear, 6, { steps = 4 }))
    assert.are.same({ 0, 0 }, rates(lr_scheduler.linear, 2, { steps = 0 }))
    assert.are.same({ 0, 0 }, rates(lr_scheduler.cosine, 2, { steps = 0 }))
    assert.are.same({ 1, 1, 2, 2 }, rates(lr_scheduler.constant, 4, { factor = 0.5, steps = 2 }))
    assert.are.same({ 2, 4, 6 }, rates(lr_scheduler.lambda, 3, function(step) return step + 1 end))
  end)

  it("keeps the ratio of groups, and continues from its state", function()
    local function new()
      local opt = optim.SGD({ { params = { nn.Parameter(ms.zeros(1)) }, lr = 1 },
        { params = { nn.Parameter(ms.zeros(1)) }, lr = 3 } })
      return opt, lr_scheduler.linear(opt, { steps = 10 })
    end
    local opt, schedule = new()
    for _ = 1, 5 do schedule:step() end
    assert.are.same({ 0.5, 1.5 }, schedule.last_lr)
    local opt2, schedule2 = new()
    schedule2:load_state_dict(schedule:state_dict())
    assert.are.equal(opt.param_groups[2].lr, opt2.param_groups[2].lr)
  end)

  it("refuses arguments that are no optimizer or function, and unknown names", function()
    assert.is_false(pcall(lr_scheduler.cosine, {}, { steps = 1 }))
    assert.is_false(pcall(lr_scheduler.lambda, optim.SGD { nn.Parameter(ms.zeros(1)) }, 3))
    assert.is_false(pcall(function() return lr_scheduler.cosin end))
    local opt = optim.SGD { nn.Parameter(ms.zeros(1)) }
    for _, case in ipairs {
      { "linear", { steps = -1 }, "option 'steps' is a number (-1), expected a whole number from 0" },
      { "linear_warmup", { steps = 2.5 }, "option 'steps'" }, { "linear_warmup", {}, "option 'steps' is missing" },
      { "cosine", { steps = 4, warmup = -1 }, "option 'warmup'" },
      { "cosine", { steps = 4, warmup = 5 }, "option 'warmup' is 5, expected at most option 'steps', 4" },
      { "constant", { steps = "3" }, "option 'steps'" },
    } do
      local ok, e = pcall(lr_scheduler[case[1]], opt, case[2])
      assert.is_false(ok)
      assert.truthy(e:find(case[3], 1, true), e)
    end
    local ok, e = pcall(lr_scheduler.lambda, opt, function() return nil end)
    assert.is_false(ok)
    assert.truthy(e:find("the factor of step 0 is nil, expected a number", 1, true), e)
    ok, e = pcall(lr_scheduler.constant, opt, { factor = 0 / 0 })
    assert.is_false(ok)
    assert.matches("the factor of step 0 is a number %(%-?nan%), expected a number", e)
    local schedule = lr_scheduler.linear(opt, { steps = 4 })
    schedule:step()
    for _, case in ipairs {
      { {}, "expected a table with step and base_lrs" },
      { { step = -5, base_lrs = { 1 } }, "step is a number (-5), expected a whole number from 0" },
      { { step = 0 / 0, base_lrs = { 1 } }, "expected a whole number from 0" },
      { { step = 2, base_lrs = {} }, "0 base_lrs, but the optimizer has 1 groups" },
      { { step = 2, base_lrs = { 1, 2 } }, "2 base_lrs, but the optimizer has 1 groups" },
      { { step = 2, base_lrs = { "a" } }, "base_lrs[1] is a string ('a')" },
    } do
      ok, e = pcall(schedule.load_state_dict, schedule, case[1])
      assert.is_false(ok)
      assert.truthy(e:find(case[2], 1, true), e)
    end
    assert.are.equal(1, schedule.count)
  end)
end)
