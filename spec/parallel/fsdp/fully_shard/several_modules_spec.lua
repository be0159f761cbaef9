-- SPDX-License-Identifier: MIT
--- Units of several modules (fully_shard of a list): one gather and one reduction for all modules that run together,
--- whichever run, in any order, inside the root's forward or separately.
local ranks = require "spec.support.ranks"
local message = require "spec.support.message"

-- Runs `first`, then a, b (one unit) and mid (a unit of its own) in the given order; "+a" runs a in a checkpoint of its
-- own.
local function net(ms)
  local nn = ms.nn
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first = nn.Linear(3, 5)
    for _, name in ipairs { "a", "b", "mid" } do self[name] = nn.Linear(5, 5) end
  end
  function Net:forward(x, program)
    x = self.first(x):tanh()
    for mark, name in program:gmatch "(%+?)(%a+)" do
      local function run(y) return self[name](y):tanh() end
      x = mark == "+" and ms.checkpoint(run, x) or run(x)
    end
    return x
  end
  ms.manual_seed(3)
  return Net():double()
end

local function wrapped(options)
  local ms = require "moonshard"
  local model = net(ms)
  ms.fsdp.fully_shard({ model.a, model.b }, options)
  ms.fsdp.fully_shard(model.mid, options)
  return ms.fsdp.fully_shard(model, options), ms
end

local function input(ms, rank, k)
  ms.manual_seed(100 * rank + k)
  return ms.randn(2, 3, { dtype = "float64" })
end

local function count(list, op)
  local n = 0
  for _, e in ipairs(list) do n = n + (e.op == op and 1 or 0) end
  return n
end

local function events_of(events, kind, unit)
  local n = 0
  for _, e in ipairs(events) do n = n + (e.event == kind and e.unit == unit and 1 or 0) end
  return n
end

-- A step of a model, sharded or not: passes of the root, with backwards together or one after the other. alone: b also
-- runs separately after each pass, on parts of its output, with its own backward.
local function step(ms, model, rank, plan, scale)
  local sum
  for k, program in ipairs(plan) do
    local h = model(input(ms, rank, k), program)
    if plan.alone then
      local cut = h:detach():requires_grad_(true)
      for row = 1, 2 do (model.b(cut:narrow(1, row, 1)):pow(2):sum() * scale):backward() end
      h:backward(cut.grad)
    else
      local loss = h:pow(2):sum() * scale
      if plan.apart then loss:backward() else sum = sum and sum + loss or loss end
    end
  end
  if sum then sum:backward() end
end

local PLANS = {
  ["both in order"] = { "a b" },
  ["another unit between them"] = { "a mid b" },
  ["the second first"] = { "b mid a" },
  ["one only"] = { "a mid" },
  ["one only, twice in a pass"] = { "a mid a" },
  ["the second only, behind a pass with both"] = { "a b", "mid b" },
  ["two passes without the second, one backward"] = { "a", "mid a" },
  ["each in its own checkpoint"] = { "mid +a +b" },
  ["each in its own checkpoint, another unit between them"] = { "+a +mid +b", "+b +mid" },
  ["one in a checkpoint, the other not"] = { "+a mid b", "a +b" },
  ["passes with and without each"] = { "a b", "mid", "b", "+a +b", apart = true },
  ["one by itself behind the root's forward"] = { "a mid", alone = true },
  ["one by itself behind passes with both"] = { "a b", "+a +b", alone = true },
}
local NAMES = {}
for name in pairs(PLANS) do NAMES[#NAMES + 1] = name end
table.sort(NAMES)

for _, world in ipairs { 1, 2, 3, 4 } do
  ranks.describe(world, ("units of several modules on %d ranks"):format(world), function(rank)
    for _, reshard in ipairs(world == 4 and { 2 } or world == 1 and { true } or { true, false }) do
      it(("train as the plain model, reshard_after_forward = %s"):format(tostring(reshard)), function()
        for _, name in ipairs(NAMES) do
          local model, ms = wrapped { reshard_after_forward = reshard }
          local plain = net(ms)
          local optimizers = { ms.optim.SGD(model:parameters(), { lr = 0.1 }),
            ms.optim.SGD(plain:parameters(), { lr = 0.1 }) }
          ms.catch_warnings(function()
            for _ = 1, 2 do
              for r = 0, world - 1 do step(ms, plain, r, PLANS[name], 1 / world) end
              step(ms, model, rank, PLANS[name], 1)
              local ok, text = pcall(ms.fsdp.check_sharded_parity, plain, model)
              assert.is_true(ok, name .. ": " .. tostring(text))
              for _, optimizer in ipairs(optimizers) do
                optimizer:step()
                optimizer:zero_grad()
              end
            end
          end)
        end
      end)
    end
  end)
end

ranks.describe(2, "a unit of several modules", function(rank)
  for name, case in pairs {
    ["side by side"] = { "mid a b", 0 }, ["each in its own checkpoint"] = { "mid +a +b", 0 },
    ["another unit between them"] = { "a mid b", 0 }, ["each in a checkpoint, another between them"] = { "+b +mid +a",
      0 },
  } do
    it("is gathered twice and reduced once a step: " .. name, function()
      local model, ms = wrapped()
      local warned, seen = ms.catch_warnings(function()
        return ms.dist.record(function() step(ms, model, rank, { case[1] }, 1) end)
      end)
      assert.same({}, warned)
      -- Gathers: the root's once, those of the two other units once in forward and once in backward.
      assert.equal(5, count(seen, "all_gather"))
      assert.equal(3, count(seen, "reduce_scatter"))
    end)
  end

  it("reshards at the end of a root's forward in which some of its modules did not run, and warns once", function()
    local model, ms = wrapped()
    local unit = "a, b"
    local warned = ms.catch_warnings(function()
      for _ = 1, 2 do
        local h
        local forward = ms.fsdp.record(function() h = model(input(ms, rank, 1), "a mid") end)
        assert.equal(1, events_of(forward, "unshard", unit))
        assert.equal(1, events_of(forward, "reshard", unit))
        assert.matches("is sharded", message(function() return model.b.weight:sum() end))
        local backward = ms.fsdp.record(function() h:sum():backward() end)
        assert.equal(1, events_of(backward, "unshard", unit))
        assert.equal(1, events_of(backward, "post_backward", unit))
        assert.is_nil(model.b.weight.grad)
        assert.is_truthy(model.a.weight.grad)
      end
      ms.no_grad(function() model.b(ms.ones(1, 5, { dtype = "float64" })) end)
    end)
    assert.equal(1, #warned)
    assert.matches("^1 of the 2 modules passed to fully_shard did not run forward before backward", warned[1])
    assert.matches("Modules that did not run forward: %[FSDPLinear%]$", warned[1])
  end)

  it("is prefetched in backward as one unit, and prefetches the unit that ran before it", function()
    local model, ms = wrapped()
    local loss = model(input(ms, rank, 1), "mid a b mid"):sum()
    local order = {}
    for _, e in ipairs(ms.fsdp.record(function() loss:backward() end)) do
      order[#order + 1] = e.event .. " " .. (e.unit == "" and "root" or e.unit)
    end
    assert.same({ "unshard mid", "unshard a, b", "reshard mid", "post_backward mid", "unshard mid", "reshard a, b",
      "post_backward a, b",
      "reshard mid", "post_backward mid", "reshard root", "post_backward root" }, order)
  end)

  it("casts the inputs and outputs of every module", function()
    local ms = require "moonshard"
    local nn, fsdp = ms.nn, ms.fsdp
    local seen = {}
    local Probe = nn.Linear:extend "Probe"
    function Probe:forward(x)
      seen[#seen + 1] = x.dtype
      return nn.Linear.forward(self, x)
    end
    local Net = nn.Module:extend "Net"
    function Net:init() self.a, self.b = Probe(5, 5), Probe(5, 5) end
    function Net:forward(x, skip)
      local y = self.a(x)
      seen[#seen + 1] = y.dtype
      return skip and y or self.b(y:double())
    end
    local model = Net()
    fsdp.fully_shard({ model.a, model.b }, { mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16",
      output_dtype = "float16" } })
    fsdp.fully_shard(model)
    assert.equal("float16", model(ms.ones(2, 5)).dtype)
    assert.same({ "bfloat16", "float16", "bfloat16" }, seen)
    ms.catch_warnings(function()
      assert.equal("float16", model(ms.ones(2, 5), true).dtype)
      assert.equal("float16", model.b(ms.ones(2, 5)).dtype)
    end)
  end)

  it("computes with the current parameters after an error between its modules", function()
    for _, where in ipairs { "a", "mid", "b" } do
      local model, ms = wrapped()
      local plain = net(ms)
      local fails = true
      model[where]:register_forward_hook(function() if fails then error("no luck", 0) end end)
      assert.equal("no luck", message(model, input(ms, rank, 1), "a mid b"))
      fails = false
      ms.no_grad(function()
        for _, p in ipairs(model:parameters()) do p:to_local():mul_(2) end       -- as an optimizer does
        for _, p in ipairs(plain:parameters()) do p:mul_(2) end
      end)
      ms.testing.assert_close(model(input(ms, rank, 1), "a mid b"):detach(),
        plain(input(ms, rank, 1), "a mid b"):detach())
    end
  end)

  it("may contain a module inside another of its modules, and enclose the rest of the model", function()
    local ms = require "moonshard"
    local nn, fsdp = ms.nn, ms.fsdp
    local Net = nn.Module:extend "Net"
    function Net:init()
      self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, { bias = false })
      self.head.weight = self.embed.weight
      self.body = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    end
    function Net:forward(t) return self.head(self.body(self.embed(t))) end
    local function make()
      ms.manual_seed(4)
      return Net()
    end
    for _, list in ipairs { { "embed", "head" }, { "embed", "head", "body", "body.1" } } do
      local model, plain, modules = make(), make(), {}
      for k, path in ipairs(list) do modules[k] = model:get_submodule(path) end
      fsdp.fully_shard(modules)
      fsdp.fully_shard(model)
      local function batch(r) return ms.tensor({ { r, 3, 6 } }, { dtype = "int64" }) end
      for _ = 1, 2 do
        for r = 0, 1 do (plain(batch(r)):pow(2):sum() / 2):backward() end
        local seen = ms.dist.record(function() model(batch(rank)):pow(2):sum():backward() end)
        fsdp.check_sharded_parity(plain, model)
        -- with all modules in the list, the root has no parameters of its own
        local trained = #list == 2 and 2 or 1
        assert.equal(trained, count(seen, "reduce_scatter"))
      end
    end
  end)
end)
