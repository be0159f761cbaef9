-- SPDX-License-Identifier: MIT
--- 6. Saving and resuming, with bitwise equal results. luajit scripts/examples/06_resume.lua
local here = arg[0]:match "^(.*)/" or "."
package.path = ("%s/../../lua/?.lua;%s/../../lua/?/init.lua;%s"):format(here, here, package.path)
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local function new()
  ms.manual_seed(1)
  local model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))
  return model, optim.AdamW(model:parameters(), { lr = 0.01 })
end

-- The batch depends only on the step, so a resumed run gets the same batches.
local function train(model, optimizer, from, to)
  for step in ms.steps(to, { from = from }) do
    ms.manual_seed(100 + step)
    local x = ms.randn(16, 4)
    nn.F.mse_loss(model(x), x:abs():sum(2, { keepdim = true })):backward()
    optimizer:step()
    optimizer:zero_grad()
  end
end

local model, optimizer = new()
train(model, optimizer, 1, 20)

-- The same training, stopped after step 8; saves weights and optimizer state to one safetensors file.
local again, again_optimizer = new()
train(again, again_optimizer, 1, 8)
local path = os.tmpname()
local tensors = again:state_dict()
for k, s in ipairs(again_optimizer:state_dict().state) do
  tensors[k .. ".exp_avg"], tensors[k .. ".exp_avg_sq"] = s.exp_avg, s.exp_avg_sq
end
ms.save(path, tensors, { metadata = { step = "8" } })

-- From here on, this could be another process.
local resumed, resumed_optimizer = new()
local saved, metadata = ms.load(path)
resumed:load_state_dict(saved, { strict = false })
local state = resumed_optimizer:state_dict()
for k in ipairs(resumed:parameters()) do
  state.state[k] = { step = tonumber(metadata.step), exp_avg = saved[k .. ".exp_avg"],
    exp_avg_sq = saved[k .. ".exp_avg_sq"] }
end
resumed_optimizer:load_state_dict(state)
train(resumed, resumed_optimizer, tonumber(metadata.step) + 1, 20)
os.remove(path)

local same = true
for name, p in resumed:named_parameters() do same = same and p:equal(model:get_parameter(name)) end
if ms.dist.rank() == 0 then
  print("resumed at step 8, equal to the undisturbed run after step 20:", same)
end
