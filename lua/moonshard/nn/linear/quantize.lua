-- SPDX-License-Identifier: MIT
--- nn.utils: weights as int8 with a scale for each row, for F.int8_linear.
local create = require "moonshard.tensor.create"
local dtypes = require "moonshard.core.dtypes"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local scope = require "moonshard.tensor.scope"
local tensor = require "moonshard.tensor"
require "moonshard.tensor.summaries"

local M = {}

--- Rounds a matrix to int8: each row has a scale, the largest absolute value of the row divided by 127, and
--- `w` is about `q * scale:unsqueeze(2)`. The scale of a row of zeros is 1. Errors: a matrix that is not finite.
---@param w Tensor  [rows, columns], floating point
---@return Tensor q  [rows, columns], int8 in [-127, 127]
---@return Tensor scale  [rows], of w's dtype
function M.quantize_rows(w)
  opts.expect(w, tensor.a_tensor, "quantize_rows: argument 1")
  if w.ndim ~= 2 or not dtypes.is_float(tensor.info_of(w).dtype) then
    errors.raise("quantize_rows: argument 1 is %s %s, expected a floating-point matrix", w.dtype, tostring(w.shape))
  end
  return scope.run("quantize_rows", function()
    w = w:detach()
    local wide = w.dtype == "float64" and w or w:float()
    local scale = w:size(2) > 0 and (wide:abs():amax(2) / 127):to(w.dtype)
      or create.zeros(w:size(1), { dtype = w.dtype, device = w.device })
    if w.device ~= "meta" then
      local bad = scale:isfinite():logical_not():nonzero()
      if bad:size(1) > 0 then
        errors.raise("quantize_rows: row %d of %d has a number that is not finite", bad[{ 1, 1 }]:item() + 1, w:size(1))
      end
    end
    scale = scale:masked_fill(scale:eq(0), 1)
    return (wide / scale:to(wide.dtype):unsqueeze(2)):round():clamp(-127, 127):to "int8", scale
  end)
end

opts.fix(M, { "quantize_rows" })

return M
