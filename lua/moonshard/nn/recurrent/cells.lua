-- SPDX-License-Identifier: MIT
--- RNNCell, LSTMCell and GRUCell: one step of a recurrent network; and a function that makes the parameters of a step,
--- which recurrent.lua calls for each layer and direction.
local errors = require "moonshard.core.errors"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local init = require "moonshard.nn.initial".init
local Module = require "moonshard.nn.module".Module
local empty = require "moonshard.nn.module.parameter".empty

local a_tensor, raise = require("moonshard.tensor").a_tensor, errors.raise
local M = {}

-- ---- parameters -------------------------------------------------------------------------------------

--- The number of gates by kind of step.
M.gates = { rnn = 1, lstm = 4, gru = 3 }

--- Fills all parameters of m with uniform numbers in +-1/sqrt(hidden_size).
---@param m Module  has the field hidden_size
function M.reset(m)
  local bound = m.hidden_size > 0 and 1 / math.sqrt(m.hidden_size) or 0
  for _, p in ipairs(m:parameters { recurse = false }) do init.uniform_(p, -bound, bound) end
end

--- Makes the parameters of one step, whose names end in suffix: two weights, with o.bias two biases, and the weight of
--- the projection, if there is one.
---@param m Module  gets the parameters
---@param size_in integer  features of the input
---@param suffix string  such as "_l0_reverse"
---@param o { bias: boolean, proj_size: integer?, dtype: string, device: string }
function M.make_parameters(m, size_in, suffix, o)
  local rows, of = M.gates[m.kind] * m.hidden_size, { dtype = o.dtype, device = o.device }
  local projected = o.proj_size or 0
  m["weight_ih" .. suffix] = empty({ rows, size_in }, of)
  m["weight_hh" .. suffix] = empty({ rows, projected > 0 and projected or m.hidden_size }, of)
  if o.bias then
    m["bias_ih" .. suffix] = empty({ rows }, of)
    m["bias_hh" .. suffix] = empty({ rows }, of)
  end
  if projected > 0 then m["weight_hr" .. suffix] = empty({ projected, m.hidden_size }, of) end
end

-- ---- cells ------------------------------------------------------------------------------------------

local spec = { bias = true, dtype = opts.string, device = opts.any }
local rnn_spec = { nonlinearity = opts.one_of({ "tanh", "relu" }, "tanh"), bias = true, dtype = opts.string,
  device = opts.any }

local function construct(self, input_size, hidden_size, given)
  local name = self:class_name()
  local o = opts(name, given, self._kind_of_cell == "rnn" and rnn_spec or spec)
  opts.expect(input_size, opts.whole_from(0), "%s: argument 1, the size of the input,", name)
  opts.expect(hidden_size, opts.whole_from(1), "%s: argument 2, the hidden size,", name)
  self.input_size, self.hidden_size, self.kind = input_size, hidden_size, self._kind_of_cell
  self.relu = o.nonlinearity == "relu"
  M.make_parameters(self, input_size, "", o)
  self:reset_parameters()
end

-- The state t as [n, hidden_size]; nil, which stands for zeros, if t is nil.
local function state(self, what, t, x, n)
  if t == nil then return nil end
  opts.expect(t, a_tensor, "%s: %s", self:class_name(), what)
  local expected = (x.ndim == 1 and "[%d]" or "[" .. n .. ", %d]"):format(self.hidden_size)
  if tostring(t.shape) ~= expected then
    raise("%s: %s has shape %s, expected %s", self:class_name(), what, tostring(t.shape), expected)
  end
  return x.ndim == 1 and t:unsqueeze(1) or t
end

local function forward(self, x, h, c)
  opts.expect(x, a_tensor, "%s: input", self:class_name())
  if x.ndim ~= 1 and x.ndim ~= 2 or x:size(-1) ~= self.input_size then
    raise("%s: the input has shape %s, expected [N, %d] or [%d]", self:class_name(), tostring(x.shape), self.input_size,
      self.input_size)
  end
  local slots, n = self._slots, x.ndim == 2 and x:size(1) or 1
  h = state(self, "h", h, x, n)
  if slots.kind == "lstm" then c = state(self, "c", c, x, n) else c = nil end
  local of_x = ops.linear(x, slots.weight_ih, slots.bias_ih):reshape(1, n, M.gates[slots.kind] * slots.hidden_size)
  local _, next_h, next_c = ops.recurrent(slots.kind, of_x, slots.weight_hh, { bias = slots.bias_hh, h = h, c = c,
    relu = slots.relu })
  if x.ndim == 1 then next_h, next_c = next_h:squeeze(1), next_c and next_c:squeeze(1) end
  if next_c == nil then return next_h end
  return next_h, next_c
end

local function cell_class(name, kind)
  local cls = Module:extend(name)
  cls._kind_of_cell, cls.init, cls.forward = kind, construct, forward
  --- Fills all parameters with uniform numbers in +-1/sqrt(hidden_size).
  function cls:reset_parameters() M.reset(self) end
  function cls:extra_repr()
    return ("%d -> %d%s%s"):format(self.input_size, self.hidden_size, self.bias_ih and ", bias" or "",
      self.relu and ", relu" or "")
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
local RNNCell = cell_class("RNNCell", "rnn")

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
