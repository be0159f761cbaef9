-- SPDX-License-Identifier: MIT
--- The launcher that started this process, from the environment; known before the ranks connect.
local engine = require "moonshard.core.ffi"
local string_of = engine.ffi.string

---@class Launch
---@field name string  "mpirun", "srun", "PMIx", "mpiexec", "torchrun"; "": none
---@field rank integer  0 without a launcher
---@field world integer  1 without a launcher; rank + 1 if the launcher does not give the number
---@field reason string  why the launcher's variables are invalid; "" if they are valid

local out = engine.ffi.new "ms_launch"

---@return Launch
return function()
  engine.lib.ms_launcher(out)
  return { name = string_of(out.name), rank = out.rank, world = math.max(out.world, out.rank + 1),
    reason = string_of(out.reason) }
end
