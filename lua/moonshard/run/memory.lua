-- SPDX-License-Identifier: MIT
--- The memory of this rank by kind, in bytes, at the moment of a sample: parameters, gradients, optimizer state, and
--- all other tensors (activations, buffers, gathered parameters); the allocator's peak and its reserved bytes; and the
--- resident memory of the process. Of a sharded tensor, this rank's part counts.
local dtypes = require "moonshard.core.dtypes"
local engine = require "moonshard.core.ffi"
local errors = require "moonshard.core.errors"
local tensor = require "moonshard.tensor"

---@class MemoryKinds
local Kinds = {}
Kinds.__index = Kinds

local function bytes_of(t)
  local held = t.placements and t:to_local() or t
  return held:numel() * held:element_size()
end

local PAGE = 4096
local function resident()
  local file = io.open("/proc/self/statm", "r")
  local pages = file and tonumber(file:read "*l":match "^%d+ (%d+)")
  if file then file:close() end
  return pages and pages * PAGE
end

-- The bytes of the optimizer's state, which is made at the first step and does not change its size afterwards.
local function state_bytes(self)
  local sum = 0
  for _, p in ipairs(self.parameters) do
    for _, value in pairs(self.optimizer:state_of(p) or {}) do
      if tensor.is_tensor(value) then sum = sum + bytes_of(value) end
    end
  end
  return sum
end

local stats = engine.ffi.new "ms_memory"
--- The bytes that tensors hold now. Called at each step, so it makes no table.
---@return integer
function Kinds:allocated()
  errors.check(engine.lib.ms_memory_stats(self.number, stats))
  return stats.allocated
end

--- Sets the values of a sample in `out`.
---@param out table
function Kinds:sample(out)
  local allocated = self:allocated()
  out.memory_peak, out.memory_reserved, out.memory_resident = stats.peak_allocated, stats.reserved, resident()
  if not self.parameters then return end
  local gradients = 0
  for k, p in ipairs(self.parameters) do
    if p.grad then gradients = gradients + self.bytes[k] end
  end
  if self.state == 0 and self.optimizer then self.state = state_bytes(self) end
  out.memory_parameters, out.memory_gradients, out.memory_optimizer = self.all, gradients, self.state
  out.memory_other = math.max(0, allocated - self.all - gradients - self.state)
end

--- Makes an object that samples a device's memory by kind.
---@param device string
---@param model? Module
---@param optimizer? table
---@return MemoryKinds
local function new(device, model, optimizer)
  local self = setmetatable({ number = dtypes.device(device, "run.start"), optimizer = optimizer, bytes = {}, all = 0, state = 0 }, Kinds)
  self.parameters = model and model:parameters()
  for k, p in ipairs(self.parameters or {}) do
    self.bytes[k] = bytes_of(p)
    self.all = self.all + self.bytes[k]
  end
  return self
end

return { new = new }
