-- SPDX-License-Identifier: MIT
--- ZeroRedundancyOptimizer: bit for bit the results of the inner optimizer, with the state of each parameter on one
--- rank only.
local message = require "spec.support.message"
local ranks = require "spec.support.ranks"

local function load()
  local ms = require "moonshard"
  return ms, ms.nn, ms.dist, ms.optim
end

-- Weights 5 x 3, 7 x 5, 2 x 7 and biases 5, 7, 2; optionally the last layer in another dtype.
local function make(mixed)
  local ms, nn = load()
  ms.manual_seed(21)
  local m = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
  if mixed then m[5]:to "float64" end
  return m
end

local function backward(model, rank, step)
  local ms = load()
  ms.manual_seed(100 * step + rank)
  local h = ms.randn(4, 3)
  for k = 1, 5 do
    if k == 5 then h = h:to(model[5].weight.dtype) end
    h = model[k](h)
  end
  h:pow(2):sum():backward()
end

-- Averages the gradients of the ranks' inputs, as DDP does.
local function average(model)
  local _, _, dist = load()
  for _, p in ipairs(model:parameters()) do
    if p.grad then dist.all_reduce(p.grad:detach(), { op = "avg" }) end
  end
end

local function same(a, b, what)
  for name, p in a:named_parameters() do assert.is_true(p:equal(b:get_parameter(name)), (what or "") .. name) end
end

local function same_state(expected, got)
  local ms = load()
  for at, entry in ms.sorted_pairs(expected.state) do
    for name, value in ms.sorted_pairs(entry) do
      local there = got.state[at][name]
      if name == "step" then assert.equal(value, there) else assert.is_true(value:equal(there), at .. name) end
    end
  end
  for at in ms.sorted_pairs(got.state) do assert.is_not_nil(expected.state[at]) end
  assert.same(expected.param_groups, got.param_groups)
end

local KINDS = {
  { "SGD", { lr = 0.1, momentum = 0.9, nesterov = true } },
  { "Adam", { lr = 0.01, amsgrad = true, weight_decay = 0.1 } }, { "AdamW", { lr = 0.02 } },
}

local function zero_of(model, kind, more)
  local _, _, _, optim = load()
  local options = { optimizer_class = optim[kind[1]] }
  for name, value in pairs(kind[2]) do options[name] = value end
  for name, value in pairs(more or {}) do options[name] = value end
  return optim.ZeroRedundancyOptimizer(model.parameters and model:parameters() or model, options)
end

-- Runs a plain optimizer on one copy of the model and the tested one on another, for some steps.
local function train(plain, a, zero, b, rank, first, last)
  for step = first, last do
    for _, pair in ipairs { { plain, a }, { zero, b } } do
      pair[2]:zero_grad()
      backward(pair[1], rank, step)
      average(pair[1])
      pair[2]:step()
    end
    same(plain, zero, ("step %d: "):format(step))
  end
end

for world = 1, 4 do
  ranks.describe(world, ("ZeroRedundancyOptimizer on %d ranks #mpi"):format(world), function()
    for _, kind in ipairs(KINDS) do
      for _, view in ipairs { false, true } do
        for _, mixed in ipairs { false, true } do
          it(("trains as %s does%s%s"):format(kind[1], view and ", parameters in blocks" or "", mixed
            and ", two dtypes" or ""), function(rank)
            local _, _, _, optim = load()
            local plain, m = make(mixed), make(mixed)
            local a, b = optim[kind[1]](plain:parameters(), kind[2]),
              zero_of(m, kind, { parameters_as_bucket_view = view })
            local before = m[1].weight
            train(plain, a, m, b, rank, 1, 4)
            assert.equal(before, m[1].weight)
          end)
        end
      end
    end

    it("assigns whole parameters to ranks, the largest first to the least loaded, and keeps state only for its own",
      function(rank)
      local m = make()
      local zero = zero_of(m, KINDS[3])
      -- 35, 15, 14, 7, 5, 2 elements.
      local owners = ({
        { "3.weight 1.weight 5.weight 3.bias 1.bias 5.bias" },
        { "3.weight 1.bias", "1.weight 5.weight 3.bias 5.bias" },
        { "3.weight", "1.weight 1.bias 5.bias", "5.weight 3.bias" },
        { "3.weight", "1.weight", "5.weight", "3.bias 1.bias 5.bias" },
      })[world]
      backward(m, 0, 1)
      zero:step()
      local own, n = {}, 0
      for name in owners[rank + 1]:gmatch "%S+" do own[m:get_parameter(name)], n = true, n + 1 end
      for name, p in m:named_parameters() do
        if own[p] then assert.equal(1, zero:state_of(p).step, name) else assert.is_nil(zero:state_of(p), name) end
      end
      assert.matches(("; %d of 6 parameters on this rank)"):format(n), tostring(zero), 1, true)
    end)

    it("works with more ranks than parameters", function(rank)
      local ms, _, _, optim = load()
      local function one() return ms.nn.Parameter(ms.full({ 3 }, 2.0)) end
      local p, q = one(), one()
      local plain, zero = optim.Adam({ p }, { lr = 0.1 }),
        optim.ZeroRedundancyOptimizer({ q }, { optimizer_class = optim.Adam, lr = 0.1 })
      for _ = 1, 3 do
        p.grad, q.grad = ms.ones(3), ms.ones(3)
        plain:step()
        zero:step()
      end
      assert.is_true(p:equal(q))
      zero:consolidate_state_dict(world - 1)
      if rank == world - 1 then same_state(plain:state_dict(), zero:state_dict()) end
    end)

    it("follows groups, their options, schedules and scalers", function(rank)
      local ms, _, _, optim = load()
      local plain, m = make(), make()
      local function groups(model)
        return { { params = model[1]:parameters(), lr = 0.5 }, { params = model[3]:parameters(), weight_decay = 0.1 } }
      end
      local a, b = optim.SGD(groups(plain), { lr = 0.1, momentum = 0.9 }),
        zero_of(groups(m), { "SGD", { lr = 0.1, momentum = 0.9 } })
      local function schedule(o) return optim.lr_scheduler.lambda(o, function(step) return 1 / (step + 1) end) end
      local c, d = schedule(a), schedule(b)
      train(plain, a, m, b, rank, 1, 2)
      c:step()
      d:step()
      train(plain, a, m, b, rank, 3, 4)
      a:add_param_group { params = plain[5]:parameters(), lr = 0.3 }
      b:add_param_group { params = m[5]:parameters(), lr = 0.3 }
      train(plain, a, m, b, rank, 5, 6)
      for k, group in ipairs(a.param_groups) do assert.equal(group.lr, b.param_groups[k].lr) end
      local function scaled(model, o)
        local scaler = ms.amp.GradScaler { init_scale = 4 }
        o:zero_grad()
        ms.manual_seed(5)
        scaler:scale(model(ms.randn(2, 3)):sum()):backward()
        scaler:step(o)
        scaler:update()
      end
      scaled(plain, a)
      scaled(m, b)
      same(plain, m)
    end)

    for _, view in ipairs { false, true } do
      it("saves and loads state that is the plain optimizer's" .. (view and ", parameters in blocks" or ""),
        function(rank)
        local _, _, _, optim = load()
        for _, kind in ipairs(KINDS) do
          local plain, m = make(), make()
          local a, b = optim[kind[1]](plain:parameters(), kind[2]),
            zero_of(m, kind, { parameters_as_bucket_view = view })
          train(plain, a, m, b, rank, 1, 2)
          for to = 0, world - 1 do
            b:consolidate_state_dict(to == 0 and { to = to } or to)
            if rank == to then
              same_state(a:state_dict(), b:state_dict())
            else
              assert.equal(("Optimizer state has not been consolidated on this rank. Please call `consolidate_state_dict(%d)` on all ranks beforehand "
                .. "if you meant to save the global state."):format(rank), message(b.state_dict, b))
            end
          end
          -- Another optimizer loads the state and continues alike.
          local saved = a:state_dict()
          local m2 = make()
          m2:load_state_dict(m:state_dict())
          local c = zero_of(m2, { kind[1], { lr = 3 } }, { parameters_as_bucket_view = view })
          c:load_state_dict(saved)
          assert.equal(kind[2].lr, c.param_groups[1].lr)
          train(plain, a, m2, c, rank, 3, 4)
          b:step()                                          -- the consolidated state is now outdated
          assert.matches("has not been consolidated", message(b.state_dict, b), 1, true)
        end
      end)
    end

    it("runs a closure, skips parameters without gradient, and clears gradients", function()
      local ms, _, _, optim = load()
      local m = make()
      local zero = zero_of(m, KINDS[1])
      local before = m[5].weight:detach():clone()
      assert.equal(7, zero:step(function()
        m[1](ms.ones(1, 3)):sum():backward()
        return 7
      end))
      assert.is_true(before:equal(m[5].weight))
      assert.is_not_nil(m[1].weight.grad)
      zero:zero_grad()
      assert.is_nil(m[1].weight.grad)
      assert.is_true(zero:isa(optim.Optimizer))
    end)

    it("refuses parameters that differ over ranks", function(rank)
      if world == 1 then return end
      local ms, nn, _, optim = load()
      local text = message(optim.ZeroRedundancyOptimizer, { nn.Parameter(ms.ones(rank == 1 and 3 or 2)) },
        { optimizer_class = optim.SGD })
      assert.equal("ZeroRedundancyOptimizer: ranks have different parameters: number 1 is float32 [3] (group 1) on rank 1 and float32 [2] (group 1) on rank 0", text)
    end)

    it("publishes a failed step to the other ranks", function(rank)
      local m = make()
      local zero = zero_of(m, KINDS[3])
      backward(m, 0, 1)
      if rank == world - 1 then zero.param_groups[1].lr = "fast" end
      assert.matches("lr is a string ('fast')", message(zero.step, zero), 1, true)
    end)

    it("steps on no rank if one rank's closure failed, and continues", function(rank)
      local plain, m = make(), make()
      local _, _, _, optim = load()
      local a, b = optim.Adam(plain:parameters(), KINDS[2][2]), zero_of(m, KINDS[2])
      for step = 1, 3 do
        assert.matches("the data ended", message(b.step, b, function()
          backward(m, rank, step)
          average(m)
          if rank == step % world then error("the data ended", 0) end
        end))
        require "moonshard".dist.recover()
        same(plain, m, "after the error: ")
        train(plain, a, m, b, rank, step, step)
      end
    end)
  end)
end

ranks.describe(3, "ZeroRedundancyOptimizer of some ranks #mpi", function()
  it("spreads state over its group", function(rank)
    local _, _, dist, optim = load()
    local group = dist.new_group { 0, 2 }
    if not dist.rank(group) then
      assert.matches("this rank is not a member of", message(optim.ZeroRedundancyOptimizer, make():parameters(),
        { optimizer_class = optim.SGD, process_group = group }), 1, true)
      return
    end
    local plain, m = make(), make()
    local a, b = optim.AdamW(plain:parameters(), { lr = 0.02 }), zero_of(m, KINDS[3], { process_group = group })
    for step = 1, 2 do
      backward(plain, 0, step)
      backward(m, 0, step)
      a:step()
      b:step()
      same(plain, m)
    end
    b:consolidate_state_dict(2)
    if rank == 2 then same_state(a:state_dict(), b:state_dict()) end
    assert.equal("consolidate_state_dict: argument 1, a rank, is a number (1), expected one of the group's ranks 0, 2",
      message(b.consolidate_state_dict, b, 1))
  end)
end)

describe("ZeroRedundancyOptimizer", function()
  it("refuses unsupported arguments", function()
    local ms, nn, _, optim = load()
    local m = make()
    local function try(params, o) return message(optim.ZeroRedundancyOptimizer, params, o) end
    local SGD = { optimizer_class = optim.SGD }
    assert.equal("ZeroRedundancyOptimizer: option 'optimizer_class' is nil, expected an optimizer's class, such as optim.AdamW", try(m:parameters()))
    assert.equal("ZeroRedundancyOptimizer: option 'optimizer_class' is class Linear, expected an optimizer's class, such as optim.AdamW",
      try(m:parameters(), { optimizer_class = nn.Linear }))
    assert.matches("option 'optimizer_class' is a SGD",
      try(m:parameters(), { optimizer_class = optim.SGD(m:parameters()) }), 1, true)
    assert.equal("ZeroRedundancyOptimizer got an empty parameter list", try({}, SGD))
    assert.matches("SGD: argument 1 is a number (3), expected a list of leaves or groups", try(3, SGD), 1, true)
    assert.matches("SGD: unknown option 'betas'", try(m:parameters(),
      { optimizer_class = optim.SGD, betas = { 0, 0 } }), 1, true)
    assert.matches("option 'process_group' is a number (1), expected a group",
      try(m:parameters(), { optimizer_class = optim.SGD, process_group = 1 }), 1, true)
    assert.matches("ZeroRedundancyOptimizer: options are a number (1), expected a table", try(m:parameters(), 1), 1,
      true)
    local sharded = nn.Linear(2, 2)
    ms.fsdp.fully_shard(sharded)
    assert.equal("ZeroRedundancyOptimizer: parameter 1 of group 1 is already sharded, so an ordinary optimizer shards its state; use that instead",
      try(sharded:parameters(), SGD))
    local zero = optim.ZeroRedundancyOptimizer(m:parameters(), SGD)
    assert.matches("belongs to another group already", message(zero.add_param_group, zero, { params = { m[1].weight } }), 1, true)
    assert.matches("is already sharded", message(zero.add_param_group, zero, { params = sharded:parameters() }), 1,
      true)
    assert.equal(1, #zero.param_groups)
    assert.matches("closure is a number (1), expected a function", message(zero.step, zero, 1), 1, true)
    assert.matches("the number of groups in the state is 2, expected the optimizer's, 1",
      message(zero.load_state_dict, zero, { state = {}, param_groups = { {}, {} } }), 1, true)
    assert.matches("expected a table with state and param_groups", message(zero.load_state_dict, zero, 1), 1, true)
  end)
end)
