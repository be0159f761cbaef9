-- SPDX-License-Identifier: MIT
--- Hostile input: each of these once gave a wrong number, a hang or an internal error message.
local ms = require "moonshard"
local nn, dist, fsdp, ranks = ms.nn, ms.dist, ms.fsdp, require "spec.support.ranks"

local function fails(text, fn)
  local ok, message = pcall(fn)
  assert.is_false(ok, "no error: " .. text)
  assert.is_truthy(tostring(message):find(text, 1, true), ("expected '%s' in '%s'"):format(text, tostring(message)))
  assert.is_truthy(tostring(message):find("hostile_spec.lua:%d+: "), "no line of the caller: " .. tostring(message))
end

describe("views of a tensor that is changed in place, with gradients,", function()
  it("are refused afterwards, not given the old gradient", function()
    local x = ms.ones(4, { requires_grad = true })
    local y = x * 1
    local view = y:view(2, 2)
    y:mul_(3)
    fails("is a view made before its base was changed in place", function() local s = view:sum() return s end)
    y:view(2, 2):sum():backward()                         -- a view made after the change includes it
    assert.same({ 3, 3, 3, 3 }, x.grad:tolist())
  end)

  it("are refused also when the base required no gradient before the change", function()
    local x = ms.ones(3, { requires_grad = true })
    local b = ms.zeros(3)
    local view = b[1]
    b:add_(x)
    fails("make the view again", function() local s = view * 2 return s end)
    assert.are.equal(2, (b[1] * 2):item())
  end)

  it("stay valid if they need none: detach() and no_grad", function()
    local x = ms.ones(3, { requires_grad = true })
    local y = x * 1
    local off, seen = y:view(3):detach(), ms.no_grad(function() return y:narrow(1, 1, 2) end)
    y:mul_(3)
    assert.same({ 3, 3, 3 }, (off + 0):tolist())
    assert.are.equal(6, seen:sum():item())
    local plain = ms.ones(4)
    local part = plain:narrow(1, 1, 2)
    plain:mul_(2)                                         -- nothing was recorded: views of plain tensors stay valid
    assert.same({ 2, 2 }, (part * x[1]):tolist())
  end)
end)

describe("numbers that do not fit", function()
  it("are errors where a tensor is made or filled", function()
    fails("2000000000000 at position 1 is out of range for int32",
      function() local t = ms.tensor({ 2e12 }, { dtype = "int32" }) return t end)
    fails("-1 at position 2 is out of range for uint8",
      function() local t = ms.tensor({ 255, -1 }, { dtype = "uint8" }) return t end)
    fails("is out of range for int32", function() ms.arange(3, { dtype = "int32" }):fill_(2 ^ 31) return end)
    fails("is out of range for uint8", function() local t = ms.arange(0, 300, { dtype = "uint8" }) return t end)
    fails("is out of range for uint8", function() local t = ms.randint(0, 300, { 2 }, { dtype = "uint8" }) return t end)
    fails("is out of range for int32", function() local t = ms.arange(3, { dtype = "int32" }) + 2 ^ 40 return t end)
    fails("is out of range for uint8", function() local t = ms.ones(2, { dtype = "uint8" }):masked_fill(ms.tensor { true,
      false }, 256) return t end)
    assert.same({ 254, 255 }, (ms.tensor({ 255, 0 }, { dtype = "uint8" }) + -1):tolist())
    assert.same({ 0, 255 }, ms.tensor({ 0, 255 }, { dtype = "uint8" }):tolist())
    assert.same({ -2 ^ 31, 2 ^ 31 - 1 }, ms.tensor({ -2 ^ 31, 2 ^ 31 - 1 }, { dtype = "int32" }):tolist())
  end)

  it("are errors as ends of a range, and as the index of a device", function()
    fails("arange: from 0 to inf", function() local t = ms.arange(0, math.huge) return t end)
    fails("arange: from 0 to", function() local t = ms.arange(0, 0 / 0) return t end)
    fails("'cuda:9' is not available", function() local t = ms.zeros(2, { device = "cuda:9" }) return t end)
  end)
end)

describe("impossible sizes and counts", function()
  local F = nn.F
  local one = ms.ones(1)
  local function layer() return nn.TransformerEncoderLayer(4, 2, { dim_feedforward = 4 }) end
  -- 274177 * 67280421310721 is 2^64 + 1, so a 64-bit product of the sizes is 1.
  local A, B = 274177, 67280421310721
  local cases = {
    ["a view of 2^64 + 1 elements"] = { function() return one:view(A, B) end, "has more than 2^63 - 1 elements" },
    ["an expanded tensor of 2^64 + 1 elements"] = { function() return one:expand(A, B) end,
      "expand: shape [274177, 67280421310721] has too many elements for a 64-bit size" },
    ["repetitions with 2^64 + 1 elements"] = { function() return one:tile(A, B) end, "more elements than memory can hold" },
    ["repetitions of one dimension"] = { function() return ms.ones(2 ^ 12):tile(2 ^ 52) end,
      "repetitions of dimension 1" },
    ["an expanded tensor of one dimension of 2^64"] = { function() return one:expand(2 ^ 64) end,
      "expected a whole number below 2^63" },
    ["a new tensor"] = { function() return ms.zeros(2 ^ 64) end, "expected a whole number below 2^63" },
    ["a Linear"] = { function() return nn.Linear(1, 2 ^ 63) end, "expected a whole number below 2^63" },
    ["an Embedding"] = { function() return nn.Embedding(A, B) end, "more elements than memory can hold" },
    ["a padding"] = { function() return F.conv2d(ms.ones(1, 1, 2, 2), ms.ones(1, 1, 1, 1), nil,
      { padding = 2 ^ 62 }) end, "the padding must be from 0 to" },
    ["layers of an encoder"] = { function() return nn.TransformerEncoder(layer(), 1e18) end,
      "TransformerEncoder: the number of layers is a number (1e+18), expected at most 65536" },
    ["layers of a Transformer"] = { function() return nn.Transformer { d_model = 4, nhead = 2,
      num_encoder_layers = 2 ^ 53 } end, "expected at most 65536" },
    ["layers of a GPT"] = { function() return require("moonshard.models.gpt") { layers = 1e18 } end,
      "expected at most 65536" },
    ["heads"] = { function() return nn.MultiheadAttention(4, 1e18) end, "embed_dim must be divisible by num_heads" },
    ["a source"] = { function() return dist.broadcast(one, { src = 2 ^ 32 }) end,
      "rank is 4294967296, expected a whole number" },
    ["a rank of a group"] = { function() return dist.new_group { 2 ^ 32 } end,
      "entry 1 is a number (4294967296), expected a rank of the world" },
    ["a mesh"] = { function() return dist.init_device_mesh("cpu", { 2 ^ 40, 2 ^ 40 }) end, "the world has 1" },
  }
  for what, case in ms.sorted_pairs(cases) do
    it("are refused: " .. what, function() fails(case[2], function() local x = case[1]() return x end) end)
  end

  it("do not include a view of very many elements: it is possible", function()
    local t = one:expand(2 ^ 40)
    assert.are.equal(2 ^ 40, t:numel())
    assert.are.equal(1, t[2 ^ 40]:item())
  end)
end)

describe("tables that are not lists of numbers", function()
  it("are refused, not cut short", function()
    fails("has a hole: element 2 is nil", function() local t = ms.tensor { 1, nil, nil, 4 } return t end)
    fails("has a key 'a'", function() local t = ms.tensor { a = 1 } return t end)
    fails("ms.stack and ms.cat", function() local t = ms.tensor { ms.ones(2), ms.ones(2) } return t end)
    fails("size is a Tensor", function() local t = ms.zeros(ms.ones(2)) return t end)
  end)
end)

describe("what a script hands to autograd and scopes", function()
  it("is counted: gradients of a Function, results of a checkpoint", function()
    local x = ms.ones(2, { requires_grad = true })
    local two = ms.Function { forward = function(_, a) return a * 2 end, backward = function(_, g) return g, g end }
    fails("backward returned 2 gradients, expected 1, as many as forward has arguments", function() two(x):sum():backward() return end)
    local padded = ms.Function { forward = function(_, a) return a * 2 end,
      backward = function(_, g) return g, nil end }
    padded(x):sum():backward()
    local runs = 0
    local y = ms.checkpoint(function(a)
      runs = runs + 1
      if runs > 1 then return a * 2, a end
      return a * 2
    end, x)
    fails("the number of results was 2 when the function was recomputed, but 1 in the forward",
      function() y:sum():backward() return end)
    local saves = ms.Function { forward = function(ctx, a) ctx:save(a, 3) return a * 2 end,
      backward = function(_, g) return g end }
    fails("ctx:save: argument 2 is a number (3)", function() local z = saves(x) return z end)
  end)

  it("must be of the right type: the arguments of ms.steps", function()
    fails("steps: argument 1 is a number (2.5)", function() for _ in ms.steps(2.5) do error "ran" end end)
    fails("steps: argument 1 is", function() for _ in ms.steps(0 / 0) do error "ran" end end)
    fails("the last argument is a number (3), expected a function", function() ms.steps(2, {}, 3) return end)
  end)
end)

describe("names and arguments of dist and fsdp", function()
  it("are checked before anything is sent", function()
    fails("broadcast_object: option 'src' is a string ('0')",
      function() dist.broadcast_object(1, { src = "0" }) return end)
    fails("broadcast_object: rank is 0.5", function() dist.broadcast_object(1, { src = 0.5 }) return end)
    fails("dist.record: argument is a number (3)", function() dist.record(3) return end)
    local mesh = dist.init_device_mesh("cpu", { 1 }, { names = { "dp_shard" } })
    fails("did you mean 'dp_shard'", function() local m = mesh.dp_shart return m end)
    fails("ignored_params[1] is a number (3)", function() fsdp.fully_shard(nn.Linear(2, 2),
      { ignored_params = { 3 } }) return end)
  end)
end)

ranks.describe(2, "operators on sharded parameters", function()
  it("have the names that scripts use", function()
    local m = ms.fsdp.fully_shard(ms.nn.Linear(4, 4))
    local ok, message = pcall(function() local y = m.weight * 2 return y end)
    assert.is_false(ok)
    assert.is_truthy(message:find("mul: parameter 'weight' is sharded", 1, true), message)
  end)
end)

-- Release tensors made outside every scope now, not during a later file that counts tensors.
teardown(function()
  collectgarbage()
  collectgarbage()
end)

describe("a tensor on device meta as the source of a copy", function()
  it("is an error, not a read of memory that is not there", function()
    fails("float32 [4] meta has no values to copy into float32 [4] cpu",
      function() ms.zeros(4):copy_(ms.zeros(4, { device = "meta" })) end)
    fails("has no values to copy into", function() ms.zeros(4):fill_(ms.zeros(1, { device = "meta" })) end)
    fails("has no values to copy into", function() nn.Linear(2,
      3):load_state_dict(nn.Linear(2, 3):to("meta"):state_dict()) end)
    ms.zeros(0):copy_(ms.zeros(0, { device = "meta" }))    -- no error: there is nothing to copy
    assert.are.equal("meta", ms.zeros(4, { device = "meta" }):copy_(ms.ones(4)).device)
  end)
end)

describe("an operator called from C without one of its tensors", function()
  it("is an error: a failed call returns 0", function()
    local engine = require "moonshard.core.ffi"
    for _, name in ipairs { "sum", "add", "linear", "cat", "copy_" } do
      local args = engine.ffi.new "ms_args"
      args.n_in = name == "sum" and 1 or 2
      assert.are_not.equal(0, engine.lib.ms_call_op(engine.lib.ms_op_find(name), args))
      assert.matches("^" .. name .. ": tensor 1 is missing", engine.ffi.string(engine.lib.ms_error()))
    end
  end)
end)
