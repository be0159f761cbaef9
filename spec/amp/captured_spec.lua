-- SPDX-License-Identifier: MIT
--- Gradient scalers in captured steps: the bits of uncaptured ones, also where steps are skipped. On a GPU, which
--- decides about the steps, the host waits for nothing.
local ms = require "moonshard"
local process = require "spec.support.process"
local training = require "spec.support.captured_training"
local nn, optim = ms.nn, ms.optim

local OPTIMIZERS = {
  { "AdamW", { lr = 1e-2 } },
  { "SGD", { lr = 1e-2, momentum = 0.9 } },
  { "NAdam", { lr = 1e-2 } },                           -- has factors that depend on all earlier steps
  { "RAdam", { lr = 1e-2, weight_decay = 0.1 } },
  { "ASGD", { lr = 1e-2 } },
}

-- A model with two groups of parameters, its optimizer, a scaler and the step. The scale grows and backs off often.
local function trainer(name, given)
  local model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
  local opt = optim[name]({ { params = model[1]:parameters() }, { params = model[3]:parameters(), lr = 5e-3 } }, given)
  local scaler = ms.amp.GradScaler { init_scale = 2 ^ 10, growth_factor = 3, backoff_factor = 0.3, growth_interval = 3 }
  return function(x, y)
    opt:zero_grad()
    local loss = nn.F.mse_loss(model(x), y)
    scaler:scale(loss):backward()
    scaler:unscale_(opt)
    nn.utils.clip_grad_norm_(model:parameters(), 1)
    scaler:step(opt)
    scaler:update()
    return loss, scaler.scale_tensor
  end, model, opt, scaler
end

-- Steps whose data has an infinity. The third step is the first that is repeated.
local BAD = { [1] = true, [5] = true, [6] = true, [13] = true, [14] = true, [15] = true, [22] = true, [39] = true }

local function batch(k)
  local x, y = ms.randn(8, 6), ms.randn(8, 3)
  if BAD[k] then x = x / ms.zeros(1) end
  return x, y
end

-- What there is to compare after a training: the optimizer's and the scaler's state, without tensors; and tensors.
local function outcome(model, opt, scaler, tensors)
  local numbers = { scaler:state_dict(), scaler:get_scale() }
  for _, p in ipairs(model:parameters()) do
    tensors[#tensors + 1] = p:detach()
    local state = opt:state_of(p) or {}
    numbers[#numbers + 1] = state.step or 0
    for _, name in ipairs(opt._row.states) do tensors[#tensors + 1] = state[name] end
  end
  for k, t in ipairs(tensors) do tensors[k] = t:cpu():nan_to_num() end
  return numbers, tensors
end

-- Trains for n steps; each_step(k, fn, opt, scaler, captured), if given, makes step k.
local function train(n, case, capture, each_step)
  ms.manual_seed(4)
  local fn, model, opt, scaler = trainer(unpack(case))
  local schedule = optim.lr_scheduler.lambda(opt, function(k) return 1 / (1 + k % 5) end)
  local step = capture and ms.capture(fn) or fn
  local seen = {}
  for k in ms.steps(n) do
    local x, y = batch(k)
    local loss, scale
    if each_step then loss, scale = each_step(k, step, x, y, { fn = fn, model = model, opt = opt, scaler = scaler })
    else loss, scale = step(x, y) end
    if loss then seen[#seen + 1], seen[#seen + 2] = loss:detach():clone():keep(), scale:clone():keep() end
    schedule:step()
  end
  local numbers, tensors = outcome(model, opt, scaler, seen)
  return { numbers = numbers, tensors = tensors, text = tostring(step), step = step }
end

local function compare(n, case, each_step)
  local want, got = train(n, case, false, each_step), train(n, case, true, each_step)
  assert.are.same(want.numbers, got.numbers)
  training.same(want.tensors, got.tensors)
  return got
end

for _, device in ipairs { "cpu", "cuda" } do
  local function on_device(name, fn)
    it(name, function()
      if device == "cuda" and not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
      ms.with_device(device, fn)
    end)
  end

  describe(("a gradient scaler in a captured step on %s #%s"):format(device, device), function()
    for _, case in ipairs(OPTIMIZERS) do
      on_device("gives the bits, states and counts of uncaptured steps, of which some are skipped: " .. case[1], function()
        local got = compare(40, case)
        -- Step 1 makes no state, so step 2 does, and is recorded; 7 later ones are skipped.
        assert.are.equal(40 - 8, got.numbers[3])
        if device == "cuda" then
          local all, within = got.text:match "(%d+) pieces of work, (%d+) in 1 CUDA graph,"
          assert.is_not_nil(all, got.text)
          assert.are.equal(all, within)
        end
      end)
    end

    -- The numbers of each repetition exceed 64 KB. With so many groups, 8 repetitions may be unknown to the host.
    on_device("has the bits of uncaptured steps with many parameters, each in a group of its own", function()
      local function results(capture)
        ms.manual_seed(4)
        local layers, groups = {}, {}
        for k = 1, 60 do
          layers[k] = nn.Linear(3, 3)
          for _, p in ipairs(layers[k]:parameters()) do groups[#groups + 1] = { params = { p }, lr = 1e-3 * k } end
        end
        local model = nn.Sequential(layers)
        local opt, scaler = optim.Adam(groups), ms.amp.GradScaler { growth_interval = 2 }
        local function fn(x)
          opt:zero_grad()
          local loss = model(x):pow(2):mean()
          scaler:scale(loss):backward()
          scaler:step(opt)
          scaler:update()
          return loss, scaler.scale_tensor
        end
        local step, seen = capture and ms.capture(fn) or fn, {}
        for k in ms.steps(24) do
          local x = ms.randn(2, 3)
          local loss, scale = step(BAD[k] and x / 0 or x)
          seen[#seen + 1], seen[#seen + 2] = loss:detach():clone():keep(), scale:clone():keep()
        end
        return outcome(model, opt, scaler, seen)
      end
      local want, list = results(false)
      local got, captured = results(true)
      assert.are.same(want, got)
      assert.are.equal(24 - 7, got[3])
      training.same(list, captured)
    end)

    on_device("has its counts and scale read between repetitions", function()
      local read = {}
      compare(16, OPTIMIZERS[1], function(_, step, x, y, of)
        local loss, scale = step(x, y)
        read[#read + 1] = { of.opt:state_of(of.model:parameters()[1]), of.scaler:state_dict() }
        read[#read][1] = read[#read][1] and read[#read][1].step or 0
        return loss, scale
      end)
      for k = 1, 16 do assert.are.same(read[k], read[16 + k]) end
      assert.are.equal(16 - 6, read[32][1])
    end)

    on_device("may be used outside of the captured step in between, also with some of the gradients", function()
      compare(24, OPTIMIZERS[1], function(k, step, x, y, of)
        if k % 4 ~= 0 then return step(x, y) end
        if k % 8 ~= 0 then return of.fn(x, y) end
        of.opt:zero_grad()
        of.model[3].bias.grad = ms.ones(3)
        of.opt:step()
        of.opt:zero_grad()
      end)
    end)

    on_device("takes a state that is loaded in between, and is read after the step was released", function()
      local got = compare(20, OPTIMIZERS[2], function(k, step, x, y, of)
        if k == 11 then
          of.scaler:load_state_dict { scale = 8, growth_factor = 2, backoff_factor = 0.25, growth_interval = 5,
            growth_tracker = 4 }
        end
        local loss, scale = step(x, y)
        if k == 20 and step ~= of.fn then step:release() end
        return loss, scale
      end)
      assert.are.equal(2, got.numbers[1].growth_factor)
    end)

    on_device("is shared by two captured steps, which take turns", function()
      local other
      compare(24, OPTIMIZERS[1], function(k, step, x, y, of)
        if step == of.fn then return step(x, y) end
        other = k > 1 and other or ms.capture(of.fn)
        return (k % 5 < 3 and step or other)(x, y)
      end)
    end)

    on_device("is refused with an optimizer whose steps are Lua functions", function()
      local model = nn.Linear(6, 3)
      local opt, scaler = optim.LAMB(model:parameters()), ms.amp.GradScaler()
      local step = ms.capture(function(x)
        scaler:scale(model(x):sum()):backward()
        scaler:step(opt)
        scaler:update()
      end, { warmup = 0 })
      local ok, message = pcall(step, ms.ones(2, 6))
      assert.is_false(ok)
      assert.matches("captured step: the steps of LAMB are Lua functions", message)
    end)

    on_device("decides also where the optimizer makes a second step, or two with one scaler", function()
      for _, scaled in ipairs { false, true } do
        local function results(capture)
          ms.manual_seed(4)
          local fn, model, opt, scaler = trainer("AdamW", { lr = 1e-2 })
          local function twice(x, y)
            local loss, scale = fn(x, y)
            if scaled then return fn(x * 0.5, y) end
            opt:zero_grad()
            nn.F.mse_loss(model(x:nan_to_num()), y):backward()
            opt:step()
            return loss, scale
          end
          local step, seen = capture and ms.capture(twice) or twice, {}
          for k in ms.steps(16) do
            local loss, scale = step(batch(k))
            seen[#seen + 1], seen[#seen + 2] = loss:detach():clone():keep(), scale:clone():keep()
          end
          return outcome(model, opt, scaler, seen)
        end
        local want, list = results(false)
        local got, captured = results(true)
        assert.are.same(want, got)
        training.same(list, captured)
      end
    end)
  end)
end

describe("a captured step with a gradient scaler on the emulated GPU #cuda #timed", function()
  -- Runs a script on an emulated GPU whose stream can be kept busy; returns what it prints.
  local function printed(script, env)
    env = env or {}
    env.MOONSHARD_CUDA = process.gpu
    local done = process.script([[
      local ms = require "moonshard"
      local nn, optim = ms.nn, ms.optim
      local function pause(seconds) require("spec.support.cuda_table").open().pause(0, 0, seconds) end
      local model = nn.Sequential(nn.Linear(6, 16, { device = "cuda" }), nn.Tanh(), nn.Linear(16, 3, { device = "cuda" }))
      local opt, scaler = optim.AdamW(model:parameters()), ms.amp.GradScaler { growth_interval = 3 }
      local good, y = ms.ones(8, 6, { device = "cuda" }), ms.zeros(8, 3, { device = "cuda" })
      local bad = good / 0
      local step = ms.capture(function(x)
        scaler:scale(nn.F.mse_loss(model(x), y)):backward()
        scaler:step(opt)
        scaler:update()
        opt:zero_grad()
      end)
      for _ = 1, 4 do step(good) end
      local function steps() return opt:state_of(model:parameters()[1]).step end
    ]] .. script, env)
    assert.are.equal(0, done.code, done.stderr)
    return done.stdout
  end

  it("waits for nothing", function()
    process.within(0.2, function()
      return tonumber((printed [[
        steps()
        pause(0.5)
        local begun = ms.time()
        for k = 1, 8 do step(k == 3 and bad or good) end
        local seconds = ms.time() - begun
        assert(steps() == 11)
        print(seconds)]]))
    end)
  end)

  it("runs ahead of the GPU by at most 32 repetitions", function()
    assert.are.equal("163\ttrue\n", printed [[
      steps()
      local begun = ms.time()
      for k = 1, 160 do
        if k % 40 == 0 then pause(0.05) end
        step(k == 77 and bad or good)
      end
      print(steps(), ms.time() - begun > 0.1)]])
  end)

  it("gives the same without CUDA graphs", function()
    local script = [[
      for k = 1, 12 do step(k % 5 == 0 and bad or good) end
      print(steps(), scaler:get_scale(), scaler:state_dict().growth_tracker)
      for _, p in ipairs(model:parameters()) do print(("%.17g"):format(p:detach():double():cpu():sum():item())) end]]
    local want = printed(script)
    assert.matches("^14\t", want)
    for _, env in ipairs { { MOONSHARD_CUDA_GRAPHS = "off" }, { MOONSHARD_CUDA_SYNC = "1" }, { MOONSHARD_EMULATOR = "late" },
      { MOONSHARD_EMULATOR = "fail:cudaGraphInstantiateWithFlags:1:2" }, { MOONSHARD_EMULATOR = "seed:7,late,chunks" } } do
      assert.are.equal(want, printed(script, env))
    end
  end)
end)
