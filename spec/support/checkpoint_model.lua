-- SPDX-License-Identifier: MIT
--- A small model with its optimizer, for specs of checkpoints.
local train_alike = require "spec.support.train_alike"

local M = {}

local function load() return require "moonshard" end

function M.make(options)
  local ms = load()
  ms.manual_seed(7)
  local Net = ms.nn.Module:extend "Net"
  function Net:init()
    self.a = ms.nn.Linear(6, 9)
    self.b = ms.nn.Linear(9, 12, { bias = false })
    self.c = ms.nn.Linear(12, 1)
    self:register_buffer("count", ms.zeros(1, { dtype = "int64" }))
  end
  function Net:forward(x)
    self.count:add_(1)
    return self.c(self.b(self.a(x):tanh()):tanh())
  end
  local model = Net()
  if options then
    ms.fsdp.fully_shard(model.a, options)
    ms.fsdp.fully_shard(model.b, options)
    ms.fsdp.fully_shard(model, options)
  end
  return model, ms.optim.AdamW(model:parameters(), { lr = 1 / 3, amsgrad = true })
end

function M.train(model, optim, from, to) train_alike(model, optim, from, to, 6) end

--- All values of model and optimizer as plain numbers, in one table.
function M.contents(model, optim)
  local ms = load()
  local out = {}
  for name, t in ms.sorted_pairs(ms.fsdp.state_dict(model)) do out["m " .. name] = t:tolist() end
  local sd = ms.fsdp.optim_state_dict(model, optim)
  for name, entry in ms.sorted_pairs(sd.state) do
    for key, v in ms.sorted_pairs(entry) do out[("o %s %s"):format(name, key)] = ms.is_tensor(v) and v:tolist() or v end
  end
  out.lr = sd.param_groups[1].lr
  return out
end

return M
