-- SPDX-License-Identifier: MIT
--- DummyDDP: a wrapper that passes everything through, in DDP's place.
local ms = require "moonshard"

local DummyDDP = ms.nn.Module:extend("DummyDDP")

function DummyDDP:init(module) self.module = module end
function DummyDDP:forward(...) return self.module(...) end

return { DummyDDP = DummyDDP }
