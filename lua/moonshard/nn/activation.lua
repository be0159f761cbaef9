-- SPDX-License-Identifier: MIT
--- Activations as modules: the functions of nn.F.
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local Module = require "moonshard.nn.module".Module

local function activation(name, fn)
  local cls = Module:extend(name)
  function cls.init(_, more) opts(name, more, {}) end
  function cls.forward(_, x) return fn(x) end
  return cls
end

--- max(x, 0), element by element.
---@class ReLU: Module
local ReLU = activation("ReLU", ops.relu)

--- x * sigmoid(x), element by element.
---@class SiLU: Module
local SiLU = activation("SiLU", ops.silu)

--- Hyperbolic tangent, element by element.
---@class Tanh: Module
local Tanh = activation("Tanh", ops.tanh)

--- 1 / (1 + e^-x), element by element.
---@class Sigmoid: Module
local Sigmoid = activation("Sigmoid", ops.sigmoid)

--- F.gelu as a module.
---@class GELU: Module
---@overload fun(opts?: { approximate: "none"|"tanh", recompute: boolean }): GELU
---@field approximate "none"|"tanh"  "tanh": GPT-2's formula
---@field recompute boolean  true: backward computes the result again instead of keeping it
local GELU = Module:extend("GELU")

function GELU:init(given)
  local o = opts("GELU", given, { approximate = opts.one_of({ "none", "tanh" }, "none"), recompute = false })
  self.approximate, self.recompute = o.approximate, o.recompute
end

local gelu, gelu_tanh, recompute = ops.gelu, ops.gelu_tanh, ops.recompute
function GELU:forward(x)
  local slots = self._slots
  local y = slots.approximate == "tanh" and gelu_tanh(x) or gelu(x)
  return slots.recompute and recompute(y) or y
end

function GELU:extra_repr() return self.approximate == "tanh" and "tanh" or "" end

return { ReLU = ReLU, SiLU = SiLU, Tanh = Tanh, Sigmoid = Sigmoid, GELU = GELU }
