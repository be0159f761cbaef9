-- SPDX-License-Identifier: MIT
--- run:checkpoint of models that are sharded in each way: the run continues to the numbers of an undisturbed one, and a
--- process without sharding reads the same weights, buffers and optimizer state.
local ms = require "moonshard"
local process = require "spec.support.process"
local ranks = require "spec.support.ranks"

local JOB = [[
local ms = require "moonshard"
local nn, fsdp = ms.nn, ms.fsdp
ms.dist.init()
local out, kind = arg[1], arg[2]
local shard = {
  whole = function(m) return m end,
  fully_shard = function(m) fsdp.fully_shard(m[1]) return fsdp.fully_shard(m) or m end,
  FSDP = function(m) m[1] = fsdp.FSDP(m[1]) return fsdp.FSDP(m) end,
  original = function(m) return fsdp.FSDP(m, { use_orig_params = true }) end,
  columns = function(m)
    return fsdp.fully_shard(m, { shard_placement_fn = function(_, p)
      return p.ndim == 2 and p.shape[2] % ms.dist.world_size() == 0 and fsdp.Shard(2) or nil
    end })
  end,
  mesh = function(m)
    local mesh = ms.dist.init_device_mesh("cpu", { 2, ms.dist.world_size() / 2 }, { names = { "replicate", "shard" } })
    return fsdp.fully_shard(m, { mesh = mesh })
  end,
  DDP = function(m) return nn.DDP(m) end,
}
local function train(name, resume, steps)
  ms.manual_seed(1)
  local model = shard[kind](nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)))
  local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
  local run = ms.run.start { out = out .. name, model = model, optimizer = optimizer, quiet = true, resume = resume }
  for step in ms.steps(steps, { from = run.step + 1 }) do
    ms.manual_seed(step)
    local loss = model(ms.rand(6, 4)):pow(2):mean()
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
    run:log { loss = loss }
    if step == 3 or step == 6 then run:checkpoint() end
  end
  run:finish()
end
train("whole", false, 6)
train("parts", false, 4)
train("parts", true, 6)
]]

-- The tensors of a run's last checkpoint, by name.
local function last(folder) return (ms.load(folder .. "/step-000006.safetensors")) end

describe("run:checkpoint", function()
  for world = 1, 4 do
    for _, kind in ipairs { "whole", "fully_shard", "columns", "mesh", "FSDP", "original", "DDP" } do
      if world == 4 and kind == "mesh" or world < 4 and kind ~= "mesh" and (kind ~= "whole" or world == 1) then
        it(("of %s over %d ranks continues the run"):format(kind, world), function()
          local folder = process.temp_folder()
          finally(function() process.remove_folder(folder) end)
          local job = ranks.run(world, JOB, { args = { folder .. "/", kind } })
          assert.are.equal(0, job.code, job.stderr)
          local one, two = ms.run.metrics(folder .. "/whole"), ms.run.metrics(folder .. "/parts")
          assert.are.equal(6, #two)
          for k = 1, 6 do assert.are.equal(one[k].loss, two[k].loss) end

          local a, b, moments = last(folder .. "/whole"), last(folder .. "/parts"), 0
          for name, t in ms.sorted_pairs(a) do
            assert.is_true(t:equal(b[name]), name)
            if name:find "exp_avg$" then moments = moments + 1 end
          end
          assert.are.equal(6, moments)                    -- two for each layer

          -- Without sharding: the shapes and names are those of the plain model.
          local checkpoint = require("moonshard.run.checkpoint").open(folder .. "/parts/step-000006.safetensors")
          local model = ms.nn.Sequential(ms.nn.Linear(4, 7), ms.nn.BatchNorm1d(7), ms.nn.ReLU(), ms.nn.Linear(7, 3))
          local optimizer = ms.optim.AdamW(model:parameters(), { lr = 0.1 })
          if kind ~= "DDP" then                           -- whose names begin with "module."
            checkpoint:load_model(model)
            checkpoint:load_training(model, optimizer)
            assert.is_true(model[1].weight:detach():equal(a["model.1.weight"]))
            assert.is_true(model[2].running_mean:equal(a["model.2.running_mean"]))
            assert.is_true(model[2].running_mean:abs():sum():item() > 0)
            assert.is_true(optimizer:state_of(model[4].bias).exp_avg:equal(a["optim.4.bias.exp_avg"]))
          end
          checkpoint:close()
        end)
      end
    end
  end
end)
