--- behaviour.md 2.2, MLP and MLPStack (multipliers 3, 4, 3: uneven shards).
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local MLP = nn.Module:extend("MLP")

function MLP:init(dim, multiplier, kind)
  self.in_proj = nn.Linear(dim, multiplier * dim, kind)
  self.out_proj = nn.Linear(multiplier * dim, dim, kind)
end

function MLP:forward(x)
  return nn.F.relu(self.out_proj(nn.F.relu(self.in_proj(x))))
end

return {
  MLP = MLP,
  make = function(kind) return nn.Sequential(MLP(6, 3, kind), MLP(6, 4, kind), MLP(6, 3, kind)) end,
  loss = function(model, rank, step, golden) return model(golden.x_of({ 8, 6 }, rank, step)):sum() end,
  optim = function(params) return optim.Adam(params, { lr = 1e-3 }) end,
  units = function(model) return { model[1], model[2], model[3] } end,
}
