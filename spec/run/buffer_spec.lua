-- SPDX-License-Identifier: MIT
--- Numbers as bytes, compared with printf's, and writing to a disk that is full.
local buffers = require "moonshard.run.buffer"
local ffi = require "ffi"

local function text_of(x)
  local buffer = buffers.new()
  buffer:number(x)
  return ffi.string(buffer.bytes, buffer.n)
end

describe("a buffer", function()
  it("writes whole numbers with all their digits", function()
    for _, x in ipairs { 0, 1, 9, 10, 99, 100, 9999, 10000, 10001, 12345678, 99999999, 1e8, 100000001, 123456789012,
      1e15, 2 ^ 53 - 1, -1, -42, -1e12 } do
      assert.are.equal(("%.0f"):format(x), text_of(x))
    end
    math.randomseed(5)
    for _ = 1, 20000 do
      local x = math.floor(10 ^ (math.random() * 15.9))
      assert.are.equal(("%.0f"):format(x), text_of(x))
    end
  end)

  it("writes other numbers with nine digits, as printf does", function()
    for _, x in ipairs { 0.5, 0.25, 1.5, -1.5, 0.1, 1 / 3, 2 / 3, 0.001, 1e-4, 0.00012345, 1e-5, 1.25e-7, 123456.789,
      99999999.5, 999999999.5, 0.9999999999, 9.9999999999, 1234567890.5, 2 ^ 60, 1e100, 1e-100, 1e300, 5e-324,
      1.7976931348623157e308 } do
      assert.are.equal(("%.9g"):format(x), text_of(x))
    end
    math.randomseed(6)
    local other = 0
    for _ = 1, 50000 do
      local x = (math.random() - 0.5) * 10 ^ math.random(-250, 250)
      local text = text_of(x)
      if text ~= ("%.9g"):format(x) and x % 1 ~= 0 then                -- exactly between two texts: either will do
        other = other + 1
        assert.is_true(math.abs(tonumber(text) - x) <= 0.500001e-8 * math.abs(x), text)
      end
    end
    assert.is_true(other <= 2, other)
  end)

  it("distinguishes all float32 values", function()
    math.randomseed(7)
    local float, bits = ffi.new "float[1]", ffi.new "uint32_t[1]"
    for _ = 1, 20000 do
      bits[0] = math.random(0, 2 ^ 31 - 1)
      ffi.copy(float, bits, 4)
      local x = float[0]
      if x - x == 0 then
        float[0] = tonumber(text_of(x))
        assert.are.equal(x, float[0])
      end
    end
  end)

  it("grows, and is empty after it was written", function()
    local path = os.tmpname()
    finally(function() os.remove(path) end)
    local buffer, file = buffers.new(), assert(io.open(path, "w"))
    for k = 1, 5000 do
      buffer:number(k)
      buffer:text "\n"
    end
    assert.is_true(buffer:write(file))
    assert.are.equal(0, buffer.n)
    file:close()
    local k = 0
    for line in io.lines(path) do
      k = k + 1
      assert.are.equal(tostring(k), line)
    end
    assert.are.equal(5000, k)
  end)

  it("keeps what a full disk does not take, up to 1 MiB", function()
    local buffer, full = buffers.new(), assert(io.open("/dev/full", "w"))
    finally(function() full:close() end)
    buffer:text "kept"
    local ok, err, lost = buffer:write(full)
    assert.are.same({ false, "No space left on device", false }, { ok, err, lost })
    assert.are.equal("kept", ffi.string(buffer.bytes, buffer.n))
    buffer:text(("x"):rep(2 ^ 20))
    lost = select(3, buffer:write(full))
    assert.are.same({ true, 0 }, { lost, buffer.n })
  end)
end)
