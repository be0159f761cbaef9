-- SPDX-License-Identifier: MIT
--- Equal numbers on the CPU and on the (emulated) GPU, in views that may begin at any element.
local M = {}

--- A tensor on the CPU and on the GPU with the same numbers, each starting `skip` elements into its storage.
---@param host Tensor      numbers of the storage, [numel + skip]
---@param shape integer[]
---@param skip integer
---@param twin? string     dtype of the one on the CPU (default: host's)
---@return Tensor cpu
---@return Tensor gpu
function M.pair(host, shape, skip, twin)
  local function of(t) return t:narrow(1, skip + 1, host:numel() - skip):view(unpack(shape)) end
  return of(twin and host:to(twin) or host), of(host:to "cuda")
end

M.numel = require "spec.support.numel"

return M
