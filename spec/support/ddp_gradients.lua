-- SPDX-License-Identifier: MIT
--- Helpers for specs of nn.DDP: gradients of a rank's own batch, in the order of the model's parameters.
local M = {}

local function load() return require "moonshard" end

--- A batch of 10 columns for this rank and step; options: rows (8), dtype (float64).
function M.batch(rank, step, options)
  local ms = load()
  options = options or {}
  ms.manual_seed(100 * step + rank)
  return ms.randn(options.rows or 8, 10, { dtype = options.dtype or "float64" })
end

--- Copies of the gradients of all parameters.
function M.now(model)
  local out = {}
  for k, p in ipairs(model:parameters()) do out[k] = p.grad:clone() end
  return out
end

--- Copies of the gradients for x alone.
function M.of(model, x)
  model:zero_grad()
  model(x):pow(2):sum():backward()
  return M.now(model)
end

return M
