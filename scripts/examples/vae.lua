-- SPDX-License-Identifier: MIT
--- A variational autoencoder of discs, which draws new ones into a PNG.
--- luajit scripts/examples/vae.lua [OUT.png]
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local data, metrics, optim = ms.data, ms.metrics, ms.optim
local VAE = require "moonshard.models.vae"

-- Images [n, 1, 16, 16] of soft discs at random places, of random size.
local SIDE = 16
local function discs(n)
  local ys, xs = ms.arange(0, SIDE):float():reshape(1, SIDE, 1), ms.arange(0, SIDE):float():reshape(1, 1, SIDE)
  local y, x = ms.rand(n, 1, 1) * 8 + 4, ms.rand(n, 1, 1) * 8 + 4
  local radius = ms.rand(n, 1, 1) * 2 + 2
  return ((radius - ((ys - y):square() + (xs - x):square()):sqrt()) * 2):sigmoid():unsqueeze(2)
end

ms.manual_seed(1)
local loader = data.DataLoader(data.TensorDataset(discs(1024)), { batch_size = 64, shuffle = true })
local vae = VAE { input = SIDE * SIDE, hidden = 128, latent = 4 }
local optimizer = optim.Adam(vae:parameters(), { lr = 2e-3 })
local EPOCHS = 12
for epoch = 1, EPOCHS do
  local mean = metrics.Mean()
  for images in loader:epoch() do
    local loss = vae:loss(images:flatten(2), { beta = math.min(1, epoch / 6) })    -- the weight of the divergence grows
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
    mean:update(loss)
  end
  if epoch % 4 == 0 then print(("epoch %d  loss %.1f"):format(epoch, mean:compute())) end
end

-- Unseen discs, and their reconstructions.
vae:eval()
ms.no_grad(function()
  local unseen = discs(64)
  local again = vae(unseen:flatten(2)):sigmoid():reshape(64, 1, SIDE, SIDE)
  print(("mean error of a pixel: %s 0.1"):format((again - unseen):abs():mean():item() < 0.1 and "below" or "not below"))
  local out = arg[1] or os.tmpname() .. ".png"
  data.write_png(out, data.make_grid(ms.cat({ unseen:narrow(1, 1, 8), again:narrow(1, 1, 8),
    vae:sample(8):reshape(8, 1, SIDE, SIDE) }, 1), { nrow = 8 }))
  print(("images, reconstructions and new ones: %d x %d pixels"):format(data.read_image(out):size(3),
    data.read_image(out):size(2)))
  if not arg[1] then os.remove(out) end
end)
