-- SPDX-License-Identifier: MIT
--- Which launcher started this process, as the engine reads it from the environment: known before the ranks have met.
local engine = require "moonshard.core.ffi"
local string_of = engine.ffi.string

---@class Launch
---@field name string  "mpirun", "srun", "PMIx", "mpiexec", "torchrun"; "": none
---@field rank integer  0 without a launcher
---@field world integer  1 without a launcher; where it does not say: the ranks up to this one
---@field reason string  why its variables make no sense; "": they do

local out = engine.ffi.new "ms_launch"

---@return Launch
return function()
  engine.lib.ms_launcher(out)
  return { name = string_of(out.name), rank = out.rank, world = math.max(out.world, out.rank + 1),
    reason = string_of(out.reason) }
end
