--- behaviour.md 2.2, NestedWrappedModule.
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

return {
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
