-- SPDX-License-Identifier: MIT
--- Activations as modules: the functions of nn.F.
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local Module = require "moonshard.nn.module".Module

local function activation(name, fn)
  local cls = Module:extend(name)
  function cls.init(_, given) opts(name, given, {}) end
  function cls.forward(_, x) return fn(x) end
  return cls
end

---@class GELU: Module
---@field approximate "none"|"tanh"
---@overload fun(opts?: { approximate: "none"|"tanh" }): GELU
local GELU = Module:extend("GELU")

function GELU:init(given)
  self.approximate = opts("GELU", given, { approximate = opts.one_of({ "none", "tanh" }, "none") }).approximate
end

local gelu, gelu_tanh = ops.gelu, ops.gelu_tanh
function GELU:forward(x)
  if self._slots.approximate == "tanh" then return gelu_tanh(x) end
  return gelu(x)
end

function GELU:extra_repr() return self.approximate == "tanh" and "tanh" or "" end

return {
  ReLU = activation("ReLU", ops.relu), SiLU = activation("SiLU", ops.silu), Tanh = activation("Tanh", ops.tanh),
  Sigmoid = activation("Sigmoid", ops.sigmoid), GELU = GELU,
}
