-- SPDX-License-Identifier: MIT
--- Tensors: construction, fields, reading values, use as keys and values of tables.
local ms = require "moonshard"
local collected = require "spec.support.collected"

local failure = require "spec.support.message"

describe("making tensors", function()
  it("takes numbers and nested tables", function()
    assert.are.same({ { 1, 2, 3 }, { 4, 5, 6 } }, ms.tensor({ { 1, 2, 3 }, { 4, 5, 6 } }):tolist())
    assert.are.equal(2.5, ms.tensor(2.5):item())
    assert.are.equal("[]", tostring(ms.tensor(2.5).shape))
    assert.are.equal("[0]", tostring(ms.tensor({}).shape))
  end)

  it("chooses dtypes by kind of value and by default_dtype", function()
    assert.are.equal("float32", ms.tensor({ 1, 2 }).dtype)
    assert.are.equal("bool", ms.tensor({ true, false }).dtype)
    assert.are.equal("int64", ms.tensor({ 1, 2 }, { dtype = "int64" }).dtype)
    assert.are.equal("int64", ms.arange(3).dtype)
    assert.are.equal("float32", ms.arange(0, 1, 0.5).dtype)
    assert.are.equal("int64", ms.randint(0, 5, { 3 }).dtype)
    ms.set_default_dtype "float64"
    assert.are.equal("float64", ms.zeros(2).dtype)
    ms.set_default_dtype "float32"
    assert.are.equal("float32", ms.default_dtype())
    assert.matches("not floating point", failure(ms.set_default_dtype, "int64"))
  end)

  for _, dtype in ipairs { "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8" } do
    it("holds small whole numbers in " .. dtype, function()
      local t = ms.tensor({ 0, 1, 2, 100 }, { dtype = dtype })
      assert.are.equal(dtype, t.dtype)
      assert.are.same({ 0, 1, 2, 100 }, t:tolist())
      assert.are.same({ 1, 1 }, ms.ones(2, { dtype = dtype }):tolist())
    end)
  end

  it("takes sizes as numbers, a table or a shape, and options last", function()
    assert.are.equal("[2, 3]", tostring(ms.zeros(2, 3).shape))
    assert.are.equal("[2, 3]", tostring(ms.zeros({ 2, 3 }).shape))
    assert.are.equal("[2, 3]", tostring(ms.zeros(ms.ones(2, 3).shape, { dtype = "int64" }).shape))
    assert.are.equal("[]", tostring(ms.zeros({}).shape))
    assert.are.equal("[]", tostring(ms.zeros({ dtype = "int64" }).shape))
    assert.are.equal("[0, 4]", tostring(ms.empty(0, 4).shape))
    local t = ms.rand(2, { requires_grad = true })
    assert.is_true(t.requires_grad and t.is_leaf)
  end)

  it("fills", function()
    assert.are.same({ 7, 7 }, ms.full({ 2 }, 7):tolist())
    assert.are.same({ 0, 0 }, ms.zeros(2):tolist())
    assert.are.same({ 1, 3, 5 }, ms.arange(1, 7, 2):tolist())
    assert.are.same({ 5, 3 }, ms.arange(5, 1, -2):tolist())
    assert.are.same({ 0, 1, 2 }, ms.arange(3):tolist())
    assert.are.same({ { 1, 0 }, { 0, 1 } }, ms.eye(2):tolist())
    local u = ms.zeros_like(ms.ones(2, { dtype = "float64" }))
    assert.are.equal("float64", u.dtype)
    assert.are.same({ 0, 0 }, u:tolist())
  end)

  it("draws the same numbers from the same seed", function()
    ms.manual_seed(7)
    local a, b = ms.randn(100), ms.rand(100)
    ms.manual_seed(7)
    assert.is_true(a:equal(ms.randn(100)))
    assert.is_true(b:equal(ms.rand(100)))
    assert.is_false(a:equal(ms.randn(100)))
    local low, high = b:min():item(), b:max():item()
    assert.is_true(low >= 0 and high < 1)
    local ids = ms.randint(3, 6, { 1000 })
    assert.are.equal(3, ids:min():item())
    assert.are.equal(5, ids:max():item())
  end)

  it("refuses invalid arguments", function()
    assert.matches("rows differ in length", failure(ms.tensor, { { 1, 2 }, { 3 } }))
    assert.matches("element 2 is a string", failure(ms.tensor, { 1, "x" }))
    assert.matches("size is %-1, expected a whole number from 0", failure(ms.zeros, -1))
    assert.matches("not a whole number", failure(ms.zeros, 1.5):gsub("expected a whole number", "not a whole number"))
    assert.matches("unknown dtype 'flot32'; did you mean 'float32'", failure(ms.zeros, 2, { dtype = "flot32" }))
    assert.matches("unknown option 'dtpye'; did you mean 'dtype'", failure(ms.zeros, 2, { dtpye = "float32" }))
    assert.matches("unknown device 'gpu'", failure(ms.zeros, 2, { device = "gpu" }))
    assert.matches("step is 0", failure(ms.arange, 0, 3, 0))
    assert.matches("2%.5 at position 2 is not a whole number", failure(ms.tensor, { 1, 2.5 }, { dtype = "int64" }))
  end)

  it("accepts memory that the caller owns", function()
    local buffer = require("ffi").new("float[4]", 1, 2, 3, 4)
    local t = ms.from_pointer(buffer, { 2, 2 })
    assert.are.same({ { 1, 2 }, { 3, 4 } }, t:tolist())
    t:mul_(10)
    assert.are.equal(40, buffer[3])
  end)
end)

describe("a tensor's fields", function()
  local t
  before_each(function() t = ms.tensor { { 1, 2, 3 }, { 4, 5, 6 } } end)

  it("say what it is", function()
    assert.are.equal("[2, 3]", tostring(t.shape))
    assert.are.equal(3, t.shape[2])
    assert.are.equal(2, t.ndim)
    assert.are.equal("cpu", t.device)
    assert.are.equal(6, t:numel())
    assert.are.equal(3, t:size(2))
    assert.are.equal(3, t:size(-1))
    assert.are.equal("[3, 1]", tostring(t:stride()))
    assert.is_true(t:is_contiguous() and not t:t():is_contiguous())
    assert.is_false(t.requires_grad)
    assert.is_true(t.is_leaf)
    assert.is_false(t.is_sparse)
    assert.is_true(ms.is_tensor(t) and t:isa(ms.Tensor))
    assert.is_false(ms.is_tensor {} or ms.is_tensor(nil) or ms.is_tensor "x")
    assert.are.equal("meta", ms.zeros(2, { device = "meta" }).device)
  end)

  it("are plain Lua numbers", function()
    for _, v in ipairs { t:numel(), t:size(1), t:stride(1), t:data_ptr(), t[1][1]:item(), t.shape[1] } do
      assert.are.equal("number", type(v))
    end
    assert.are.equal("boolean", type(ms.tensor(true):item()))
    assert.are.equal(math.huge, ms.tensor(math.huge):item())
    assert.are.equal("number", type(ms.tensor({ 3 }, { dtype = "int64" }):item()))
  end)

  it("that are unknown belong to the user", function()
    assert.is_nil(t.colour)
    t.colour = "red"
    assert.are.equal("red", t.colour)
    assert.matches("'shape' cannot be assigned", failure(function() t.shape = { 1 } end))
    assert.matches("'relu' is a method", failure(function() t.relu = 1 end))
  end)

  it("index: t[i] reads and writes", function()
    assert.are.same({ 4, 5, 6 }, t[2]:tolist())
    assert.are.equal(6, t[-1][-1]:item())
    t[1] = 9
    assert.are.same({ { 9, 9, 9 }, { 4, 5, 6 } }, t:tolist())
    t[2] = ms.tensor { 1, 2, 3 }
    assert.are.same({ 1, 2, 3 }, t[2]:tolist())
    assert.matches("position 3 is out of range for size 2", failure(function() return t[3] end))
    assert.matches("position 0 is out of range", failure(function() t[0] = 1 end))
  end)

  it("== is identity and < an error", function()
    assert.is_true(t == t and t ~= t:clone())
    assert.matches("tensors cannot be compared", failure(function() return t < t end))
  end)
end)

describe("deepcopy", function()
  it("copies values and keeps sharing, and copies of leaves are leaves", function()
    local t = ms.tensor({ 1, 2 }, { requires_grad = true })
    t.grad = ms.ones(2)
    t.note = { 1 }
    local copy = ms.deepcopy { a = t, b = { t }, n = 3, s = "x" }
    assert.is_true(rawequal(copy.a, copy.b[1]))
    assert.are_not.equal(t, copy.a)
    assert.are.same({ 1, 2 }, copy.a:tolist())
    assert.are.same({ 1, 1 }, copy.a.grad:tolist())
    assert.is_true(copy.a.requires_grad and copy.a.is_leaf)
    assert.are.same({ 1 }, copy.a.note)
    copy.a:detach():fill_(5)
    assert.are.same({ 1, 2 }, t:tolist())
    assert.matches("only leaves", failure(ms.deepcopy, t * 2))
  end)

  it("keeps memory that views share shared, its strides and dtypes, and copies it once", function()
    local x = ms.arange(0, 12):to "float64":reshape(3, 4)
    collected()
    local before = ms.memory_stats("cpu").live_tensors
    local copy = ms.deepcopy { row = x:select(1, 2), turned = x:t(), x = x, wide = x:narrow(1, 1, 1):expand(5, 4),
      other = ms.ones(2) }
    assert.are.same(x:tolist(), copy.x:tolist())
    assert.are.same({ 1, 4 }, copy.turned:stride())
    assert.are.same({ 0, 1 }, copy.wide:stride())
    copy.row:fill_(-1)
    assert.are.same({ -1, -1, -1, -1 }, copy.x[2]:tolist())
    assert.are.same({ 1, -1, 9 }, copy.turned[2]:tolist())
    assert.are.same({ 4, 5, 6, 7 }, x[2]:tolist())
    assert.are.equal(copy.x:data_ptr() + 4 * 8, copy.row:data_ptr())
    assert.is_true(ms.memory_stats("cpu").live_tensors - before < 20)
    -- A list of a tensor and a leaf that is a view of it, copied twice.
    local w = ms.zeros(2, 3)
    local leaf = w:narrow(1, 1, 1):detach():requires_grad_()
    local again = ms.deepcopy(ms.deepcopy { w, leaf })
    again[1]:fill_(2)
    assert.are.same({ { 2, 2, 2 } }, again[2]:tolist());
    (again[2] * 3):sum():backward()
    assert.are.same({ { 3, 3, 3 } }, again[2].grad:tolist())
    assert.is_nil(leaf.grad)
  end)
end)

describe("sorted_pairs", function()
  it("goes through the keys in order", function()
    local keys = {}
    for k in ms.sorted_pairs { b = 1, a = 2, [3] = 3, [1] = 4 } do keys[#keys + 1] = k end
    assert.are.same({ 1, 3, "a", "b" }, keys)
  end)
end)

describe("devices", function()
  it("have a default", function()
    ms.with_device("meta", function() assert.are.equal("meta", ms.zeros(2).device) end)
    assert.are.equal("cpu", ms.zeros(2).device)
    assert.is_false(pcall(ms.with_device, "meta", error))
    assert.are.equal("cpu", ms.default_device())
  end)
  it("count their bytes", function()
    collected()                                 -- leftovers of earlier tests are not counted
    local before = ms.memory_stats("cpu")
    local t = ms.zeros(1000)
    assert.are.equal(before.allocated + 4000, ms.memory_stats("cpu").allocated)
    t:release()
    assert.are.equal(before.allocated, ms.memory_stats("cpu").allocated)
  end)
end)

describe("warnings", function()
  it("are caught with their repeats", function()
    local list, a, b = ms.catch_warnings(function()
      ms.warn "one"
      ms.warn "one"
      return 1, nil
    end)
    assert.are.same({ "one", "one" }, list)
    assert.are.equal(1, a)
    assert.is_nil(b)
  end)
end)
