-- SPDX-License-Identifier: MIT
--- Recurrent layers: what golden/recurrent_spec.lua does not compare, which is shapes, defaults, state, printing and
--- errors.
local ms = require "moonshard"
local nn = ms.nn
local collected = require "spec.support.collected"
local raises = require "spec.support.raises"

local function names(m)
  local list = {}
  for name in m:named_parameters() do list[#list + 1] = name end
  return table.concat(list, " ")
end
local function shape(t) return table.concat(t.shape, " ") end

describe("recurrent layers", function()
  before_each(function() ms.manual_seed(4) end)

  it("have PyTorch's names, in its order", function()
    assert.equal("weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0 weight_ih_l0_reverse weight_hh_l0_reverse bias_ih_l0_reverse bias_hh_l0_reverse",
      names(nn.GRU(2, 3, { bidirectional = true })))
    local m = nn.LSTM(2, 3, 2, { bias = false })
    assert.equal("weight_ih_l0 weight_hh_l0 weight_ih_l1 weight_hh_l1", names(m))
    assert.equal("12 3", shape(m.weight_ih_l1))
    assert.equal("weight_ih weight_hh bias_ih bias_hh", names(nn.LSTMCell(2, 3)))
  end)

  it("start uniform in +-1/sqrt(hidden_size)", function()
    for _, m in ipairs { nn.RNN(5, 16), nn.LSTM(5, 16), nn.GRU(5, 16), nn.GRUCell(5, 16) } do
      local high = 0
      for _, p in ipairs(m:parameters()) do high = math.max(high, p:detach():abs():max():item()) end
      assert.is_true(high <= 0.25 and high > 0.23)
    end
  end)

  it("begin with zeros, and go on from the states that they return", function()
    for _, class in ipairs { nn.RNN, nn.LSTM, nn.GRU } do
      local m, x = class(3, 4, 2), ms.rand(6, 2, 3)
      local zeros = ms.zeros(2, 2, 4)
      local y, h, c = m(x)
      ms.testing.assert_close(m(x, zeros, class == nn.LSTM and zeros or nil), y)
      assert.equal("6 2 4", shape(y))
      assert.equal("2 2 4", shape(h))
      assert.equal(class == nn.LSTM, c ~= nil)
      local first, h1, c1 = m(x:narrow(1, 1, 4))
      local second, h2 = m(x:narrow(1, 5, 2), h1, c1)
      ms.testing.assert_close(ms.cat { first, second }, y)
      ms.testing.assert_close(h2, h)
      ms.testing.assert_close(y:select(1, 6), h:select(1, 2))
    end
  end)

  it("take the batch first, or no batch", function()
    local m, x = nn.LSTM(3, 4, { bidirectional = true }), ms.rand(5, 2, 3)
    local y, h, c = m(x)
    m.batch_first = true
    local turned, h2 = m(x:transpose(1, 2))
    ms.testing.assert_close(turned:transpose(1, 2), y)
    ms.testing.assert_close(h2, h)
    local one, h3, c3 = m(x:select(2, 1))
    assert.equal("5 8", shape(one))
    ms.testing.assert_close(one, y:select(2, 1))
    ms.testing.assert_close(h3, h:select(2, 1))
    ms.testing.assert_close(c3, c:select(2, 1))
    ms.testing.assert_close((m(x:select(2, 1), ms.zeros(2, 4), ms.zeros(2, 4))), one)
    assert.equal("0 7 8", shape((m(ms.rand(0, 7, 3)))))
  end)

  it("give what their cells give, step by step", function()
    for layer, cell in pairs { [nn.RNN(3, 4)] = nn.RNNCell(3, 4), [nn.GRU(3, 4)] = nn.GRUCell(3, 4),
      [nn.LSTM(3, 4)] = nn.LSTMCell(3, 4) } do
      local sd = {}
      for name, t in pairs(layer:state_dict()) do sd[name:gsub("_l0", "")] = t end
      cell:load_state_dict(sd)
      local x, h, c = ms.rand(30, 2, 3), nil, nil
      local y = layer(x)
      for t = 1, 30 do
        h, c = cell(x[t], h, c)
        ms.testing.assert_close(h, y[t])
      end
      ms.testing.assert_close(cell(x[1][1]), y[1][1])
    end
  end)

  it("drop between layers in training only", function()
    local m, x = nn.GRU(3, 8, 2, { dropout = 0.5 }), ms.rand(4, 2, 3)
    assert.is_false(m(x):equal((m(x))))
    m:eval()
    assert.is_true(m(x):equal((m(x))))
    local _, warned = pcall(ms.catch_warnings, function() return nn.GRU(3, 8, { dropout = 0.5 }) end)
    assert.are.same({ "GRU: dropout acts between layers, so dropout = 0.5 has no effect with 1 layer" }, warned)
  end)

  it("stand in a Sequential before a layer that takes their output", function()
    local net = nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2))
    assert.equal("5 2 2", shape(net(ms.rand(5, 2, 3))))
  end)

  it("train when their parameters are sharded", function()
    local whole, x = nn.LSTM(3, 4, 2), ms.rand(5, 2, 3)
    local sharded = ms.fsdp.fully_shard(ms.deepcopy(whole))
    local y, z = whole(x), sharded(x)
    ms.testing.assert_close(z, y)
    y:sum():backward()
    z:sum():backward()
    ms.testing.assert_close(sharded.weight_hh_l1.grad:full_tensor(), whole.weight_hh_l1.grad)
  end)

  it("release what the steps make", function()
    local m, x = nn.LSTM(3, 4, 2), ms.rand(40, 2, 3)
    collected()
    local before = ms.memory_stats("cpu").live_tensors
    local y, h, c = ms.no_grad(function() return m(x) end)
    assert.equal(before + 3, ms.memory_stats("cpu").live_tensors)
    assert.equal("40 2 4", shape(y))
    assert.equal(shape(h), shape(c))
  end)

  it("print their sizes", function()
    assert.equal("LSTM(10 -> 20, 2 layers, bias, bidirectional, batch first, dropout 0.5)",
      tostring(nn.LSTM(10, 20, 2, { bidirectional = true, batch_first = true, dropout = 0.5 })))
    assert.equal("RNN(1 -> 2, bias, relu)", tostring(nn.RNN(1, 2, { nonlinearity = "relu" })))
    assert.equal("GRUCell(1 -> 2)", tostring(nn.GRUCell(1, 2, { bias = false })))
  end)

  it("refuse sizes, states and inputs that do not fit", function()
    local m = nn.LSTM(3, 4)
    raises("LSTM: input.size(-1) must be equal to input_size. Expected 3, got 5", m, ms.ones(2, 2, 5))
    raises("LSTM: Expected input to be 2D or 3D, got 1D instead", m, ms.ones(3))
    raises("LSTM: Expected sequence length to be larger than 0, got input [0, 2, 3]", m, ms.ones(0, 2, 3))
    raises("LSTM: c has shape [1, 1, 4], expected [1, 2, 4]", m, ms.ones(5, 2, 3), ms.ones(1, 2, 4), ms.ones(1, 1, 4))
    raises("LSTM: h is a number (3), expected a tensor", m, ms.ones(5, 2, 3), 3)
    raises("GRU: option 'num_layers' is a number (0), expected a whole number from 1", nn.GRU, 3, 4, 0)
    raises("GRU: argument 2, the size of the state, is nil, expected a whole number from 1", nn.GRU, 3)
    raises("GRU: option 'dropout' is a number (2), expected a number from 0 to 1", nn.GRU, 3, 4, { dropout = 2 })
    raises("GRUCell: the input has shape [2, 5], expected [N, 3] or [3]", nn.GRUCell(3, 4), ms.ones(2, 5))
    raises("LSTMCell: h has shape [1, 4], expected [2, 4]", nn.LSTMCell(3, 4), ms.ones(2, 3), ms.ones(1, 4))
  end)
end)
