-- SPDX-License-Identifier: MIT
--- DDP's join (docs/semantics.md#ddp-join): ranks with unequal numbers of inputs train as one process does on all
--- inputs, whatever else they send; and further options of DDP's constructor.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.dist, ms.nn.ddp_hooks
end

local f64 = { dtype = "float64" }

-- Two layers and a batch norm; `parts` selects the layer that a rank's step uses.
local function build(seed)
  local ms, nn = load()
  ms.manual_seed(seed or 7)
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.a, self.b = nn.Linear(4, 6, f64), nn.Linear(6, 3, f64)
    self.side = nn.Linear(6, 3, f64)
    self:register_buffer("calls", ms.zeros(1, f64))
  end
  function Net:forward(x, side)
    self.calls:add_(1)
    local y = self.a(x):tanh()
    return side and self.b(y) + self.side(y) or self.b(y)
  end
  return Net()
end

local function input(rank, step)
  local ms = load()
  ms.manual_seed(100 * step + rank)
  return ms.randn(3, 4, f64)
end

-- The number of steps of a rank.
local function steps_of(rank, world) return rank == world - 1 and 2 or 2 + 2 * rank + (rank % 2) end

-- One process for all ranks: the gradients of active ranks, divided by `divisor(active)`.
local function reference(world, divisor, uses_side, steps)
  local ms = load()
  local model = build()
  local optimizer = ms.optim.SGD(model:parameters(), { lr = 0.1, momentum = 0.9 })
  local most = 0
  for r = 0, world - 1 do most = math.max(most, steps(r, world)) end
  for step = 1, most do
    local active = 0
    for r = 0, world - 1 do active = active + (steps(r, world) >= step and 1 or 0) end
    for r = 0, world - 1 do
      if steps(r, world) >= step then
        (model(input(r, step), uses_side(r, step)):pow(2):sum() / divisor(active)):backward()
      end
    end
    optimizer:step()
    optimizer:zero_grad()
  end
  return model, most
end

local function equal_models(a, b)
  local ms = load()
  for name, p in a:named_parameters() do
    ms.testing.assert_close(b:get_parameter(name):detach(), p:detach(), { rtol = 1e-10, atol = 1e-12 })
  end
end

local function never() return false end
local function always() return true end
local function sometimes(r, step) return (r + step) % 3 == 0 end

for world = 1, 3 do
  ranks.describe(world, ("join on %d ranks"):format(world), function()
    for _, case in ipairs {
      { "as if ranks that have finished had zeros", {}, side = always },
      { "over the ranks that still have inputs", {}, { divide_by_initial_world_size = false }, side = always },
      { "in small buckets held by gradients", { bucket_cap_mb = 1e-4, gradient_as_bucket_view = true }, side = always },
      { "where parameters may be unused", { bucket_cap_mb = 1e-4, find_unused_parameters = true }, side = sometimes },
      { "where parameters that no rank used are not sent", { bucket_cap_mb = 1e-4, find_unused_parameters = true,
      skip_all_reduce_unused_params = true }, side = sometimes },
      { "with a static graph", { bucket_cap_mb = 1e-4, static_graph = true }, side = never },
      { "with a hook", { bucket_cap_mb = 1e-4 }, side = always, hook = true },
      { "where one rank has no input at all", { bucket_cap_mb = 1e-4 }, side = always, none = true },
      { "where one rank has no input at all, with a static graph", { bucket_cap_mb = 1e-4, static_graph = true },
      side = always, none = true },
      { "without a broadcast of buffers", { broadcast_buffers = false }, side = always },
    } do
      it("averages " .. case[1], function(rank)
        local ms, nn, dist, hooks = load()
        local steps = case.none and function(r, w) return r == 0 and w > 1 and 0 or steps_of(r, w) end or steps_of
        local by_all = not (case[3] and case[3].divide_by_initial_world_size == false)
        local want, most = reference(world, function(active) return by_all and world or active end, case.side, steps)
        local ddp = nn.DDP(build(), case[2])
        if case.hook then ddp:register_comm_hook(nil, hooks.allreduce_hook) end
        local optimizer = ms.optim.SGD(ddp:parameters(), { lr = 0.1, momentum = 0.9 })
        local count = ms.catch_warnings(function()
          assert.equal("passed on", ddp:join(case[3] or {}, function()
            for step = 1, steps(rank, world) do
              ddp(input(rank, step), case.side(rank, step)):pow(2):sum():backward()
              optimizer:step()
              optimizer:zero_grad()
            end
            return "passed on"
          end))
        end)
        assert.is_true(#count <= 1)                             -- the first iteration may warn that nothing was unused
        -- All ranks get the model of the last active one (momentum stays local, as in PyTorch).
        equal_models(want, ddp.module)
        local calls = dist.all_gather_object(ddp.module.calls:item())
        for _, n in ipairs(calls) do assert.equal(calls[1], n) end
        if case[2].broadcast_buffers ~= false and not case.none then assert.is_true(calls[1] >= most) end
        -- All ranks continue together outside the join.
        local after = ms.optim.SGD(ddp:parameters(), { lr = 0.1 })
        local twin = ms.optim.SGD(want:parameters(), { lr = 0.1 })
        ms.catch_warnings(function()
          for step = 50, 52 do
            for r = 0, world - 1 do (want(input(r, step), case.side(r, step)):pow(2):sum() / world):backward() end
            ddp(input(rank, step), case.side(rank, step)):pow(2):sum():backward()
            for _, o in ipairs { after, twin } do
              o:step()
              o:zero_grad()
            end
          end
        end)
        equal_models(want, ddp.module)
      end)
    end

    it("works with no_sync, and with forwards without a backward", function(rank)
      local ms, nn = load()
      local ddp = nn.DDP(build(), { bucket_cap_mb = 1e-4 })
      local sums = {}
      ddp:join(function()
        for step = 1, 2 + rank do
          ddp:no_sync(function() ddp(input(rank, step), true):sum():backward() end)
          ms.no_grad(function() ddp(input(rank, step)) end)
          ddp(input(rank, step), true):sum():backward()
          sums[step] = ddp.module.a.weight.grad:clone()
          ddp:zero_grad()
        end
      end)
      for step = 1, 2 + rank do
        local want = ms.zeros_like(sums[step])
        local model = build()
        for r = 0, world - 1 do
          if step <= 2 + r then model(input(r, step), true):sum():backward() end
        end
        want:add_(model.a.weight.grad * (2 / world))
        ms.testing.assert_close(sums[step], want, { rtol = 1e-10, atol = 1e-12 })
      end
    end)

    it("has no effect if enable is false, and returns fn's results", function(rank)
      local _, nn, dist = load()
      local ddp = nn.DDP(build())
      local told = dist.record(function()
        local a, b, c = ddp:join({ enable = false }, function()
          ddp(input(rank, 1), true):sum():backward()
          return 1, nil, 3
        end)
        assert.same({ 1, 3 }, { a, c })
        assert.is_nil(b)
      end)
      for _, c in ipairs(told) do assert.not_equal("all_gather", c.op) end
    end)
  end)
end

ranks.describe(3, "the end of a join", function()
  it("is an error on every rank if the script asks for it", function(rank)
    local _, nn = load()
    local ddp, done = nn.DDP(build()), 0
    local text = message(ddp.join, ddp, { throw_on_early_termination = true }, function()
      for step = 1, 3 + rank do
        ddp(input(rank, step), true):sum():backward()
        done = step
      end
    end)
    assert.equal("Detected at least one rank that exhausted inputs. Throwing across all ranks.", text)
    assert.equal(3, done)
    -- If all ranks finish together there is no error, even after an earlier error.
    ddp:zero_grad()
    local out = ddp:join({ throw_on_early_termination = true }, function()
      for step = 1, 2 do ddp(input(rank, step), true):sum():backward() end
      return "ended"
    end)
    assert.equal("ended", out)
  end)

  it("refuses a nested join, and an argument that is no function", function(rank)
    local _, nn = load()
    local ddp = nn.DDP(build())
    assert.matches("expected a function", message(ddp.join, ddp, {}, 3))
    assert.matches("unknown option", message(ddp.join, ddp, { divide = true }, function() end))
    ddp:join(function()
      ddp(input(rank, 1), true):sum():backward()
      assert.matches("already inside a join", message(ddp.join, ddp, function() end))
    end)
  end)
end)

-- A gang of its own, because the ranks do nothing more after such an error.
ranks.describe(3, "an error inside a join", function()
  it("is raised on every rank", function(rank)
    local _, nn = load()
    local ddp = nn.DDP(build())
    local text = message(ddp.join, ddp, function()
      for step = 1, rank == 2 and 1 or 4 do
        if rank == 1 and step == 3 then error("the data ends here", 0) end
        ddp(input(rank, step), true):sum():backward()
      end
    end)
    assert.matches("the data ends here", text)
  end)
end)

ranks.describe(2, "options of DDP", function()
  it("accepts a 1-d device mesh instead of a group", function(rank)
    local _, nn, dist = load()
    local mesh = dist.init_device_mesh("cpu", { 2 })
    local ddp = nn.DDP(build(), { device_mesh = mesh })
    ddp(input(rank, 1), true):sum():backward()
    local want = build()
    for r = 0, 1 do (want(input(r, 1), true):sum() / 2):backward() end
    require("moonshard").testing.assert_close(ddp.module.a.weight.grad, want.a.weight.grad,
      { rtol = 1e-10, atol = 1e-12 })
    assert.equal("Cannot specify both process_group and device_mesh arguments.",
      message(nn.DDP, build(), { device_mesh = mesh, process_group = dist.default_group() }))
    assert.matches("Only 1D device mesh is supported, but got",
      message(nn.DDP, build(), { device_mesh = dist.init_device_mesh("cpu", { 1, 2 }) }))
    assert.matches("expected a device mesh", message(nn.DDP, build(), { device_mesh = 3 }))
  end)

  it("sends nothing at construction if init_sync is false", function(rank)
    local _, nn, dist = load()
    local ddp
    local told = dist.record(function() ddp = nn.DDP(build(rank + 1), { init_sync = false }) end)
    assert.equal(0, #told)
    assert.is_true(ddp.module.a.weight:equal(build(rank + 1).a.weight))
  end)

  it("does not reduce buckets that no rank used with skip_all_reduce_unused_params", function(rank)
    local _, nn, dist = load()
    for _, skip in ipairs { false, true } do
      local ddp = nn.DDP(build(), { bucket_cap_mb = 1e-6, find_unused_parameters = true,
        skip_all_reduce_unused_params = skip })
      local sent = {}
      for step, side in ipairs { false, rank == 1, true } do
        ddp:zero_grad()
        local told = dist.record(function() ddp(input(rank, step), side):sum():backward() end)
        sent[step] = 0
        for _, c in ipairs(told) do
          if c.op == "all_reduce" and c.dtype == "float64" then sent[step] = sent[step] + c.input_numel end
        end
        local grad = ddp.module.side.weight.grad
        if step == 1 then assert.is_nil(grad) else
          assert.is_not_nil(grad)
          local want = build()
          for r = step == 2 and 1 or 0, 1 do (want(input(r, step), true):sum() / 2):backward() end
          require("moonshard").testing.assert_close(grad, want.side.weight.grad, { rtol = 1e-10, atol = 1e-12 })
        end
      end
      local all = 4 * 6 + 6 + 2 * (6 * 3 + 3)
      assert.same({ skip and all - 21 or all, all, all }, sent)
    end
  end)
end)
