-- SPDX-License-Identifier: MIT
--- The model of PyTorch's execution order suite: layer2 is frozen and unused.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn, optim = ms.nn, ms.optim

local ExecOrder = nn.Module:extend("ExecOrder")

function ExecOrder:init(kind)
  kind = kind or {}
  local no_bias = { bias = false, dtype = kind.dtype, device = kind.device }
  self.layer0 = nn.Linear(5, 6, kind)
  self.layer1 = nn.Linear(6, 6, no_bias)
  self.layer2 = nn.Sequential(nn.Linear(6, 3, no_bias), nn.ReLU(), nn.Linear(3, 6, no_bias))
  for _, p in ipairs(self.layer2:parameters()) do p.requires_grad = false end
end

function ExecOrder:forward(x)
  return nn.F.relu(self.layer1(nn.F.relu(self.layer0(x))))
end

common.sum_model(ExecOrder, { 8, 5 })

return {
  ExecOrder = ExecOrder,
  init = common.init_of(function() return ExecOrder() end, function(m) return { m.layer1, m.layer2 } end),
  make = function(kind) return ExecOrder(kind) end,
  loss = function(model, rank, step, golden) return model(golden.x_of({ 8, 5 }, rank, step)):sum() end,
  optim = function(params) return optim.SGD(params, { lr = 0.002, momentum = 0.9 }) end,
  units = function(model) return { model.layer0, model.layer1 } end,
}
