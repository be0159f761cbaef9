-- SPDX-License-Identifier: MIT
--- nn.F.bilinear. It runs in a scope, which releases its intermediate results.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"

local a_tensor, raise, run = tensor.a_tensor, errors.raise, scope.scope
local M = {}

--- x1^T W x2 + b for each output o, with W = w[o].
---@param x1 Tensor  [..., in1]
---@param x2 Tensor  [..., in2], of x1's shape except for the last dimension
---@param w Tensor  [out, in1, in2]
---@param b? Tensor  [out]
---@return Tensor  [..., out]
function M.bilinear(x1, x2, w, b)
  opts.expect(x1, a_tensor, "bilinear: argument 1")
  opts.expect(x2, a_tensor, "bilinear: argument 2")
  opts.expect(w, a_tensor, "bilinear: weight")
  if w.ndim ~= 3 then raise("bilinear: weight has shape %s, expected [out, in1, in2]", tostring(w.shape)) end
  local out, in1, in2 = w:size(1), w:size(2), w:size(3)
  local fits = x1.ndim == x2.ndim and x1.ndim > 0 and x1:size(-1) == in1 and x2:size(-1) == in2
  local sizes = { unpack(x1.shape) }
  for d = 1, x1.ndim - 1 do fits = fits and x2:size(d) == sizes[d] end
  if not fits then
    raise("bilinear: inputs of shapes %s and %s, weight %s: expected [..., %d] and [..., %d] of the same leading sizes",
      tostring(x1.shape), tostring(x2.shape), tostring(w.shape), in1, in2)
  end
  sizes[#sizes] = out
  return run(function()
    local rows = ops.linear(x1:reshape(-1, in1), w:permute(1, 3, 2):reshape(out * in2, in1))
    local y = rows:reshape(-1, out, in2):matmul(x2:reshape(-1, in2, 1)):squeeze(3)
    if b ~= nil then y = y + b end
    return y:reshape(sizes)
  end)
end

opts.fix(M, { "bilinear" })

return M
