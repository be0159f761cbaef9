-- SPDX-License-Identifier: MIT
--- nn.Module, whole: what it registers (register.lua), how it is called (call.lua), its modes and state (state.lua).
local base = require "moonshard.nn.register"
require "moonshard.nn.call"
require "moonshard.nn.state"
return base
