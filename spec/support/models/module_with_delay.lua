-- SPDX-License-Identifier: MIT
--- ModuleWithDelay around another of these models: sleeps after its loss, and before each of its reductions (the
--- engine's own delay of collectives). `init` makes PyTorch's NestedWrappedModuleWithDelay.
local ffi = require "ffi"
local ms = require "moonshard"
local engine = require "moonshard.core.ffi"
local nested = require "spec.support.models.nested_wrapped_module"

ffi.cdef "int usleep(unsigned);"

local ModuleWithDelay = ms.nn.Module:extend("ModuleWithDelay")

--- Options of `given`: delay_after_loss_ms, delay_before_reduction_ms.
function ModuleWithDelay:init(module, given)
  self.delay_after_loss_ms = given and given.delay_after_loss_ms or 0
  self.delay_before_reduction_ms = given and given.delay_before_reduction_ms or 0
  self.module = module
  self.rank = module.rank
end

function ModuleWithDelay:get_input(device)
  self.module.rank = self.rank                      -- the inner model's input depends on it
  return self.module:get_input(device)
end

function ModuleWithDelay:forward(...) return self.module(...) end

function ModuleWithDelay:get_loss(input, output)
  local loss = self.module:get_loss(input, output)
  if self.delay_after_loss_ms > 0 then ffi.C.usleep(self.delay_after_loss_ms * 1000) end
  return loss
end

function ModuleWithDelay:run_backward(loss)
  engine.lib.ms_dist_set_delay(ffi.C.MS_DIST_REDUCE_SCATTER, self.delay_before_reduction_ms / 1000)
  local ok, e = pcall(self.module.run_backward, self.module, loss)
  engine.lib.ms_dist_set_delay(-1, 0)
  if not ok then error(e, 0) end
end

--- The init of any of these models, with a ModuleWithDelay around it. Options of `given`: the model's options, and the
--- two delays.
local function init(model, group, fsdp_init_mode, device_init_mode, given)
  local inner, delays = {}, {}
  for key, value in ms.sorted_pairs(given or {}) do
    if key:find "^delay_[ab]" and key ~= "delay_before_free_ms" then delays[key] = value else inner[key] = value end
  end
  return ModuleWithDelay(model.init(group, fsdp_init_mode, device_init_mode, inner), delays)
end

return {
  ModuleWithDelay = ModuleWithDelay,
  init_of = init,
  init = function(...) return init(nested, ...) end,
}
