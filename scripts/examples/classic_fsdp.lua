-- SPDX-License-Identifier: MIT
--- PyTorch's classic FSDP: flat parameters, a wrapping policy, float16 with a gradient scaler, state dicts.
---   mpirun -n 2 luajit scripts/examples/classic_fsdp.lua      (without mpirun: a world of one rank)
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn, dist, fsdp, optim, amp = ms.nn, ms.dist, ms.fsdp, ms.optim, ms.amp

dist.init()
local function say(...) if dist.rank() == 0 then print(...) end end

local Block = nn.Module:extend "Block"
function Block:init(dim)
  self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
end
function Block:forward(x) return x + self.down(nn.F.gelu(self.up(x))) end

-- Every Block becomes a unit; the other parameters belong to the root. Weights are gathered and used in float16;
-- shards, optimizer state and reduced gradients stay float32.
ms.manual_seed(1)
local model = fsdp.FSDP(nn.Sequential(nn.Linear(8, 32), Block(32), Block(32), nn.Linear(32, 1)), {
  auto_wrap_policy = fsdp.wrap.module_wrap_policy { Block },
  mixed_precision = fsdp.MixedPrecision { param_dtype = "float16", reduce_dtype = "float32" },
  sharding_strategy = dist.world_size() > 1 and "full_shard" or "no_shard",
  use_orig_params = true,
})
ms.manual_seed(1 + dist.rank())                         -- from here on, random data differ between ranks
say("units:", #fsdp.fsdp_modules(model))

local optimizer = optim.AdamW(model:parameters(), { lr = 0.005 })       -- made after wrapping, as in PyTorch
-- The initial scale is too large on purpose: the first steps are skipped.
local scaler = amp.ShardedGradScaler { init_scale = 2 ^ 40, backoff_factor = 2 ^ -8 }
local skipped = 0
for step in ms.steps(120) do
  local x = ms.randn(64, 8)
  local loss = nn.F.mse_loss(model(x):float(), x:sin():sum(2, { keepdim = true }))
  scaler:scale(loss):backward()
  scaler:unscale_(optimizer)
  model:clip_grad_norm_(1)
  local before = scaler:get_scale()
  scaler:step(optimizer)                                -- skipped if a gradient is inf or NaN on any rank
  scaler:update()
  optimizer:zero_grad()
  if scaler:get_scale() < before then skipped = skipped + 1 end
  if step % 60 == 0 then say(("step %d  loss %.2f"):format(step, loss:item())) end
end
say("steps skipped:", skipped, "scale:", scaler:get_scale())

-- Whole tensors with the names of the unwrapped model, on rank 0; loadable on any number of ranks.
local state = fsdp.state_dict(model, { type = "full", rank0_only = true, offload_to_cpu = true })
if dist.rank() == 0 then say("the second block's weight:", state["2.up.weight"].dtype, state["2.up.weight"].shape) end
fsdp.summon_full_params(model, function() say("summoned:", model.module[2].up.weight.shape) end)
fsdp.load_state_dict(model, state, { broadcast_from_rank0 = true })
