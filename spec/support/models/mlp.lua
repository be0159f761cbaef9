-- SPDX-License-Identifier: MIT
--- The MLP of PyTorch's FSDP suites.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nn = ms.nn

local MLP = nn.Module:extend("MLP")

--- Options of `given` and their defaults: bias (true), with_buffer (false), dim_multiplier (4), dtype, device.
function MLP:init(dim, given)
  local o = given or {}
  local kind = { bias = o.bias, dtype = o.dtype, device = o.device }
  local wide = (o.dim_multiplier or 4) * dim
  self.in_proj = nn.Linear(dim, wide, kind)
  self.out_proj = nn.Linear(wide, dim, kind)
  if o.with_buffer then self:register_buffer("buffer", ms.randn(dim, { dtype = o.dtype, device = o.device })) end
end

function MLP:forward(x)
  local z = nn.F.relu(self.out_proj(nn.F.relu(self.in_proj(x))))
  return self.buffer and z + self.buffer or z
end

common.sum_model(MLP, { 3, 5 })

return {
  MLP = MLP,
  --- Options of `given` besides the common ones: bias, with_buffer (true).
  init = common.init_of(function(o) return MLP(5, { bias = o.bias, with_buffer = o.with_buffer ~= false }) end,
    function(m) return { m.in_proj } end),
}
