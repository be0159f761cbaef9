-- SPDX-License-Identifier: MIT
--- 5. Parameters, gradients and optimizer state sharded over ranks.
---   mpirun -n 2 luajit scripts/examples/05_fully_shard.lua       (without mpirun: a world of one rank)
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn, dist, fsdp, optim = ms.nn, ms.dist, ms.fsdp, ms.optim

dist.init()
local rank, world = dist.rank(), dist.world_size()
local function say(...) if rank == 0 then print(...) end end

ms.manual_seed(1)                                       -- the same weights on every rank
local model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

-- The third layer is a unit: gathered just before it computes, resharded afterwards. The root has the other parameters.
fsdp.fully_shard(model[3])
fsdp.fully_shard(model)
local p = model[3].weight
say("the whole parameter:", p.shape)
say("rows on this rank:", p:to_local().shape[1] == math.ceil(64 / world) and "64 / ranks" or "?")

local optimizer = optim.AdamW(model:parameters(), { lr = 0.01 })
for step in ms.steps(200) do
  -- Every rank has its own eight rows of the batch; gradients are averaged over ranks.
  local x = ms.randn(8 * world, 8):narrow(1, 8 * rank + 1, 8)
  local loss = nn.F.mse_loss(model(x), x:sin():sum(2, { keepdim = true }))
  loss:backward()
  local norm = nn.utils.clip_grad_norm_(model:parameters(), 1)
  optimizer:step()
  optimizer:zero_grad()
  if step % 100 == 0 then
    local mean = loss:detach():clone()
    dist.all_reduce(mean, { op = "avg" })
    say(("step %d  loss %.2f, norm of the whole gradient %.1f"):format(step, mean:item(), norm:item()))
  end
end
local whole = p:full_tensor()                           -- collective
say("gathered again:", whole.shape)
