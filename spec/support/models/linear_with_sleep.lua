-- SPDX-License-Identifier: MIT
--- LinearWithSleep: a matrix product that sleeps in forward, and twice as long in backward, followed by ReLU. For specs
--- about communication that overlaps with a slow layer.
local ffi = require "ffi"
local ms = require "moonshard"
local engine = require "moonshard.core.ffi"
local nn = ms.nn

ffi.cdef "int usleep(unsigned);"

local LinearWithSleep = nn.Module:extend("LinearWithSleep")

-- Sleeps some milliseconds and records the actual time, because a busy machine may wake it late. On a GPU the compute
-- stream pauses instead, and the requested time is recorded.
local function sleep(milliseconds, naps, device)
  if milliseconds == 0 then return end
  if device:find "^cuda" then
    require("spec.support.cuda_table").open().pause(tonumber(device:match "%d+"), 0, milliseconds / 1000)
    naps[#naps + 1] = milliseconds
    return
  end
  local begun = engine.lib.ms_time()
  ffi.C.usleep(milliseconds * 1000)
  naps[#naps + 1] = (engine.lib.ms_time() - begun) * 1000
end

local slow_product = ms.Function {
  forward = function(ctx, x, w, layer)
    sleep(layer.sleep_ms, layer.naps, x.device)
    ctx:save(x, w)
    ctx.layer = layer
    return x:matmul(w)
  end,
  backward = function(ctx, g)
    sleep(2 * ctx.layer.sleep_ms, ctx.layer.naps, g.device)
    local x, w = ctx:saved()
    return g:matmul(w:t()), x:t():matmul(g)
  end,
}

--- naps: a list to which the duration of each sleep is appended, in milliseconds.
function LinearWithSleep:init(dim, sleep_ms, naps)
  self.dim, self.sleep_ms, self.naps = dim, sleep_ms, naps or {}
  self.weight = nn.Parameter(ms.rand(dim, dim))
end

function LinearWithSleep:forward(x) return nn.F.relu(slow_product(x, self.weight, self)) end

return { LinearWithSleep = LinearWithSleep }
