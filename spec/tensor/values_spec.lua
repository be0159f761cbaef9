-- SPDX-License-Identifier: MIT
--- Elements of tensors as Lua's values: NaNs with any bits, and int64 values that a number does not hold.
local ffi = require "ffi"
local ms = require "moonshard"
local data = ms.data
local process = require "spec.support.process"
local raises = require "spec.support.raises"

-- Runs in a process of its own, because LuaJIT crashes on a NaN that it takes for a pointer.
local NANS = [[
local ffi = require "ffi"
local ms = require "moonshard"
-- of sign 0 and 1, quiet and signalling, with few and with many bits of payload
local halves = { 0x7fff, 0xffff, 0x7fc1, 0xffc1, 0xff81, 0xfffe, 0x7e01, 0xfe01, 0xfd00 }
local words = { 0x7fffffff, 0xffffffff, 0xffd63412, 0xffc00001, 0x7f800001, 0xff800001, 0xfff80000, 0xfffc1234 }
local kinds = { bfloat16 = { "uint16_t", {} }, float16 = { "uint16_t", {} }, float32 = { "uint32_t", words },
  float64 = { "uint64_t", {} } }
for _, bits in ipairs(halves) do
  if bit.band(bits, 0x7f80) == 0x7f80 then table.insert(kinds.bfloat16[2], bits) end
  if bit.band(bits, 0x7c00) == 0x7c00 then table.insert(kinds.float16[2], bits) end
end
for high = 0xfff1, 0xffff do
  for _, low in ipairs { 0ULL, 1ULL, 0x7fff12345678ULL } do
    if high ~= 0xfff0 or low ~= 0 then table.insert(kinds.float64[2], bit.bor(bit.lshift(high + 0ULL, 48), low)) end
  end
end
local function check(what, v)
  if type(v) ~= "number" or v == v or -v == -v or ("%g"):format(v + 1):find "%d" then
    print(what .. " gives a " .. type(v))
    os.exit(1)
  end
end
for dtype, kind in pairs(kinds) do
  local bits = ffi.new(kind[1] .. "[?]", #kind[2], kind[2])
  local x = ms.from_pointer(bits, #kind[2], { dtype = dtype })
  local functions = { "neg", "abs", "double", "exp", "clone", "flatten" }
  for round = 1, 100 do                          -- LuaJIT compiles the loop
    for k, v in ipairs(x:tolist()) do check(dtype .. ": tolist", v) check(dtype .. ": item", x[k]:item()) end
    local name = functions[round % #functions + 1]
    for _, v in ipairs(x[name](x):tolist()) do check(dtype .. ": " .. name, v) end
    check(dtype .. ": sum", x:sum():item())
    check(dtype .. ": reshape", x:reshape(1, -1):tolist()[1][1])
    collectgarbage "step"
  end
  tostring(x)
  assert(not pcall(ms.testing.assert_close, x, ms.zeros_like(x)))
end
local bits = ffi.new("uint32_t[1]", 0xffffffff)
local bad = ms.from_pointer(bits, 1)
local p = ms.ones(1):requires_grad_()
p.grad = bad:clone()
check("clip_grad_norm_", ms.nn.utils.clip_grad_norm_(p, 1):item())
local scaler = ms.amp.GradScaler { init_scale = 2 }
local opt = ms.optim.SGD({ p }, { lr = 1 })
scaler:scale(p:sum()):backward()
p.grad = bad:clone()
scaler:step(opt)
scaler:update()
assert(p:item() == 1 and scaler:get_scale() == 1, "a step with a nan gradient is skipped")
scaler:load_state_dict(scaler:state_dict())
print "numbers"
]]

local function wav(bits, samples)
  local bytes = bits / 8
  local format = ffi.new("uint16_t[8]", 3, 1, 8000, 0, 8000 * bytes, 0, bytes, bits)
  return "RIFF\0\0\0\0WAVEfmt \16\0\0\0" .. ffi.string(format, 16) .. "data" .. string.char(#samples) .. "\0\0\0" .. samples
end

describe("the values of tensors", function()
  it("are numbers for NaNs with any sign and payload, of every floating-point dtype", function()
    local result = process.script(NANS)
    assert.are.equal("numbers\n0", result.stdout .. result.code, result.stderr)
  end)

  it("of a WAV file may be NaNs with any bits", function()
    local folder = process.temp_folder()
    for bits, samples in pairs { [32] = "\255\255\255\255\0\0\0\64", [64] = ("\255"):rep(8) .. "\0\0\0\0\0\0\0\64" } do
      local path = folder .. "/nan.wav"
      process.write(path, wav(bits, samples))
      local x = data.read_wav(path)
      assert.are.same({ true, false }, x:isnan():tolist()[1])
      assert.are.equal(2, x[1][2]:item())
    end
    process.remove_folder(folder)
  end)
end)

-- 2^53 + 1 and - 2^62 - 1 are between doubles.
local BIG, LOW = 9007199254740993LL, -4611686018427387905LL
local LEAST, MOST = -9223372036854775807LL - 1, 9223372036854775807LL
local function int64(...) return ms.tensor({ ... }, { dtype = "int64" }) end

describe("int64 values beyond 2^53", function()
  local x = int64(BIG, LOW, 5, LEAST, MOST)

  it("are exact as items and in lists, where they are int64_t", function()
    local list = x:tolist()
    assert.are.equal("cdata", type(list[1]))
    for k, v in ipairs { BIG, LOW, 5, LEAST, MOST } do
      assert.is_true(list[k] == v and x[k]:item() == v)
      assert.is_true(x:reshape(1, 5):tolist()[1][k] == v)
    end
    assert.are.equal(BIG, ms.tensor(BIG):tolist())
    assert.are.equal("9007199254740993", ("%d"):format(list[1]))
    assert.are.equal("x = 9007199254740993", "x = " .. x[1])
  end)

  it("up to there are numbers", function()
    for _, v in ipairs { 0, -3, 2 ^ 53, -2 ^ 53, 2 ^ 53 - 1 } do
      assert.are.equal("number", type(int64(v):item()))
      assert.are.same({ v }, int64(v):tolist())
      assert.are.same({ v, 1 }, { tonumber(int64(v, BIG):tolist()[1]), 1 })
      assert.are.equal("number", type(int64(v, BIG):tolist()[1]))
    end
  end)

  it("are printed with all digits", function()
    local lines = {
      "Tensor int64 [5] cpu",
      "[    9007199254740993, -4611686018427387905,                    5, -9223372036854775808,  9223372036854775807]",
    }
    assert.are.equal(table.concat(lines, "\n"), tostring(x))
    assert.are.equal("Tensor int64 [] cpu\n9007199254740993", tostring(x[1]))
    assert.is_truthy(tostring(x:expand(300, 5)):find("9223372036854775807", 1, true))      -- read line by line
  end)

  it("come from tensor with literals and from lists that tolist made", function()
    assert.is_true(ms.tensor(x:tolist()):equal(x))
    assert.are.equal("int64", ms.tensor(5LL).dtype)
    assert.are.same({ 1, 2, 3 }, ms.tensor { 1LL, 2, 3ULL }:tolist())
    assert.are.same({ { 1, 2 }, { 3, 1 } }, ms.tensor { { 1, 2 }, { 3LL, true } }:tolist())
    local fits = "expected a whole number from -2^63 to below 2^63, because of the 64-bit integers"
    raises("tensor: element 1 is a number (0.5), " .. fits, ms.tensor, { 0.5, 3LL })
    raises("tensor: element 2 is a number (0.5), " .. fits, ms.tensor, { 3LL, 0.5 })
    raises("tensor: element 1 is a 64-bit integer (9223372036854775808ULL), " .. fits .. "; tonumber(x) rounds it",
      ms.tensor, { 9223372036854775808ULL })
    raises("tensor: there are 64-bit integers (LL), which need dtype int64, but option 'dtype' is 'float32'",
      ms.tensor, { 5LL }, { dtype = "float32" })
  end)

  it("are refused where a number is expected, with the way out", function()
    local with_tensor = "is a 64-bit integer (5LL), expected a tensor or a number; ms.tensor(x) makes an int64 tensor of it, exactly"
    local t = int64(1)
    for _, name in ipairs { "add", "mul", "eq", "lt", "pow" } do
      raises(name .. ": argument " .. with_tensor, t[name], t, 5LL)
    end
    raises("fill_: operand " .. with_tensor, t.fill_, t, 5LL)
    local with_number = "is a 64-bit integer (5LL), expected a number or a boolean; tonumber(x) makes a number of it"
    raises("full: value " .. with_number, ms.full, 1, 5LL)
    assert.is_false(pcall(function() return t + 5ULL end))
    assert.is_false(pcall(function() t[1] = 5LL end))
    assert.is_false(pcall(ms.zeros, 5LL))
    assert.is_false(pcall(data.default_collate, { 5LL, 6LL }))
    assert.is_false(pcall(ms.save, os.tmpname(), { x = 5LL }))
  end)

  it("are compared exactly by assert_close, which names them", function()
    local close = ms.testing.assert_close
    close(x, x:clone())
    close(x:tolist(), x:tolist())
    raises("assert_close: 1 of 1 elements of int64 [1] differ; worst at [1]: got 9007199254740993LL, expected "
      .. "9007199254740992LL; difference 1, allowed 0 (rtol 0, atol 0)", close, int64(BIG), int64(2 ^ 53))
  end)

  it("go through operators exactly", function()
    local a, b = int64(BIG), int64(BIG + 2)
    local both = ms.cat { b, a }
    for name, case in pairs {
      add = { a + 3, BIG + 3 }, ["add of a large number"] = { a + 2 ^ 60, BIG + 2LL ^ 60 }, rsub = { 1 - a, 1 - BIG },
      mul = { a * 3, BIG * 3 }, neg = { -a, -BIG }, sum = { both:sum(), 2 * BIG + 2 },
      cumsum = { both:cumsum(1)[2], 2 * BIG + 2 }, prod = { both:prod(), BIG * (BIG + 2) },
      max = { both:max(), BIG + 2 }, min = { both:min(), BIG }, sort = { (both:sort(1))[1], BIG }, topk = { (both:topk(1, 1)), BIG + 2 },
      remainder = { a % 7, BIG % 7 }, floor_divide = { (a * 9):floor_divide(9), BIG },
      pow = { int64(94906267LL) ^ 2, 94906267LL * 94906267LL },
      dot = { both:dot(int64(3, 5)), (BIG + 2) * 3 + BIG * 5 },
      matmul = { both:reshape(1, 2):matmul(int64(3, 5):reshape(2, 1)), (BIG + 2) * 3 + BIG * 5 },
      scatter_add = { int64(0):scatter_add(1, int64(0, 0), both), 2 * BIG + 2 },
      where = { ms.where(a:lt(b), a, b), BIG },
      clamp = { a:clamp(-2 ^ 60, 2 ^ 60), BIG }, ["assignment of a part"] = { (function()
        local t = int64(0, 0)
        t[1] = a[1]
        return t[1]
      end)(), BIG }, ["assignment by a mask"] = { (function()
        local t = int64(0, 3)
        t[t:eq(0)] = a
        return t[1]
      end)(), BIG },
    } do
      assert.is_true(case[1]:reshape(1):item() == case[2], name)
    end
    assert.are.same({ { false }, { true }, { true } }, { a:eq(b):tolist(), a:lt(b):tolist(), a:gt(2 ^ 53):tolist() })
    assert.are.same({ 2 ^ 53, BIG, BIG + 1, BIG + 2 }, ms.arange(2 ^ 53, 2 ^ 53 + 4):tolist())
    raises("fill_: 9.2233720368547758e+18 is out of range for int64 [1] cpu", ms.full, 1, 2 ^ 63, { dtype = "int64" })
  end)

  it("are not logged as metrics, whose numbers are doubles", function()
    local folder = process.temp_folder()
    local run = ms.run.start { out = folder .. "/run", quiet = true }
    raises("run:log: 'seen' is a 64-bit integer (9007199254740993LL), expected a number; tonumber(x) rounds it",
      run.log, run, { seen = ms.tensor(BIG) })
    run:finish()
    process.remove_folder(folder)
  end)
end)
