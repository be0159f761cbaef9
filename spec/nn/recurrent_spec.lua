-- SPDX-License-Identifier: MIT
--- Recurrent layers: what golden/recurrent_spec.lua does not compare, which is shapes, defaults, state, printing and
--- errors.
local ms = require "moonshard"
local nn = ms.nn
local collected = require "spec.support.collected"
local raises = require "spec.support.raises"

local names = require "spec.support.names"
local function shape(t) return table.concat(t.shape, " ") end

describe("recurrent layers", function()
  before_each(function() ms.manual_seed(4) end)

  it("have PyTorch's names, in its order", function()
    assert.equal("weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0 weight_ih_l0_reverse weight_hh_l0_reverse bias_ih_l0_reverse bias_hh_l0_reverse",
      names(nn.GRU(2, 3, { bidirectional = true }):named_parameters()))
    local m = nn.LSTM(2, 3, 2, { bias = false })
    assert.equal("weight_ih_l0 weight_hh_l0 weight_ih_l1 weight_hh_l1", names(m:named_parameters()))
    assert.equal("12 3", shape(m.weight_ih_l1))
    assert.equal("weight_ih weight_hh bias_ih bias_hh", names(nn.LSTMCell(2, 3):named_parameters()))
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

  -- The steps of a layer in plain tensor functions: the formulas of PyTorch's documentation.
  local function by_hand(kind, m, x, relu)
    local h, states = ms.zeros(x:size(2), m.weight_hh_l0:size(2), { dtype = x.dtype }), {}
    local c = ms.zeros(x:size(2), m.hidden_size, { dtype = x.dtype })
    for t = 1, x:size(1) do
      local a = x[t]:matmul(m.weight_ih_l0:t()) + m.bias_ih_l0
      local b = h:matmul(m.weight_hh_l0:t()) + m.bias_hh_l0
      if kind == "RNN" then h = relu and (a + b):relu() or (a + b):tanh()
      elseif kind == "LSTM" then
        local i, f, g, o = unpack((a + b):chunk(4, 2))
        c = f:sigmoid() * c + i:sigmoid() * g:tanh()
        h = o:sigmoid() * c:tanh()
        if m.weight_hr_l0 then h = h:matmul(m.weight_hr_l0:t()) end
      else
        local ra, za, na = unpack(a:chunk(3, 2))
        local rb, zb, nb = unpack(b:chunk(3, 2))
        local z = (za + zb):sigmoid()
        h = (1 - z) * (na + (ra + rb):sigmoid() * nb):tanh() + z * h
      end
      states[t] = h
    end
    return ms.stack(states)
  end

  -- Sizes that fill blocks of columns and rows, and those that do not.
  for _, case in ipairs { { "RNN", 33 }, { "RNN", 48, { nonlinearity = "relu" } }, { "LSTM", 70 }, { "LSTM", 16 },
    { "GRU", 70 }, { "GRU", 96 }, { "LSTM", 70, { proj_size = 20 } } } do
    local kind, H, o = unpack(case)
    for _, N in ipairs { 1, 37 } do
      it(("compute their formulas: %s of %d units over %d sequences"):format(kind, H, N), function()
        local given = { dtype = "float64", nonlinearity = o and o.nonlinearity, proj_size = o and o.proj_size }
        local m, x = nn[kind](7, H, given), ms.rand(9, N, 7, { dtype = "float64" })
        local results = {}
        for k, fn in ipairs { m, function() return by_hand(kind, m, x, given.nonlinearity == "relu") end } do
          m:zero_grad()
          local y = fn(x)
          y:pow(2):sum():backward()
          results[k] = { y:detach() }
          for _, p in ipairs(m:parameters()) do table.insert(results[k], p.grad:clone()) end
        end
        for k, t in ipairs(results[1]) do ms.testing.assert_close(t, results[2][k], { rtol = 1e-9, atol = 1e-11 }) end
      end)
    end
  end

  it("have the same bits with any number of threads", function()
    local threads, results = ms.num_threads(), {}
    local m, x = nn.LSTM(20, 100, { bidirectional = true }), ms.rand(12, 50, 20)
    for k, n in ipairs { 1, 2, 5 } do
      ms.set_num_threads(n)
      m:zero_grad()
      local y = m(x)
      y:sum():backward()
      results[k] = { y:detach(), m.weight_hh_l0.grad:clone(), m.bias_hh_l0_reverse.grad:clone() }
    end
    ms.set_num_threads(threads)
    for k = 2, 3 do
      for i, t in ipairs(results[1]) do assert.is_true(results[k][i]:equal(t)) end
    end
  end)

  it("compute half types as float32, and round", function()
    for _, kind in ipairs { "RNN", "LSTM", "GRU" } do
      for _, dtype in ipairs { "bfloat16", "float16" } do
        local m, x = nn[kind](6, 20), ms.rand(8, 3, 6):to(dtype)
        m:to(dtype)
        local wide = ms.deepcopy(m):to "float32"
        local y, z = m(x), wide(x:float())
        assert.equal(dtype, y.dtype)
        y:float():sum():backward()
        z:sum():backward()
        local o = dtype == "bfloat16" and { rtol = 0.02, atol = 0.01 } or { rtol = 0.003, atol = 0.002 }
        ms.testing.assert_close(y:float(), z, o)
        o.atol = 10 * o.atol
        ms.testing.assert_close(m.weight_hh_l0.grad:float(), wide.weight_hh_l0.grad, o)
      end
    end
  end)

  it("compute in the lower precision under autocast", function()
    local m, x = nn.LSTM(6, 20), ms.rand(8, 3, 6)
    local y, h, c = ms.amp.autocast("bfloat16", function() return m(x) end)
    assert.same({ "bfloat16", "bfloat16", "bfloat16" }, { y.dtype, h.dtype, c.dtype })
    ms.testing.assert_close(y:float(), (m(x)), { rtol = 0.02, atol = 0.01 })
  end)

  it("project the state to another size", function()
    local m = nn.LSTM(3, 6, 2, { proj_size = 2, bidirectional = true })
    assert.equal("24 4", shape(m.weight_ih_l1))
    assert.equal("24 2", shape(m.weight_hh_l1))
    assert.equal("2 6", shape(m.weight_hr_l1))
    local y, h, c = m(ms.rand(5, 2, 3))
    assert.equal("5 2 4", shape(y))
    assert.equal("4 2 2", shape(h))
    assert.equal("4 2 6", shape(c))
    assert.equal("LSTM(3 -> 6, projected to 2, 2 layers, bias, bidirectional)", tostring(m))
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
    raises("LSTM: h is a table, expected a tensor; states are arguments: y, h, c = layer(x, h, c)", m, ms.ones(5, 2, 3),
      { ms.ones(1, 2, 4), ms.ones(1, 2, 4) })
    raises("GRU: option 'num_layers' is a number (0), expected a whole number from 1", nn.GRU, 3, 4, 0)
    raises("GRU: argument 2, the hidden size, is nil, expected a whole number from 1", nn.GRU, 3)
    raises("GRU: option 'dropout' is a number (2), expected a number from 0 to 1", nn.GRU, 3, 4, { dropout = 2 })
    raises("LSTM: option 'proj_size' is a number (4), expected less than the hidden size, 4", nn.LSTM, 3, 4,
      { proj_size = 4 })
    raises("GRU: unknown option 'proj_size' (accepted: batch_first, bias, bidirectional, device, dropout, dtype, num_layers)", nn.GRU, 3, 4, { proj_size = 2 })
    raises("GRUCell: the input has shape [2, 5], expected [N, 3] or [3]", nn.GRUCell(3, 4), ms.ones(2, 5))
    raises("LSTMCell: h has shape [1, 4], expected [2, 4]", nn.LSTMCell(3, 4), ms.ones(2, 3), ms.ones(1, 4))
  end)
end)
