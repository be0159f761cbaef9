-- SPDX-License-Identifier: MIT
--- Equal numbers on the CPU and on the (emulated) GPU, in views that may begin at any element.
local assert = require "luassert"

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

--- Asserts that a result has the shape of the right one, and differs from it by at most this part of its norm.
function M.near(got, want, bound, text)
  local g = got:detach():to "cpu":to "float64"
  assert.same({ unpack(want.shape) }, { unpack(g.shape) }, text)
  local off = (g - want:detach()):norm():item() / math.max(want:detach():norm():item(), 1e-3)
  assert.is_true(off <= bound, ("%s: relative error %g"):format(text, off))
end

M.numel = require "spec.support.numel"

return M
