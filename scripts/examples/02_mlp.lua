-- SPDX-License-Identifier: MIT
--- 2. A network that learns a circle.   luajit scripts/examples/02_mlp.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

ms.manual_seed(1)
-- 512 points of a square; the label says whether a point lies inside the circle of radius 0.8.
local points = ms.rand(512, 2) * 2 - 1
local inside = points:pow(2):sum(2):lt(0.64):long()

local model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
print(model)
local optimizer = optim.AdamW(model:parameters(), { lr = 0.01 })

-- Each iteration of ms.steps is a scope: tensors made in it are released at its end.
for step in ms.steps(300) do
  local loss = nn.F.cross_entropy(model(points), inside)
  loss:backward()
  optimizer:step()
  optimizer:zero_grad()
  if step % 100 == 0 then print(("step %d  loss %.3f"):format(step, loss:item())) end
end

local right = ms.no_grad(function() return model(points):argmax(2):eq(inside):sum():item() end)
print(right > 490 and "more than 490 of 512 points right" or ("only %d of 512 points right"):format(right))
