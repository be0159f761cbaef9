-- SPDX-License-Identifier: MIT
--- MLPStack: three MLPs, whose dim_multiplier is 3, 4 and 3, so that shards are uneven.
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim
local common = require "spec.support.models.common"
local MLP = require "spec.support.models.mlp".MLP

local MLPStack = nn.Sequential:extend("MLPStack")

function MLPStack:init(dim, given)
  local o = given or {}
  local function mlp(n) return MLP(dim, { dim_multiplier = n, dtype = o.dtype, device = o.device }) end
  nn.Sequential.init(self, mlp(3), mlp(4), mlp(3))
end

common.sum_model(MLPStack, { 8, 6 })

local function units(model) return { model[1], model[2], model[3] } end

return {
  init = common.init_of(function() return MLPStack(6) end, units),
  make = function(kind) return MLPStack(6, kind) end,
  loss = function(model, rank, step, golden) return model(golden.x_of({ 8, 6 }, rank, step)):sum() end,
  optim = function(params) return optim.Adam(params, { lr = 1e-3 }) end,
  units = units,
}
