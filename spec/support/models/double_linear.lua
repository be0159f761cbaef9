-- SPDX-License-Identifier: MIT
--- DoubleLinear: two Linears on the same input with an output each, or, as an option, the second of them unused.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn = ms.nn

local DoubleLinear = nn.Module:extend("DoubleLinear")

--- Options of `given` and their defaults: use_second_linear (true), dtype, device.
function DoubleLinear:init(dim, given)
  local o = given or {}
  local kind = { dtype = o.dtype, device = o.device }
  self.lin1 = nn.Linear(dim, dim, kind)
  self.lin2 = nn.Linear(dim, dim, kind)
  self.use_second_linear = o.use_second_linear ~= false
end

function DoubleLinear:forward(x)
  if self.use_second_linear then return nn.F.relu(self.lin1(x)), nn.F.relu(self.lin2(x)) end
  return nn.F.relu(self.lin1(x))
end

common.sum_model(DoubleLinear, { 4, 7 })

return {
  DoubleLinear = DoubleLinear,
  --- Options of `given` besides the common ones: use_second_linear.
  init = common.init_of(function(o) return DoubleLinear(7, o) end, function(m) return { m.lin1, m.lin2 } end),
}
