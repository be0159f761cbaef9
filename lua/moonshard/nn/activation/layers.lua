-- SPDX-License-Identifier: MIT
--- Activations as modules: the functions of nn.F.
local create = require "moonshard.tensor.create"
local functions = require "moonshard.nn.activation.functions"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local Module = require "moonshard.nn.module".Module
local Parameter = require "moonshard.nn.module.parameter".Parameter

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

--- Mish (Misra 2019): x * tanh(softplus(x)), element by element.
---@class Mish: Module
local Mish = activation("Mish", ops.mish)

--- clamp(x + 3, 0, 6) / 6, element by element.
---@class Hardsigmoid: Module
local Hardsigmoid = activation("Hardsigmoid", ops.hardsigmoid)

--- x * hardsigmoid(x) (Howard et al. 2019), element by element.
---@class Hardswish: Module
local Hardswish = activation("Hardswish", ops.hardswish)

--- x / (1 + |x|), element by element.
---@class Softsign: Module
local Softsign = activation("Softsign", ops.softsign)

--- log(sigmoid(x)), element by element, without overflow.
---@class LogSigmoid: Module
local LogSigmoid = activation("LogSigmoid", ops.logsigmoid)

--- F.selu as a module.
---@class SELU: Module
local SELU = activation("SELU", functions.selu)

--- F.tanhshrink as a module.
---@class Tanhshrink: Module
local Tanhshrink = activation("Tanhshrink", functions.tanhshrink)

--- F.relu6 as a module: x limited to [0, 6].
---@class ReLU6: Module
local ReLU6 = activation("ReLU6", functions.relu6)

-- An activation with one number as argument, which is stored in the field named `field`.
local function with_number(name, field, default, fn)
  local cls = Module:extend(name)
  ---@param value? number  the activation's number (default: that of the class)
  function cls:init(value) self[field] = value == nil and default or opts.expect(value, opts.number, "%s: %s", name, field) end
  function cls:forward(x) return fn(x, self._slots[field]) end
  function cls:extra_repr() return ("%g"):format(self[field]) end
  return cls
end

--- F.leaky_relu as a module.
---@class LeakyReLU: Module
---@overload fun(negative_slope?: number): LeakyReLU
---@field negative_slope number  factor for negative elements (default: 0.01)
local LeakyReLU = with_number("LeakyReLU", "negative_slope", 0.01, functions.leaky_relu)

--- F.elu as a module.
---@class ELU: Module
---@overload fun(alpha?: number): ELU
---@field alpha number  minus the limit of the result at -infinity (default: 1)
local ELU = with_number("ELU", "alpha", 1, functions.elu)

--- F.celu as a module.
---@class CELU: Module
---@overload fun(alpha?: number): CELU
---@field alpha number  minus the limit of the result at -infinity, not 0 (default: 1)
local CELU = with_number("CELU", "alpha", 1, functions.celu)

--- F.softshrink as a module.
---@class Softshrink: Module
---@overload fun(lambda?: number): Softshrink
---@field lambda number  from 0 (default: 0.5)
local Softshrink = with_number("Softshrink", "lambda", 0.5, functions.softshrink)

--- F.hardshrink as a module.
---@class Hardshrink: Module
---@overload fun(lambda?: number): Hardshrink
---@field lambda number  from 0 (default: 0.5)
local Hardshrink = with_number("Hardshrink", "lambda", 0.5, functions.hardshrink)

--- F.softplus as a module.
---@class Softplus: Module
---@overload fun(opts?: { beta: number, threshold: number }): Softplus
---@field beta number  sharpness (default: 1)
---@field threshold number  where beta x exceeds it, the result is x (default: 20)
local Softplus = Module:extend("Softplus")

function Softplus:init(given)
  local o = opts("Softplus", given, { beta = 1, threshold = 20 })
  self.beta, self.threshold = o.beta, o.threshold
end
function Softplus:forward(x) return functions.softplus(x, { beta = self.beta, threshold = self.threshold }) end
function Softplus:extra_repr() return ("beta %g, threshold %g"):format(self.beta, self.threshold) end

--- F.hardtanh as a module.
---@class Hardtanh: Module
---@overload fun(low?: number, high?: number): Hardtanh
---@field low number  lower limit (default: -1)
---@field high number  upper limit (default: 1)
local Hardtanh = Module:extend("Hardtanh")

---@param low? number  lower limit (default: -1)
---@param high? number  upper limit (default: 1)
function Hardtanh:init(low, high)
  self.low = opts.expect(low == nil and -1 or low, opts.number, "Hardtanh: lower limit")
  self.high = opts.expect(high == nil and 1 or high, opts.number, "Hardtanh: upper limit")
end
function Hardtanh:forward(x) return functions.hardtanh(x, self.low, self.high) end
function Hardtanh:extra_repr() return ("%g, %g"):format(self.low, self.high) end

--- F.threshold as a module.
---@class Threshold: Module
---@overload fun(limit: number, value: number): Threshold
---@field limit number  the threshold
---@field value number  the result at and below it
local Threshold = Module:extend("Threshold")

---@param limit number  the threshold
---@param value number  the result at and below it
function Threshold:init(limit, value)
  self.limit = opts.expect(limit, opts.number, "Threshold: limit")
  self.value = opts.expect(value, opts.number, "Threshold: value")
end
function Threshold:forward(x) return functions.threshold(x, self.limit, self.value) end
function Threshold:extra_repr() return ("%g, %g"):format(self.limit, self.value) end

--- x where x > 0, weight * x elsewhere, with weights that are learnt (He et al. 2015).
---@class PReLU: Module
---@overload fun(n?: integer, opts?: { init: number, dtype: string, device: string }): PReLU
---@field weight Parameter  [n]; one for all channels (n = 1) or one for each
local PReLU = Module:extend("PReLU")

---@param n? integer  number of weights: 1, or the channels of the input (default: 1)
---@param given? { init: number, dtype: string, device: string }  init: first value of the weights (default: 0.25)
function PReLU:init(n, given)
  n, given = opts.shift("PReLU", n, given)
  local o = opts("PReLU", given, { init = 0.25, dtype = opts.string, device = opts.string })
  n = n == nil and 1 or opts.expect(n, opts.whole_from(1), "PReLU: number of parameters")
  self.weight = Parameter(create.full({ n }, o.init, { dtype = o.dtype, device = o.device }))
end
function PReLU:forward(x) return functions.prelu(x, self.weight) end
function PReLU:extra_repr() return tostring(self.weight:numel()) end

-- An activation along a dimension, kept in the field `dim`.
local function along(name, fn)
  local cls = Module:extend(name)
  ---@param dim? integer  the dimension, from 1; negative from the end (default: -1)
  function cls:init(dim) self.dim = dim == nil and -1 or opts.expect(dim, opts.whole, "%s: dimension", name) end
  function cls:forward(x) return fn(x, self._slots.dim) end
  function cls:extra_repr() return tostring(self.dim) end
  return cls
end
local F = { softmax = function(x, d) return x:softmax(d) end, log_softmax = function(x, d) return x:log_softmax(d) end }

--- F.softmax as a module.
---@class Softmax: Module
---@overload fun(dim?: integer): Softmax
---@field dim integer  the dimension, from 1; negative from the end (default: -1)
local Softmax = along("Softmax", F.softmax)

--- F.log_softmax as a module.
---@class LogSoftmax: Module
---@overload fun(dim?: integer): LogSoftmax
---@field dim integer  the dimension, from 1; negative from the end (default: -1)
local LogSoftmax = along("LogSoftmax", F.log_softmax)

--- F.softmin as a module.
---@class Softmin: Module
---@overload fun(dim?: integer): Softmin
---@field dim integer  the dimension, from 1; negative from the end (default: -1)
local Softmin = along("Softmin", functions.softmin)

--- F.glu as a module.
---@class GLU: Module
---@overload fun(dim?: integer): GLU
---@field dim integer  the dimension, from 1; negative from the end (default: -1)
local GLU = along("GLU", functions.glu)

--- F.swiglu as a module: it halves the size, as GLU does.
---@class SwiGLU: Module
---@overload fun(dim?: integer): SwiGLU
---@field dim integer  the dimension, from 1; negative from the end (default: -1)
local SwiGLU = along("SwiGLU", functions.swiglu)

return { ReLU = ReLU, SiLU = SiLU, Tanh = Tanh, Sigmoid = Sigmoid, GELU = GELU, Mish = Mish, Hardsigmoid =
  Hardsigmoid, Hardswish = Hardswish, Softsign = Softsign, LogSigmoid = LogSigmoid, SELU = SELU, ReLU6 = ReLU6,
  LeakyReLU = LeakyReLU, ELU = ELU, CELU = CELU, Softplus = Softplus, Hardtanh = Hardtanh, Threshold = Threshold, PReLU
  = PReLU, Softmax = Softmax, LogSoftmax = LogSoftmax, Softmin = Softmin, GLU = GLU, SwiGLU = SwiGLU,
  Softshrink = Softshrink, Hardshrink = Hardshrink, Tanhshrink = Tanhshrink }
