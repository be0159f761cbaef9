-- SPDX-License-Identifier: MIT
--- RNNCell, LSTMCell and GRUCell: one step of a recurrent network, and the formulas of the steps, which recurrent.lua
--- shares.
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local init = require "moonshard.nn.initial".init
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.parameter".empty

local a_tensor, raise = require("moonshard.tensor").a_tensor, errors.raise
local linear, sigmoid, tanh, relu = ops.linear, ops.sigmoid, ops.tanh, ops.relu
local M = {}

-- ---- the steps --------------------------------------------------------------------------------------

--- The steps by kind: fn(x, h, c, w, b) returns the next h and, for "lstm", the next c. x: the input's product with
--- its weight, plus its bias, [..., gates * H]; w, b: weight and bias of h.
M.steps = {}
--- The number of gates by kind.
M.gates = { rnn_tanh = 1, rnn_relu = 1, lstm = 4, gru = 3 }

function M.steps.rnn_tanh(x, h, _, w, b) return tanh(x + linear(h, w, b)) end
function M.steps.rnn_relu(x, h, _, w, b) return relu(x + linear(h, w, b)) end

-- Gates in the order input, forget, candidate, output (Hochreiter & Schmidhuber 1997; Gers et al. 2000).
function M.steps.lstm(x, h, c, w, b)
  local gates = (x + linear(h, w, b)):chunk(4, -1)
  c = sigmoid(gates[2]) * c + sigmoid(gates[1]) * tanh(gates[3])
  return sigmoid(gates[4]) * tanh(c), c
end

-- Gates in the order reset, update, candidate (Cho et al. 2014). The reset gate multiplies the product of h with its
-- weight, as in PyTorch.
function M.steps.gru(x, h, _, w, b)
  local of_x, of_h = x:chunk(3, -1), linear(h, w, b):chunk(3, -1)
  local reset, update = sigmoid(of_x[1] + of_h[1]), sigmoid(of_x[2] + of_h[2])
  local candidate = tanh(of_x[3] + reset * of_h[3])
  return candidate + update * (h - candidate)
end

--- Fills all parameters of m with uniform numbers in +-1/sqrt(hidden_size).
---@param m Module  has the field hidden_size
function M.reset(m)
  local bound = m.hidden_size > 0 and 1 / math.sqrt(m.hidden_size) or 0
  for _, p in ipairs(m:parameters { recurse = false }) do init.uniform_(p, -bound, bound) end
end

--- Makes the parameters of one step, whose names end in suffix: two weights and, with o.bias, two biases.
---@param m Module  gets the parameters
---@param kind string  a key of M.gates
---@param size_in integer  features of the input
---@param suffix string  such as "_l0_reverse"
---@param o { bias: boolean, dtype: string, device: string }
function M.make_parameters(m, kind, size_in, suffix, o)
  local rows, of = M.gates[kind] * m.hidden_size, { dtype = o.dtype, device = o.device }
  m["weight_ih" .. suffix] = empty({ rows, size_in }, of)
  m["weight_hh" .. suffix] = empty({ rows, m.hidden_size }, of)
  if o.bias then
    m["bias_ih" .. suffix] = empty({ rows }, of)
    m["bias_hh" .. suffix] = empty({ rows }, of)
  end
end

-- ---- cells ------------------------------------------------------------------------------------------

local spec = { bias = true, dtype = opts.string, device = opts.any }
local rnn_spec = { nonlinearity = opts.one_of({ "tanh", "relu" }, "tanh"), bias = true, dtype = opts.string,
  device = opts.any }

local function construct(self, input_size, hidden_size, given)
  local name = self:class_name()
  local o = opts(name, given, self._kind_of_cell and spec or rnn_spec)
  opts.expect(input_size, opts.whole_from(0), "%s: argument 1, the size of the input,", name)
  opts.expect(hidden_size, opts.whole_from(1), "%s: argument 2, the size of the state,", name)
  self.input_size, self.hidden_size, self.kind = input_size, hidden_size, self._kind_of_cell or "rnn_" .. o.nonlinearity
  M.make_parameters(self, self.kind, input_size, "", o)
  self:reset_parameters()
end

-- The state t, whose shape is checked; zeros if t is nil.
local function state(self, what, t, x)
  local sizes = { unpack(x.shape) }
  sizes[#sizes] = self.hidden_size
  if t == nil then return create.zeros(sizes, { dtype = x.dtype, device = x.device }) end
  opts.expect(t, a_tensor, "%s: %s", self:class_name(), what)
  local expected = "[" .. table.concat(sizes, ", ") .. "]"
  if tostring(t.shape) ~= expected then
    raise("%s: %s has shape %s, expected %s", self:class_name(), what, tostring(t.shape), expected)
  end
  return t
end

local function forward(self, x, h, c)
  opts.expect(x, a_tensor, "%s: input", self:class_name())
  if x.ndim ~= 1 and x.ndim ~= 2 or x:size(-1) ~= self.input_size then
    raise("%s: the input has shape %s, expected [N, %d] or [%d]", self:class_name(), tostring(x.shape), self.input_size,
      self.input_size)
  end
  local slots = self._slots
  h = state(self, "h", h, x)
  if slots.kind == "lstm" then c = state(self, "c", c, x) end
  return M.steps[slots.kind](linear(x, slots.weight_ih, slots.bias_ih), h, c, slots.weight_hh, slots.bias_hh)
end

local function cell_class(name, kind)
  local cls = Module:extend(name)
  cls._kind_of_cell, cls.init, cls.forward = kind, construct, forward
  --- Fills all parameters with uniform numbers in +-1/sqrt(hidden_size).
  function cls:reset_parameters() M.reset(self) end
  function cls:extra_repr()
    return ("%d -> %d%s%s"):format(self.input_size, self.hidden_size, self.bias_ih and ", bias" or "",
      self.kind == "rnn_relu" and ", relu" or "")
  end
  return cls
end

--- One step of a simple recurrent network (Elman 1990): h' = tanh(W_ih x + b_ih + W_hh h + b_hh). Called with x,
--- [N, in] or [in], and h, zeros if absent; returns h'.
---@class RNNCell: Module
---@field weight_ih Parameter  [hidden_size, input_size]
---@field weight_hh Parameter  [hidden_size, hidden_size]
---@field bias_ih Parameter?  [hidden_size]; nil without bias
---@field bias_hh Parameter?  [hidden_size]; nil without bias
---@overload fun(input_size: integer, hidden_size: integer, opts?: { nonlinearity: "tanh"|"relu", bias: boolean, dtype: string, device: string }): RNNCell
---   input_size: features of the input; hidden_size: features of the state; nonlinearity: "relu" in place of tanh
local RNNCell = cell_class "RNNCell"

--- One step of a long short-term memory: `h, c = cell(x, h, c)` with x [N, in] or [in]; h and c are zeros if absent.
--- The rows of the weights are the gates input, forget, candidate and output.
---@class LSTMCell: Module
---@field weight_ih Parameter  [4 * hidden_size, input_size]
---@field weight_hh Parameter  [4 * hidden_size, hidden_size]
---@field bias_ih Parameter?  [4 * hidden_size]; nil without bias
---@field bias_hh Parameter?  [4 * hidden_size]; nil without bias
---@overload fun(input_size: integer, hidden_size: integer, opts?: { bias: boolean, dtype: string, device: string }): LSTMCell
---   input_size: features of the input; hidden_size: features of the state
local LSTMCell = cell_class("LSTMCell", "lstm")

--- One step of a gated recurrent unit: `h = cell(x, h)` with x [N, in] or [in]; h is zeros if absent. The rows of the
--- weights are the gates reset, update and candidate.
---@class GRUCell: Module
---@field weight_ih Parameter  [3 * hidden_size, input_size]
---@field weight_hh Parameter  [3 * hidden_size, hidden_size]
---@field bias_ih Parameter?  [3 * hidden_size]; nil without bias
---@field bias_hh Parameter?  [3 * hidden_size]; nil without bias
---@overload fun(input_size: integer, hidden_size: integer, opts?: { bias: boolean, dtype: string, device: string }): GRUCell
---   input_size: features of the input; hidden_size: features of the state
local GRUCell = cell_class("GRUCell", "gru")

M.layers = { RNNCell = RNNCell, LSTMCell = LSTMCell, GRUCell = GRUCell }
return M
