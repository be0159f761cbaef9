-- SPDX-License-Identifier: MIT
--- Dropout, and its variants of functions.lua as modules.
local errors = require "moonshard.core.errors"
local functions = require "moonshard.nn.dropout.functions"
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

-- A subclass of Dropout that calls fn instead of F.dropout.
local function dropout_class(name, fn)
  local cls = Dropout:extend(name)
  function cls:forward(x)
    local slots = self._slots
    return fn(x, slots.p, { training = slots.training })
  end
  return cls
end

--- In training, sets whole channels of [N, C, L] or [C, L] to 0 with probability p, and multiplies the others by
--- 1 / (1 - p).
---@class Dropout1d: Dropout
---@overload fun(p?: number): Dropout1d  p: probability of setting a channel to 0 (default: 0.5)
local Dropout1d = dropout_class("Dropout1d", functions.dropout1d)

--- In training, sets whole channels of [N, C, H, W] to 0 with probability p, and multiplies the others by 1 / (1 - p).
---@class Dropout2d: Dropout
---@overload fun(p?: number): Dropout2d  p: probability of setting a channel to 0 (default: 0.5)
local Dropout2d = dropout_class("Dropout2d", functions.dropout2d)

--- In training, sets whole channels of [N, C, D, H, W] or [C, D, H, W] to 0 with probability p, and multiplies the others
--- by 1 / (1 - p).
---@class Dropout3d: Dropout
---@overload fun(p?: number): Dropout3d  p: probability of setting a channel to 0 (default: 0.5)
local Dropout3d = dropout_class("Dropout3d", functions.dropout3d)

--- F.alpha_dropout as a module: dropout that keeps mean 0 and variance 1 after SELU.
---@class AlphaDropout: Dropout
---@overload fun(p?: number): AlphaDropout  p: probability of dropping an element (default: 0.5)
local AlphaDropout = dropout_class("AlphaDropout", functions.alpha_dropout)

return { Dropout = Dropout, Dropout1d = Dropout1d, Dropout2d = Dropout2d, Dropout3d = Dropout3d,
  AlphaDropout = AlphaDropout }
