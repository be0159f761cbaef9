-- SPDX-License-Identifier: MIT
--- NestedWrappedModule: five Linears in sequence. The 2nd and 3rd together are a unit, inside of which the 2nd is a
--- unit of its own; the 4th is a unit; the 1st and 5th belong to none of these.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn, optim = ms.nn, ms.optim

local NestedWrappedModule = nn.Module:extend("NestedWrappedModule")

function NestedWrappedModule:init(o)
  common.begin(self, o)
  local wrap = common.wrapper(o)
  local function linear(i, j) return common.place(nn.Linear(i, j), o) end
  self.module = nn.Sequential(linear(8, 4), wrap(nn.Sequential(wrap(linear(4, 16)), linear(16, 16))),
    wrap(linear(16, 4)), linear(4, 8))
end

function NestedWrappedModule:forward(x) return self.module(x) end

common.sum_model(NestedWrappedModule, { 4, 8 })

return {
  NestedWrappedModule = NestedWrappedModule,
  init = function(...) return NestedWrappedModule(common.options(...)) end,
  make = function(kind)
    return nn.Sequential(
      nn.Linear(8, 4, kind),
      nn.Sequential(nn.Linear(4, 16, kind), nn.Linear(16, 16, kind)),
      nn.Linear(16, 4, kind),
      nn.Linear(4, 8, kind))
  end,
  loss = function(model, rank, step, golden) return model(golden.x_of({ 4, 8 }, rank, step)):sum() end,
  optim = function(params) return optim.SGD(params, { lr = 0.002, momentum = 0.9 }) end,
  units = function(model) return { model[2][1], model[2], model[3] } end,
}
