-- SPDX-License-Identifier: MIT
--- DummyDDP: a wrapper without effect, instead of DDP.
local ms = require "moonshard"

local DummyDDP = ms.nn.Module:extend("DummyDDP")

function DummyDDP:init(module) self.module = module end
function DummyDDP:forward(...) return self.module(...) end

return { DummyDDP = DummyDDP }
