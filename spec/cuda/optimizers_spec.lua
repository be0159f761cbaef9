-- SPDX-License-Identifier: MIT
--- Every optimizer's step on the (emulated) GPU, with each set of states, dtype and kind of memory: master weights,
--- parameters and gradients that no wide load can read, more elements than a block takes.
local ms = require "moonshard"
local on_gpu = require "spec.support.on_gpu"(8)

-- The options of each optimizer that decide which states it keeps.
local OPTIONS = {
  SGD = { {}, { momentum = 0.9 }, { momentum = 0.9, nesterov = true, weight_decay = 0.1, maximize = true } },
  Adam = { {}, { amsgrad = true, weight_decay = 0.1 } },
  AdamW = { {}, { amsgrad = true } },
  NAdam = { {} },
  RAdam = { {} },
  Adamax = { {} },
  Adagrad = { {} },
  Adadelta = { {} },
  RMSprop = { {}, { momentum = 0.9 }, { centered = true }, { centered = true, momentum = 0.9 } },
  Rprop = { {} },
  ASGD = { {} },
  Lion = { {} },
}
local MASTER = { SGD = true, Adam = true, AdamW = true }                 -- those that keep master weights of half types
local DTYPES = { "float32", "float64", "bfloat16", "float16" }
-- One unit in the last place, or what float32's rounding makes of three steps.
local BOUNDS = { float32 = 1e-6, float64 = 1e-14, bfloat16 = 2 ^ -7, float16 = 2 ^ -10 }

local function train(device, name, options, dtype, n, odd)
  ms.manual_seed(8)
  local function numbers()
    local x = ms.randn(n + 1):to(dtype):to(device)
    return odd and x:narrow(1, 2, n) or x:narrow(1, 1, n):clone()
  end
  local p = numbers():detach():requires_grad_(true)
  local optimizer = ms.optim[name]({ p }, options)
  for step = 1, 3 do
    p.grad = numbers()
    if step == 2 then ms.nn.utils.clip_grad_norm_({ p }, 0.5) end
    optimizer:step()
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
            for _, n in ipairs { 5, 70, 2050, 40007 } do
              for _, odd in ipairs { false, true } do
                local given = { master_weights = master or nil }
                for k, v in pairs(options) do given[k] = v end
                local want = train("cpu", name, given, dtype, n, odd)
                local got = train("cuda", name, given, dtype, n, odd)
                ms.testing.assert_close(got, want, { rtol = BOUNDS[dtype], atol = BOUNDS[dtype] / 10 })
              end
            end
          end
        end
      end)
    end
  end
end)
