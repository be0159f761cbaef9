-- SPDX-License-Identifier: MIT
--- A number that a GPU computes and the host reads later: for a gradient scaler, whether a gradient was not finite. The
--- optimizer and the scaler that share a flag continue as if it were 0, and correct their counts when they read it.
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"

local lib, ffi = engine.lib, engine.ffi
local value = ffi.new "double[1]"

---@class Flag
local Flag = {}
Flag.__index = Flag

--- Makes a flag of the value that `t` has now, without waiting for the value.
---@param t Tensor  one float32 element
---@return Flag
function Flag.new(t)
  local made = lib.ms_flag_new(t.id)
  if made == nil then errors.fail(t) end
  return setmetatable({ made = ffi.gc(made, lib.ms_flag_free) }, Flag)
end

--- Waits for the value, at the first call only.
---@return number
function Flag:read()
  if self.made then
    if lib.ms_flag_read(self.made, value) ~= 0 then errors.fail() end
    lib.ms_flag_free(ffi.gc(self.made, nil))
    self.value, self.made = value[0], nil
  end
  return self.value
end

return Flag
