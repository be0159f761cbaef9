-- SPDX-License-Identifier: MIT
--- Averages of parameters (optim.EMA, optim.swa_utils) and hooks around steps.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"
local message = require "spec.support.message"
local nn, optim = ms.nn, ms.optim
local swa = optim.swa_utils

describe("EMA", function()
  it("keeps decay of the average at each update", function()
    local p = nn.Parameter(ms.tensor { 1, 2 })
    local ema = optim.EMA({ p }, { decay = 0.75 })
    ms.no_grad(function() p:copy_(ms.tensor { 5, 6 }) end)
    ema:update()
    assert.same({ 2, 3 }, ema:state_dict().averages[1]:tolist())
    assert.are.equal(1, ema.updates)
  end)

  it("keeps less at the first updates with warmup", function()
    local p = nn.Parameter(ms.zeros(1, { dtype = "float64" }))
    local ema = optim.EMA({ p }, { decay = 0.5, warmup = true })
    ms.no_grad(function() p:fill_(1) end)
    ema:update()
    assert.near(0.9, ema:state_dict().averages[1]:item(), 1e-12)
    ema:update()
    assert.near(0.9 * 2 / 11 + 9 / 11, ema:state_dict().averages[1]:item(), 1e-12)
  end)

  it("is the mean over the updates with mean = true", function()
    local p = nn.Parameter(ms.zeros(1, { dtype = "float64" }))
    local ema = optim.EMA({ p }, { mean = true })
    for k = 1, 5 do
      ms.no_grad(function() p:fill_(k * k) end)
      ema:update()
    end
    assert.near(11, ema:state_dict().averages[1]:item(), 1e-12)
    assert.are.equal("EMA: options 'mean' and 'decay' exclude each other", message(optim.EMA, { p }, { mean = true, decay = 0.5 }))
  end)

  it("lends the averages to the parameters for a call, also if it fails", function()
    local p = nn.Parameter(ms.tensor { 1 })
    local ema = optim.EMA { p }
    ms.no_grad(function() p:fill_(3) end)
    assert.are.equal(1, ema:apply(function() return p:item() end))
    assert.are.equal(3, p:item())
    assert.is_false(pcall(ema.apply, ema, function() error "x" end))
    assert.are.equal(3, p:item())
  end)

  it("averages half types in float32, and continues from its state", function()
    local p = nn.Parameter(ms.ones(2, { dtype = "bfloat16" }))
    local a = optim.EMA({ p }, { decay = 0.999 })
    ms.no_grad(function() p:fill_(2) end)
    for _ = 1, 3 do a:update() end
    local b = optim.EMA({ p }, { decay = 0.999 })
    b:load_state_dict(a:state_dict())
    a:update()
    b:update()
    local x, y = a:state_dict(), b:state_dict()
    assert.are.equal("float32", x.averages[1].dtype)
    assert.is_true(x.averages[1]:equal(y.averages[1]))
    assert.are.equal(4, y.updates)
    a:apply(function() assert.is_true(p:equal(y.averages[1]:to "bfloat16")) end)
    assert.is_true(y.averages[1]:equal(x.averages[1]))
    assert.same({ 2, 2 }, p:tolist())
  end)

  it("refuses other shapes, other numbers of parameters, and a decay above 1", function()
    local p = nn.Parameter(ms.ones(2))
    local ema = optim.EMA { p }
    assert.truthy(message(optim.EMA, { p }, { decay = 2 }):find("option 'decay' is a number (2), expected a number from 0 to 1", 1, true))
    assert.truthy(message(optim.EMA, {}):find("expected a list of parameters", 1, true))
    assert.truthy(message(ema.load_state_dict, ema, { updates = 1, averages = {} }):find("the number of averages is 0, expected the number of parameters, 1", 1,
      true))
    assert.truthy(message(ema.load_state_dict, ema, { updates = 1, averages = { ms.ones(3) } }):find(
      "average 1 has shape [3], expected [2]", 1, true))
  end)
end)

for world = 1, 3 do
  ranks.describe(world, "EMA over sharded parameters", function()
    it("has the averages of the whole ones", function()
      local function net()
        ms.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
      end
      local whole, model = net(), ms.fsdp.fully_shard(net())
      local a, b = optim.EMA(whole:parameters(), { decay = 0.5 }), optim.EMA(model:parameters(), { decay = 0.5 })
      local one, two = optim.SGD(whole:parameters(), { lr = 0.1 }), optim.SGD(model:parameters(), { lr = 0.1 })
      local x = ms.ones(4, 3)
      for _ = 1, 3 do
        for k, m in ipairs { whole, model } do
          m(x):pow(2):sum():backward()
          local o = k == 1 and one or two
          o:step()
          o:zero_grad()
        end
        a:update()
        b:update()
      end
      local want = a:apply(function() return whole(x):detach() end)
      local got = b:apply(function() return model(x):detach() end)
      ms.testing.assert_close(got, want)
      ms.testing.assert_close(model(x):detach(), whole(x):detach())

      -- Averages in a checkpoint: loaded here into models that are sharded in another way.
      local dist = ms.dist
      local path = dist.broadcast_object(os.tmpname() .. ".checkpoint", { src = 0 })
      ms.fsdp.save(path, model, two, { ema = b })
      local strategy = dist.world_size() > 1 and "full_shard" or "no_shard"
      for _, wrap in ipairs { function(m) return m end, function(m)
        return ms.fsdp.FSDP(m, { use_orig_params = true, sharding_strategy = strategy })
      end } do
        local other = wrap(net())
        local c = optim.EMA(other:parameters(), { decay = 0.5 })
        ms.fsdp.load(path, other, nil, { ema = c })
        assert.are.equal(3, c.updates)
        assert.is_true(c:apply(function() return other(x):detach() end):allclose(got, { rtol = 1e-6 }))
        assert.is_true(other(x):allclose(model(x):detach(), { rtol = 1e-6 }))
      end
      ms.fsdp.save(path, model)
      local _, said = pcall(ms.fsdp.load, path, model, nil, { ema = b })
      assert.truthy(said:find("has no averages; fsdp.save stores them if it gets the option 'ema'", 1, true), said)
      _, said = pcall(ms.fsdp.save, path, model, nil, { ema = a })
      assert.truthy(said:find("save: option 'ema': parameter 1 of the averages is not a parameter of the model", 1, true), said)
      _, said = pcall(ms.fsdp.save, path, model, nil, { extra = { ema = b:state_dict() } })
      assert.truthy(said:find("pass averages as the option 'ema'", 1, true), said)
      dist.barrier()
      if dist.rank() == 0 then os.execute("rm -r " .. path) end
    end)
  end)
end

describe("AveragedModel", function()
  local function moved(model, value)
    ms.no_grad(function() model.weight:fill_(value) end)
    return model
  end

  it("is the mean of the updates' parameters", function()
    local model = moved(nn.Linear(2, 1, { bias = false }), 1)
    local averaged = swa.AveragedModel(model)
    for _, value in ipairs { 1, 2, 6 } do averaged:update_parameters(moved(model, value)) end
    assert.same({ { 3, 3 } }, averaged.module.weight:tolist())
    assert.are.equal(3, averaged.n_averaged:item())
    assert.same({ { 6 } }, averaged(ms.ones(1, 2)):tolist())
    assert.same({ { 6, 6 } }, model.weight:tolist())
  end)

  it("is an exponential average with decay, or what avg_fn returns", function()
    local model = moved(nn.Linear(1, 1, { bias = false }), 0)
    local a = swa.AveragedModel(model, { decay = 0.75 })
    local b = swa.AveragedModel(model, { avg_fn = function(average, value, n) return average + value * n end })
    for _, value in ipairs { 4, 8 } do
      a:update_parameters(moved(model, value))
      b:update_parameters(model)
    end
    assert.are.equal(5, a.module.weight:item())
    assert.are.equal(12, b.module.weight:item())
    assert.truthy(message(swa.AveragedModel, model, { decay = 0.5, avg_fn = print }):find("both given", 1, true))
  end)

  it("copies buffers, averages them on request, and is saved and loaded", function()
    local model = nn.BatchNorm1d(1)
    local a, b = swa.AveragedModel(model), swa.AveragedModel(model, { use_buffers = true })
    for _, value in ipairs { 2, 4 } do
      model.running_mean:fill_(value)
      a:update_parameters(model)
      b:update_parameters(model)
    end
    assert.are.equal(4, a.module.running_mean:item())
    assert.are.equal(3, b.module.running_mean:item())
    local c = swa.AveragedModel(model)
    c:load_state_dict(b:state_dict())
    assert.are.equal(2, c.n_averaged:item())
  end)

  it("recomputes the statistics of batch norms over a loader", function()
    ms.manual_seed(2)
    local model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model:eval()
    local batches = { ms.rand(8, 3), ms.rand(8, 3) }
    local at = 0
    swa.update_bn(function()
      at = at + 1
      return batches[at]
    end, model)
    local want = ms.no_grad(function() return (model[1](batches[1]):mean(1) + model[1](batches[2]):mean(1)) / 2 end)
    ms.testing.assert_close(model[2].running_mean, want)
    assert.is_false(model.training)
    assert.are.equal(0.1, model[2].momentum)
  end)

  it("leaves the statistics of other norms than batch norms as they are", function()
    local tracked = { track_running_stats = true }
    local model = nn.Sequential(nn.InstanceNorm1d(2, tracked), nn.SyncBatchNorm(2), nn.BatchNorm1d(2))
    model[1].running_mean:fill_(7)
    for k = 2, 3 do model[k].running_mean:fill_(7) end
    model:eval()
    local left = 2
    swa.update_bn(function()
      left = left - 1
      return left >= 0 and ms.rand(4, 2, 3) or nil
    end, model)
    -- In training an instance norm mixes each batch, of mean near 0.5, into its own statistics.
    local mean = model[1].running_mean[1]:item()
    assert.is_true(mean > 0.81 * 7 and mean < 0.81 * 7 + 0.19)
    assert.are.equal(0.1, model[1].momentum)
    for k = 2, 3 do
      assert.is_true(math.abs(model[k].running_mean[1]:item()) < 1)
      assert.are.equal(2, model[k].num_batches_tracked:item())
    end
  end)
end)

describe("the schedule swa", function()
  it("moves to swa_lr and stays, from the rate at which it was made", function()
    local o = optim.SGD({ nn.Parameter(ms.ones(1)) }, { lr = 1 })
    local s = optim.lr_scheduler.swa(o, { swa_lr = 0.5, anneal_steps = 2, anneal_strategy = "linear" })
    local seen = {}
    for k = 1, 4 do
      seen[k] = o.param_groups[1].lr
      s:step()
    end
    assert.same({ 1, 0.75, 0.5, 0.5 }, seen)
  end)
end)

describe("hooks of an optimizer", function()
  for _, name in ipairs { "SGD", "Adafactor", "LBFGS" } do
    it("run before and after a step, in order, until they are removed: " .. name, function()
      local p = nn.Parameter(ms.ones(2))
      local o, seen = optim[name] { p }, {}
      local function closure()
        o:zero_grad()
        local loss = p:pow(2):sum()
        loss:backward()
        seen[#seen + 1] = "closure"
        return loss
      end
      local before = o:register_step_pre_hook(function(self, fn)
        assert.are.equal(o, self)
        assert.are.equal(closure, fn)
        seen[#seen + 1] = "before"
      end)
      local after = o:register_step_post_hook(function() seen[#seen + 1] = "after" end)
      o:step(closure)
      assert.are.equal("before", seen[1])
      assert.are.equal("closure", seen[2])
      assert.are.equal("after", seen[#seen])
      before:remove()
      before:remove()
      after:remove()
      seen = {}
      o:step(closure)
      assert.are.equal("closure", seen[1])
      assert.are.equal("closure", seen[#seen])
    end)
  end

  it("replace the closure by what the first one returns", function()
    local p, called = nn.Parameter(ms.ones(1)), false
    local o = optim.SGD({ p }, { lr = 1 })
    o:register_step_pre_hook(function()
      return function()
        called = true
        return 7
      end
    end)
    assert.are.equal(7, o:step())
    assert.is_true(called)
    assert.truthy(message(o.register_step_pre_hook, o, 3):find("hook is a number (3), expected a function", 1, true))
  end)
end)
