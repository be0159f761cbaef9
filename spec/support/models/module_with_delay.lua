-- SPDX-License-Identifier: MIT
--- ModuleWithDelay around a NestedWrappedModule: each of its reductions is delayed by 2 ms (the engine's own delay of
--- collectives), so that a gradient that is read too early is wrong.
local ffi = require "ffi"
local ms = require "moonshard"
local engine = require "moonshard.core.ffi"
local nested = require "spec.support.models.nested_wrapped_module"

local ModuleWithDelay = ms.nn.Module:extend("ModuleWithDelay")

function ModuleWithDelay:init(module) self.module, self.rank = module, module.rank end

function ModuleWithDelay:get_input(device)
  self.module.rank = self.rank                      -- the inner model's input depends on it
  return self.module:get_input(device)
end

function ModuleWithDelay:forward(...) return self.module(...) end
function ModuleWithDelay:get_loss(...) return self.module:get_loss(...) end

function ModuleWithDelay:run_backward(loss)
  engine.lib.ms_dist_set_delay(ffi.C.MS_DIST_REDUCE_SCATTER, 0.002)
  local ok, e = pcall(self.module.run_backward, self.module, loss)
  engine.lib.ms_dist_set_delay(-1, 0)
  if not ok then error(e, 0) end
end

return { init = function(...) return ModuleWithDelay(nested.init(...)) end }
