-- SPDX-License-Identifier: MIT
local ms = require "moonshard"
local process = require "spec.support.process"
local raises = require "spec.support.raises"
local ranks = require "spec.support.ranks"
local nn, optim = ms.nn, ms.optim
local lr_scheduler = optim.lr_scheduler

local function rates(make, n, ...)
  local opt = optim.SGD({ nn.Parameter(ms.zeros(1)) }, { lr = 2 })
  local schedule = make(opt, ...)
  local list = {}
  for k = 1, n do
    assert.are.equal(opt.param_groups[1].lr, schedule.last_lr[1])
    assert.are.same(schedule.last_lr, schedule:get_last_lr())
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
    assert.are.same({ 1, 1, 2, 2 }, rates(lr_scheduler.constant, 4, { factor = 0.5, steps = 2 }))
    assert.are.same({ 2, 4, 6 }, rates(lr_scheduler.lambda, 3, function(step) return step + 1 end))
  end)

  it("warns of 0 steps, or refuses them, and says that #loader is 0", function()
    local loader = ms.data.DataLoader({ 1, 2, 3 }, { batch_size = 2 })
    local advice = "; a loader has loader:size() batches, and #loader is 0 in Lua"
    for _, name in ipairs { "linear", "cosine", "wsd" } do
      local warnings = ms.catch_warnings(function()
        local given = { steps = 5 * #loader, decay = name == "wsd" and 0 or nil }
        assert.are.same(name == "wsd" and { 2 } or { 0 }, rates(lr_scheduler[name], 1, given))
      end)
      assert.are.same({ ("lr_scheduler.%s: option 'steps' is 0, so every step has the last factor%s"):format(name, advice) },
        warnings)
    end
    local opt = optim.SGD({ nn.Parameter(ms.zeros(1)) }, { lr = 1, momentum = 0.9 })
    raises("lr_scheduler.cosine: option 'warmup' is 2, expected at most option 'steps', 0" .. advice, lr_scheduler.cosine,
      opt, { steps = #loader, warmup = 2 })
    raises("lr_scheduler.one_cycle: the number of steps is 0, expected a whole number from 1" .. advice, lr_scheduler.one_cycle,
      opt, { max_lr = 1, epochs = 3, steps_per_epoch = #loader })
    assert.are.same({}, ms.catch_warnings(function() lr_scheduler.cosine(opt, { steps = loader:size() }) end))
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

  it("continues composed schedules from their state, whatever the optimizer's learning rate was when they were made", function()
    local s = lr_scheduler
    local function exponential(o) return s.exponential(o, { gamma = 0.5 }) end
    local function warm_then_fall(o)
      local flat = s.constant(o, { factor = 0.1, steps = 2 })
      return s.sequential(o, { schedules = { flat, exponential(o) }, milestones = { 2 } })
    end
    local kinds = {
      chained = function(o) return s.chained(o, { s.constant(o, { factor = 1 }), exponential(o) }) end,
      sequential = warm_then_fall,
      nested = function(o)
        local both = s.chained(o, { exponential(o), s.linear(o, { steps = 8 }) })
        return s.sequential(o, { schedules = { both, warm_then_fall(o) }, milestones = { 3 } })
      end,
      remembering = function(o)
        return s.sequential(o, { schedules = { exponential(o), s.multiplicative(o, function(t) return 1 / t end),
          s.swa(o, { swa_lr = 0.25, anneal_steps = 4 }) }, milestones = { 1, 4 } })
      end,
    }
    local function new()
      local params = {}
      for k = 1, 2 do params[k] = { params = { nn.Parameter(ms.ones(1)) }, lr = 4 / k } end
      return optim.SGD(params, { lr = 1 })
    end
    for name, make in ms.sorted_pairs(kinds) do
      for at = 1, 6 do
        local o = new()
        local whole = make(o)
        for _ = 1, at do whole:step() end
        local saved, own = o:state_dict(), ms.deepcopy(whole:state_dict())
        local resumed = new()
        resumed:load_state_dict(saved)
        local again = make(resumed)
        again:load_state_dict(own)
        for _ = 0, 3 do
          assert.are.same(whole:get_last_lr(), again:get_last_lr(), ("%s after %d steps"):format(name, at))
          assert.are.equal(whole:get_last_lr()[2], resumed.param_groups[2].lr)
          whole:step()
          again:step()
        end
      end
    end
    local o = new()
    local schedule = kinds.chained(o)
    local sd = schedule:state_dict()
    sd.parts = nil                      -- as states of version 1.0
    sd.step, sd.base_lrs = 2, { 8, 16 }
    schedule:load_state_dict(sd)
    assert.are.same({ 2, 4 }, schedule:get_last_lr())
    sd = schedule:state_dict()
    sd.parts[2].step = 1.5
    raises("lr_scheduler: load_state_dict: parts[2].step is a number (1.5), expected a whole number from 0", function() schedule:load_state_dict(sd) end)
    sd.parts[2] = nil
    raises("lr_scheduler: load_state_dict: the number of parts is 1, expected that of the schedule's, 2",
      function() schedule:load_state_dict(sd) end)
  end)

  it("continues with the momentum that an earlier schedule of a sequence has left", function()
    local s = lr_scheduler
    local function cycle_first(o, last)
      return s.sequential(o, { schedules = { s.one_cycle(o, { max_lr = 1, steps = 20 }), last }, milestones = { 3 } })
    end
    local function make(o)                              -- a sequence in a sequence
      local inner = cycle_first(o, s.exponential(o, { gamma = 0.5 }))
      local fall = s.exponential(o, { gamma = 0.9 })
      return s.sequential(o, { schedules = { s.constant(o), inner, fall }, milestones = { 1, 6 } })
    end
    local function new() return optim.SGD({ nn.Parameter(ms.ones(1)) }, { lr = 1, momentum = 0.5 }) end
    for at = 0, 8 do
      local o = new()
      local whole = make(o)
      for _ = 1, at do whole:step() end
      local saved, own = o:state_dict(), whole:state_dict()
      local resumed = new()
      resumed:load_state_dict(saved)
      make(resumed):load_state_dict(own)
      assert.are.equal(o.param_groups[1].momentum, resumed.param_groups[1].momentum, at)
      assert.are.equal(o.param_groups[1].lr, resumed.param_groups[1].lr, at)
    end
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
      { { step = 2, base_lrs = {} }, "the number of base_lrs is 0, expected that of the optimizer's groups, 1" },
      { { step = 2, base_lrs = { 1, 2 } }, "the number of base_lrs is 2, expected that of the optimizer's groups, 1" },
      { { step = 2, base_lrs = { "a" } }, "base_lrs[1] is a string ('a')" },
    } do
      ok, e = pcall(schedule.load_state_dict, schedule, case[1])
      assert.is_false(ok)
      assert.truthy(e:find(case[2], 1, true), e)
    end
    assert.are.equal(1, schedule.count)
  end)
end)

describe("lr_scheduler", function()
  local function sgd(lr) return optim.SGD({ nn.Parameter(ms.zeros(1)) }, { lr = lr or 2, momentum = 0.9 }) end

  it("warms up, stays and decays in the shapes of WSD", function()
    local S = lr_scheduler.wsd
    assert.are.same({ 1, 2, 2, 2, 1, 0, 0 }, rates(S, 7, { steps = 5, warmup = 2, decay = 2 }))
    assert.are.same({ 2, 2, 1.1, 0.2 }, rates(S, 4, { steps = 3, decay = 2, min_factor = 0.1, shape = "cosine" }))
    assert.are.same({ 2, 1, 0.585786 }, rates(S, 3, { steps = 4, decay = 4, shape = "sqrt" }))
  end)

  it("begins a second schedule of an optimizer with the initial rate, or with the one that the script set", function()
    local opt = sgd()
    lr_scheduler.constant(opt, { factor = 0.5 })
    assert.are.equal(1, opt.param_groups[1].lr)
    lr_scheduler.exponential(opt, { gamma = 0.5 })
    assert.are.equal(2, opt.param_groups[1].lr)
    opt.param_groups[1].lr = 3
    lr_scheduler.constant(opt, { factor = 0.5 })
    assert.are.equal(1.5, opt.param_groups[1].lr)
  end)

  describe("takes other names of its options", function()
    for _, case in ipairs {
      { "linear", { steps = 4, start_factor = 0.25, end_factor = 1 }, "steps", "total_iters" },
      { "linear", { steps = 4 }, "steps", "num_training_steps" },
      { "constant", { steps = 2, factor = 0.5 }, "steps", "total_iters" },
      { "polynomial", { steps = 4, power = 2 }, "steps", "total_iters" },
      { "linear_warmup", { steps = 4 }, "steps", "total_iters" },
      { "linear_warmup", { steps = 4 }, "steps", "num_training_steps" },
      { "cosine", { steps = 6 }, "steps", "T_max" },
      { "cosine", { steps = 6, warmup = 2 }, "warmup", "num_warmup_steps" },
      { "cosine", { steps = 6, min_factor = 0.1 }, "min_factor", "min_lr_ratio" },
      { "wsd", { steps = 6, warmup = 2, decay = 3 }, "decay", "num_decay_steps" },
      { "wsd", { steps = 6, warmup = 2, decay = 3 }, "warmup", "warmup_steps" },
      { "one_cycle", { steps = 8, max_lr = 1, cycle_momentum = false }, "steps", "total_steps" },
      { "cosine_warm_restarts", { steps = 3, T_mult = 2 }, "steps", "T_0" },
      { "swa", { steps = 3, swa_lr = 0.5 }, "steps", "anneal_steps" },
      { "swa", { steps = 3, swa_lr = 0.5 }, "steps", "anneal_epochs" },
    } do
      local kind, given, ours, other = unpack(case)
      it(("%s: %s for %s"):format(kind, other, ours), function()
        local renamed = {}
        for name, value in pairs(given) do renamed[name == ours and other or name] = value end
        local right = rates(lr_scheduler[kind], 6, given)
        assert.are.same(right, rates(lr_scheduler[kind], 6, renamed))
        assert.is_true(right[1] ~= right[3])
        renamed[ours] = given[ours]
        local ok, message = pcall(lr_scheduler[kind], sgd(), renamed)
        assert.is_false(ok)
        local wanted = ("lr_scheduler.%s: options '%s' and '%s' mean the same; give one of them"):format(kind, ours, other)
        assert.truthy(message:find(wanted, 1, true), message)
        renamed[ours], renamed[other] = nil, "many"
        assert.matches("option '" .. other .. "' is a string", select(2, pcall(lr_scheduler[kind], sgd(), renamed)))
      end)
    end

    it("but no number of steps of PyTorch's without the factors, whose defaults differ", function()
      for _, case in ipairs {
        { "linear", { total_iters = 4 },
          "option 'end_factor' is missing, which 'total_iters' needs: PyTorch's default is 1; with 'steps', it is 0" },
        { "linear", { total_iters = 4, end_factor = 1 }, "option 'start_factor' is missing" },
        { "constant", { total_iters = 4 },
          "option 'factor' is missing, which 'total_iters' needs: PyTorch's default is 1/3; with 'steps', it is 1" },
        { "cosine", { T_max = 4, total_iters = 4 }, "options 'T_max' and 'total_iters' mean the same" },
      } do
        local ok, message = pcall(lr_scheduler[case[1]], sgd(), case[2])
        assert.is_false(ok)
        assert.truthy(message:find(case[3], 1, true), message)
      end
    end)
  end)

  it("refuses what does not fit together", function()
    local opt, other = sgd(), sgd()
    local plain = optim.SGD({ nn.Parameter(ms.zeros(1)) }, { lr = 1 })
    for _, case in ipairs {
      { "one_cycle", opt, { max_lr = 1 }, "expected a number, or options epochs and steps_per_epoch" },
      { "one_cycle", plain, { max_lr = 1, steps = 5 }, "group 1 has no momentum to cycle" },
      { "cyclic", plain, { base_lr = 0.1, max_lr = 1 }, "group 1 has no momentum to cycle" },
      { "wsd", opt, { steps = 5, decay = 4, warmup = 2 }, "expected at most option 'steps', 5, together" },
      { "chained", opt, {}, "the list of schedules is empty, expected at least one" },
      { "chained", opt, { lr_scheduler.step(other, { step_size = 1 }) }, "schedule 1 belongs to another optimizer" },
      { "chained", opt, { lr_scheduler.reduce_on_plateau(opt) }, "whose steps take a value" },
      { "sequential", opt, { schedules = { lr_scheduler.constant(opt) }, milestones = { 3 } },
        "the number of milestones is 1, expected 0, one fewer than schedules" },
      { "multistep", opt, { milestones = { 1.5 } }, "milestones[1] is a number (1.5), expected a whole number from 0" },
      { "reduce_on_plateau", opt, { factor = 1 }, "expected a number below 1" },
      { "cosine_warm_restarts", opt, { T_0 = 0 }, "option 'T_0'" },
    } do
      local ok, e = pcall(lr_scheduler[case[1]], case[2], case[3])
      assert.is_false(ok, case[1])
      assert.truthy(e:find(case[4], 1, true), e)
    end
    local ok, e = pcall(function() lr_scheduler.reduce_on_plateau(opt):step() end)
    assert.is_false(ok)
    assert.truthy(e:find("step: argument 1 is nil, expected a number", 1, true), e)
    ok, e = pcall(function()
      local s = lr_scheduler.one_cycle(opt, { max_lr = 1, total_steps = 2 })
      for _ = 1, 3 do s:step() end
    end)
    assert.is_false(ok)
    assert.truthy(e:find("step 3 was asked for, expected at most 2, the number of steps", 1, true), e)
  end)
end)

describe("lr_range_test", function()
  local function setting()
    ms.manual_seed(1)
    local m = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    local x = ms.randn(64, 4)
    return m, function()
      local loss = nn.F.mse_loss(m(x), x:sum(2, { keepdim = true }))
      loss:backward()
      return loss
    end
  end

  it("finds a rate that trains, stops when the loss explodes, and leaves everything as it was", function()
    local m, step = setting()
    local opt = optim.AdamW(m:parameters(), { lr = 0.1 })
    step()
    opt:step()
    local before, state = ms.deepcopy(m:state_dict()), ms.deepcopy(opt:state_dict())
    local range = ms.lr_range_test(opt, step, { from = 1e-5, to = 100, steps = 80 })
    assert.is_true(#range.lr < 80)
    assert.is_true(range.suggestion > 1e-4 and range.suggestion < 1)
    assert.are.equal(0.1, opt.param_groups[1].lr)
    for name, t in pairs(m:state_dict()) do assert.is_true(t:equal(before[name])) end
    assert.are.equal(tostring(state.state[1].step), tostring(opt:state_dict().state[1].step))
    assert.is_true(opt:state_dict().state[1].exp_avg:equal(state.state[1].exp_avg))
    assert.truthy(range:plot():svg():find("suggested learning rate", 1, true))
  end)

  it("writes its curve as SVG, and prints it", function()
    local m, step = setting()
    local range = ms.lr_range_test(optim.SGD(m:parameters(), { lr = 0.1 }), step, { from = 1e-4, to = 1, steps = 20 })
    local path = os.tmpname()
    range:plot():save(path)
    assert.matches("^<svg .-</svg>\n$", process.read(path))
    os.remove(path)
    assert.matches("learning rate.-suggested learning rate: %S+$", tostring(range))
  end)

  it("passes errors of the script on, and says when it began too high", function()
    local m, step = setting()
    local opt = optim.SGD(m:parameters(), { lr = 0.1 })
    local ok, e = pcall(ms.lr_range_test, opt, function() error("mine", 0) end)
    assert.is_false(ok)
    assert.are.equal("mine", e)
    assert.are.equal(0.1, opt.param_groups[1].lr)
    ok, e = pcall(ms.lr_range_test, opt, step, { from = 1e4, to = 1e5 })
    assert.is_false(ok)
    assert.truthy(e:find("set option 'from' below 10000", 1, true), e)
    ok, e = pcall(ms.lr_range_test, opt, function() return 0 / 0 end)
    assert.is_false(ok)
    assert.truthy(e:find("in step 1 the loss was not finite", 1, true), e)
  end)
end)

for world = 1, 3, 2 do
  ranks.describe(world, "lr_range_test over shards", function(rank)
    it("stops at the same step on every rank, though their losses differ, and restores the shards", function()
      ms.manual_seed(1)
      local m = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
      ms.fsdp.fully_shard(m)
      local opt = optim.AdamW(m:parameters(), { lr = 0.1 })
      local before = ms.fsdp.state_dict(m)
      ms.manual_seed(2 + rank)
      local x = ms.randn(16, 4) * (1 + 3 * rank)
      local range = ms.lr_range_test(opt, function()
        local loss = nn.F.mse_loss(m(x), x:sum(2, { keepdim = true }))
        loss:backward()
        return loss
      end, { from = 1e-4, to = 1000, steps = 60 })
      for _, other in ipairs(ms.dist.all_gather_object(range.loss)) do assert.are.same(range.loss, other) end
      assert.is_true(#range.lr < 60)
      for name, t in pairs(ms.fsdp.state_dict(m)) do assert.is_true(t:equal(before[name]), name) end
    end)
  end)
end
