-- SPDX-License-Identifier: MIT
--- Casts between integers and float32, 64 elements at a time, beside casts of one element, which have no such path.
local ms = require "moonshard"

local huge = math.huge
local FAR = {
  float32 = { 2 ^ 31, -2 ^ 31, 2 ^ 31 - 128, 2 ^ 40 + 2 ^ 20, -2 ^ 62, 1e30, huge, -huge, 0 / 0, -0.75, 255.5 },
  int64 = { 2 ^ 31, -2 ^ 31, 2 ^ 31 - 1, -2 ^ 31 - 1, 2 ^ 40 + 1, 2 ^ 53, -2 ^ 62, 16777217 },
}

describe("casts", function()
  for _, case in ipairs {
    { "float32", "int64" }, { "float32", "int32" }, { "float32", "int16" }, { "float32", "int8" },
    { "float32", "uint8" }, { "int64", "float32" }, { "int64", "bfloat16" },
  } do
    it(("from %s to %s have the bits of single elements"):format(unpack(case)), function()
      local numbers = {}
      for k = 1, 200 do numbers[k] = k * 37 % 300 - 90 end
      for k, number in ipairs(FAR[case[1]]) do
        local at = (k * 19) % 200 + 1
        local near = numbers[at]
        numbers[at] = number
        local x = ms.tensor(numbers, { dtype = case[1] })
        local whole = x:to(case[2])
        for _, e in ipairs { at, 1, 64, 65, 192, 200 } do
          local one = x:narrow(1, e, 1):clone():to(case[2])
          assert.are.equal(tostring(one:item()), tostring(whole[e]:item()))
        end
        assert.is_true(whole:equal(x:unsqueeze(2):expand(200, 2):to(case[2]):select(2, 1)))
        numbers[at] = near
      end
    end)
  end
end)
