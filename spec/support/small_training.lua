-- SPDX-License-Identifier: MIT
--- A small sharded training for specs, with three units (the root, a plain one, one of low precision), clipping and
--- AdamW.
local STEPS = 3

local function make()
  local ms = require "moonshard"
  local nn, fsdp = ms.nn, ms.fsdp
  ms.manual_seed(3)
  local model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 11))
  fsdp.fully_shard(model[2])
  fsdp.fully_shard(model[5], { mp_policy = fsdp.MixedPrecisionPolicy { param_dtype = "bfloat16",
    output_dtype = "float32" } })
  fsdp.fully_shard(model)
  return model, ms.optim.AdamW(model:parameters(), { lr = 0.01 }), ms
end

local function train(model, optimizer, ms, rank, losses)
  for step = 1, STEPS do
    ms.scope(function()
      ms.manual_seed(100 * step + rank)
      local ids = ms.randint(0, 11, { 7 })
      local loss = ms.nn.F.cross_entropy(model(ids), ids)
      loss:backward()
      ms.nn.utils.clip_grad_norm_(model:parameters(), 1)
      optimizer:step()
      optimizer:zero_grad()
      losses[step] = loss:item()
    end)
  end
end

return { make, train }
