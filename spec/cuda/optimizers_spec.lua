-- SPDX-License-Identifier: MIT
--- Every optimizer's step on the (emulated) GPU has the CPU's bits where the gradients are the same, with each set of
--- states, dtype and kind of memory: master weights, parameters and gradients that no wide load can read, more elements
--- than a block takes.
local ms = require "moonshard"
local on_gpu = require "spec.support.on_gpu"(8)

-- The options of each optimizer that decide which states it keeps, and terms of its formula.
local OPTIONS = {
  SGD = { {}, { momentum = 0.9 }, { momentum = 0.9, nesterov = true, weight_decay = 0.1, maximize = true } },
  Adam = { {}, { amsgrad = true, weight_decay = 0.1 } },
  AdamW = { { lr = 0.01 }, { amsgrad = true }, { lr = 0.01, maximize = true } },
  NAdam = { {}, { lr = 0.01, weight_decay = 0.1 } },
  RAdam = { {}, { lr = 0.01, betas = { 0.8, 0.5 } } },
  Adamax = { {} },
  Adagrad = { {}, { initial_accumulator_value = 0.1 } },
  Adadelta = { {}, { eps = 1e-3 } },
  RMSprop = { {}, { momentum = 0.9 }, { centered = true }, { centered = true, momentum = 0.9, weight_decay = 1 } },
  Rprop = { {} },
  ASGD = { {}, { t0 = 1 } },
  Lion = { {}, { lr = 0.01, weight_decay = 0.1 } },
}
local MASTER = { SGD = true, Adam = true, AdamW = true }                 -- those that keep master weights of half types
local DTYPES = { "float32", "float64", "bfloat16", "float16" }

--- norm: of which power the gradients' norm is limited; 0: of none; "skip": a scaler leaves out the second step, whose
--- gradient is infinite.
local function train(device, name, options, dtype, n, odd, norm)
  ms.manual_seed(8)
  local function place(x)
    x = x:to(device)
    return odd and x:narrow(1, 2, n) or x:narrow(1, 1, n):clone()
  end
  local p = place(ms.randn(n + 1):to(dtype)):detach():requires_grad_(true)
  local other = ms.randn(3):to(dtype):to(device):detach():requires_grad_(true)
  local optimizer = ms.optim[name](norm == 3 and { p } or { other, p }, options)
  local scaler = norm == "skip" and ms.amp.ShardedGradScaler { init_scale = 2 }
  for step = 1, 3 do
    -- No subnormal gradients: the CPU takes them for 0, so their sign would be 0 there (Lion, Rprop).
    local g = ms.randn(n + 1):to(dtype)
    g = g:masked_fill(g:abs():lt(2 ^ -12), 0.5)
    g = g:masked_fill((ms.arange(0, n + 1) + step):remainder(5):eq(0), 0)       -- signs of 0
    if scaler and step == 2 then g[3] = math.huge end
    p.grad, other.grad = place(g), g:narrow(1, 1, 3):clone():to(device)
    if scaler then
      scaler:scale(ms.ones(1, { device = device }))
      scaler:step(optimizer)
      scaler:update()
    elseif norm > 0 then optimizer:step_clipped(0.5, { norm_type = norm }) else optimizer:step() end
  end
  return p:detach():to "cpu"
end

describe("steps on a GPU #cuda", function()
  for name, sets in pairs(OPTIONS) do
    for _, dtype in ipairs(DTYPES) do
      on_gpu(("of %s give the CPU's parameters in %s"):format(name, dtype), function()
        local half = dtype == "bfloat16" or dtype == "float16"
        for _, options in ipairs(sets) do
          for _, master in ipairs(half and MASTER[name] and { false, true } or { false }) do
            for _, n in ipairs { 5, 70, 777, 2050, 40007 } do
              for _, odd in ipairs { false, true } do
                local given = { master_weights = master or nil }
                for k, v in pairs(options) do given[k] = v end
                for _, norm in ipairs(n == 70 and { 0, math.huge, 3, "skip" } or { 0 }) do
                  local want = train("cpu", name, given, dtype, n, odd, norm)
                  local got = train("cuda", name, given, dtype, n, odd, norm)
                  -- The CPU's pass flushes subnormal numbers, also those of float16.
                  if dtype == "float16" then assert.is_true((got:float() - want:float()):abs():max():item() < 2 ^ -14)
                  elseif norm == 3 then assert.is_true(got:allclose(want, { rtol = 1e-2 }))
                  else assert.is_true(got:equal(want)) end
                end
              end
            end
          end
        end
      end)
    end
  end
end)
