-- SPDX-License-Identifier: MIT
--- Puts nn.Module together: registration (register.lua), paths (paths.lua), calls (call.lua), modes and state
--- (state.lua, state_hooks.lua).
local base = require "moonshard.nn.module.register"
require "moonshard.nn.module.paths"
require "moonshard.nn.module.call"
require "moonshard.nn.module.state"
require "moonshard.nn.module.state_hooks"
require("moonshard.core.methods").guard(base.Module, "model")
return base
