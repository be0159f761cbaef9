-- SPDX-License-Identifier: MIT
--- A run that is recorded in a folder, stopped, and continued. luajit scripts/examples/run.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local data, nn, optim = ms.data, ms.nn, ms.optim

local folder = os.tmpname() .. ".run"

-- The same call begins the run and continues it after its latest checkpoint, which also holds `state`.
local function train(out, stop)
  ms.manual_seed(1)
  local x = ms.rand(640, 2)
  local items = data.TensorDataset(x, x:prod(2, { keepdim = true }))
  local loader = data.DataLoader(items, { batch_size = 40, shuffle = true })
  local model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
  local optimizer = optim.AdamW(model:parameters(), { lr = 0.01 })
  local schedule = optim.lr_scheduler.cosine(optimizer, { steps = 100 })
  local progress = { best = math.huge }
  local run = ms.run.start { out = out, resume = true, config = { lr = 0.01 }, total = 100, model = model,
    optimizer = optimizer, state = { loader = loader, schedule = schedule, progress = progress }, samples = 40,
    sinks = { "csv", "tensorboard" }, quiet = true }
  if run.loaded then print(("continues after step %d, in epoch %d"):format(run.step, loader.epochs + 1)) end
  for step in ms.steps(stop, { from = run.step + 1 }) do
    local batch, wanted = loader:next()                 -- after an epoch's last batch, the first of the next
    local loss = nn.F.mse_loss(model(batch), wanted)
    loss:backward()
    progress.best = math.min(progress.best, loss:item())
    run:log { loss = loss, lr = schedule.last_lr[1] }   -- before zero_grad, so that the memory of gradients is recorded
    optimizer:step()
    schedule:step()
    optimizer:zero_grad()
    if step % 25 == 0 then run:checkpoint() end
    if step % 50 == 0 then run:histogram("first-layer", model[1].weight) end
  end
  if stop == 100 then run:image("first-layer", model[1].weight) end
  run:finish()
  return model[1].weight, progress.best
end

local function count(name, pattern)
  local n = 0
  for line in io.lines(folder .. "/" .. name) do n = n + (line:find(pattern, 1, true) and 1 or 0) end
  return n
end

train(folder, 60)
print "stopped after step 60; the latest checkpoint is of step 50"
local weight, best = train(folder, 100)

local metrics = ms.run.metrics(folder)
print(("lines: %d, the last of step %d"):format(#metrics, metrics[#metrics].step))
print(("images: %d"):format(count("media.jsonl", '"kind": "image"')))
print(("lines superseded: %d"):format(count("superseded.jsonl", '"step"')))
local straight, its_best = train(folder .. "2", 100)
print("equal to a run that was not stopped:", weight:equal(straight) and best == its_best)
os.execute(("rm -r '%s' '%s2' '%s'"):format(folder, folder, (folder:gsub("%.run$", ""))))
