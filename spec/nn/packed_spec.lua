-- SPDX-License-Identifier: MIT
--- nn.utils.rnn: padding, packing, and packed sequences through recurrent layers.
local ms = require "moonshard"
local nn = ms.nn
local collected = require "spec.support.collected"
local raises = require "spec.support.raises"
local rnn = nn.utils.rnn

local close = ms.testing.assert_close
local function shape(t) return table.concat(t.shape, " ") end
local function text(t) return table.concat(t:reshape(-1):tolist(), " ") end

describe("nn.utils.rnn", function()
  before_each(function() ms.manual_seed(6) end)

  it("packs step by step, the longest sequence first", function()
    local x = ms.tensor { { 1, 2, 3 }, { 4, 5, 0 }, { 6, 0, 0 } }
    local p = rnn.pack_padded_sequence(x, { 3, 2, 1 }, { batch_first = true })
    assert.equal("1 4 6 2 5 3", text(p.data))
    assert.equal("3 2 1", text(p.batch_sizes))
    assert.is_nil(p.sorted_indices)
    assert.equal("1 4 6 2 5 3", text(rnn.pack_padded_sequence(x:t(), ms.tensor({ 3, 2, 1 }, { dtype = "int64" })).data))
  end)

  it("names the fields of a packed sequence where a script reads another one", function()
    local p = rnn.pack_sequence { ms.ones(3, 1), ms.ones(2, 1) }
    for key, shown in pairs { [1] = "1", dta = "'dta'", lengths = "'lengths'" } do
      raises("a PackedSequence has no field " .. shown .. "; it has data, batch_sizes, sorted_indices and "
        .. "unsorted_indices, and nn.utils.rnn.pad_packed_sequence(packed) returns a padded tensor and the lengths",
        function() return p[key] end)
    end
    assert.is_nil(p.sorted_indices)
    assert.is_nil(p._mark)
  end)

  it("sorts sequences of one length in the order given", function()
    local x = ms.tensor { { 1, 0, 0 }, { 4, 5, 0 }, { 6, 7, 8 }, { 9, 10, 0 } }
    local p = rnn.pack_padded_sequence(x, { 1, 2, 3, 2 }, { batch_first = true, enforce_sorted = false })
    assert.equal("6 4 9 1 7 5 10 8", text(p.data))
    assert.equal("4 3 1", text(p.batch_sizes))
    assert.equal("2 1 3 0", text(p.sorted_indices))
    assert.equal("3 1 0 2", text(p.unsorted_indices))
    local y, lengths = rnn.pad_packed_sequence(p, { batch_first = true })
    assert.is_true(y:equal(x))
    assert.equal("1 2 3 2", text(lengths))
  end)

  it("pads to a length, with a value", function()
    local p = rnn.pack_sequence({ ms.tensor { 1, 2 }, ms.tensor { 3 } })
    local y, lengths = rnn.pad_packed_sequence(p, { padding_value = -1, total_length = 4 })
    assert.equal("1 3 2 -1 -1 -1 -1 -1", text(y))
    assert.equal("4 2", shape(y))
    assert.equal("2 1", text(lengths))
  end)

  it("pads lists of sequences on either side", function()
    local list = { ms.tensor { 1 }, ms.tensor { 2, 3, 4 }, ms.tensor { 5, 6 } }
    assert.equal("1 0 0 2 3 4 5 6 0", text(rnn.pad_sequence(list, { batch_first = true })))
    assert.equal("1 2 5 0 3 6 0 4 0", text(rnn.pad_sequence(list)))
    assert.equal("9 9 1 2 3 4 9 5 6",
      text(rnn.pad_sequence(list, { batch_first = true, padding_side = "left", padding_value = 9 })))
    local whole = rnn.pad_sequence({ ms.tensor({ 1, 2 }, { dtype = "int64" }), ms.tensor({ 3 }, { dtype = "int64" }) })
    assert.equal("int64", whole.dtype)
  end)

  it("gives an object that prints, moves and casts, and is still a plain table of tensors", function()
    local p = rnn.pack_sequence({ ms.tensor { 1 }, ms.tensor { 2, 3, 4 } }, { enforce_sorted = false })
    assert.equal("PackedSequence(2 sequences of up to 3 steps, data float32 [4] cpu)", tostring(p))
    assert.equal("PackedSequence(1 sequence of up to 1 step, data float32 [1] cpu)",
      tostring(rnn.pack_sequence { ms.tensor { 1 } }))
    assert.is_true(p:isa(rnn.PackedSequence))
    assert.equal("PackedSequence", p:class_name())
    assert.is_true(rawequal(p, p:cpu()) and rawequal(p, p:float()) and rawequal(p, p:to "float32"))
    local q = p:double()
    assert.equal("float64 int64", q.data.dtype .. " " .. q.batch_sizes.dtype)
    assert.is_true(rawequal(q.batch_sizes, p.batch_sizes))
    assert.is_true(q:isa(rnn.PackedSequence))
    for name, dtype in pairs { half = "float16", bfloat16 = "bfloat16", long = "int64", int = "int32", short = "int16",
      char = "int8", byte = "uint8" } do
      assert.equal(dtype, p[name](p).data.dtype)
    end
    local meta = p:to "meta"
    assert.equal("meta meta cpu", meta.data.device .. " " .. meta.sorted_indices.device .. " " .. meta.batch_sizes.device)
    assert.is_true(rawequal(p, p:pin_memory()))
    assert.equal(p.data:is_pinned(), p:is_pinned())
    raises("cpu: called on nil; write packed:cpu()", function() p.cpu() end)
    local y = nn.GRU(1, 2)(rnn.pack_sequence { ms.ones(2, 1) })
    assert.is_true(y:isa(rnn.PackedSequence))
  end)

  it("leaves scopes, and is moved by a loader and sent by its workers", function()
    local kept = ms.scope(function() return ms.scope(function() return rnn.pack_sequence { ms.ones(2, 1) } end) end)
    assert.is_false(kept.data:is_released())
    local function collate(items) return ms.nn.utils.rnn.pack_sequence(items, { enforce_sorted = false }) end
    for _, workers in ipairs { 0, 1 } do
      local loader = ms.data.DataLoader({ ms.ones(2, 1), ms.ones(4, 1) }, { batch_size = 2, collate = collate,
        pin_memory = true, device = "cpu", workers = workers })
      local n = 0
      for packed in loader:epoch() do
        assert.is_true(packed:isa(rnn.PackedSequence))
        assert.equal("6 1", shape(packed.data))
        n = n + 1
      end
      loader:close()
      assert.equal(1, n)
    end
  end)

  it("is kept in files as its tensors, which make a packed sequence again", function()
    local path = os.tmpname()
    local p = rnn.pack_sequence({ ms.rand(1, 2), ms.rand(3, 2) }, { enforce_sorted = false })
    ms.save(path, p)
    local back = ms.load(path)
    os.remove(path)
    local gru = nn.GRU(2, 2)
    assert.is_true(gru(p).data:equal(gru(back).data))
  end)

  it("takes padded and packed sequences apart", function()
    local list = { ms.rand(2, 3), ms.rand(4, 3), ms.rand(1, 3) }
    for _, first in ipairs { true, false } do
      local order = { batch_first = first }
      local back = rnn.unpad_sequence(rnn.pad_sequence(list, order), { 2, 4, 1 }, order)
      for k, t in ipairs(list) do assert.is_true(back[k]:equal(t)) end
    end
    local unpacked = rnn.unpack_sequence(rnn.pack_sequence(list, { enforce_sorted = false }))
    assert.equal(3, #unpacked)
    for k, t in ipairs(list) do assert.is_true(unpacked[k]:equal(t)) end
  end)

  it("sends gradients to the rows, and none to the padding", function()
    local x = ms.rand(3, 2, 2, { dtype = "float64", requires_grad = true })
    local p = rnn.pack_padded_sequence(x, { 1, 3 }, { enforce_sorted = false })
    p.data:sum():backward()
    assert.equal("1 1 1 1 0 0 1 1 0 0 1 1", text(x.grad))
    local a, b = ms.rand(3, { dtype = "float64" }), ms.rand(2, { dtype = "float64" })
    assert.is_true(ms.testing.gradcheck(function(s, t)
      local q = rnn.pack_sequence({ t, s }, { enforce_sorted = false })
      return (rnn.pad_packed_sequence(q, { padding_value = 3 })):pow(3)
    end, { a:requires_grad_(), b:requires_grad_() }))
  end)

  it("makes a packed sequence of its parts", function()
    local ids = ms.tensor({ 2, 0, 1 }, { dtype = "int64" })
    local p = rnn.PackedSequence(ms.rand(3, 1), ms.tensor({ 3 }, { dtype = "int64" }), ids)
    assert.equal("1 2 0", text(p.unsorted_indices))
    assert.is_nil(rnn.invert_permutation(nil))
  end)

  it("refuses lengths and sequences that do not fit", function()
    local x = ms.rand(4, 2, 3)
    raises("pack_padded_sequence: lengths[2] is 3, after 2: lengths must be sorted in decreasing order when "
      .. "enforce_sorted is true; enforce_sorted = false sorts them", rnn.pack_padded_sequence, x, { 2, 3 })
    raises("pack_padded_sequence: lengths[1] is 5, expected a whole number from 1 to 4, the number of steps",
      rnn.pack_padded_sequence, x, { 5, 3 })
    raises("pack_padded_sequence: lengths[2] is 0, expected a whole number from 1 to 4, the number of steps",
      rnn.pack_padded_sequence, x, { 4, 0 })
    raises("pack_padded_sequence: Expected `len(lengths)` to be equal to batch_size, but got 3 (batch_size=2)",
      rnn.pack_padded_sequence, x, { 4, 3, 2 })
    raises("pack_padded_sequence: lengths is int64 [], expected integers [2], one for each sequence",
      rnn.pack_padded_sequence, x, ms.tensor(2, { dtype = "int64" }))
    raises("pack_padded_sequence: lengths must be integers, got float32 [2]; write lengths:long(), make them with "
      .. 'ms.tensor(..., { dtype = "int64" }), or give a list of numbers', rnn.pack_padded_sequence, x, ms.ones(2))
    raises("pack_padded_sequence: input has shape [4], expected [T, N, ...]", rnn.pack_padded_sequence, ms.ones(4), { 4 })
    raises("pad_sequence: argument 1 is an empty list, expected a list of at least one tensor", rnn.pad_sequence, {})
    raises("pad_sequence: sequence 2 has shape [2, 4], expected [length, ...], with all sizes but the length as "
      .. "in sequence 1, [2, 3]", rnn.pad_sequence, { ms.ones(2, 3), ms.ones(2, 4) })
    raises("pad_packed_sequence: argument 1 is a Tensor, expected a packed sequence", rnn.pad_packed_sequence, x)
    raises("pad_packed_sequence: Expected total_length to be at least the length of the longest sequence in input, but "
      .. "got total_length=3 and max sequence length being 4", rnn.pad_packed_sequence,
      rnn.pack_padded_sequence(x, { 4, 3 }), { total_length = 3 })
    raises("PackedSequence: batch_sizes is float32 [1], expected int64 [steps] with at least one step",
      rnn.PackedSequence, ms.rand(3, 1), ms.ones(1))
  end)
end)

describe("packed sequences through recurrent layers", function()
  before_each(function() ms.manual_seed(7) end)

  local layers = {
    RNN = { nn.RNN, {} }, LSTM = { nn.LSTM, {} }, GRU = { nn.GRU, {} }, ["an LSTM with a projection"] = { nn.LSTM, { proj_size = 2 } },
  }

  for name, case in ms.sorted_pairs(layers) do
    it(("give what each sequence gives alone, through %s"):format(name), function()
      local o = { bidirectional = true, num_layers = 2, dtype = "float64", proj_size = case[2].proj_size }
      local m, lengths = case[1](3, 4, o), { 2, 5, 1, 5 }
      local x = ms.rand(5, 4, 3, { dtype = "float64" })
      local states = {}
      for k = 1, case[1] == nn.LSTM and 2 or 1 do
        states[k] = ms.rand(4, 4, k == 1 and o.proj_size or 4, { dtype = "float64" })
      end
      local packed, h, c = m(rnn.pack_padded_sequence(x, lengths, { enforce_sorted = false }), unpack(states))
      local y = rnn.pad_packed_sequence(packed)
      for n, length in ipairs(lengths) do
        local alone, h1, c1 = m(x:select(2, n):narrow(1, 1, length), states[1]:select(2, n),
          states[2] and states[2]:select(2, n))
        close(y:select(2, n):narrow(1, 1, length), alone)
        close(h:select(2, n), h1)
        if c then close(c:select(2, n), c1) end
      end
    end)

    it(("have the gradients of finite differences, through %s"):format(name), function()
      local o = { bidirectional = true, dtype = "float64", proj_size = case[2].proj_size }
      local m = case[1](2, 3, o)
      local x = ms.rand(4, 3, 2, { dtype = "float64", requires_grad = true })
      local function all(input)
        local packed, h, c = m(rnn.pack_padded_sequence(input, { 2, 4, 1 }, { enforce_sorted = false }))
        return ms.cat { packed.data:reshape(-1), h:reshape(-1), (c or h):reshape(-1) }
      end
      assert.is_true(ms.testing.gradcheck(all, x))
    end)
  end

  it("train when the parameters are sharded", function()
    local whole, x = nn.GRU(3, 4), ms.rand(5, 2, 3)
    local sharded = ms.fsdp.fully_shard(ms.deepcopy(whole))
    local packed = rnn.pack_padded_sequence(x, { 5, 2 })
    whole(packed).data:sum():backward()
    sharded(packed).data:sum():backward()
    close(sharded.weight_hh_l0.grad:full_tensor(), whole.weight_hh_l0.grad)
  end)

  it("release what the layers make", function()
    local m, packed = nn.LSTM(3, 4, 2, { bidirectional = true }), rnn.pack_padded_sequence(ms.rand(5, 2, 3), { 5, 2 })
    collected()
    local before = ms.memory_stats("cpu").live_tensors
    local y, h, c = ms.no_grad(function() return m(packed) end)
    assert.equal("7 8", shape(y.data))
    assert.equal(shape(h), shape(c))
    assert.equal(before + 3, ms.memory_stats("cpu").live_tensors)
  end)

  it("are refused when they do not fit", function()
    local m = nn.LSTM(3, 4)
    raises("LSTM: input.size(-1) must be equal to input_size. Expected 3, got 2", m, rnn.pack_sequence { ms.rand(2, 2) })
    raises("LSTM: h has shape [1, 1, 4], expected [1, 2, 4]", m, rnn.pack_sequence { ms.rand(2, 3), ms.rand(1, 3) },
      ms.rand(1, 1, 4), ms.rand(1, 1, 4))
    local sizes = ms.tensor({ 2, 3 }, { dtype = "int64" })
    raises("lstm: batch_sizes[2] is 3, expected from 1 to the size before it, 2", m,
      rnn.PackedSequence(ms.rand(5, 3), sizes))
    raises("lstm: the sum of batch_sizes is 3, but the packed input [5, 16] has 5 rows", m,
      rnn.PackedSequence(ms.rand(5, 3), ms.tensor({ 2, 1 }, { dtype = "int64" })))
    raises("LSTM: input is a list of 1 tensor, expected a tensor or a packed sequence; its tensor is list[1]", m, { ms.rand(5, 2, 3) })
  end)

  it("give on cuda what they give on the cpu", function()
    if not ms.cuda.is_available() then return pending(ms.cuda.why_unavailable()) end
    for _, case in ms.sorted_pairs(layers) do
      local m = case[1](3, 4, { bidirectional = true, num_layers = 2, proj_size = case[2].proj_size })
      local x = ms.rand(5, 3, 3)
      local results = {}
      for _, device in ipairs { "cpu", "cuda" } do
        local there = ms.deepcopy(m):to(device)
        local input = x:to(device):clone():requires_grad_()
        local packed, h = there(rnn.pack_padded_sequence(input, { 2, 5, 1 }, { enforce_sorted = false }))
        ms.cat { packed.data:pow(2):sum():reshape(1), h:sum():reshape(1) }:sum():backward()
        results[#results + 1] = { rnn.pad_packed_sequence(packed), h, input.grad, there.weight_hh_l0.grad,
          there.bias_hh_l1_reverse.grad, there.weight_hr_l1 and there.weight_hr_l1.grad }
      end
      for k, t in ipairs(results[1]) do close(results[2][k]:to "cpu", t) end
    end
  end)
end)
