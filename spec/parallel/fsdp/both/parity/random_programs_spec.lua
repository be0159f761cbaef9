-- SPDX-License-Identifier: MIT
--- Random models and programs under sharding: layers are assigned to units at random (several per unit under
--- fully_shard); forwards call them in any order and number, in nested checkpoints, without gradients, with unused
--- results, or separately; backwards run together, separately or in reverse, with or without accumulation. Gradients
--- and parameters equal those of the plain model after every step.
local ranks = require "spec.support.ranks"
local load = require("spec.support.wrapped").load

local LAYERS = { "a", "b", "c", "d", "e" }
local STEPS = 3

-- Returns functions that draw random numbers, equal on every rank and independent of ms.manual_seed.
local function generator(seed)
  local state = seed * 7919 + 13
  local function uniform()
    state = (state * 1103515245 + 12345) % 2147483648
    return state / 2147483648
  end
  for _ = 1, 5 do uniform() end
  return uniform, function(n) return math.floor(uniform() * n) + 1 end
end

local function apply(self, x, program)
  local ms = load()
  for _, step in ipairs(program) do
    local kind, what = step[1], step[2]
    if kind == "call" then
      x = self[what](x):tanh()
    elseif kind == "checkpoint" then
      x = ms.checkpoint(function(y) return apply(self, y, what) end, x)
    elseif kind == "no_grad" then
      x = x + ms.no_grad(function() return self[what](x) end)
    else
      self[what](x)
    end
  end
  return x
end

local function net()
  local ms, nn = load()
  local Net = nn.Module:extend "Net"
  function Net:init()
    self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
    for _, name in ipairs(LAYERS) do self[name] = nn.Linear(5, 5) end
  end
  function Net:forward(x, program) return self.last(apply(self, self.first(x):tanh(), program)) end
  ms.manual_seed(3)
  return Net():double()
end

local function random_program(uniform, pick, depth)
  local program = {}
  for k = 1, pick(5) do
    local c = uniform()
    local layer = LAYERS[pick(#LAYERS)]
    if c < 0.6 then program[k] = { "call", layer }
    elseif c < 0.8 and depth > 0 then program[k] = { "checkpoint", random_program(uniform, pick, depth - 1) }
    elseif c < 0.9 then program[k] = { "no_grad", layer }
    else program[k] = { "unused", layer } end
  end
  return program
end

local function text_of(program)
  local out = {}
  for k, step in ipairs(program) do
    out[k] = ("%s(%s)"):format(step[1], type(step[2]) == "table" and text_of(step[2]) or step[2])
  end
  return table.concat(out, " ")
end

-- Ways to shard a model. Each returns the sharded model, the layers that are units or parts of one, and a description
-- for messages.
local FRONTS = {}

function FRONTS.fully_shard(model, _, pick)
  local _, _, fsdp = load()
  local options = ({ {}, { reshard_after_forward = true }, { reshard_after_forward = false } })[pick(3)]
  local groups, own, told = { {}, {}, {} }, {}, {}
  for _, name in ipairs(LAYERS) do
    local g = pick(4)
    if g < 4 then
      table.insert(groups[g], name)
      own[#own + 1] = name
    end
  end
  for _, group in ipairs(groups) do
    local modules = {}
    for k, name in ipairs(group) do modules[k] = model[name] end
    if #modules > 0 then fsdp.fully_shard(#modules == 1 and modules[1] or modules, options) end
    told[#told + 1] = table.concat(group, "+")
  end
  return fsdp.fully_shard(model, options), own, ("units %s, reshard_after_forward %s"):format(table.concat(told, " "),
    tostring(options.reshard_after_forward))
end

function FRONTS.FSDP(model, uniform, pick)
  local _, _, fsdp, _, quietly = load()
  local options = {
    sharding_strategy = ({ "full_shard", "shard_grad_op", "no_shard" })[pick(3)],
    backward_prefetch = ({ "pre", "post", "none" })[pick(3)],
    use_orig_params = uniform() < 0.5,
  }
  local own = {}
  local wrapped = quietly(function()
    for _, name in ipairs(LAYERS) do
      if pick(3) > 1 then
        model[name] = fsdp.FSDP(model[name], options)
        own[#own + 1] = name
      end
    end
    return fsdp.FSDP(model, options)
  end)
  return wrapped, own, ("instances %s, %s, %s, use_orig_params %s"):format(table.concat(own, " "),
    options.sharding_strategy, options.backward_prefetch,
    tostring(options.use_orig_params))
end

-- One step of a model, sharded or not; sync(on) is called where gradients are accumulated.
local function train(model, plan, rank, step, scale, sync)
  local ms = load()
  local losses = {}
  for k, program in ipairs(plan) do
    ms.manual_seed(1000 * step + 10 * k + rank)
    local x = ms.randn(2, 3, { dtype = "float64" })
    sync(not plan.accumulates or k == #plan)
    local out = model(x, program)
    if plan.backward == "alone" then
      local cut = out:detach():requires_grad_(true)
      local wide = ms.cat({ cut, cut, cut }, 2):narrow(2, 1, 5)
      for row = 1, 2 do
        (model[plan.alone](wide:narrow(1, row, 1)):pow(2):sum() * scale):backward { retain_graph = row == 1 }
      end
      out:backward(cut.grad)
    else
      losses[k] = out:pow(2):sum() * scale
      if plan.backward == "apart" then losses[k]:backward() end
    end
  end
  if plan.backward == "together" then
    local sum = losses[1]
    for k = 2, #losses do sum = sum + losses[k] end
    sum:backward()
  elseif plan.backward == "reverse" then
    for k = #losses, 1, -1 do
      sync(not plan.accumulates or k == 1)
      losses[k]:backward()
    end
  end
end

local function check(front, seed, rank, world)
  local ms, _, fsdp = load()
  local uniform, pick = generator(seed)
  local plain = net()
  local model, own, told = FRONTS[front](net(), uniform, pick)
  local optims = {}
  for k, m in ipairs { plain, model } do optims[k] = ms.optim.SGD(m:parameters(), { lr = 0.05 }) end
  for step = 1, STEPS do
    local plan = {}
    for k = 1, pick(3) do plan[k] = random_program(uniform, pick, 2) end
    plan.backward, plan.accumulates = ({ "together", "apart", "reverse", "alone" })[pick(4)], front == "fully_shard"
      and pick(4) == 1
    plan.alone = own[pick(math.max(#own, 1))]
    if not plan.alone and plan.backward == "alone" then plan.backward = "apart" end
    local function nothing() end
    for r = 0, world - 1 do train(plain, plan, r, step, 1 / world, nothing) end
    local ok, text = pcall(function()
      train(model, plan, rank, step, 1, front == "fully_shard"
        and function(on) model:set_requires_gradient_sync(on) end or nothing)
      fsdp.check_sharded_parity(plain, model)
    end)
    if not ok then
      local programs = {}
      for k, program in ipairs(plan) do programs[k] = text_of(program) end
      error(("%s\nseed %d, step %d: %s; backward %s%s%s; programs:\n%s"):format(tostring(text), seed, step, told,
        plan.backward,
        plan.alone and ", alone " .. plan.alone or "", plan.accumulates and ", accumulated" or "",
          table.concat(programs, "\n")), 0)
    end
    for _, optim in ipairs(optims) do
      optim:step()
      optim:zero_grad()
    end
  end
end

for _, world in ipairs { 1, 2, 3 } do
  ranks.describe(world, ("random programs on %d ranks"):format(world), function(rank)
    for _, front in ipairs { "fully_shard", "FSDP" } do
      it("train as the plain model: " .. front, function()
        load().catch_warnings(function()
          for seed = 100 * world, 100 * world + 14 do check(front, seed, rank, world) end
        end)
      end)
    end
  end)
end
