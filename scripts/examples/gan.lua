-- SPDX-License-Identifier: MIT
--- A generative adversarial network that learns a ring, recorded as a run with both models and both optimizers.
--- luajit scripts/examples/gan.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local function mlp(inputs, outputs)
  return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
    nn.Linear(64, outputs))
end
local function ring(n)                                  -- points at distance 1 from the origin, with a little noise
  local angle = ms.rand(n, 1) * (2 * math.pi)
  return ms.cat({ angle:cos(), angle:sin() }, 2) + ms.randn(n, 2) * 0.05
end

ms.manual_seed(1)
local NOISE, B, STEPS = 8, 128, 800
local generator, critic = mlp(NOISE, 2), mlp(2, 1)
local g_optimizer = optim.Adam(generator:parameters(), { lr = 1e-3, betas = { 0.5, 0.9 } })
local c_optimizer = optim.Adam(critic:parameters(), { lr = 1e-3, betas = { 0.5, 0.9 } })

-- A run saves one model and its optimizer; `state` has the others.
local folder = os.tmpname() .. ".run"
local run = ms.run.start { out = folder, resume = true, total = STEPS, model = generator, optimizer = g_optimizer,
  state = { critic = critic, c_optimizer = c_optimizer }, samples = B, quiet = true }

local bce = nn.F.binary_cross_entropy_with_logits
for step in ms.steps(STEPS, { from = run.step + 1 }) do
  local fake = generator(ms.randn(B, NOISE))
  local on_real, on_fake = critic(ring(B)), critic(fake:detach())
  local c_loss = bce(on_real, ms.ones_like(on_real)) + bce(on_fake, ms.zeros_like(on_fake))
  c_optimizer:zero_grad()
  c_loss:backward()
  c_optimizer:step()

  local judged = critic(fake)
  local g_loss = bce(judged, ms.ones_like(judged))
  g_optimizer:zero_grad()
  g_loss:backward()
  g_optimizer:step()
  run:log { g_loss = g_loss, c_loss = c_loss }
  if step % 400 == 0 then run:checkpoint() end
end
run:finish()

ms.no_grad(function()
  local radius = generator(ms.randn(1000, NOISE)):norm(2, 2)
  local angle = generator(ms.randn(1000, NOISE))
  local quarters = (angle:select(2, 1):gt(0):long() * 2 + angle:select(2, 2):gt(0):long()):bincount()
  print(("radius %.1f, the least of four quarters has %s"):format(radius:mean():item(),
    quarters:min():item() > 100 and "more than 100 of 1000 points" or quarters:min():item() .. " points"))
end)
os.execute(("rm -r '%s' '%s'"):format(folder, (folder:gsub("%.run$", ""))))
