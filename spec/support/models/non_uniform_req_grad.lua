-- SPDX-License-Identifier: MIT
--- NonUniformReqGradNWM: a NestedWrappedModule in which all parameters except those of the last Linear are frozen.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nested = require "spec.support.models.nested_wrapped_module"
local nn, optim = ms.nn, ms.optim

local NonUniformReqGradNWM = nested.NestedWrappedModule:extend("NonUniformReqGradNWM")

function NonUniformReqGradNWM:init(o)
  common.begin(self, o)
  local wrap = common.wrapper(o)
  local function linear(i, j) return common.place(nn.Linear(i, j), o) end
  self.module = nn.Sequential(linear(8, 4), wrap(nn.Sequential(wrap(linear(4, 16)), linear(16, 16))),
    wrap(nn.Sequential(linear(16, 4), linear(4, 8))))
end

local function freeze_but(model, pattern)
  for name, p in model:named_parameters() do
    if not name:find(pattern) then p.requires_grad = false end
  end
  return model
end

return {
  NonUniformReqGradNWM = NonUniformReqGradNWM,
  init = function(group, fsdp_init_mode, device_init_mode, given)
    local o = common.options(group, fsdp_init_mode, device_init_mode, given)
    if o.wrap_fsdp and not o.fsdp then o.fsdp = { use_orig_params = true } end
    return freeze_but(NonUniformReqGradNWM(o), "^module%.3.*%.2.*")
  end,
  make = function(kind)
    return freeze_but(nn.Sequential(
      nn.Linear(8, 4, kind),
      nn.Sequential(nn.Linear(4, 16, kind), nn.Linear(16, 16, kind)),
      nn.Sequential(nn.Linear(16, 4, kind), nn.Linear(4, 8, kind))), "^3%.2%.")
  end,
  loss = function(model, rank, step, golden) return model(golden.x_of({ 4, 8 }, rank, step)):sum() end,
  optim = function(params) return optim.SGD(params, { lr = 0.002, momentum = 0.9 }) end,
  units = function(model) return { model[2][1], model[2], model[3] } end,
}
