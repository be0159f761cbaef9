-- SPDX-License-Identifier: MIT
--- Learning rates and momenta of 40 steps, compared with PyTorch's schedules.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local S = ms.optim.lr_scheduler

local LOSSES = { 5, 4, 4, 4, 3.9999, 3, 3, 3, 3.1, 3, 3, 2.9, 2.9, 2.9, 2.9, 2.9 }

local schedules = {
  step = { S.step, { step_size = 7, gamma = 0.5 } },
  multistep = { S.multistep, { milestones = { 3, 8, 8, 20 }, gamma = 0.3 } },
  exponential = { S.exponential, { gamma = 0.9 } },
  polynomial = { S.polynomial, { total_iters = 12, power = 1.5 } },
  restarts = { S.cosine_warm_restarts, { T_0 = 6, eta_min = 0.01 } },
  restarts_longer = { S.cosine_warm_restarts, { T_0 = 4, T_mult = 2, eta_min = 0.01 } },
  one_cycle = { S.one_cycle, { max_lr = 0.7, total_steps = 40 } },
  one_cycle_linear = { S.one_cycle, { max_lr = 0.7, epochs = 8, steps_per_epoch = 5, anneal_strategy = "linear",
    pct_start = 0.4 } },
  one_cycle_three = { S.one_cycle, { max_lr = 0.7, total_steps = 40, three_phase = true } },
  cyclic = { S.cyclic, { base_lr = 0.01, max_lr = 0.3, step_size_up = 5, step_size_down = 8 } },
  cyclic_halved = { S.cyclic, { base_lr = 0.01, max_lr = 0.3, step_size_up = 4, mode = "triangular2" } },
  cyclic_range = { S.cyclic, { base_lr = 0.01, max_lr = 0.3, step_size_up = 4, mode = "exp_range", gamma = 0.97 } },
  multiplicative = { S.multiplicative, function(t) return t % 2 == 1 and 0.95 or 0.9 end },
  plateau = { S.reduce_on_plateau, { factor = 0.5, patience = 1, cooldown = 2, min_lr = 0.01 } },
  plateau_max = { S.reduce_on_plateau, { mode = "max", factor = 0.3, patience = 2, threshold = 0.05,
    threshold_mode = "abs" } },
  sequential = { function(o)
    return S.sequential(o, { milestones = { 4, 15 }, schedules = { S.linear(o, { start_factor = 0.25, end_factor = 1,
      steps = 4 }), S.exponential(o, { gamma = 0.9 }), S.step(o, { step_size = 5, gamma = 0.5 }) } })
  end },
  cosine = { S.cosine, { steps = 39, min_factor = 0.1 } },
  linear = { S.linear, { start_factor = 0.25, end_factor = 0.75, steps = 10 } },
  constant = { S.constant, { factor = 0.5, steps = 6 } },
  lambda = { S.lambda, function(t) return 0.9 ^ t end },
  swa = { S.swa, { swa_lr = 0.05, anneal_steps = 8 } },
  swa_linear = { S.swa, { swa_lr = 0.05, anneal_steps = 8, anneal_strategy = "linear" } },
  chained = { function(o)
    return S.chained(o, { S.constant(o, { factor = 0.5, steps = 6 }), S.exponential(o, { gamma = 0.95 }) })
  end },
}

local function sgd()
  return ms.optim.SGD({ ms.nn.Parameter(ms.zeros(1)) }, { lr = 0.2, momentum = 0.9 })
end

describe("golden schedules", function()
  local reference = golden.load "schedules"

  for name, case in ms.sorted_pairs(reference.cases) do
    local made = schedules[name]
    it("are PyTorch's: " .. name, function()
      local o = sgd()
      local s = made[1](o, made[2])
      for t, lr in ipairs(case.lr) do
        golden.close(("learning rate of step %d"):format(t - 1), lr, o.param_groups[1].lr, 1e-9, 1e-12)
        golden.close(("momentum of step %d"):format(t - 1), case.momentum[t], o.param_groups[1].momentum, 1e-9)
        if t < #case.lr then s:step(name:find "plateau" and LOSSES[math.min(t, 16)] or nil) end
      end
    end)

    it("continue from their state: " .. name, function()
      local o, p = sgd(), sgd()
      local s, u = made[1](o, made[2]), made[1](p, made[2])
      local function value(t) return name:find "plateau" and LOSSES[math.min(t, 16)] or nil end
      for t = 1, 9 do s:step(value(t)) end
      u:load_state_dict(s:state_dict())
      for t = 10, 30 do
        s:step(value(t))
        u:step(value(t))
        assert.are.equal(o.param_groups[1].lr, p.param_groups[1].lr)
        assert.are.equal(o.param_groups[1].momentum, p.param_groups[1].momentum)
      end
    end)
  end
end)
