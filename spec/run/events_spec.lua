-- SPDX-License-Identifier: MIT
--- TensorBoard's event files, read by a decoder of the public formats: TFRecord (length, masked CRC32C, data, masked
--- CRC32C) and protocol buffers (a key of field and wire type before each value).
local bit, ffi = require "bit", require "ffi"
local ms = require "moonshard"
local process = require "spec.support.process"

-- CRC32C bit by bit: the polynomial 0x1edc6f41, reflected.
local function crc32c(text)
  local c = -1
  for k = 1, #text do
    c = bit.bxor(c, text:byte(k))
    for _ = 1, 8 do c = bit.bxor(bit.rshift(c, 1), bit.band(c, 1) == 1 and 0x82f63b78 or 0) end
  end
  return bit.tobit(bit.bnot(c))
end

local function masked(text)
  local c = crc32c(text)
  return bit.tobit(bit.bor(bit.rshift(c, 15), bit.lshift(c, 17)) + 0xa282ead8)
end

local function word(text, at) return ffi.cast("const int32_t *", ffi.cast("const char *", text) + at)[0] end
local function double(text, at) return ffi.cast("const double *", ffi.cast("const char *", text) + (at or 0))[0] end
local function float(text) return ffi.cast("const float *", text)[0] end

local function records(text)
  local list, at = {}, 0
  while at < #text do
    local n = word(text, at)
    assert.are.equal(0, word(text, at + 4))
    assert.are.equal(masked(text:sub(at + 1, at + 8)), word(text, at + 8))
    local data = text:sub(at + 13, at + 12 + n)
    assert.are.equal(masked(data), word(text, at + 12 + n))
    list[#list + 1] = data
    at = at + 16 + n
  end
  assert.are.equal(#text, at)
  return list
end

-- The fields of a message: number -> list of values; whole numbers, or the bytes of all other types.
local function message(text)
  local fields, at = {}, 1
  local function varint()
    local value, scale = 0, 1
    while true do
      local b = text:byte(at)
      at = at + 1
      value = value + b % 128 * scale
      scale = scale * 128
      if b < 128 then return value end
    end
  end
  while at <= #text do
    local key = varint()
    local kind, value = key % 8
    if kind == 0 then
      value = varint()
    else
      local n = kind == 1 and 8 or kind == 5 and 4 or kind == 2 and varint()
      value = text:sub(at, at + n - 1)
      assert.are.equal(n, #value)
      at = at + n
    end
    local field = math.floor(key / 8)
    fields[field] = fields[field] or {}
    table.insert(fields[field], value)
  end
  return fields
end

local function doubles(text)
  local list = {}
  for k = 0, #text / 8 - 1 do list[k + 1] = double(text, 8 * k) end
  return list
end

describe("event files", function()
  local folder
  setup(function() folder = process.temp_folder() end)
  teardown(function() process.remove_folder(folder) end)

  local function events(out)
    local names, list = process.names(folder .. "/" .. out, "^events%.out%.tfevents%."), {}
    for _, name in ipairs(names) do
      for _, data in ipairs(records(process.read(folder .. "/" .. out .. "/" .. name))) do
        list[#list + 1] = message(data)
      end
    end
    return list, #names
  end

  it("have the checksum of the format", function()
    assert.are.equal(bit.tobit(0xe3069283), crc32c "123456789")          -- RFC 3720's check value
    local record = require "moonshard.run.events".record
    assert.are.same({ "", "123456789" }, records(record "" .. record "123456789"))
  end)

  it("carry scalars, images, texts and histograms with step and time", function()
    local run = ms.run.start { out = folder .. "/all", sinks = { "tensorboard" }, quiet = true }
    local before = os.time()
    run:log { loss = 0.5, bad = 0 / 0, step = 300 }
    run:image("in/put", ms.zeros(3, 2, 4))
    run:text("story", "once")
    run:histogram("weights", ms.tensor { 0, 1, 2, 3 }, { bins = 2 })
    run:confusion("digits", { 0, 1 }, { 0, 0 })
    run:finish()
    local list = events "all"
    assert.are.equal("brain.Event:2", list[1][3][1])
    assert.are.same({ 1, 1 }, { list[2][2][1], message(list[2][7][1])[1][1] })   -- starts at step 1
    local values = {}
    for k = 3, #list do
      assert.are.equal(300, list[k][2][1])
      assert.is_true(math.abs(double(list[k][1][1]) - before) < 100)
      for _, value in ipairs(message(list[k][5][1])[1]) do
        local v = message(value)
        values[v[1][1]] = v
      end
    end
    assert.are.equal(0.5, float(values.loss[2][1]))
    assert.is_true(float(values.bad[2][1]) ~= float(values.bad[2][1]))
    assert.is_nil(values.time)
    local image = message(values["in/put"][4][1])
    assert.are.same({ 2, 4, 3 }, { image[1][1], image[2][1], image[3][1] })
    assert.are.equal(process.read(folder .. "/all/images/in_put-000300.png"), image[4][1])
    local text = message(values.story[8][1])
    assert.are.same({ 7, "once" }, { text[1][1], text[8][1] })
    assert.are.equal("text", message(message(values.story[9][1])[1][1])[1][1])
    local h = message(values.weights[5][1])
    assert.are.same({ 0, 3, 4, 6, 14 }, { double(h[1][1]), double(h[2][1]), double(h[3][1]), double(h[4][1]),
      double(h[5][1]) })
    assert.are.same({ { 1.5, 3 }, { 2, 2 } }, { doubles(h[6][1]), doubles(h[7][1]) })
    assert.are.equal(16, message(values.digits[4][1])[1][1])
  end)

  it("of a continued run give the step from which earlier files do not count", function()
    for _, first in ipairs { 0, 2 } do
      local run = ms.run.start { out = folder .. "/more", sinks = { "tensorboard" }, quiet = true, resume = true,
        first = first }
      for _ = 1, 4 do run:log { loss = first } end
      run:finish()
    end
    local list, files = events "more"
    assert.are.equal(2, files)
    local starts, steps = {}, {}
    for _, event in ipairs(list) do
      if event[7] then starts[#starts + 1] = event[2][1] end
      if event[5] then steps[#steps + 1] = event[2][1] end
    end
    assert.are.same({ 1, 3 }, starts)
    assert.are.same({ 1, 2, 3, 4, 3, 4, 5, 6 }, steps)
  end)
end)
