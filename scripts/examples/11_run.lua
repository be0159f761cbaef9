-- SPDX-License-Identifier: MIT
--- 11. A run that is recorded in a folder, stopped, and continued. luajit scripts/examples/11_run.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local folder = os.tmpname() .. ".run"

-- The same call begins the run and continues it: after its latest checkpoint, if there is one.
local function train(stop)
  ms.manual_seed(1)
  local model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
  local optimizer = optim.AdamW(model:parameters(), { lr = 0.01 })
  local run = ms.run.start { out = folder, resume = true, config = { lr = 0.01 }, total = 100, model = model,
    optimizer = optimizer, samples = 64, sinks = { "csv", "tensorboard" }, quiet = true }
  if run.loaded then print("continues after step " .. run.step) end
  for step in ms.steps(stop, { from = run.step + 1 }) do
    local x = ms.rand(64, 2)
    local loss = nn.F.mse_loss(model(x), x:prod(2, { keepdim = true }))
    loss:backward()
    run:log { loss = loss, lr = 0.01 }                  -- before zero_grad, so that the memory of gradients is recorded
    optimizer:step()
    optimizer:zero_grad()
    if step % 50 == 0 then
      run:checkpoint()
      run:histogram("first-layer", model[1].weight)
    end
  end
  if stop == 100 then run:image("first-layer", model[1].weight) end
  run:finish()
end

local function count(name, pattern)
  local n = 0
  for line in io.lines(folder .. "/" .. name) do n = n + (line:find(pattern, 1, true) and 1 or 0) end
  return n
end

train(60)
print "stopped after step 60; the latest checkpoint is of step 50"
train(100)

local metrics = ms.run.metrics(folder)
print(("lines: %d, the last of step %d"):format(#metrics, metrics[#metrics].step))
print(("images: %d"):format(count("media.jsonl", '"kind": "image"')))
print(("lines superseded: %d"):format(count("superseded.jsonl", '"step"')))
os.execute(("rm -r '%s' '%s'"):format(folder, (folder:gsub("%.run$", ""))))
