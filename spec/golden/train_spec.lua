-- SPDX-License-Identifier: MIT
--- Six data-parallel steps of each reference model compared with PyTorch's results; one process simulates all ranks.
local ms = require "moonshard"
local golden = require "spec.support.golden"

--- Simulates the run of `world` ranks: averages gradients by accumulating loss / world.
local function play(name, world, dtype, loss_tol, param_rtol, param_atol)
  local spec, run = golden.models[name], golden.run_of(name, world)
  golden.dtype = dtype
  local model = golden.fill(spec.make { dtype = dtype })
  local opt = spec.optim(golden.trainable(model))
  for step, expected in ipairs(run.losses_by_step_and_rank) do
    ms.scope(function()
      opt:zero_grad()
      for rank = 0, world - 1 do
        local loss = spec.loss(model, rank, step - 1, golden)
        golden.close(("loss at step %d of rank %d"):format(step, rank), expected[rank + 1], loss:item(), loss_tol,
          loss_tol)
        local part = loss / world
        part:backward()
      end
      golden.close("gradient norm at step " .. step, run.grad_norm_by_step[step], golden.grad_norm(model:parameters()),
        loss_tol)
      opt:step()
    end)
  end
  golden.close_params(run, model, function(p) return p end, param_rtol, param_atol)
end

describe("golden training", function()
  if not golden.folder then
    pending("needs reference data, which is missing (MOONSHARD_GOLDEN names its folder)")
    return
  end
  after_each(function() golden.dtype = "float64" end)

  for _, name in ipairs(golden.models) do
    for world = 1, 4 do
      it(("of %s as %d ranks in float64"):format(name, world), function()
        play(name, world, "float64", 1e-10, 1e-9, 1e-11)
      end)
    end
    it(("of %s in float32"):format(name), function()
      play(name, 1, "float32", 2e-5, 1e-4, 2e-5)
    end)
  end
end)
