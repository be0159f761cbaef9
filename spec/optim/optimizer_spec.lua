-- SPDX-License-Identifier: MIT
local collected = require "spec.support.collected"
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim
local message = require "spec.support.message"

local function leaf(list, dtype)
  local p = nn.Parameter(ms.tensor(list, { dtype = dtype or "float64" }))
  return p
end

local function set_grad(p, list)
  p.grad = ms.tensor(list, { dtype = p.dtype })
end

describe("an optimizer", function()
  it("refuses arguments that are no list, and unknown names", function()
    local p = leaf { 1 }
    assert.truthy(message(optim.SGD, p):find("expected a list of leaves or groups", 1, true))
    assert.truthy(message(optim.SGD, {}):find("the list of parameters is empty", 1, true))
    assert.truthy(message(optim.SGD, { p, p }):find("parameter 2 is in the list twice", 1, true))
    assert.truthy(message(optim.SGD, { p * 2 }):find("parameter 1 is the result of an operation", 1, true))
    local opt = optim.SGD({ p }, { lr = 1 })
    assert.matches("SGD: add_param_group: argument 1 is nil, expected a group {params = {…}}",
      message(opt.add_param_group, opt), 1, true)
    assert.truthy(message(function() return optim.AdamX end):find("did you mean 'Adam", 1, true))
  end)

  it("has groups with options of their own, which scripts may change", function()
    local a, b = leaf { 1 }, leaf { 1 }
    local opt = optim.SGD({ { params = { a }, lr = 0.5 }, { params = { b } } }, { lr = 0.1 })
    set_grad(a, { 1 })
    set_grad(b, { 1 })
    opt:step()
    assert.are.same({ 0.5 }, a:tolist())
    assert.are.same({ 0.9 }, b:tolist())
    opt.param_groups[2].lr = 0.9
    opt:step()
    assert.is_true(math.abs(b:item()) < 1e-15)
    local c = leaf { 2 }
    opt:add_param_group { params = { c }, lr = 1 }
    set_grad(c, { 1 })
    opt:step()
    assert.are.equal(1, c:item())
  end)

  it("does not step parameters without gradient, and makes no state for them", function()
    local a, b = leaf { 1 }, leaf { 2 }
    local opt = optim.AdamW({ a, b }, { lr = 0.1, weight_decay = 0.5 })
    set_grad(a, { 1 })
    opt:step()
    assert.are.equal(2, b:item())
    local sd = opt:state_dict()
    assert.are.same({ 1, 2 }, sd.param_groups[1].params)
    assert.are.equal(1, sd.state[1].step)
    assert.is_nil(sd.state[2])
    assert.is_nil(opt:state_of(b))
    set_grad(b, { 1 })
    opt:step()
    assert.are.equal(2, opt:state_of(a).step)
    assert.are.equal(1, opt:state_of(b).step)
  end)

  it("returns the closure's result, or true", function()
    local p = leaf { 1 }
    local opt = optim.SGD({ p }, { lr = 1 })
    set_grad(p, { 0 })
    assert.is_true(opt:step())
    assert.are.equal("loss", opt:step(function()
      opt:zero_grad()
      set_grad(p, { 2 })
      return "loss"
    end))
    assert.are.equal(-1, p:item())
  end)

  it("runs the closure with gradients, also inside no_grad", function()
    local p = leaf { 3 }
    local opt = optim.SGD({ p }, { lr = 1 })
    ms.no_grad(function()
      opt:step(function()
        opt:zero_grad()
        local loss = (p * p):sum()
        loss:backward()
        return loss
      end)
    end)
    assert.are.equal(-3, p:item())
    assert.is_false(pcall(opt.step, opt, 3))
  end)

  it("checks every option of every group", function()
    for _, case in ipairs {
      { "SGD", { dampening = "x" }, "dampening" }, { "SGD", { nesterov = true },
      "Nesterov momentum requires a momentum and zero dampening" },
      { "Adam", { amsgrad = 1 }, "amsgrad" }, { "AdamW", { betas = 0.9 }, "betas" },
      { "AdamW", { betas = { 0.9, 1 } }, "betas[2] is a number (1)" },
      { "Adam", { eps = -1 }, "eps" }, { "SGD", { lr = -1 }, "lr is a number (-1), expected a number from 0" },
      { "AdamW", { learning_rate = 1 }, "'learning_rate'; did you mean 'lr'?" },
      { "SGD", { momentun = 1 }, "did you mean 'momentum'?" },
    } do
      for _, in_group in ipairs { false, true } do
        local ok, e
        if in_group then
          local group = { params = { leaf { 1 } } }
          for key, value in pairs(case[2]) do group[key] = value end
          ok, e = pcall(optim[case[1]], { group })
        else
          ok, e = pcall(optim[case[1]], { leaf { 1 } }, case[2])
        end
        assert.is_false(ok)
        assert.truthy(e:find(case[3], 1, true), e)
      end
    end
  end)

  it("clears gradients to nil, or to zeros", function()
    local p = leaf { 1 }
    local opt = optim.SGD { p }
    set_grad(p, { 3 })
    opt:zero_grad { set_to_none = false }
    assert.are.same({ 0 }, p.grad:tolist())
    opt:zero_grad()
    assert.is_nil(p.grad)
  end)

  it("changes nothing when something does not fit", function()
    local a, b = leaf { 1, 2 }, nn.Parameter(ms.ones(4, 2, { dtype = "float64" }):t())
    local opt = optim.Adam({ a, b }, { lr = 1 })
    set_grad(a, { 1, 1 })
    b.grad = ms.ones(2, 4, { dtype = "float64" })
    collected()                                 -- leftovers of earlier tests are not counted
    local live = ms.memory_stats().allocated
    assert.truthy(message(opt.step, opt):find("parameter 2 (float64 [2, 4] cpu) is not contiguous", 1, true))
    assert.are.same({ 1, 2 }, a:tolist())
    assert.are.equal(live, ms.memory_stats().allocated)
    assert.is_nil(opt:state_of(a))
  end)

  it("steps all its groups or none", function()
    local lib = require "moonshard.core.ffi".lib
    local function two_groups(second)
      local a = leaf({ 1, 2 }, "float32")
      local opt = optim.AdamW({ { params = { a } }, { params = { second }, lr = 0.5 } }, { lr = 0.25 })
      return a, opt
    end
    local turned = nn.Parameter(ms.ones(4, 2):t())
    local a, opt = two_groups(turned)
    set_grad(a, { 1, 1 })
    turned.grad = ms.ones(2, 4)
    assert.truthy(message(opt.step, opt):find("parameter 1 (float32 [2, 4] cpu) is not contiguous", 1, true))
    assert.are.same({ 1, 2 }, a:tolist())
    assert.is_nil(opt:state_of(a))

    local b
    local function gradients()
      set_grad(a, { 1, -1 })
      set_grad(b, { 2, -3 })
    end
    local function fresh()
      b = leaf({ 3, 4 }, "float32")
      a, opt = two_groups(b)
      gradients()
    end
    fresh()
    opt:step()
    local want, failures = { a:tolist(), b:tolist() }, 0
    for n = 1, 20 do
      fresh()
      lib.ms_fail_allocation(n)
      local ok, e = pcall(opt.step, opt)
      lib.ms_fail_allocation(0)
      if not ok then
        failures = failures + 1
        assert.truthy(tostring(e):find("no memory", 1, true), e)
        assert.are.same({ { 1, 2 }, { 3, 4 } }, { a:tolist(), b:tolist() })
        opt:step()
      end
      assert.are.same(want, { a:tolist(), b:tolist() })
    end
    assert.is_true(failures >= 4, failures)                             -- one for each allocation of state
  end)

  it("steps float16 values below its normal range, 2^-14", function()
    for _, given in ipairs { { lr = 1 }, { lr = 1, momentum = 0.5 } } do
      for _, n in ipairs { 3, 2500 } do  -- the second: in several pieces
        local p = nn.Parameter(ms.full({ n }, 3 * 2 ^ -20, { dtype = "float16" }))
        p.grad = ms.full({ n }, 2 ^ -20, { dtype = "float16" })
        optim.SGD({ p }, given):step()
        assert.are.equal(2 * 2 ^ -20, p:double():min():item())
        assert.are.equal(2 * 2 ^ -20, p:double():max():item())
      end
    end
  end)
  it("steps half types with float32 state, and empty parameters", function()
    for _, dtype in ipairs { "bfloat16", "float16" } do
      local p, e = leaf({ 1, -2 }, dtype), nn.Parameter(ms.zeros(0, 3, { dtype = dtype }))
      local opt = optim.AdamW({ p, e }, { lr = 0.25, weight_decay = 0 })
      set_grad(p, { 1, -1 })
      e.grad = ms.zeros(0, 3, { dtype = dtype })
      opt:step()
      assert.are.same({ 0.75, -1.75 }, p:tolist())
      assert.are.equal("float32", opt:state_of(p).exp_avg.dtype)
      assert.are.equal(1, opt:state_of(e).step)
    end
  end)

  it("gives the same bits with one thread and with two", function()
    local results = {}
    local before = ms.num_threads()
    for _, threads in ipairs { 1, 2 } do
      ms.set_num_threads(threads)
      ms.manual_seed(5)
      local p = nn.Parameter(ms.randn(300, 331))
      local opt = optim.AdamW({ p }, { lr = 0.1 })
      local norm
      for _ = 1, 3 do
        p.grad = ms.randn(300, 331)
        norm = nn.utils.clip_grad_norm_({ p }, 1):item()
        opt:step()
      end
      results[threads] = { p:detach(), norm }
    end
    ms.set_num_threads(before)
    assert.is_true(results[1][1]:equal(results[2][1]))
    assert.are.equal(results[1][2], results[2][2])
  end)

  it("keeps its state when the script changes the list of parameters", function()
    local a, b = leaf { 1 }, leaf { 1 }
    local opt = optim.SGD({ a }, { lr = 1, momentum = 0.5 })
    set_grad(a, { 1 })
    opt:step()
    opt.param_groups[1].params = { b, a }
    set_grad(b, { 1 })
    opt:step()
    assert.are.equal(2, opt:state_of(a).step)
    assert.are.same({ 1.5 }, opt:state_of(a).momentum_buffer:tolist())
    assert.are.equal(0, b:item())
  end)

  it("refuses a state that does not fit, and does not change", function()
    local p, q = leaf { 1, 2 }, leaf { 1, 2, 3 }
    local a, b = optim.Adam { p }, optim.Adam { q }
    set_grad(p, { 1, 1 })
    a:step()
    assert.truthy(message(b.load_state_dict, b, a:state_dict()):find(
      "exp_avg of parameter 1 has shape [2], but the parameter has shape [3]", 1, true))
    assert.truthy(message(optim.Adam { p, q }.load_state_dict, optim.Adam { leaf { 1 }, leaf { 2 } },
      a:state_dict()):find("the number of parameters of group 1 is 1 in the state", 1, true))
    assert.is_nil(b:state_of(q))
  end)

  it("refuses the state of another optimizer, and malformed state", function()
    local p = leaf { 1, 2 }
    local sgd, adam = optim.SGD({ p }, { lr = 1, momentum = 0.9 }), optim.Adam { p }
    set_grad(p, { 1, 1 })
    sgd:step()
    local said = message(adam.load_state_dict, adam, sgd:state_dict())
    assert.truthy(said:find(
      "Adam: load_state_dict: parameter 1 has no exp_avg in the state; was the state made by another optimizer?", 1, true), said)
    set_grad(p, { 1, 1 })
    local other = optim.AdamW { p }
    other:step()
    said = message(sgd.load_state_dict, sgd, other:state_dict())
    assert.truthy(said:find("SGD: load_state_dict: parameter 1 has 'exp_avg' in the state, which SGD does not keep", 1,
      true), said)
    for _, case in ipairs {
      { function(sd) sd.param_groups[1] = 5 end, "group 1 is a number (5), expected a group" },
      { function(sd) sd.param_groups[1].params = nil end, "group 1 is a table, expected a group" },
      { function(sd) sd.param_groups[1].betas = {} end, "betas[1] is nil, expected a number from 0 to below 1" },
      { function(sd) sd.param_groups[1].lr = "a" end, "lr is a string ('a'), expected a number" },
      { function(sd) sd.state[1] = 5 end, "state of parameter 1 is a number (5), expected a table" },
      { function(sd) sd.state[1] = { step = -1 } end,
      "step of parameter 1 is a number (-1), expected a number from 0" },
    } do
      local sd = adam:state_dict()
      case[1](sd)
      said = message(adam.load_state_dict, adam, sd)
      assert.truthy(said:find(case[2], 1, true), said)
    end
    assert.is_nil(adam:state_of(p))
  end)

  it("checks its options at each step: negative numbers are allowed, other types are not", function()
    local p = leaf { 1, 2 }
    local opt = optim.Adam { p }
    local group = opt.param_groups[1]
    set_grad(p, { 1, 1 })
    for _, case in ipairs {
      { "lr", 0 / 0, "nan), expected a number" }, { "eps", "a", "eps is a string ('a'), expected a number" },
      { "betas", { 0.9, 2 }, "betas[2] is a number (2), expected a number from 0 to below 1" },
      { "betas", {}, "betas[1] is nil" },
    } do
      local before = group[case[1]]
      group[case[1]] = case[2]
      local said = message(opt.step, opt)
      assert.truthy(said:find(case[3], 1, true), said)
      group[case[1]] = before
    end
    assert.are.same({ 1, 2 }, p:tolist())
    group.lr = -1
    opt:step()
    assert.near(2, p:tolist()[1], 1e-5)
  end)

  it("accepts a group's leaves after it has refused the group", function()
    local p, q = leaf { 1 }, leaf { 2 }
    local opt = optim.Adam { p }
    assert.truthy(message(opt.add_param_group, opt, { params = { q }, lr = -1 }):find("lr is a number (-1)", 1, true))
    opt:add_param_group { params = { q }, lr = 1 }
    assert.are.equal(2, #opt.param_groups)
    assert.truthy(message(opt.add_param_group, opt, { params = { q } }):find("parameter 1 belongs to another group already", 1, true))
  end)

  it("keeps memory flat over steps without the collector", function()
    ms.manual_seed(1)
    local model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    local opt = optim.AdamW(model:parameters(), { lr = 0.01 })
    local x, y = ms.randn(4, 8), ms.randn(4, 1)
    collectgarbage()
    collectgarbage("stop")
    local live, first, last = {}, nil, nil
    for step in ms.steps(60) do
      opt:zero_grad()
      local loss = nn.F.mse_loss(model(x), y)
      loss:backward()
      nn.utils.clip_grad_norm_(model:parameters(), 1)
      opt:step()
      first, last = first or loss:item(), loss:item()
      live[step] = ms.memory_stats().live_tensors
    end
    collectgarbage("restart")
    assert.are.equal(live[10], live[60])
    assert.is_true(last < first)
  end)

  it("prints", function()
    assert.are.equal("SGD(1 group, 2 parameters, lr 0.5)",
      tostring(optim.SGD({ leaf { 1 }, leaf { 2 } }, { lr = 0.5 })))
  end)
end)

describe("clip_grad_norm_", function()
  it("only measures with math.huge, and does not change small gradients", function()
    local p = leaf { 0, 0 }
    set_grad(p, { 3, 4 })
    assert.are.equal(5, nn.utils.clip_grad_norm_({ p }, math.huge):item())
    assert.are.equal(5, nn.utils.clip_grad_norm_(p, 10):item())
    assert.are.same({ 3, 4 }, p.grad:tolist())
    assert.are.equal(4, nn.utils.clip_grad_norm_({ p }, math.huge, { norm_type = math.huge }):item())
    nn.utils.clip_grad_norm_({ p }, 1)
    assert.is_true(math.abs(p.grad:norm():item() - 1) < 1e-6)
  end)

  it("is 0 without gradients, and refuses an invalid order", function()
    assert.are.equal(0, nn.utils.clip_grad_norm_({ leaf { 1 } }, 1):item())
    assert.truthy(message(nn.utils.clip_grad_norm_, { leaf { 1 } }, 1,
      { norm_type = 0 }):find("norm_type is 0, expected a number above 0", 1, true))
  end)

  it("passes NaN on", function()
    local p, q = leaf { 0 }, leaf { 1 }
    set_grad(p, { 0 / 0 })
    set_grad(q, { 1 })
    local total = nn.utils.clip_grad_norm_({ p, q }, 1):item()
    assert.are_not.equal(total, total)
    local g = q.grad:item()
    assert.are_not.equal(g, g)
  end)
end)

describe("a step that clips", function()
  local function parameters(dtype)
    local list = {}
    for k, n in ipairs { 1, 7, 40001, 4099 } do
      list[k] = nn.Parameter(ms.randn(n, { dtype = dtype }))
      list[k].grad = ms.randn(n, { dtype = dtype })
    end
    return list
  end
  local function copies(list)
    local out = {}
    for k, p in ipairs(list) do
      out[k] = nn.Parameter(p:detach():clone())
      out[k].grad = p.grad:clone()
    end
    return out
  end

  for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16" } do
    for _, case in ipairs { { 0.5, 2 }, { 0.5, math.huge }, { 1e9, 2 }, { math.huge, 1 } } do
      it(("has the bits of clip_grad_norm_ and a step, and keeps gradients: %s, at most %g, norm %g")
        :format(dtype, unpack(case)), function()
        ms.manual_seed(5)
        local apart = parameters(dtype)
        local one = copies(apart)
        for _, make in ipairs { function(p) return optim.AdamW(p, { lr = 0.1 }) end,
          function(p) return optim.SGD({ { params = { p[1], p[2] } }, { params = { p[3], p[4] }, momentum = 0.9 } }, { lr = 0.1 }) end } do
          local a, b = make(apart), make(one)
          for _ = 1, 2 do
            local grads = {}
            for k, p in ipairs(one) do
              p.grad, grads[k] = apart[k].grad:clone(), apart[k].grad:clone()
            end
            local want = nn.utils.clip_grad_norm_(apart, case[1], { norm_type = case[2] })
            a:step()
            local got = b:step_clipped(case[1], { norm_type = case[2] })
            assert.is_true(got:equal(want))
            assert.are.equal(want.dtype, got.dtype)
            for k, p in ipairs(one) do
              assert.is_true(p:detach():equal(apart[k]:detach()))
              assert.is_true(p.grad:equal(grads[k]))
            end
          end
        end
      end)
    end
  end

  it("makes all parameters NaN if a gradient is, as clip_grad_norm_ does", function()
    local list = parameters "float32"
    list[2].grad:narrow(1, 3, 1):fill_(0 / 0)
    local norm = optim.SGD(list, { lr = 0.1 }):step_clipped(1)
    assert.is_true(norm:item() ~= norm:item())
    for _, p in ipairs(list) do assert.are.equal(p:numel(), p:detach():isnan():sum():item()) end
  end)

  it("returns 0 where no parameter has a gradient", function()
    local p = leaf { 1 }
    local opt = optim.AdamW({ p }, { lr = 1 })
    assert.are.equal(0, opt:step_clipped(1):item())
    assert.are.equal(1, p:item())
    assert.is_nil(opt:state_of(p))
  end)

  for _, case in ipairs {
    { "whose step is a Lua function", function(p) return optim.Adafactor({ p }, { lr = 0.1 }) end },
    { "with a hook", function(p)
      local opt = optim.SGD({ p }, { lr = 0.1 })
      opt:register_step_pre_hook(function() opt.param_groups[1].lr = 0.2 end)
      return opt
    end },
  } do
    it("is clip_grad_norm_ and a step for an optimizer " .. case[1], function()
      local apart, one = nn.Parameter(ms.ones(2, 3)), nn.Parameter(ms.ones(2, 3))
      apart.grad, one.grad = ms.arange(6):float():reshape(2, 3), ms.arange(6):float():reshape(2, 3)
      nn.utils.clip_grad_norm_({ apart }, 0.5)
      case[2](apart):step()
      local norm = case[2](one):step_clipped(0.5)
      assert.near(math.sqrt(55), norm:item(), 1e-5)
      assert.is_true(one:detach():equal(apart:detach()))
      assert.is_true(one.grad:equal(apart.grad))
    end)
  end

  it("refuses limits below 0, unknown options and orders of the norm that are not positive", function()
    local p = leaf { 1 }
    set_grad(p, { 1 })
    local opt = optim.SGD({ p }, { lr = 1 })
    assert.truthy(message(opt.step_clipped, opt, -1):find("SGD: step_clipped: max_norm is a number (-1)", 1, true))
    assert.truthy(message(opt.step_clipped, opt):find("SGD: step_clipped: max_norm is nil", 1, true))
    assert.truthy(message(opt.step_clipped, opt, 1, { norm = 2 }):find("unknown option 'norm'", 1, true))
    assert.truthy(message(opt.step_clipped, opt, 1, { norm_type = 0 }):find("norm_type is 0, expected a number above 0", 1, true))
    assert.are.equal(1, p:item())
  end)
end)

describe("master weights", function()
  for _, name in ipairs { "SGD", "Adam", "AdamW" } do
    for _, dtype in ipairs { "float16", "bfloat16" } do
      it(("step in float32, and are rounded to the parameter: %s, %s"):format(name, dtype), function()
        ms.manual_seed(6)
        local n = 3001
        local p = nn.Parameter(ms.randn(n, { dtype = dtype }))
        local wide = nn.Parameter(p:detach():to "float32")
        local options = name == "SGD" and { lr = 1e-4, momentum = 0.9 } or { lr = 1e-4 }
        local of_wide = optim[name]({ wide }, options)
        options.master_weights = true
        local opt = optim[name]({ p }, options)
        for _ = 1, 5 do
          p.grad = ms.randn(n, { dtype = dtype })
          wide.grad = p.grad:to "float32"
          opt:step()
          of_wide:step()
          local master = opt:state_of(p).master
          assert.are.equal("float32", master.dtype)
          assert.is_true(master:equal(wide:detach()))
          assert.is_true(p:detach():equal(wide:detach():to(dtype)))
        end
      end)
    end
  end

  it("are kept only for half types, and continue to the bit from a state dict", function()
    ms.manual_seed(7)
    local p, q = nn.Parameter(ms.randn(9, { dtype = "bfloat16" })), leaf({ 1 }, "float32")
    local opt = optim.AdamW({ p, q }, { lr = 1e-3, master_weights = true })
    local function step(o, a)
      a.grad, q.grad = ms.ones(9, { dtype = "bfloat16" }), ms.ones(1)
      o:step_clipped(0.5)
    end
    step(opt, p)
    assert.is_nil(opt:state_of(q).master)
    local again = nn.Parameter(p:detach():clone())
    local other = optim.AdamW({ again, q }, { lr = 1e-3, master_weights = true })
    other:load_state_dict(opt:state_dict())
    for _ = 1, 20 do
      step(opt, p)
      step(other, again)
    end
    assert.is_true(opt:state_of(p).master:equal(other:state_of(again).master))
    assert.is_true(p:detach():equal(again:detach()))
  end)
end)
