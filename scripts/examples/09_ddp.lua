-- SPDX-License-Identifier: MIT
--- 9. The whole model on every rank: PyTorch's DistributedDataParallel.
---   mpirun -n 2 luajit scripts/examples/09_ddp.lua               (without mpirun: a world of one rank)
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn, dist, optim = ms.nn, ms.dist, ms.optim

dist.init()
local rank, world = dist.rank(), dist.world_size()
local function say(...) if rank == 0 then print(...) end end

ms.manual_seed(1 + rank)                                -- different weights on each rank; DDP broadcasts rank 0's
local model = nn.DDP(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), { gradient_as_bucket_view = true })
local first = dist.all_gather_object(model.module[1].weight:sum():item())
say("rank 0's weights on all:", first[1] == first[world])

local optimizer = optim.SGD(model:parameters(), { lr = 0.05, momentum = 0.9 })
local function loss_of(x) return nn.F.mse_loss(model(x), x:sin():mean(2, { keepdim = true })) end

for step in ms.steps(150) do
  -- Two micro-batches: the gradients of the first stay on the rank; the backward of the second averages the sum over
  -- ranks.
  model:no_sync(function() (loss_of(ms.randn(8, 8)) / 2):backward() end)
  local loss = loss_of(ms.randn(8, 8)) / 2
  loss:backward()
  nn.utils.clip_grad_norm_(model:parameters(), 1)
  optimizer:step()
  optimizer:zero_grad()
  if step % 50 == 0 then
    local mean = 2 * loss:detach()
    dist.all_reduce(mean, { op = "avg" })
    say(("step %d  loss %.3f"):format(step, mean:item()))
  end
end
local sums = dist.all_gather_object(model.module[1].weight:sum():item())
say("weights bitwise equal:", sums[1] == sums[world])

-- A hook instead of the average: its result for a bucket becomes the bucket's gradients.
local buckets = 0
local hooked = nn.DDP(nn.Linear(4, 2))
hooked:register_comm_hook(nil, function(_, bucket)
  buckets = buckets + 1
  local sum = bucket.flat:clone()
  dist.all_reduce(sum)
  return sum / world
end)
hooked(ms.ones(1, 4)):sum():backward()
say("buckets that the hook saw:", buckets)
say("gradient of the bias:", table.concat(hooked.module.bias.grad:tolist(), " "))
