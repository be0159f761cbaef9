-- SPDX-License-Identifier: MIT
--- What holds for every optimizer: its state is saved and loaded, half types are stepped with float32 state, and
--- sharded parameters take the steps of whole ones.
local ms = require "moonshard"
local ranks = require "spec.support.ranks"
local message = require "spec.support.message"
local nn, optim = ms.nn, ms.optim

-- Options that use every part of a formula.
local all = {
  SGD = { lr = 0.05, momentum = 0.9, nesterov = true, weight_decay = 0.1 },
  Adam = { lr = 0.05, weight_decay = 0.1, amsgrad = true },
  AdamW = { lr = 0.05, maximize = true },
  RMSprop = { lr = 0.05, alpha = 0.9, momentum = 0.5, centered = true, weight_decay = 0.1 },
  Adagrad = { lr = 0.05, lr_decay = 0.1, initial_accumulator_value = 0.1 },
  Adadelta = { lr = 0.5, eps = 1e-3 },
  Adamax = { lr = 0.05, weight_decay = 0.1 },
  NAdam = { lr = 0.05, weight_decay = 0.1, momentum_decay = 0.1 },
  RAdam = { lr = 0.05, betas = { 0.9, 0.9 } },
  Lion = { lr = 0.01, weight_decay = 0.1 },
  Rprop = { lr = 0.05 },
  ASGD = { lr = 0.05, lambd = 0.1, t0 = 1 },
  Adafactor = { lr = 0.05, weight_decay = 0.1 },
  Muon = { lr = 0.05, ns_dtype = "float64" },
  LAMB = { lr = 0.05, weight_decay = 0.1 },
  LBFGS = { lr = 0.5, max_iter = 3 },
}

-- A stepper of all parameters; Muon leaves what is no matrix to SGD.
local function make(name, model)
  local matrices, rest = {}, {}
  for _, p in ipairs(model:parameters()) do
    local list = name ~= "Muon" or #(rawget(p, "_whole_shape") or p.shape) == 2 and matrices or rest
    if list == true then list = matrices end
    list[#list + 1] = p
  end
  local list = { optim[name](matrices, all[name]) }
  if #rest > 0 then list[2] = optim.SGD(rest, { lr = 0.05 }) end
  return list
end

local function net()
  ms.manual_seed(3)
  local model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
  return model:double()
end

local function input(step, rank)
  ms.manual_seed(100 * step + rank)
  return ms.rand(4, 5, { dtype = "float64" })
end

describe("every optimizer", function()
  it("keeps master weights exactly if it has the option", function()
    local engine = require "moonshard.core.ffi"
    local kind = 0
    while engine.lib.ms_optim_at(kind) ~= nil do
      local options = engine.ffi.new("ms_optim_options", { kind = kind, master_weights = 1 })
      local name = engine.ffi.string(engine.lib.ms_optim_at(kind).name)
      local refused = engine.lib.ms_optim_check(options) ~= 0
      local has = pcall(optim[name], { ms.zeros(2) }, { master_weights = true })
      assert.equal(has, not refused, name)
      if name == "Lion" then
        local _, text = pcall(require("moonshard.core.errors").fail)
        assert.matches("optimizer Lion: master_weights is 1, expected 0: it keeps no master weights", tostring(text), 1, true)
      end
      kind = kind + 1
    end
    assert.equal(12, kind)
  end)

  it("is in the list of this spec", function()
    local none = { Optimizer = true, ZeroRedundancyOptimizer = true, SparseAdam = true, EMA = true }
    for name, cls in ms.sorted_pairs(optim) do
      if type(cls) == "table" and rawget(cls, "__isa") and not none[name] then assert.is_table(all[name], name) end
    end
  end)

  for name in ms.sorted_pairs(all) do
    it(("continues from its state, loaded into a new one: %s"):format(name), function()
      local function run(from, to, model, list)
        for step = from, to do
          for _, o in ipairs(list) do
            o:step(function()
              model:zero_grad()
              local loss = model(input(step, 0)):pow(2):sum()
              loss:backward()
              return loss
            end)
          end
        end
      end
      local a, b = net(), net()
      local first = make(name, a)
      run(1, 3, a, first)
      b:load_state_dict(a:state_dict())
      local second = make(name, b)
      for k, o in ipairs(second) do
        o.param_groups[1].lr = 7
        o:load_state_dict(first[k]:state_dict())
      end
      run(4, 6, a, first)
      run(4, 6, b, second)
      for k, p in ipairs(b:parameters()) do assert.is_true(p:equal(a:parameters()[k]), name) end
      assert.same(first[1]:state_dict().param_groups, second[1]:state_dict().param_groups)
    end)

    it(("steps half types with wider state: %s"):format(name), function()
      local p, q = nn.Parameter(ms.ones(4, 3, { dtype = "bfloat16" })), nn.Parameter(ms.ones(4, 3))
      for _, leaf in ipairs { p, q } do
        local o = optim[name]({ leaf }, all[name])
        for _ = 1, 3 do
          o:step(function()
            o:zero_grad()
            local loss = (leaf:float() * 3):pow(2):sum()
            loss:backward()
            return loss
          end)
        end
        for _, t in pairs(o:state_of(leaf)) do
          if ms.is_tensor(t) and name ~= "LBFGS" then assert.are.equal("float32", t.dtype) end
        end
      end
      assert.is_false(q:equal(ms.ones(4, 3)))
      assert.near(0, (p:float() - q):abs():max():item(), 0.1 * math.max(1, q:abs():max():item()))
    end)
  end
end)

describe("every optimizer", function()
  for name in ms.sorted_pairs(all) do
    if name ~= "Muon" then                               -- which has no option maximize, as PyTorch's
      it("ascends with maximize as it descends on the negative: " .. name, function()
        local function trained(maximize)
          local options = { maximize = maximize }
          for key, value in pairs(all[name]) do
            if key ~= "maximize" then options[key] = value end
          end
          local model = net()
          local o = optim[name](model:parameters(), options)
          for step = 1, 3 do
            o:step(function()
              o:zero_grad()
              local loss = model(input(step, 0)):pow(2):sum() * (maximize and -1 or 1)
              loss:backward()
              return loss
            end)
          end
          return model:state_dict()
        end
        local down, up = trained(false), trained(true)
        for key, t in ms.sorted_pairs(down) do assert.is_true(t:equal(up[key]), key) end
      end)
    end
  end
end)

for world = 1, 4 do
  ranks.describe(world, "every optimizer over sharded parameters", function(rank)
    for name in ms.sorted_pairs(all) do
      if name ~= "LBFGS" then
        for _, kind in ipairs { "fully_shard", "FSDP" } do
          it(("takes the steps of whole ones: %s, %s"):format(name, kind), function()
            local whole, model = net(), net()
            if kind == "fully_shard" then
              ms.fsdp.fully_shard(model[3])
              ms.fsdp.fully_shard(model)
            else
              model = ms.fsdp.FSDP(model, { use_orig_params = true, sharding_strategy = "shard_grad_op" })
            end
            local a, b = make(name, whole), make(name, model)
            for step = 1, 3 do
              for r = 0, world - 1 do (whole(input(step, r)):pow(2):sum() / world):backward() end
              model(input(step, rank)):pow(2):sum():backward()
              for _, o in ipairs(a) do o:step() end
              for _, o in ipairs(b) do o:step() end
              whole:zero_grad()
              for _, o in ipairs(b) do o:zero_grad() end
            end
            local want = whole:state_dict()
            for key, t in ms.sorted_pairs(ms.fsdp.state_dict(model)) do
              ms.testing.assert_close(t, want[key], { rtol = 1e-9, atol = 1e-11 })
            end
          end)
        end
      end
    end

    it("refuses LBFGS", function()
      local model = ms.fsdp.fully_shard(net())
      assert.truthy(message(optim.LBFGS, model:parameters()):find("parameter 1 is sharded", 1, true))
    end)
  end)
end

describe("Muon", function()
  it("steps by nearly orthonormal columns, also when it iterates in bfloat16, the default", function()
    ms.manual_seed(2)
    for _, dtype in ipairs { "bfloat16", "float32" } do
      local p = nn.Parameter(ms.zeros(12, 8))
      p.grad = ms.eye(12):narrow(2, 1, 8) + 0.1 * ms.rand(12, 8)
      optim.Muon({ p }, { lr = 1, weight_decay = 0, ns_dtype = dtype ~= "bfloat16" and dtype or nil }):step()
      local step = -p:detach() / math.sqrt(12 / 8)
      local gram = step:t():matmul(step)                              -- singular values are from about 0.7 to 1.2
      assert.is_true(gram:diag():gt(0.4):all():item() and gram:diag():lt(1.5):all():item(), tostring(gram:diag()))
      assert.is_true((gram - gram:diag():diag()):abs():max():item() < 0.3, tostring(gram))
    end
  end)
end)

describe("SparseAdam", function()
  it("refuses dense gradients", function()
    local p = nn.Parameter(ms.ones(2, 2))
    p:sum():backward()
    local o = optim.SparseAdam { p }
    assert.truthy(message(o.step, o):find("has a dense gradient; use Adam", 1, true))
  end)
end)

describe("a captured step", function()
  -- The first call only runs; the second one records.
  local function refusal(step)
    return message(function()
      for _ = 1, 3 do step() end
    end)
  end

  local p = nn.Parameter(ms.ones(2, 2))
  for _, name in ipairs { "Muon", "Adafactor", "LBFGS" } do
    it("refuses optimizers whose steps are Lua functions: " .. name, function()
      local o = optim[name] { p }
      local step = ms.capture(function()
        o:step(function()
          o:zero_grad()
          local loss = p:pow(2):sum()
          loss:backward()
          return loss
        end)
      end)
      local text = refusal(step)
      assert.truthy(text:find(("the steps of %s are Lua functions"):format(name), 1, true), text)
    end)
  end

  it("refuses step hooks, naming the hook", function()
    local o = optim.SGD { p }
    o:register_step_post_hook(function() end)
    local text = refusal(ms.capture(function()
      p:pow(2):sum():backward()
      o:step()
    end))
    assert.truthy(text:find("it calls a step hook of SGD (", 1, true), text)
  end)
end)

describe("options of composed optimizers", function()
  local p = nn.Parameter(ms.ones(2, 2))
  for _, case in ipairs {
    { "Muon", { momentum = -1 }, "Muon: option 'momentum' is a number (-1), expected a number from 0" },
    { "Muon", { adjust_lr_fn = "orginal" }, "did you mean 'original'?" },
    { "Muon", { ns_coefficients = { 1, 2 } }, "ns_coefficients[3] is nil, expected a number" },
    { "Adafactor", { d = 0.5 }, "option 'd' is a number (0.5), expected a number from 1" },
    { "Adafactor", { eps = { true, 1 } }, "eps[1] is a boolean (true), expected false or a number from 0" },
    { "SparseAdam", { betas = { 0.9, 1 } }, "betas[2] is a number (1), expected a number from 0 to below 1" },
    { "LBFGS", { line_search_fn = "wolfe" }, "expected one of 'strong_wolfe'" },
    { "LBFGS", { max_iter = 0 }, "option 'max_iter' is a number (0), expected a whole number from 1" },
  } do
    it(("name the option and its value: %s %s"):format(case[1], next(case[2])), function()
      local text = message(optim[case[1]], { p }, case[2])
      assert.truthy(text:find(case[3], 1, true), text)
    end)
  end

  it("refuse vectors for Muon, several groups for LBFGS, and a step without a closure", function()
    local v = nn.Parameter(ms.ones(2))
    assert.truthy(message(optim.Muon, { p, v }):find("parameter 2 has shape [2], expected a matrix", 1, true))
    assert.truthy(message(optim.LBFGS, { { params = { p } }, { params = { v } } }):find("more than one group", 1, true))
    local o = optim.LBFGS { p }
    assert.truthy(message(o.step, o):find("LBFGS: step: closure is nil, expected a function", 1, true))
  end)
end)
