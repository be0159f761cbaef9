-- SPDX-License-Identifier: MIT
--- Shared by BatchNorm and InstanceNorm: the buffers of running statistics.
local create = require "moonshard.tensor.create"
local init = require "moonshard.nn.initial".init

local M = {}

--- Registers the buffers running_mean, running_var and num_batches_tracked; without track_running_stats they are nil.
---@param m Module  gets the buffers
---@param d integer  number of channels
---@param o { track_running_stats: boolean, dtype: string, device: string }
function M.register(m, d, o)
  local tracked, kind = o.track_running_stats, { dtype = o.dtype, device = o.device }
  m:register_buffer("running_mean", tracked and create.zeros({ d }, kind) or nil)
  m:register_buffer("running_var", tracked and create.ones({ d }, kind) or nil)
  m:register_buffer("num_batches_tracked", tracked and create.zeros({}, { dtype = "int64", device = o.device }) or nil)
end

--- Sets the running mean to 0, the running variance to 1 and the number of batches to 0.
function M.reset(self)
  if not self.running_mean then return end
  init.zeros_(self.running_mean)
  init.ones_(self.running_var)
  self.num_batches_tracked:zero_()
end

return M
