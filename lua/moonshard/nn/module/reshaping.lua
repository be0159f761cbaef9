-- SPDX-License-Identifier: MIT
--- Layers that change only the shape: Flatten and Unflatten.
local opts = require "moonshard.core.opts"
local tensor = require "moonshard.tensor"
local Module = require "moonshard.nn.module".Module

--- Merges dimensions first to last into one.
---@class Flatten: Module
---@field first integer  first dimension to merge (default: 2, so that the batch remains)
---@field last integer  last dimension to merge (default: -1)
---@overload fun(first?: integer, last?: integer): Flatten
local Flatten = Module:extend "Flatten"

---@param first? integer  from 1; negative from the end (default: 2)
---@param last? integer  from 1; negative from the end (default: -1)
function Flatten:init(first, last)
  self.first = first == nil and 2 or opts.expect(first, opts.whole, "Flatten: first dimension")
  self.last = last == nil and -1 or opts.expect(last, opts.whole, "Flatten: last dimension")
end
---@param x Tensor  [N, ...]
---@return Tensor  a view where the strides allow it
function Flatten:forward(x)
  opts.expect(x, tensor.a_tensor, "Flatten: argument")
  return x:flatten(self.first, self.last)
end
function Flatten:extra_repr() return ("%d, %d"):format(self.first, self.last) end

--- Divides one dimension into several.
---@class Unflatten: Module
---@field dim integer  the dimension to divide
---@field sizes integer[]  the sizes that replace it
---@overload fun(dim: integer, sizes: integer[]): Unflatten
local Unflatten = Module:extend "Unflatten"

---@param dim integer  from 1; negative from the end
---@param sizes integer[]  their product is the size of the dimension; one of them may be -1, which follows from the rest
function Unflatten:init(dim, sizes)
  self.dim = opts.expect(dim, opts.whole, "Unflatten: dimension")
  opts.need(opts.is_plain(sizes) and #sizes > 0, sizes, "a list of sizes", "Unflatten: argument 2")
  local copy, open = {}, 0
  for k, n in ipairs(sizes) do
    copy[k] = opts.expect(n, opts.whole_from(-1), "Unflatten: size %d", k)
    if n == -1 then open = open + 1 end
  end
  opts.need(open < 2, open, "at most 1", "Unflatten: number of sizes that are -1")
  self.sizes = copy
end

---@param x Tensor  of any shape that has the dimension
---@return Tensor  a view where the strides allow it
function Unflatten:forward(x)
  opts.expect(x, tensor.a_tensor, "Unflatten: argument")
  local at = self.dim < 0 and x.ndim + 1 + self.dim or self.dim
  local size, product, open = x:size(self.dim), 1, nil
  local out = {}
  for d = 1, at - 1 do out[d] = x.shape[d] end
  for _, n in ipairs(self.sizes) do
    out[#out + 1] = n
    if n == -1 then open = #out else product = product * n end
  end
  if open and product > 0 and size % product == 0 then
    out[open], product = size / product, size
  end
  if product ~= size then
    local wanted = open and "a multiple of %d for the sizes [%s]" or "%d, the product of the sizes [%s]"
    opts.wrong(size, wanted:format(product, table.concat(self.sizes, ", ")), "Unflatten: size of dimension %d",
      self.dim)
  end
  for d = at + 1, x.ndim do out[#out + 1] = x.shape[d] end
  return x:reshape(out)
end
function Unflatten:extra_repr() return ("%d, [%s]"):format(self.dim, table.concat(self.sizes, ", ")) end

return { Flatten = Flatten, Unflatten = Unflatten }
