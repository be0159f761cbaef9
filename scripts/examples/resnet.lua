-- SPDX-License-Identifier: MIT
--- ResNet-18 over ranks: sharded, with batch norm over all ranks, each rank with its part of the data.
---   mpirun -n 2 luajit scripts/examples/resnet.lua            (without mpirun: a world of one rank)
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local data, dist, fsdp, metrics, nn, optim = ms.data, ms.dist, ms.fsdp, ms.metrics, ms.nn, ms.optim
local ResNet = require "moonshard.models.resnet"

dist.init()
local rank, world = dist.rank(), dist.world_size()
local function say(...) if rank == 0 then print(...) end end

-- Images [n, 3, 24, 24] of stripes in random colours; the class is the direction of the stripes.
local function stripes(n)
  local y, x = ms.arange(0, 24):float():reshape(1, 1, 24, 1), ms.arange(0, 24):float():reshape(1, 1, 1, 24)
  local classes = ms.randint(0, 4, { n })
  local angle = classes:float():reshape(n, 1, 1, 1) * (math.pi / 4) + ms.randn(n, 1, 1, 1) * 0.1
  local wave = ((x * angle:cos() + y * angle:sin()) * (ms.rand(n, 1, 1, 1) * 0.5 + 0.6) + ms.rand(n, 1, 1, 1) * 6):sin()
  return wave * ms.randn(n, 3, 1, 1) + ms.randn(n, 3, 24, 24) * 0.3, classes
end

ms.manual_seed(1)                                       -- the same images and weights on every rank
local images, classes = stripes(512)
local crop = data.transforms.RandomCrop(24, { padding = 2 })
local training = data.DataLoader(data.Dataset { size = 512, get = function(i) return crop(images[i]), classes[i] end },
  { batch_size = 32 / world, shuffle = true, rank = rank, world = world })
local validation = data.DataLoader(data.TensorDataset(stripes(128)), { batch_size = 32, rank = rank, world = world })

local model = nn.SyncBatchNorm.convert_sync_batchnorm(ResNet { depth = 18, classes = 4, width = 8 })
for stage = 1, 4 do
  for _, block in ipairs(model["layer" .. stage]) do fsdp.fully_shard(block) end
end
fsdp.fully_shard(model)
local optimizer = optim.AdamW(model:parameters(), { lr = 0.01 })
local EPOCHS = 6
local schedule = optim.lr_scheduler.one_cycle(optimizer, { max_lr = 0.01, epochs = EPOCHS,
  steps_per_epoch = training:size() })

for epoch = 1, EPOCHS do
  local mean = metrics.Mean()
  for x, y in training:epoch() do
    local loss = nn.F.cross_entropy(model(x), y)
    loss:backward()
    optimizer:step()
    schedule:step()
    optimizer:zero_grad()
    mean:update(loss)
  end
  say(("epoch %d  loss %.2f"):format(epoch, mean:compute()))      -- the mean over all ranks; compute is collective
end

model:eval()
local accuracy = metrics.Accuracy()
ms.no_grad(function()
  for x, y in validation:epoch() do accuracy:update(model(x), y) end
end)
local share = accuracy:compute()
say(share > 0.9 and "more than 90 % right" or ("%.0f %% right"):format(100 * share))
