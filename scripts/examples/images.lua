-- SPDX-License-Identifier: MIT
--- A vision transformer that tells shapes apart, with a loader, a schedule and metrics.
--- luajit scripts/examples/images.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local data, metrics, nn, optim = ms.data, ms.metrics, ms.nn, ms.optim
local ViT = require "moonshard.models.vit"

local NAMES = { "row", "column", "diagonal", "frame" }
local function draw(n)                                  -- images of noise with one shape each, and their classes
  local images, classes = ms.rand(n, 1, 16, 16) * 0.4, ms.randint(0, #NAMES, { n })
  for k, class in ipairs(classes:tolist()) do
    local image, at = images[k][1], 1 + k * 7 % 9
    if class == 0 then image:narrow(1, at, 2):fill_(1) end
    if class == 1 then image:narrow(2, at, 2):fill_(1) end
    if class == 2 then image:copy_(image:maximum(ms.eye(16))) end
    if class == 3 then
      local inside = image:narrow(1, at + 1, 4):narrow(2, at + 1, 4):clone()
      image:narrow(1, at, 6):narrow(2, at, 6):fill_(1)
      image:narrow(1, at + 1, 4):narrow(2, at + 1, 4):copy_(inside)
    end
  end
  return data.TensorDataset(images, classes)
end

ms.manual_seed(1)
local training = data.DataLoader(draw(512), { batch_size = 32, shuffle = true })
local validation = data.DataLoader(draw(200), { batch_size = 100 })
local model = ViT { image = 16, patch = 4, channels = 1, classes = #NAMES, dim = 32, layers = 2, heads = 4,
  mlp_dim = 64 }
local EPOCHS = 6
local optimizer = optim.AdamW(model:parameters(), { lr = 3e-3 })
local schedule = optim.lr_scheduler.cosine(optimizer, { steps = EPOCHS * training:size(), warmup = 10 })

for epoch = 1, EPOCHS do
  local mean = metrics.Mean()
  for x, y in training:epoch() do
    local loss = nn.F.cross_entropy(model(x), y)
    loss:backward()
    nn.utils.clip_grad_norm_(model:parameters(), 1)
    optimizer:step()
    schedule:step()
    optimizer:zero_grad()
    mean:update(loss)
  end
  print(("epoch %d  loss %.3f"):format(epoch, mean:compute()))
end

model:eval()
local accuracy, confusion = metrics.Accuracy(), metrics.ConfusionMatrix { classes = #NAMES }
ms.no_grad(function()
  for x, y in validation:epoch() do
    local scores = model(x)
    accuracy:update(scores, y)
    confusion:update(scores, y)
  end
end)
print(accuracy:compute() > 0.95 and "more than 95 % right" or confusion:compute())
