-- SPDX-License-Identifier: MIT
--- RNN, LSTM, GRU and their cells, forward and backward, compared with PyTorch's results.
local ms = require "moonshard"
local golden_cases = require "spec.support.golden_cases"
local nn = ms.nn

-- All results of a module as one vector; its parameters are replaced by the inputs, so that these get the gradients.
-- lengths: the input is packed, and the output padded with 0.5.
local function flat(m, n_states, lengths, x, ...)
  local given = { ... }
  local names, states = {}, {}
  for name in m:named_parameters() do names[#names + 1] = name end
  for k = 1, n_states do states[k] = given[k] end
  for k, name in ipairs(names) do rawget(m, "_slots")[name] = given[n_states + k] end
  assert(#given == n_states + #names)
  if lengths then x = nn.utils.rnn.pack_padded_sequence(x, lengths, { enforce_sorted = false }) end
  local results = { m(x, unpack(states)) }
  if lengths then results[1] = nn.utils.rnn.pad_packed_sequence(results[1], { padding_value = 0.5 }) end
  for k, r in ipairs(results) do results[k] = r:reshape(-1) end
  return ms.cat(results)
end

local function case(class, n_states, o, lengths)
  return function(x, ...)
    local given = { dtype = x.dtype }
    for name, value in pairs(o or {}) do given[name] = value end
    return flat(class(4, 3, given), n_states, lengths, x, ...)
  end
end

local both = { num_layers = 2, bidirectional = true }
local projected = { num_layers = 2, bidirectional = true, proj_size = 2 }
local sorted, unsorted = { 6, 4, 4, 1 }, { 3, 6, 1, 5, 6 }
local cases = {
  rnn_tanh = case(nn.RNN, 1), rnn_relu = case(nn.RNN, 1, { nonlinearity = "relu" }), lstm = case(nn.LSTM, 2),
  gru = case(nn.GRU, 1), rnn_tanh_deep = case(nn.RNN, 1, both), lstm_deep = case(nn.LSTM, 2, both),
  gru_deep = case(nn.GRU, 1, both), gru_long = case(nn.GRU, 1),
  lstm_batch_first = case(nn.LSTM, 2, { bias = false, batch_first = true }),
  lstm_projected = case(nn.LSTM, 2, { proj_size = 2 }), lstm_projected_deep = case(nn.LSTM, 2, projected),
  rnn_tanh_packed = case(nn.RNN, 1, nil, sorted), lstm_packed = case(nn.LSTM, 2, nil, sorted),
  rnn_relu_packed = case(nn.RNN, 1, { nonlinearity = "relu" }, sorted), gru_packed = case(nn.GRU, 1, nil, sorted),
  rnn_tanh_packed_deep = case(nn.RNN, 1, both, unsorted), lstm_packed_deep = case(nn.LSTM, 2, both, unsorted),
  gru_packed_deep = case(nn.GRU, 1, both, unsorted), lstm_packed_projected = case(nn.LSTM, 2, projected, unsorted),
  rnn_tanh_cell = case(nn.RNNCell, 1), rnn_relu_cell = case(nn.RNNCell, 1, { nonlinearity = "relu" }),
  lstm_cell = case(nn.LSTMCell, 2), gru_cell = case(nn.GRUCell, 1),
}

golden_cases("recurrent", cases)
