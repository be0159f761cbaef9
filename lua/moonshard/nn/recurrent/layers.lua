-- SPDX-License-Identifier: MIT
--- RNN, LSTM and GRU over sequences, of one length or packed. The product of the input with its weight is one operation
--- for all steps of a layer and direction, and the recurrence is another (the engine's rnn, lstm and gru).
local cells = require "moonshard.nn.recurrent.cells"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local packed = require "moonshard.nn.recurrent.packed"
local shape = require "moonshard.tensor.shape"
local Module = require "moonshard.nn.module".Module

local a_tensor, raise = require("moonshard.tensor").a_tensor, errors.raise

local spec = { num_layers = opts.option(opts.whole_from(1), 1), bias = true, batch_first = false, dropout = 0,
  bidirectional = false, dtype = opts.string, device = opts.any }
local rnn_spec = { nonlinearity = opts.one_of({ "tanh", "relu" }, "tanh") }
local lstm_spec = { proj_size = opts.option(opts.whole_from(0), 0) }
for name, option in pairs(spec) do rnn_spec[name], lstm_spec[name] = option, option end
local specs = { rnn = rnn_spec, lstm = lstm_spec, gru = spec }

local function construct(self, input_size, hidden_size, given)
  local name = self:class_name()
  local o = opts(name, given, specs[self._kind_of_step])
  opts.expect(input_size, opts.whole_from(1), "%s: argument 1, the size of the input,", name)
  opts.expect(hidden_size, opts.whole_from(1), "%s: argument 2, the hidden size,", name)
  opts.need(o.dropout >= 0 and o.dropout <= 1, o.dropout, "a number from 0 to 1", "%s: option 'dropout'", name)
  local proj_size = o.proj_size or 0
  opts.need(proj_size < hidden_size, proj_size, ("less than the hidden size, %d"):format(hidden_size),
    "%s: option 'proj_size'", name)
  if o.dropout > 0 and o.num_layers == 1 then
    log.warn(("%s: dropout acts between layers, so dropout = %g has no effect with 1 layer"):format(name, o.dropout))
  end
  self.input_size, self.hidden_size, self.num_layers, self.proj_size = input_size, hidden_size, o.num_layers, proj_size
  self.batch_first, self.dropout, self.bidirectional = o.batch_first, o.dropout, o.bidirectional
  self.kind, self.relu = self._kind_of_step, o.nonlinearity == "relu"
  local directions = o.bidirectional and { "", "_reverse" } or { "" }
  local state_size = proj_size > 0 and proj_size or hidden_size
  self.suffixes = {}
  for layer = 0, o.num_layers - 1 do
    for _, direction in ipairs(directions) do
      local suffix = ("_l%d%s"):format(layer, direction)
      self.suffixes[#self.suffixes + 1] = suffix
      cells.make_parameters(self, layer == 0 and input_size or #directions * state_size, suffix, o)
    end
  end
  self:reset_parameters()
end

-- Runs one direction of one layer over x; returns the states of all steps, and the last h and c. at: the index of layer
-- and direction, from 1; states: the initial h and c of all layers and directions, each [layers * directions, N, size]
-- or nil.
local function run(self, at, x, states, batch_sizes)
  local slots, suffix = self._slots, self.suffixes[at]
  local of_x = ops.linear(x, slots["weight_ih" .. suffix], slots["bias_ih" .. suffix])
  local y, h, c = ops.recurrent(slots.kind, of_x, slots["weight_hh" .. suffix], {
    bias = slots["bias_hh" .. suffix], h = states.h and states.h:select(1, at), c = states.c and states.c:select(1, at),
    project = slots["weight_hr" .. suffix], batch_sizes = batch_sizes, reversed = suffix:find "_reverse$" ~= nil,
    relu = slots.relu })
  ops.drop(of_x)
  return y, h, c
end

-- Checks a state: nil, or [layers * directions, N, size], without N for an input without a batch. Returns it with N.
local function state(self, what, t, n, size)
  if t == nil then return nil end
  if opts.is_plain(t) then
    raise("%s: %s is a table, expected a tensor; states are arguments: y, h%s = layer(x, h%s)", self:class_name(), what,
      self.kind == "lstm" and ", c" or "", self.kind == "lstm" and ", c" or "")
  end
  opts.expect(t, a_tensor, "%s: %s", self:class_name(), what)
  local expected = (n and "[%d, " .. n .. ", %d]" or "[%d, %d]"):format(#self.suffixes, size)
  if tostring(t.shape) ~= expected then
    raise("%s: %s has shape %s, expected %s", self:class_name(), what, tostring(t.shape), expected)
  end
  return n and t or t:unsqueeze(2)
end

local function check_features(self, x)
  if x:size(-1) ~= self.input_size then
    raise("%s: input.size(-1) must be equal to input_size. Expected %d, got %d", self:class_name(), self.input_size,
      x:size(-1))
  end
end

local function check_input(self, x)
  local name = self:class_name()
  opts.need(a_tensor.test(x), x, "a tensor or a packed sequence", "%s: input", name)
  if x.ndim ~= 2 and x.ndim ~= 3 then raise("%s: Expected input to be 2D or 3D, got %dD instead", name, x.ndim) end
  check_features(self, x)
  if x:size(self.batch_first and x.ndim == 3 and 2 or 1) == 0 then
    raise("%s: Expected sequence length to be larger than 0, got input %s", name, tostring(x.shape))
  end
end

-- Runs all layers over x, [T, N, in] or packed rows [rows, in]. Returns y and the last h and c of all layers.
local function run_layers(self, x, states, batch_sizes)
  local h_out, c_out, per_layer, y = {}, {}, self.bidirectional and 2 or 1, x
  for layer = 1, self.num_layers do
    if layer > 1 and self.training and self.dropout > 0 then
      local whole = y
      y = ops.dropout(whole, self.dropout)
      ops.drop(whole)
    end
    local parts = {}
    for k = 1, per_layer do
      local at = (layer - 1) * per_layer + k
      parts[k], h_out[at], c_out[at] = run(self, at, y, states, batch_sizes)
    end
    if layer > 1 then ops.drop(y) end
    y = per_layer == 1 and parts[1] or shape.cat(parts, x.ndim)
  end
  return y, shape.stack(h_out, 1), self.kind == "lstm" and shape.stack(c_out, 1) or nil
end

local function forward_packed(self, x, h, c)
  packed.check(x, self:class_name())
  packed.refuse_captured(self:class_name(), "batch_sizes")
  check_features(self, x.data)
  local sizes = x.batch_sizes.device == "cpu" and x.batch_sizes or x.batch_sizes:to "cpu"
  local n = sizes[1]:item()
  h = state(self, "h", h, n, self.proj_size > 0 and self.proj_size or self.hidden_size)
  c = state(self, "c", c, n, self.hidden_size)
  if x.sorted_indices ~= nil then
    h, c = h and h:index_select(2, x.sorted_indices), c and c:index_select(2, x.sorted_indices)
  end
  local y, h_n, c_n = run_layers(self, x.data, { h = h, c = c }, sizes)
  if x.unsorted_indices ~= nil then
    h_n, c_n = h_n:index_select(2, x.unsorted_indices), c_n and c_n:index_select(2, x.unsorted_indices)
  end
  return packed.with_data(x, y), h_n, c_n
end

local function forward_dense(self, x, h, c)
  check_input(self, x)
  local single, turned = x.ndim == 2, x.ndim == 3 and self.batch_first
  local y = single and x:unsqueeze(2) or turned and x:transpose(1, 2) or x
  local n = not single and y:size(2) or nil
  h = state(self, "h", h, n, self.proj_size > 0 and self.proj_size or self.hidden_size)
  c = state(self, "c", c, n, self.hidden_size)
  local h_n, c_n
  y, h_n, c_n = run_layers(self, y, { h = h, c = c })
  y = single and y:squeeze(2) or turned and y:transpose(1, 2) or y
  if single then h_n, c_n = h_n:squeeze(2), c_n and c_n:squeeze(2) end
  return y, h_n, c_n
end

local function forward(self, x, h, c)
  local y, h_n, c_n = (packed.is_packed(x) and forward_packed or forward_dense)(self, x, h,
    self.kind == "lstm" and c or nil)
  if c_n == nil then return y, h_n end
  return y, h_n, c_n
end

local function extra_repr(self)
  return ("%d -> %d%s%s%s%s%s%s%s"):format(self.input_size, self.hidden_size, self.proj_size > 0
    and (", projected to %d"):format(self.proj_size) or "", self.num_layers > 1
    and (", %d layers"):format(self.num_layers) or "", self.bias_ih_l0 and ", bias" or "", self.relu and ", relu" or "",
    self.bidirectional and ", bidirectional" or "", self.batch_first and ", batch first" or "",
    self.dropout > 0 and (", dropout %g"):format(self.dropout) or "")
end

local function recurrent_class(name, kind)
  local cls = Module:extend(name)
  cls._kind_of_step, cls.forward, cls.extra_repr = kind, forward, extra_repr
  --- Makes the parameters; the number of layers may be the third argument, as in PyTorch.
  function cls:init(input_size, hidden_size, num_layers, given)
    if type(num_layers) == "number" then
      given = given == nil and {} or given
      opts.need(opts.is_plain(given) and given.num_layers == nil, given,
        "options without num_layers, which argument 3 gives", "%s: argument 4", name)
      local copy = { num_layers = num_layers }
      for key, value in pairs(given) do copy[key] = value end
      return construct(self, input_size, hidden_size, copy)
    end
    num_layers, given = opts.shift(name, num_layers, given)
    return construct(self, input_size, hidden_size, num_layers == nil and given or num_layers)
  end
  --- Fills all parameters with uniform numbers in +-1/sqrt(hidden_size).
  function cls:reset_parameters() cells.reset(self) end
  --- Does nothing. Programs for PyTorch call it before a forward on a GPU.
  function cls.flatten_parameters() end
  return cls
end

--- A simple recurrent network (Elman 1990): `y, h = rnn(x, h)`; a step is `h' = tanh(W_ih x + b_ih + W_hh h + b_hh)`. x
--- is [T, N, in], [N, T, in] with batch_first, [T, in], or a packed sequence (nn.utils.rnn). h is the state before the
--- first step, [layers * directions, N, hidden_size], without N for x [T, in]; zeros if absent. y has the states of the
--- last layer at every step, in the layout of x (packed if x is), with directions * hidden_size features. The second
--- result is the state after the last step, in the shape of h; for a packed sequence after each sequence's own last
--- step, in their original order. Parameters are weight_ih_l0 [hidden_size, in], weight_hh_l0 [hidden_size,
--- hidden_size], bias_ih_l0 and bias_hh_l0 [hidden_size]. The names have l1, l2, ... for further layers, and the suffix
--- _reverse for the other direction.
---@class RNN: Module
---@overload fun(input_size: integer, hidden_size: integer, num_layers?: integer, opts?: { num_layers: integer, nonlinearity: "tanh"|"relu", bias: boolean, batch_first: boolean, dropout: number, bidirectional: boolean, dtype: string, device: string }): RNN
---   input_size: features of the input; hidden_size: features of the state; num_layers: the number of layers (default:
---   1), by position or as an option; nonlinearity: "relu" in place of tanh; batch_first: the first dimension of x and
---   y is the batch; dropout: probability, in training, of setting an element between two layers to 0; bidirectional:
---   also runs from the end to the beginning
local RNN = recurrent_class("RNN", "rnn")

--- A long short-term memory (Hochreiter & Schmidhuber 1997): `y, h, c = lstm(x, h, c)`. A step computes, with `a = W_ih
--- x + b_ih + W_hh h + b_hh` cut into i, f, g, o: `c' = sigmoid(f) c + sigmoid(i) tanh(g)`, `h' = sigmoid(o) tanh(c')`.
--- x is [T, N, in], [N, T, in] with batch_first, [T, in], or a packed sequence (nn.utils.rnn). h and c are the states
--- before the first step, [layers * directions, N, hidden_size], without N for x [T, in]; zeros if absent. y has h of
--- the last layer at every step, in the layout of x (packed if x is), with directions * hidden_size features. The other
--- results are the states after the last step, in the shapes of h and c; for a packed sequence after each sequence's
--- own last step, in their original order. Parameters are weight_ih_l0 [4 * hidden_size, in], weight_hh_l0 [4 *
--- hidden_size, hidden_size], bias_ih_l0 and bias_hh_l0 [4 * hidden_size], rows in the order i, f, g, o. The names have
--- l1, l2, ... for further layers, and the suffix _reverse for the other direction. With proj_size (Sak et al. 2014)
--- weight_hr_l0, [proj_size, hidden_size], projects each state: h and y have proj_size features.
---@class LSTM: Module
---@overload fun(input_size: integer, hidden_size: integer, num_layers?: integer, opts?: { num_layers: integer, bias: boolean, batch_first: boolean, dropout: number, bidirectional: boolean, proj_size: integer, dtype: string, device: string }): LSTM
---   input_size: features of the input; hidden_size: features of the state; num_layers: the number of layers (default:
---   1), by position or as an option; batch_first: the first dimension of x and y is the batch; dropout: probability,
---   in training, of setting an element between two layers to 0; bidirectional: also runs from the end to the
---   beginning; proj_size: features of the projected state, 0 for none, less than hidden_size
local LSTM = recurrent_class("LSTM", "lstm")

--- Gated recurrent units (Cho et al. 2014): `y, h = gru(x, h)`. A step computes `r = sigmoid(W_ir x + b_ir + W_hr h +
--- b_hr)`, z in the same way, `n = tanh(W_in x + b_in + r (W_hn h + b_hn))` and `h' = (1 - z) n + z h`. x is [T, N,
--- in], [N, T, in] with batch_first, [T, in], or a packed sequence (nn.utils.rnn). h is the state before the first
--- step, [layers * directions, N, hidden_size], without N for x [T, in]; zeros if absent. y has the states of the last
--- layer at every step, in the layout of x (packed if x is), with directions * hidden_size features. The second result
--- is the state after the last step, in the shape of h; for a packed sequence after each sequence's own last step, in
--- their original order. Parameters are weight_ih_l0 [3 * hidden_size, in], weight_hh_l0 [3 * hidden_size,
--- hidden_size], bias_ih_l0 and bias_hh_l0 [3 * hidden_size], rows in the order r, z, n. The names have l1, l2, ... for
--- further layers, and the suffix _reverse for the other direction.
---@class GRU: Module
---@overload fun(input_size: integer, hidden_size: integer, num_layers?: integer, opts?: { num_layers: integer, bias: boolean, batch_first: boolean, dropout: number, bidirectional: boolean, dtype: string, device: string }): GRU
---   input_size: features of the input; hidden_size: features of the state; num_layers: the number of layers (default:
---   1), by position or as an option; batch_first: the first dimension of x and y is the batch; dropout: probability,
---   in training, of setting an element between two layers to 0; bidirectional: also runs from the end to the beginning
local GRU = recurrent_class("GRU", "gru")

local layers = { RNN = RNN, LSTM = LSTM, GRU = GRU }
for name, cell in pairs(cells.layers) do layers[name] = cell end
return layers
