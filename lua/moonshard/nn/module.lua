-- SPDX-License-Identifier: MIT
--- Puts nn.Module together: registration (register.lua), calls (call.lua), modes and state (state.lua).
local base = require "moonshard.nn.register"
require "moonshard.nn.call"
require "moonshard.nn.state"
return base
