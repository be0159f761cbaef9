-- SPDX-License-Identifier: MIT
--- Captured steps: every call gives the bits of the function itself, and what cannot be repeated is refused.
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local training = require "spec.support.captured_training"
local same, train, kinds = training.same, training.train, training.kinds

describe("a captured step", function()
  for name, make in pairs(kinds) do
    it("gives the bits of 50 uncaptured steps: " .. name, function()
      same(train(make, 50, false), (train(make, 50, true)))
    end)
  end

  it("gives the same bits with two threads", function()
    local threads = ms.num_threads()
    ms.set_num_threads(2)
    local make = kinds["dropout, clipping and SGD with momentum, zero_grad last"]
    same(train(make, 12, false), (train(make, 12, true)))
    ms.set_num_threads(threads)
  end)

  it("returns new tensors without a graph at every call", function()
    local _, _, fn = kinds["an MLP with AdamW, zero_grad first"]()
    local step = ms.capture(fn)
    local losses, x, y = {}, ms.randn(8, 6), ms.randn(8, 3)
    for k = 1, 5 do
      losses[k] = step(x, y)
      assert.is_false(losses[k].requires_grad)
    end
    local before = losses[3]:item()
    step(x, y)
    assert.are.equal(before, losses[3]:item())
    assert.is_true(losses[5]:item() < losses[1]:item())
  end)

  it("leaves the grads of its last call in the parameters", function()
    local model, opt, fn = kinds["an MLP with AdamW, zero_grad first"]()
    local step = ms.capture(fn)
    local x, y = ms.randn(8, 6), ms.randn(8, 3)
    for _ = 1, 4 do step(x, y) end
    local p = model:parameters()[1]
    local kept = p:detach():clone()
    opt:zero_grad()
    assert.is_nil(p.grad)
    step(x, y)
    assert.is_not_nil(p.grad)
    assert.are.equal(tostring(p.shape), tostring(p.grad.shape))
    assert.is_false(ms.equal(kept, p:detach()))
  end)

  it("knows its memory, which is constant and freed with it", function()
    collectgarbage()
    local _, _, fn = kinds["dropout, clipping and SGD with momentum, zero_grad last"]()
    local x, y = ms.randn(8, 6), ms.randn(8, 3)
    local step = ms.capture(fn)
    ms.scope(function() step(x, y) end)
    local engine = require "moonshard.core.ffi"
    local out = engine.ffi.new "ms_memory"
    local function allocated()
      engine.lib.ms_memory_stats(0, out)
      return out.allocated
    end
    local before = allocated()
    ms.scope(function() step(x, y) end)
    local bytes = step:memory()
    assert.is_true(bytes > 8 * 16 * 4)
    assert.are.equal(before + bytes, allocated())
    ms.scope(function() for _ = 1, 20 do step(x, y) end end)
    assert.are.equal(before + bytes, allocated())
    step:release()
    assert.are.equal(before, allocated())
    assert.has_error(function() step(x, y) end)
    assert.are.equal("CapturedStep(released)", tostring(step))
  end)

  it("makes tensors of the script's values again in every call", function()
    local step = ms.capture(function(x)
      local sum = ms.tensor { 1, 2 }
      sum:add_(x)
      return sum, ms.zeros(2):add_(x)
    end)
    for k = 1, 5 do
      local sum, zeros = step(ms.tensor { k, k })
      assert.are.same({ 1 + k, 2 + k }, sum:tolist())
      assert.are.same({ k, k }, zeros:tolist())
    end
  end)

  it("sees the grads that scripts read in it", function()
    local p = nn.Parameter(ms.ones(2))
    local step = ms.capture(function(x)
      p.grad = nil;
      (p * x):sum():backward()
      ms.no_grad(function() p:sub_(p.grad * 0.5) end)
      return p:detach()
    end)
    for k = 1, 4 do assert.are.same({ 1 - k, 1 - k }, step(ms.tensor { 2, 2 }):tolist()) end
  end)

  it("records the call after one in which a gradient scaler skips the optimizer's step", function()
    local p = nn.Parameter(ms.ones(1))
    local opt = optim.SGD({ p }, { lr = 1 })
    local scaler = ms.amp.GradScaler { init_scale = 4, growth_interval = 2 }
    local step = ms.capture(function(x)
      opt:zero_grad()
      scaler:scale((p * x):sum()):backward()
      scaler:step(opt)
      scaler:update()
      return p
    end, { warmup = 0 })
    local infinite, one = ms.full({ 1 }, math.huge), ms.ones(1)
    -- The argument, then p and the scale after the call; the third call is recorded.
    local calls = { { infinite, 1, 2 }, { infinite, 1, 1 }, { one, 0, 1 }, { one, -1, 2 }, { infinite, -1, 1 },
      { one, -2, 1 }, { one, -3, 2 }, { one, -4, 2 }, { infinite, -4, 1 } }
    for k, call in ipairs(calls) do
      local now = step(call[1])
      assert.are.equal(call[2], now:item())
      assert.is_false(now.requires_grad)
      assert.are.equal(call[2], p:item())
      assert.are.equal(call[3], scaler:get_scale())
      assert.are.equal(k > 2, step:memory() > 0)
    end
    assert.are.equal(0, scaler:state_dict().growth_tracker)
    step(one)
    assert.are.equal(1, scaler:state_dict().growth_tracker)
    scaler:load_state_dict { scale = 8, growth_factor = 2, backoff_factor = 0.25, growth_interval = 5,
      growth_tracker = 4 }
    step(one)
    assert.are.equal(16, scaler:get_scale())
    step(infinite)
    assert.are.equal(4, scaler:get_scale())
  end)

  it("takes numbers and strings as they were, and other tensors of the same kind", function()
    local step = ms.capture(function(x, factor, how) return how == "add" and x + factor or x * factor end,
      { warmup = 0 })
    assert.are.equal(5, step(ms.tensor { 3 }, 2, "add"):item())
    assert.are.equal(7, step(ms.tensor { 5 }, 2, "add"):item())
    assert.has_error(function() step(ms.tensor { 5 }, 3, "add") end)
    assert.has_error(function() step(ms.tensor { 5 }, 2) end)
    assert.has_error(function() step(2, 2, "add") end)
  end)
end)

-- refused: { what, pattern of the message, function that makes the step }, for steps that cannot be recorded. changed:
-- { what, pattern of the message, function of the captured step, its model and its optimizer }, for repetitions.
local x, y = ms.ones(8, 6), ms.ones(8, 3)

local function mlp()
  local model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))
  local opt = optim.AdamW(model:parameters())
  return model, opt, function(a, b)
    local loss = nn.F.mse_loss(model(a), b)
    loss:backward()
    opt:step()
    opt:zero_grad()
    return loss
  end
end

local refused = {
  { "reading a value", "item reads values of float32 %[%] cpu", function()
    local _, _, fn = mlp()
    return function(a, b) return fn(a, b):item() end
  end },
  { "printing a tensor", "tolist reads values", function() return function(a) return #tostring(a * 2) end end },
  { "checked parameters of a distribution", "Categorical: logits is checked.-validate_args = false", function()
    return function(a) return ms.distributions.Categorical({ logits = a }):entropy() end
  end },
  { "checked values of a distribution", "Normal: log_prob: value is checked.-validate_args = false", function()
    local normal = ms.distributions.Normal(ms.zeros(8, 6), 1)
    return function(a) return normal:log_prob(a) end
  end },
  { "packing", "pack_padded_sequence reads the values of lengths", function()
    local lengths = ms.tensor({ 8, 7, 5, 3, 2, 1 }, { dtype = "int64" })
    return function(a) return nn.utils.rnn.pack_padded_sequence(a, lengths).data end
  end },
  { "padding a packed sequence", "pad_packed_sequence reads the values of batch_sizes", function()
    local packed = nn.utils.rnn.pack_sequence { ms.ones(3, 1), ms.ones(2, 1) }
    return function() return (nn.utils.rnn.pad_packed_sequence(packed)) end
  end },
  { "a recurrent layer over a packed sequence", "GRU reads the values of batch_sizes", function()
    local gru, packed = nn.GRU(1, 2), nn.utils.rnn.pack_sequence { ms.ones(3, 1), ms.ones(2, 1) }
    return function() return ms.no_grad(function() return gru(packed).data end) end
  end },
  { "a tensor hook", "it calls a tensor hook %(.-capture_spec.lua:%d+%)", function()
    local model, _, fn = mlp()
    model:parameters()[1]:register_hook(function() end)
    return fn
  end },
  { "a hook after accumulation", "it calls a leaf hook %(.-capture_spec.lua:%d+%)", function()
    local model, _, fn = mlp()
    model:parameters()[1]:register_post_accumulate_grad_hook(function() end)
    return fn
  end },
  { "a forward hook", "a forward hook of Dropout %(.-capture_spec.lua:%d+%)", function()
    local model, _, fn = mlp()
    model[2]:register_forward_hook(function() end)
    return fn
  end },
  { "a full backward hook", "backward hook.-%(.-capture_spec.lua:%d+%)", function()
    local model, _, fn = mlp()
    model[3]:register_full_backward_hook(function() end)
    return fn
  end },
  { "a schedule inside", "changes options of group 1 of AdamW", function()
    local _, opt, fn = mlp()
    local schedule = optim.lr_scheduler.lambda(opt, function(k) return 1 / (1 + k) end)
    return function(a, b)
      local loss = fn(a, b)
      schedule:step()
      return loss
    end
  end },
  { "a tensor that outlives it", "1 tensor made inside is still in use after it", function()
    local kept = {}
    return function(a)
      kept[1] = (a * 2):keep()
      return kept[1]
    end
  end },
  { "a result whose graph no backward used", "result 1, float32 %[8, 3%] cpu, has a graph", function()
    local model = mlp()
    return function(a) return model(a) end
  end },
  { "a graph from outside", "which ran before the step", function()
    local model = mlp()
    local graphs = {}
    for k = 1, 3 do graphs[k] = model(x):sum() end
    local k = 0
    return function()
      k = k + 1
      graphs[k]:backward()
      return graphs[k]:detach()
    end
  end },
  { "setting the random generator", "sets the random generator", function()
    return function(a)
      ms.manual_seed(5)
      return a + 1
    end
  end },
  { "a gradient scaler without its update", "made inside is still in use after it", function()
    local model, opt = mlp()
    local scaler = ms.amp.GradScaler { init_scale = 2 }
    local calls = 0
    return function(a, b)
      calls = calls + 1
      local loss = nn.F.mse_loss(model(a), b)
      scaler:scale(loss):backward()
      scaler:step(opt)
      if calls == 1 then scaler:update() end
      opt:zero_grad()
      return loss
    end
  end },
  { "a yield", "coroutine.yield inside ms.capture", function()
    local calls = 0
    return function(a)
      calls = calls + 1
      if calls > 1 then coroutine.yield() end
      return a * 2
    end
  end, outside = true },
  { "a captured step inside", "captured inside each other", function()
    local inner = ms.capture(function(a) return a * 2 end, { warmup = 0 })
    inner(x)
    return function(a) return inner(a) end
  end },
}

local changed = {
  { "another shape", "argument 1 is float32 %[4, 6%] cpu, expected float32 %[8, 6%] cpu",
    function(step) step(ms.ones(4, 6), y) end },
  { "another dtype", "argument 2 is float64 %[8, 3%] cpu, expected float32", function(step) step(x, y:double()) end },
  { "fewer arguments", "the number of arguments is 1, expected 2", function(step) step(x) end },
  { "an argument that requires grad", "requires grad", function(step)
    step(ms.ones(8, 6, { requires_grad = true }), y)
  end },
  { "a replaced parameter", "field 'weight' of Linear was replaced", function(step, model)
    model[1].weight = nn.Parameter(ms.zeros(4, 6))
    step(x, y)
  end },
  { "a replaced module", "field '2' of Sequential was replaced", function(step, model)
    model[2] = nn.Dropout(0.5)
    step(x, y)
  end },
  { "eval()", "field 'training' of Sequential was changed to false", function(step, model)
    model:eval()
    step(x, y)
  end },
  { "another probability of dropout", "field 'p' of Dropout was changed to 0.1", function(step, model)
    model[2].p = 0.1
    step(x, y)
  end },
  { "parameters of another dtype", "moved to other memory or another dtype", function(step, model)
    model:double()
    step(x, y)
  end },
  { "a loaded optimizer state", "groups or state of AdamW were replaced", function(step, _, opt)
    opt:load_state_dict(opt:state_dict())
    step(x, y)
  end },
  { "another group", "groups or state of AdamW were replaced", function(step, _, opt)
    opt:add_param_group { params = { nn.Parameter(ms.ones(1)) } }
    step(x, y)
  end },
  { "an option that the optimizer refuses", "AdamW: lr is a string", function(step, _, opt)
    opt.param_groups[1].lr = "fast"
    step(x, y)
  end },
  { "a grad where there was none", "has a grad, but had none when the step was recorded", function(step, model)
    model:parameters()[1].grad = ms.ones(4, 6)
    step(x, y)
  end },
  { "no_grad", "the grad mode %(no_grad%) has changed since the step was recorded", function(step)
    ms.no_grad(function() step(x, y) end)
  end },
}

describe("what a captured step refuses", function()
  for _, case in ipairs(refused) do
    it(case[1] .. ", when it is recorded", function()
      local step = ms.capture(case[3]())
      step(x, y)
      local ok, message = pcall(step, x, y)
      assert.is_false(ok)
      assert.matches(case[2], message)
      if not case.outside then assert.matches("captured step", message) end
      assert.are.equal(2, (ms.tensor { 1 } + 1):item())         -- nothing is recorded any more
      assert.is_false(pcall(step, x, y))                        -- refused again: the state is as before
    end)
  end

  for _, case in ipairs(changed) do
    it(case[1] .. ", when it is repeated", function()
      local model, opt, fn = mlp()
      local step = ms.capture(fn)
      for _ = 1, 3 do step(x, y) end
      local before = model[1].bias:detach():clone()
      local ok, message = pcall(case[3], step, model, opt)
      assert.is_false(ok)
      assert.matches(case[2], message)
      assert.is_true(ms.equal(before, model[1].bias:detach():float()))  -- nothing has run
    end)
  end

  it("an error of an operator, which a repetition reports as the function would", function()
    local weight = nn.Parameter(ms.ones(3, 2))
    local step = ms.capture(function(ids) return nn.F.embedding(ids, weight):detach():sum() end)
    local good, bad = ms.tensor({ 1, 2 }, { dtype = "int64" }), ms.tensor({ 1, 9 }, { dtype = "int64" })
    for _ = 1, 3 do step(good) end
    local ok, message = pcall(step, bad)
    assert.is_false(ok)
    assert.matches("embedding", message)
    assert.are.equal(4, step(good):item())
  end)

  it("another plain argument, also where it was true or a tensor is given", function()
    local step = ms.capture(function(t, double) return double and t * 2 or t + 0 end)
    local t = ms.ones(2)
    for _ = 1, 3 do step(t, true) end
    for text, value in pairs { ["argument 2 is false, but was true"] = false,
      ["argument 2 is a Tensor, but was true"] = ms.ones(2) } do
      local ok, message = pcall(step, t, value)
      assert.is_false(ok)
      assert.matches(text, message)
    end
    assert.are.same({ 2, 2 }, step(t, true):tolist())
  end)

  it("wrong arguments of ms.capture", function()
    assert.has_error(function() ms.capture(1) end)
    assert.has_error(function() ms.capture(function() end, { warmup = -1 }) end)
    assert.has_error(function() ms.capture(function() end, { warm = 1 }) end)
    assert.has_error(function() ms.capture(function() end)({}) end)
  end)
end)
