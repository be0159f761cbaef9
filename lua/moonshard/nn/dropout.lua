-- SPDX-License-Identifier: MIT
--- Dropout.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local Module = require "moonshard.nn.module".Module

--- In training, sets elements to 0 with probability p and multiplies the others by 1 / (1 - p).
---@class Dropout: Module
---@overload fun(p?: number): Dropout
local Dropout = Module:extend("Dropout")

---@param p? number  probability of setting an element to 0 (default: 0.5)
function Dropout:init(p)
  if p == nil then p = 0.5 end
  if type(p) ~= "number" or not (p >= 0 and p <= 1) then
    errors.raise("Dropout: dropout probability has to be between 0 and 1, but got %s%s", errors.show(p),
      opts.by_position(p))
  end
  self.p = p
end

local dropout = ops.dropout
---@param x Tensor  of any shape
---@return Tensor  of x's shape; x itself in eval mode, or if p is 0
function Dropout:forward(x)
  local slots = self._slots
  local p = slots.p
  if p == 0 or not slots.training then return x end
  return dropout(x, p)
end

function Dropout:extra_repr() return ("%g"):format(self.p) end

Dropout.init = opts.fixed("Dropout", Dropout.init)

return { Dropout = Dropout }
