-- SPDX-License-Identifier: MIT
--- Puts nn.Module together: registration (register.lua), paths (paths.lua), calls (call.lua), modes and state
--- (state.lua, state_hooks.lua).
local base = require "moonshard.nn.register"
require "moonshard.nn.paths"
require "moonshard.nn.call"
require "moonshard.nn.state"
require "moonshard.nn.state_hooks"
require("moonshard.core.methods").guard(base.Module, "model")
return base
