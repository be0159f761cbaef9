-- SPDX-License-Identifier: MIT
--- The Net of PyTorch's FSDP suites.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn, optim = ms.nn, ms.optim

local Net = nn.Module:extend("Net")

function Net:init(kind)
  self.net = nn.Sequential(nn.Linear(8, 16, kind), nn.ReLU(), nn.Linear(16, 8, kind))
  self.out = nn.Linear(8, 4, kind)
end

function Net:forward(x)
  return self.out(nn.F.relu(self.net(x)))
end

common.sum_model(Net, { 16, 8 })

return {
  Net = Net,
  init = common.init_of(function() return Net() end, function(m) return { m.net[3], m.net } end),
  make = function(kind) return Net(kind) end,
  loss = function(model, rank, step, golden) return model(golden.x_of({ 16, 8 }, rank, step)):sum() end,
  optim = function(params) return optim.SGD(params, { lr = 0.002, momentum = 0.9 }) end,
  units = function(model) return { model.net, model.out } end,
}
