-- SPDX-License-Identifier: MIT
--- AlwaysWrapNestedWrappedModule: a NestedWrappedModule in which every submodule is a unit.
local ms = require "moonshard"
local common = require "spec.support.models.common"
local nested = require "spec.support.models.nested_wrapped_module"

local AlwaysWrapNestedWrappedModule = nested.NestedWrappedModule:extend("AlwaysWrapNestedWrappedModule")

return {
  AlwaysWrapNestedWrappedModule = AlwaysWrapNestedWrappedModule,
  init = function(group, fsdp_init_mode, device_init_mode, given)
    local o = common.options(group, fsdp_init_mode, device_init_mode, given)
    local wrap_fsdp = o.wrap_fsdp
    o.wrap_fsdp = false
    local model = AlwaysWrapNestedWrappedModule(o)
    if not wrap_fsdp then return model end
    local options = common.fsdp_options(o)
    options.auto_wrap_policy = options.auto_wrap_policy or ms.fsdp.wrap.always_wrap_policy
    return ms.fsdp.FSDP(model, options)
  end,
}
