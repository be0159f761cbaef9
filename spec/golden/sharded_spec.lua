-- SPDX-License-Identifier: MIT
--- The same training with every model sharded by fully_shard over real ranks: each rank has its own input, the engine
--- averages the gradients, and every rank must get PyTorch's results.
local ms = require "moonshard"
local golden = require "spec.support.golden"
local ranks = require "spec.support.ranks"

local function train(name, rank, world, reshard)
  local fsdp = ms.fsdp
  local spec, run = golden.models[name], golden.run_of(name, world)
  local model = golden.fill(spec.make { dtype = "float64" })
  for _, m in ipairs(spec.units(model)) do fsdp.fully_shard(m, { reshard_after_forward = reshard }) end
  fsdp.fully_shard(model, { reshard_after_forward = reshard })
  local params = golden.trainable(model)
  local opt = spec.optim(params)
  for step, expected in ipairs(run.losses_by_step_and_rank) do
    ms.scope(function()
      opt:zero_grad()
      local loss = spec.loss(model, rank, step - 1, golden)
      golden.close(("loss at step %d of rank %d"):format(step, rank), expected[rank + 1], loss:item(), 1e-10, 1e-10)
      loss:backward()
      local norm = ms.nn.utils.clip_grad_norm_(params, math.huge)
      golden.close("gradient norm at step " .. step, run.grad_norm_by_step[step], norm:item(), 1e-10)
      opt:step()
    end)
  end
  golden.close_params(run, model, function(p) return p:full_tensor() end, 1e-9, 1e-11)
end

for world = 1, 4 do
  ranks.describe(world, ("golden training sharded over %d ranks #mpi"):format(world), function()
    if not golden.folder then
      pending("needs reference data, which is missing (MOONSHARD_GOLDEN names its folder)")
      return
    end
    for _, name in ipairs(golden.models) do
      it("of " .. name, function(rank, n) train(name, rank, n, nil) end)
      it("of " .. name .. ", kept gathered between forward and backward",
        function(rank, n) train(name, rank, n, false) end)
    end
  end)
end
