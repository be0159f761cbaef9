-- SPDX-License-Identifier: MIT
--- RNN, LSTM and GRU over sequences. The product of the input with its weight is one operation for all time steps of a
--- layer; the product of the state with its weight is one for each step.
local cells = require "moonshard.nn.cells"
local create = require "moonshard.tensor.create"
local errors = require "moonshard.core.errors"
local log = require "moonshard.core.log"
local opts = require "moonshard.core.opts"
local ops = require "moonshard.nn.ops"
local scope = require "moonshard.tensor.scope"
local cat = require "moonshard.tensor.shape".cat
local Module = require "moonshard.nn.module".Module

local a_tensor, raise = require("moonshard.tensor").a_tensor, errors.raise

local spec = { num_layers = opts.option(opts.whole_from(1), 1), bias = true, batch_first = false, dropout = 0,
  bidirectional = false, dtype = opts.string, device = opts.any }
local rnn_spec = { nonlinearity = opts.one_of({ "tanh", "relu" }, "tanh") }
for name, option in pairs(spec) do rnn_spec[name] = option end

local function construct(self, input_size, hidden_size, given)
  local name = self:class_name()
  local o = opts(name, given, self._kind_of_step and spec or rnn_spec)
  opts.expect(input_size, opts.whole_from(0), "%s: argument 1, the size of the input,", name)
  opts.expect(hidden_size, opts.whole_from(1), "%s: argument 2, the size of the state,", name)
  opts.need(o.dropout >= 0 and o.dropout <= 1, o.dropout, "a number from 0 to 1", "%s: option 'dropout'", name)
  if o.dropout > 0 and o.num_layers == 1 then
    log.warn(("%s: dropout acts between layers, so dropout = %g has no effect with 1 layer"):format(name, o.dropout))
  end
  self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, o.num_layers
  self.batch_first, self.dropout, self.bidirectional = o.batch_first, o.dropout, o.bidirectional
  self.kind = self._kind_of_step or "rnn_" .. o.nonlinearity
  local directions = o.bidirectional and { "", "_reverse" } or { "" }
  self.suffixes = {}
  for layer = 0, o.num_layers - 1 do
    for _, direction in ipairs(directions) do
      local suffix = ("_l%d%s"):format(layer, direction)
      self.suffixes[#self.suffixes + 1] = suffix
      cells.make_parameters(self, self.kind, layer == 0 and input_size or #directions * hidden_size, suffix, o)
    end
  end
  self:reset_parameters()
end

-- Divides x along dimension 1 into pieces of size 1, which are appended to list. The backward of a split joins the
-- gradients of its pieces, while that of a narrow makes a gradient of the size of x. The operator makes up to 20
-- pieces, so longer sequences are split in a tree.
local function split_steps(x, list)
  local n = x:size(1)
  if n == 1 then
    list[#list + 1] = x
  else
    for _, part in ipairs(x:split(math.ceil(n / 20), 1)) do split_steps(part, list) end
  end
  return list
end

-- Runs one direction of one layer over x, [T, N, in]; returns the states of all steps, [T, N, H], and the last h and c.
local function run(self, suffix, x, h, c)
  local slots = self._slots
  local step, name = cells.steps[slots.kind], self:class_name()
  local w, b = slots["weight_hh" .. suffix], slots["bias_hh" .. suffix]
  local inputs = split_steps(ops.linear(x, slots["weight_ih" .. suffix], slots["bias_ih" .. suffix]), {})
  local outputs, n = {}, #inputs
  local first, last, by = 1, n, 1
  if suffix:find "_reverse$" then first, last, by = n, 1, -1 end
  for t = first, last, by do
    h, c = scope.run(name, step, inputs[t], h, c, w, b)
    outputs[t] = h
  end
  return cat(outputs, 1), h, c
end

-- The initial states as a list of [1, N, H], one for each layer and direction; zeros if t is nil.
local function states(self, what, t, x, single)
  local n, H = #self.suffixes, self.hidden_size
  if t == nil then
    local zeros, list = create.zeros({ 1, x:size(2), H }, { dtype = x.dtype, device = x.device }), {}
    for k = 1, n do list[k] = zeros end
    return list
  end
  opts.expect(t, a_tensor, "%s: %s", self:class_name(), what)
  local expected = single and ("[%d, %d]"):format(n, H) or ("[%d, %d, %d]"):format(n, x:size(2), H)
  if tostring(t.shape) ~= expected then
    raise("%s: %s has shape %s, expected %s", self:class_name(), what, tostring(t.shape), expected)
  end
  return split_steps(single and t:unsqueeze(2) or t, {})
end

local function check_input(self, x)
  local name = self:class_name()
  opts.expect(x, a_tensor, "%s: input", name)
  if x.ndim ~= 2 and x.ndim ~= 3 then raise("%s: Expected input to be 2D or 3D, got %dD instead", name, x.ndim) end
  if x:size(-1) ~= self.input_size then
    raise("%s: input.size(-1) must be equal to input_size. Expected %d, got %d", name, self.input_size, x:size(-1))
  end
  if x:size(self.batch_first and x.ndim == 3 and 2 or 1) == 0 then
    raise("%s: Expected sequence length to be larger than 0, got input %s", name, tostring(x.shape))
  end
end

local function forward(self, x, h, c)
  check_input(self, x)
  local single, turned = x.ndim == 2, x.ndim == 3 and self.batch_first
  local y = single and x:unsqueeze(2) or turned and x:transpose(1, 2) or x
  local lstm = self.kind == "lstm"
  local h_in, c_in = states(self, "h", h, y, single), lstm and states(self, "c", c, y, single)
  local h_out, c_out, per_layer = {}, {}, self.bidirectional and 2 or 1
  for layer = 1, self.num_layers do
    if layer > 1 and self.training and self.dropout > 0 then y = ops.dropout(y, self.dropout) end
    local parts = {}
    for k = 1, per_layer do
      local at = (layer - 1) * per_layer + k
      parts[k], h_out[at], c_out[at] = run(self, self.suffixes[at], y, h_in[at], lstm and c_in[at] or nil)
    end
    y = per_layer == 1 and parts[1] or cat(parts, 3)
  end
  y = single and y:squeeze(2) or turned and y:transpose(1, 2) or y
  local h_n, c_n = cat(h_out, 1), lstm and cat(c_out, 1) or nil
  if single then h_n, c_n = h_n:squeeze(2), lstm and c_n:squeeze(2) or nil end
  if not lstm then return y, h_n end
  return y, h_n, c_n
end

local function extra_repr(self)
  return ("%d -> %d%s%s%s%s%s%s"):format(self.input_size, self.hidden_size, self.num_layers > 1
    and (", %d layers"):format(self.num_layers) or "", self.bias_ih_l0 and ", bias" or "", self.kind == "rnn_relu"
    and ", relu" or "", self.bidirectional and ", bidirectional" or "", self.batch_first and ", batch first" or "",
    self.dropout > 0 and (", dropout %g"):format(self.dropout) or "")
end

local function recurrent_class(name, kind)
  local cls = Module:extend(name)
  cls._kind_of_step, cls.forward, cls.extra_repr = kind, forward, extra_repr
  --- Makes the parameters; the number of layers may stand in third place, as in PyTorch.
  function cls:init(input_size, hidden_size, num_layers, given)
    if type(num_layers) == "number" then
      given = given == nil and {} or given
      opts.need(opts.is_plain(given) and given.num_layers == nil, given,
        "options without num_layers, which argument 3 gives", "%s: argument 4", name)
      local copy = { num_layers = num_layers }
      for key, value in pairs(given) do copy[key] = value end
      return construct(self, input_size, hidden_size, copy)
    end
    return construct(self, input_size, hidden_size, num_layers == nil and given or num_layers)
  end
  --- Fills all parameters with uniform numbers in +-1/sqrt(hidden_size).
  function cls:reset_parameters() cells.reset(self) end
  return cls
end

--- A simple recurrent network (Elman 1990): `y, h = rnn(x, h)`. x is [T, N, in], [N, T, in] with batch_first, or
--- [T, in]; h, zeros if absent, is [layers * directions, N, hidden_size], without N for x [T, in]; y is like x, with
--- directions * hidden_size features. The parameters of the first layer are weight_ih_l0, weight_hh_l0, bias_ih_l0 and
--- bias_hh_l0; those of the other direction have the suffix _reverse.
---@class RNN: Module
---@overload fun(input_size: integer, hidden_size: integer, num_layers?: integer, opts?: { num_layers: integer, nonlinearity: "tanh"|"relu", bias: boolean, batch_first: boolean, dropout: number, bidirectional: boolean, dtype: string, device: string }): RNN
---   input_size: features of the input; hidden_size: features of the state; num_layers: the number of layers (default:
---   1), by position or as an option; nonlinearity: "relu" in place of tanh; batch_first: the first dimension of x and
---   y is the batch; dropout: probability, in training, of setting an element between two layers to 0; bidirectional:
---   also runs from the end to the beginning
local RNN = recurrent_class "RNN"

--- A long short-term memory (Hochreiter & Schmidhuber 1997): `y, h, c = lstm(x, h, c)`; shapes and names as in RNN, c
--- like h. The rows of the weights are the gates input, forget, candidate and output.
---@class LSTM: Module
---@overload fun(input_size: integer, hidden_size: integer, num_layers?: integer, opts?: { num_layers: integer, bias: boolean, batch_first: boolean, dropout: number, bidirectional: boolean, dtype: string, device: string }): LSTM
---   input_size: features of the input; hidden_size: features of the state; num_layers: the number of layers (default:
---   1), by position or as an option; batch_first: the first dimension of x and y is the batch; dropout: probability,
---   in training, of setting an element between two layers to 0; bidirectional: also runs from the end to the beginning
local LSTM = recurrent_class("LSTM", "lstm")

--- Gated recurrent units (Cho et al. 2014): `y, h = gru(x, h)`; shapes and names as in RNN. The rows of the weights are
--- the gates reset, update and candidate.
---@class GRU: Module
---@overload fun(input_size: integer, hidden_size: integer, num_layers?: integer, opts?: { num_layers: integer, bias: boolean, batch_first: boolean, dropout: number, bidirectional: boolean, dtype: string, device: string }): GRU
---   input_size: features of the input; hidden_size: features of the state; num_layers: the number of layers (default:
---   1), by position or as an option; batch_first: the first dimension of x and y is the batch; dropout: probability,
---   in training, of setting an element between two layers to 0; bidirectional: also runs from the end to the beginning
local GRU = recurrent_class("GRU", "gru")

local layers = { RNN = RNN, LSTM = LSTM, GRU = GRU }
for name, cell in pairs(cells.layers) do layers[name] = cell end
return layers
